# SPDX-License-Identifier: Apache-2.0
"""The structs that the kernels take by value, read from csrc/, where each field is explained.

tests/test_kernel_interface.py has a compiler compare them.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..cuda_runtime.kernel_source import source_folder
from ..rows import LogitRows

LEADING_DIMS = 4
"""kLeadingDims of csrc/rows/problem.cuh: the most leading dimensions that a launch walks."""

_F32, _F64 = ctypes.c_float, ctypes.c_double
_U8, _U16, _U32 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32
_I64, _POINTER = ctypes.c_int64, ctypes.c_uint64
_BOOL = ctypes.c_bool
_TYPES = {"float": _F32, "double": _F64, "bool": _BOOL, "unsigned char": _U8, "u16": _U16, "u32": _U32, "i64": _I64}
# The format characters of the module struct.
_CODES = {_F32: "f", _F64: "d", _U8: "B", _U16: "H", _U32: "I", _I64: "q", _POINTER: "Q", _BOOL: "?"}
_FIELDS = re.compile(r"(?:const )?(\w+(?: char)?)(\*?)\s+(\w+(?:, \w+)*)(?:\[(\w+)\])?")


def _structure(name: str, file: str, struct_name: str = "", **types: Any) -> type[ctypes.Structure]:
    """A struct of that file. struct_name: its name there, if that differs from `name`. types: the types of its fields that
    ``_TYPES`` lacks."""
    text = re.sub("//.*", "", (source_folder() / file).read_text(encoding="utf-8"))
    # Functions come after the fields.
    found = re.search(rf"struct {struct_name or name} {{([^(){{}}]*);", text)
    assert found, f"{file} has no struct {name}"
    fields = []
    for declaration in found[1].split(";"):
        parsed = _FIELDS.fullmatch(declaration.strip())
        assert parsed, f"`{declaration.strip()}` of {name} cannot be read"
        of, pointer, names, length = parsed.groups()
        type_ = _POINTER if pointer else (_TYPES | types)[of]
        if length is not None:
            type_ *= LEADING_DIMS if length == "kLeadingDims" else int(length)
        fields += [(field, type_) for field in names.split(", ")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


RowScale = _structure("RowScale", "rows/scale.cuh", "ScaleOfRows", FLOAT=_F32)
DrawScale = _structure("DrawScale", "rows/scale.cuh", "ScaleOfRows", FLOAT=_F64)
Problem = _structure("Problem", "rows/problem.cuh", RowScale=RowScale)
RowNumbers = _structure("RowNumbers", "rows/numbers.cuh", "NumbersOfRows", SCALE=RowScale)
DrawNumbers = _structure("DrawNumbers", "rows/numbers.cuh", "NumbersOfRows", SCALE=DrawScale)
FullRows = _structure("FullRows", "full_rows/full_row.cuh", RowNumbers=RowNumbers)
States = _structure("States", "topk/merge_states.cu", RowScale=RowScale)
Piece = _structure("Piece", "linear/accumulate_piece.cu", RowNumbers=RowNumbers)
Routing = _structure("Routing", "routers/route_experts.cu")
RowSums = _structure("RowSums", "tokens/token_sums.cu")
TargetRanks = _structure("TargetRanks", "ranks/target_ranks.cu")
LogitGradients = _structure("LogitGradients", "linear/logit_gradient.cu", RowNumbers=RowNumbers)
SampleRows = _structure("SampleRows", "draws/sample_request.cuh", DrawNumbers=DrawNumbers)
StepAttention = _structure("StepAttention", "attention/step_attention.cu")


def address(tensor: Tensor | None) -> int:
    """The address of a tensor, or 0 for one that a call does not have. A broadcast view has the address of its tensor."""
    return 0 if tensor is None else tensor.data_ptr()


@cache
def rows_writer(structure: type[ctypes.Structure]) -> Callable[[bytearray, LogitRows], None]:
    """``write(buffer, rows)``: writes what a call reads into those fields of the struct in `buffer` that are named as those of
    :class:`LogitRows`, in the struct itself or in a struct within it."""
    found = _places(structure)
    places = [
        (i, struct.Struct("<" + _CODES[found[name][0]]).pack_into, found[name][1])
        for i, name in enumerate(LogitRows._fields)
        if name in found
    ]
    # Whether lengths are int64 is written together with them: plans of whole rows and of draws do not have it.
    _, is_long = found["lengths_are_long"]

    def write(buffer: bytearray, rows: LogitRows) -> None:
        if rows.lengths is not None:
            buffer[is_long] = rows.lengths.dtype is torch.int64
        for i, pack, offset in places:
            value = rows[i]
            if value is not None:
                pack(buffer, offset, value.data_ptr() if isinstance(value, Tensor) else value)

    return write


def _places(structure: type[ctypes.Structure]) -> dict[str, tuple[Any, int]]:
    """The type and the offset of each field, with those of the structs within."""
    found: dict[str, tuple[Any, int]] = {}
    for name, type_, *_ in structure._fields_:
        offset = getattr(structure, name).offset
        if issubclass(type_, ctypes.Structure):
            found |= {inner: (of, offset + at) for inner, (of, at) in _places(type_).items()}
        else:
            found[name] = (type_, offset)
    return found


def with_rows(filled: ctypes.Structure, rows: LogitRows) -> bytearray:
    """The struct, once the rows are written into it."""
    buffer = bytearray(filled)
    rows_writer(type(filled))(buffer, rows)
    return buffer


def writer(structure: type[ctypes.Structure], *names: str) -> tuple[Callable[..., None], int]:
    """``write, offset``: ``write(buffer, offset, *values)`` writes these fields of the struct in `buffer`, which follow each other
    without a gap. An assignment to each field by ctypes would take longer."""
    places = _places(structure)
    first = end = places[names[0]][1]
    for name in names:
        type_, offset = places[name]
        if offset != end:
            raise ValueError(f"`{name}` of {structure.__name__} does not follow the field before it")
        end += ctypes.sizeof(type_)
    return struct.Struct("<" + "".join(_CODES[places[name][0]] for name in names)).pack_into, first

# SPDX-License-Identifier: Apache-2.0
"""The structs that the kernels take by value, read from csrc/, where each field is explained.

tests/test_kernel_interface.py has a compiler compare them.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
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


Problem = _structure("Problem", "rows/problem.cuh")
RowNumbers = _structure("RowNumbers", "rows/numbers.cuh", "NumbersOfRows", FLOAT=_F32)
DrawNumbers = _structure("DrawNumbers", "rows/numbers.cuh", "NumbersOfRows", FLOAT=_F64)
FullRows = _structure("FullRows", "full_rows/full_row.cuh", RowNumbers=RowNumbers)
States = _structure("States", "topk/merge_states.cu")
Piece = _structure("Piece", "linear/accumulate_piece.cu", RowNumbers=RowNumbers)
Routing = _structure("Routing", "routers/route_experts.cu")
TargetRanks = _structure("TargetRanks", "ranks/target_ranks.cu")
LogitGradients = _structure("LogitGradients", "linear/logit_gradient.cu", RowNumbers=RowNumbers)
SampleRows = _structure("SampleRows", "draws/sample_request.cuh", DrawNumbers=DrawNumbers)


def address(tensor: Tensor | None) -> int:
    """The address of a tensor, or 0 for one that a call does not have. A broadcast view has the address of its tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_writer(structure: type[ctypes.Structure]) -> Callable[[bytearray, LogitRows], None]:
    """``write(buffer, rows)``: writes what a call reads into those fields of the struct in `buffer` that are named as those of
    :class:`LogitRows`, in the struct itself or in its numbers of rows."""
    found: dict[str, tuple[Any, int]] = {}
    numbers = getattr(structure, "numbers", None)
    if numbers is not None:
        of_rows: Any = dict(item[:2] for item in structure._fields_)["numbers"]
        found |= {name: (type_, numbers.offset + getattr(of_rows, name).offset) for name, type_ in of_rows._fields_}
    found |= {item[0]: (item[1], getattr(structure, item[0]).offset) for item in structure._fields_}
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


def with_rows(
    filled: ctypes.Structure, write_rows: Callable[[bytearray, LogitRows], None], rows: LogitRows
) -> bytearray:
    """The struct, once the rows are written into it."""
    buffer = bytearray(filled)
    write_rows(buffer, rows)
    return buffer


def writer(structure: type[ctypes.Structure], *names: str) -> tuple[Callable[..., None], int]:
    """``write, offset``: ``write(buffer, offset, *values)`` writes these fields of the struct in `buffer`, which follow each other
    without a gap. An assignment to each field by ctypes would take longer."""
    types = dict(item[:2] for item in structure._fields_)
    first = end = getattr(structure, names[0]).offset
    for name in names:
        if getattr(structure, name).offset != end:
            raise ValueError(f"`{name}` of {structure.__name__} does not follow the field before it")
        end += getattr(structure, name).size
    return struct.Struct("<" + "".join(_CODES[types[name]] for name in names)).pack_into, first

# SPDX-License-Identifier: Apache-2.0
"""The structs that the kernels take by value, with the names, the order and the types of their C++ fields.

tests/test_kernel_interface.py compares each field with csrc/.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..rows import LogitRows

_F32, _F64 = ctypes.c_float, ctypes.c_double
_U8, _U16, _U32 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32
_I64, _POINTER = ctypes.c_int64, ctypes.c_uint64
_BOOL = ctypes.c_bool

LEADING_DIMS = 4
"""kLeadingDims of csrc/rows/problem.cuh: the most leading dimensions that a launch walks."""


class Problem(ctypes.Structure):
    """struct Problem of csrc/rows/problem.cuh, where each field is explained."""

    _fields_ = (
        ("logits", _POINTER),
        ("row_stride", _I64),
        ("rows", _U32),
        ("V", _U32),
        ("k", _U32),
        ("parts_per_row", _U32),
        ("tiles_per_part_log2", _U16),
        ("lead", _U16),
        ("parts_per_split", _U32),
        ("splits_with_one_more", _U32),
        ("leading_dims", _U32),
        ("k_of_warp", _U16),
        ("warps_of_k", _U16),
        ("k_of_split", _U16),
        ("list_length", _U16),
        ("splits_of_k", _U32),
        ("temperature", _F32),
        ("row_temperature", _POINTER),
        ("lists", _POINTER),
        ("parts", _POINTER),
        ("row_tickets", _POINTER),
        ("logsumexp", _POINTER),
        ("values", _POINTER),
        ("indices", _POINTER),
        ("value_kind", _U32),
        ("normalize_topk", _U32),
        ("beams", _U32),
        ("k_of_beam", _U32),
        ("sizes", _U32 * LEADING_DIMS),
        ("mask_kind", _U32),
        ("k_of_sequence", _U32),
        ("logits_strides", _I64 * LEADING_DIMS),
        ("mask_strides", _I64 * LEADING_DIMS),
        ("temperature_strides", _I64 * LEADING_DIMS),
        ("mask", _POINTER),
        ("mask_element_stride", _I64),
        ("beam_scores", _POINTER),
        ("beam_scores_strides", _I64 * 2),
        ("beam_lists", _POINTER),
        ("beam_indices", _POINTER),
        ("beam_tickets", _POINTER),
        ("lengths", _POINTER),
        ("lengths_are_long", _U32),
        ("lengths_strides", _I64 * LEADING_DIMS),
    )


def _numbers_of_rows(temperature: type) -> tuple[tuple[str, Any], ...]:
    """The fields of struct NumbersOfRows of csrc/rows/numbers.cuh, where each is explained."""
    return (
        ("row_temperature", _POINTER),
        ("lengths", _POINTER),
        ("temperature", temperature),
        ("lengths_are_long", _U32),
    )


class RowNumbers(ctypes.Structure):
    _fields_ = _numbers_of_rows(_F32)


class DrawNumbers(ctypes.Structure):
    _fields_ = _numbers_of_rows(_F64)


class FullRows(ctypes.Structure):
    """struct FullRows of csrc/full_rows/full_row.cuh, where each field is explained."""

    _fields_ = (
        ("logits", _POINTER),
        ("out", _POINTER),
        ("inner_stride", _I64),
        ("inner_rows", _U32),
        ("V", _U32),
        ("numbers", RowNumbers),
        ("kind", _U8),
        ("result_stays", _BOOL),
        ("shared_vectors", _U16),
        ("rows", _U32),
        ("outer_stride", _I64),
        ("blocks_per_row", _U32),
        ("parts", _POINTER),
        ("counters", _POINTER),
    )


class States(ctypes.Structure):
    """struct States of csrc/topk/merge_states.cu, where each field is explained."""

    _fields_ = (
        ("logits", _POINTER),
        ("indices", _POINTER),
        ("m", _POINTER),
        ("d", _POINTER),
        ("lengths", _POINTER),
        ("row_temperature", _POINTER),
        ("values", _POINTER),
        ("result_indices", _POINTER),
        ("logsumexp", _POINTER),
        ("logits_part_stride", _I64),
        ("logits_row_stride", _I64),
        ("indices_part_stride", _I64),
        ("indices_row_stride", _I64),
        ("m_part_stride", _I64),
        ("m_row_stride", _I64),
        ("d_part_stride", _I64),
        ("d_row_stride", _I64),
        ("lengths_stride", _I64),
        ("rows", _U32),
        ("parts", _U32),
        ("width", _U32),
        ("k", _U32),
        ("value_kind", _U32),
        ("normalize_topk", _U32),
        ("temperature", _F32),
    )


class Piece(ctypes.Structure):
    """struct Piece of csrc/linear/accumulate_piece.cu, where each field is explained."""

    _fields_ = (
        ("logits", _POINTER),
        ("row_stride", _I64),
        ("numbers", RowNumbers),
        ("values", _POINTER),
        ("indices", _POINTER),
        ("state", _POINTER),
        ("targets", _POINTER),
        ("target_logits", _POINTER),
        ("target_ranks", _POINTER),
        ("rows", _U32),
        ("tokens", _U32),
        ("k", _U32),
        ("num_targets", _U32),
        ("first_token", _U32),
        ("is_first", _U32),
    )


class Routing(ctypes.Structure):
    """struct Routing of csrc/routers/route_experts.cu, where each field is explained."""

    _fields_ = (
        ("bias", _POINTER),
        ("groups", _U32),
        ("topk_groups", _U32),
        ("group_size", _U32),
        ("log2_group_lanes", _U32),
        ("group_turns", _U32),
        ("sums_two", _U32),
        ("normalizes", _U32),
        ("scale", _F32),
        ("are_short", _U32),
    )


class TargetRanks(ctypes.Structure):
    """struct TargetRanks of csrc/ranks/target_ranks.cu, where each field is explained."""

    _fields_ = (
        ("targets", _POINTER),
        ("ranks", _POINTER),
        ("counts", _POINTER),
        ("tickets", _POINTER),
        ("num_targets", _U32),
        ("blocks_per_target", _U32),
        ("counts_ties", _U32),
    )


class LogitGradients(ctypes.Structure):
    """struct LogitGradients of csrc/linear/logit_gradient.cu, where each field is explained."""

    _fields_ = (
        ("logits", _POINTER),
        ("m", _POINTER),
        ("coefficient", _POINTER),
        ("numbers", RowNumbers),
        ("listed", _POINTER),
        ("mask", _POINTER),
        ("row_stride", _I64),
        ("mask_row_stride", _I64),
        ("mask_element_stride", _I64),
        ("tokens", _U32),
        ("start", _U32),
        ("length", _U32),
        ("mask_kind", _U32),
    )


class SampleRows(ctypes.Structure):
    """struct SampleRows of csrc/draws/sample_request.cuh, where each field is explained."""

    _fields_ = (
        ("logits", _POINTER),
        ("row_stride", _I64),
        ("V", _U32),
        ("blocks_per_row", _U32),
        ("num_samples", _U32),
        ("part_length_log2", _U32),
        ("scratch", _POINTER),
        ("tickets", _POINTER),
        ("tokens", _POINTER),
        ("log_probs", _POINTER),
        ("numbers", DrawNumbers),
        ("seed", _I64),
        ("row_seed", _POINTER),
        ("counter", _I64),
        ("row_counter", _POINTER),
        ("one", _F32),
        ("truncated", _U32),
        ("mask_kind", _U32),
        ("length", _U32),
        ("first_row", _U32),
        ("mask", _POINTER),
        ("mask_row_stride", _I64),
        ("mask_element_stride", _I64),
        ("list_logits", _POINTER),
        ("list_indices", _POINTER),
        ("list_state", _POINTER),
        ("top_k", _I64),
        ("row_top_k", _POINTER),
        ("top_p", _F64),
        ("row_top_p", _POINTER),
        ("min_p", _F64),
        ("row_min_p", _POINTER),
        ("best_values", _POINTER),
        ("best_indices", _POINTER),
        ("best_logsumexp", _POINTER),
        ("logprobs", _U32),
        ("rows", _U32),
        ("kept_counts", _POINTER),
        ("kept_logsumexp", _POINTER),
    )


_CODES = {_F32: "f", _F64: "d", _U8: "B", _U16: "H", _U32: "I", _I64: "q", _POINTER: "Q", _BOOL: "?"}


def fields(structure: type[ctypes.Structure], *names: str) -> tuple[struct.Struct, int]:
    """The layout of the named fields, which follow each other in the struct without a gap, and the first one's offset.

    A call of the layout writes them all; an assignment of ctypes for each takes longer.

    Raises:
        ValueError: they do not follow each other.
    """
    types = dict(item[:2] for item in structure._fields_)
    first = end = getattr(structure, names[0]).offset
    for name in names:
        if getattr(structure, name).offset != end:
            raise ValueError(f"`{name}` of {structure.__name__} does not follow the field before it")
        end += getattr(structure, name).size
    return struct.Struct("<" + "".join(_CODES[types[name]] for name in names)), first


def address(tensor: Tensor | None) -> int:
    """Where a tensor begins; 0 stands for one that a call does not have. A broadcast view begins where its tensor does."""
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
    # How wide lengths are comes with them: of whole rows and draws, they alone say it.
    _, is_long = found["lengths_are_long"]

    def write(buffer: bytearray, rows: LogitRows) -> None:
        if rows.lengths is not None:
            buffer[is_long] = rows.lengths.dtype is torch.int64
        for i, pack, offset in places:
            value = rows[i]
            if value is not None:
                pack(buffer, offset, value.data_ptr() if isinstance(value, Tensor) else value)

    return write


def writer(structure: type[ctypes.Structure], *names: str) -> tuple[Callable[..., None], int]:
    """``write, offset``: ``write(buffer, offset, *values)`` writes these fields of the struct in `buffer`."""
    layout, offset = fields(structure, *names)
    return layout.pack_into, offset

# SPDX-License-Identifier: Apache-2.0
"""What a launch of csrc/topk/softmax_topk.cu, short_rows.cu or router_rows.cu looks like: a pure function of shapes and strides.

The caller keeps a launch for later calls, which then only fill in the addresses. Python takes most of the time of a small eager
call, so nothing is computed twice. No GPU is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..problem import TopK, TopkProblem
from ..rows import LogitRows
from .kernel_arguments import LEADING_DIMS, Problem, rows_writer, writer
from .launch import FORMATS, VALUE_KINDS, check_row_count, collapse, has_adjacent, row_count
from .topk_choice import KernelChoice, Method, list_length

_MASK_USES = {"allowed": 1, "topk": 1, "all": 2}
_LENGTHS = 3  # without a mask

# The fields that change from call to call. A plan has all others.
_write_rows = rows_writer(Problem)
_write_call, _CALL = writer(Problem, "lists", "parts", "row_tickets", "logsumexp", "values", "indices")
_write_beam_scores, _BEAM_SCORES = writer(Problem, "beam_scores")
_write_beam_scratch, _BEAM_SCRATCH = writer(Problem, "beam_lists", "beam_indices", "beam_tickets")


class Launch(NamedTuple):
    """A launch but for its addresses."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    problem: bytes  # struct Problem with the addresses left zero
    # Scratch, in words of 8 bytes: candidates and (m, d) of a row's blocks, then candidates and tokens of the beams.
    scratch_words: int
    lists: int
    parts: int
    beam_lists: int
    # Zeroed counters, of 4 bytes.
    row_tickets: int
    beam_tickets: int

    def fill(self, rows: LogitRows, beam_scores: Tensor | None, scratch: int, tickets: int, out: TopK) -> bytearray:
        """The struct with the addresses of a call; `scratch` and `tickets` are 0 where there are none."""
        filled = bytearray(self.problem)
        parts = scratch + 8 * self.lists
        _write_rows(filled, rows)
        values, indices, logsumexp = out
        addresses = logsumexp.data_ptr(), values.data_ptr(), indices.data_ptr()
        _write_call(filled, _CALL, scratch, parts, tickets, *addresses)
        if beam_scores is not None:
            beam_lists = parts + 8 * self.parts
            beam_tokens, beam_tickets = beam_lists + 8 * self.beam_lists, tickets + 4 * self.row_tickets
            _write_beam_scores(filled, _BEAM_SCORES, beam_scores.data_ptr())
            _write_beam_scratch(filled, _BEAM_SCRATCH, beam_lists, beam_tokens, beam_tickets)
        return filled


def plan(
    problem: TopkProblem, is_aligned: bool, choice: KernelChoice, beam_scores: Tensor | None = None
) -> Launch | None:
    """The launch for at least one row. None if the kernel cannot read the rows where they lie: their elements must be adjacent, and
    it walks some unrelated strides alone. Tensors may be meta tensors. is_aligned: whether the logits start at a multiple of 16 bytes."""
    logits, _, row_temperature, mask, lengths = problem.rows
    *leading, vocab_size = logits.shape
    rows = row_count(logits.shape)
    check_row_count(rows)
    # The kernel walks the rows of all tensors by the same sizes, so dimensions are folded for all together.
    missing = (0,) * len(leading)
    per_row = [
        logits.stride()[:-1],
        missing if mask is None else mask.stride()[:-1],
        missing if row_temperature is None else row_temperature.stride(),
        missing if lengths is None else lengths.stride(),
    ]
    sizes, strides = collapse(leading, per_row)
    if len(sizes) > LEADING_DIMS or not has_adjacent(logits):
        return None

    itemsize = logits.dtype.itemsize
    is_aligned = is_aligned and all(stride * itemsize % 16 == 0 for stride in strides[0])
    is_unmasked = mask is None
    mask_use = 0 if lengths is None else _LENGTHS
    if not is_unmasked:
        mask_use = _MASK_USES[problem.normalize]

    k_row = min(problem.k, vocab_size)
    method = choice.method(k_row, itemsize, is_unmasked)
    splits = choice.splits
    beams = 0 if beam_scores is None else leading[1]
    length = list_length(k_row, splits)
    k_of_warp, k_of_split = choice.k_of_warp(k_row), choice.k_of_split(k_row)
    parts_per_split, splits_with_one_more = divmod(choice.parts, splits)
    argument = Problem(
        row_stride=strides[0][-1],
        rows=rows,
        V=vocab_size,
        k=k_row,
        parts_per_row=choice.parts,
        tiles_per_part_log2=choice.tiles_per_part.bit_length() - 1,
        lead=choice.lead,
        parts_per_split=parts_per_split,
        splits_with_one_more=splits_with_one_more,
        leading_dims=len(sizes),
        k_of_warp=k_of_warp,
        warps_of_k=-(-k_row // k_of_warp),
        k_of_split=k_of_split,
        list_length=length,
        splits_of_k=-(-k_row // k_of_split),
        value_kind=VALUE_KINDS[problem.values],
        normalize_topk=problem.normalize == "topk" and problem.values != "state",
        beams=beams,
        k_of_beam=-(-problem.k // beams) if beams else 0,
        sizes=_innermost_first(sizes, 1),
        mask_kind=mask is not None and mask.dtype != torch.bool,
        k_of_sequence=problem.k,
        logits_strides=_innermost_first(strides[0], 0),
        mask_strides=_innermost_first(strides[1], 0),
        temperature_strides=_innermost_first(strides[2], 0),
        lengths_strides=_innermost_first(strides[3], 0),
        mask_element_stride=0 if mask is None else mask.stride(-1),
        beam_scores_strides=(0, 0) if beam_scores is None else beam_scores.stride(),
    )
    lists = rows * splits * (length + 1) if splits > 1 else 0
    parts = rows * choice.parts if splits > 1 else 0
    beam_lists = rows * k_row if beams else 0
    return Launch(
        kernel_name(FORMATS[logits.dtype], choice, method, is_aligned, mask_use),
        choice.grid(rows),
        choice.threads,
        choice.shared_bytes(method, is_aligned, is_unmasked),
        bytes(argument),
        scratch_words=lists + parts + 2 * beam_lists,
        lists=lists,
        parts=parts,
        beam_lists=beam_lists,
        row_tickets=rows if splits > 1 else 0,
        beam_tickets=leading[0] if beams else 0,
    )


def kernel_name(element: str, choice: KernelChoice, method: Method, is_aligned: bool, mask_use: int) -> str:
    """A kernel of csrc/topk/softmax_topk.cu, short_rows.cu or router_rows.cu, as NVRTC wants it named."""
    group = "" if choice.lanes else f"{choice.warps}, {method:d}, "
    flags = f"{str(is_aligned).lower()}, {mask_use}"
    return f"fused_topk::{choice.kernel}_kernel<fused_topk::{element}, {group}{choice.vectors}, {flags}>"


def _innermost_first(numbers: list[int], filler: int) -> tuple[int, ...]:
    return (*numbers[::-1], *[filler] * (LEADING_DIMS - len(numbers)))

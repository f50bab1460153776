# SPDX-License-Identifier: Apache-2.0
"""The plan of a request: the shape and dtype of its result, and the function by which its backend computes it.
A plan does not depend on the contents of the tensors. So it is cached and serves every later request with the same
layout: for a short row, planning takes longer than the rest of the call. Plans hold no device memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from . import backends
from .backends.protocol import StartFullRows, StartMerge, StartTopk
from .problem import FullRowProblem, MergeProblem, MergeTensors, Problem, TopK, result_dtype

# As they are at import: others put functions in their places that give meta tensors (accelerate's init_empty_weights).
_empty, _empty_like = torch.empty, torch.empty_like


class Like(NamedTuple):
    """What a plan knows of a tensor: its layout, without its address."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor | None) -> Like | None:
        return None if tensor is None else Like(tensor.dtype, tensor.shape, tensor.stride())

    def meta(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class TopkResult(NamedTuple):
    """The shape and the dtype of each field of a :class:`TopK`."""

    values: tuple[tuple[int, ...], torch.dtype]
    indices: tuple[tuple[int, ...], torch.dtype]
    logsumexp: tuple[tuple[int, ...], torch.dtype]

    @staticmethod
    def of(shape: tuple[int, ...], value_dtype: torch.dtype, rows: tuple[int, ...], dtype: torch.dtype) -> TopkResult:
        """`shape`: of the values and indices. `rows`: of the logsumexp."""
        return TopkResult((shape, value_dtype), (shape, torch.int64), (rows, dtype))

    def empty(self, device: torch.device) -> TopK:
        """New uninitialised tensors of these shapes and dtypes."""
        (shape, value_dtype), _, (rows, dtype) = self
        # The size is passed by keyword because torch parses a positional tuple more slowly. tuple.__new__ avoids the
        # named tuple's own __new__, which is written in Python.
        values = _empty(size=shape, dtype=value_dtype, device=device)
        indices = _empty(size=shape, dtype=torch.int64, device=device)
        return tuple.__new__(TopK, (values, indices, _empty(size=rows, dtype=dtype, device=device)))


def row_result(logits: Tensor, k: int, values: str) -> TopkResult:
    """The shapes and dtypes for the k best of each row."""
    rows, dtype = tuple(logits.shape[:-1]), result_dtype(logits.dtype)
    return _row_result(rows, k, values, logits.dtype, dtype)


def _row_result(
    rows: tuple[int, ...], k: int, values: str, logits_dtype: torch.dtype, dtype: torch.dtype
) -> TopkResult:
    if values == "state":
        return TopkResult.of((*rows, k), logits_dtype, (2, *rows), dtype)
    return TopkResult.of((*rows, k), logits_dtype if values == "logits" else dtype, rows, dtype)


def merge_result(logits: Tensor, k: int, values: str) -> TopkResult:
    """The shapes and dtypes for the k best of the parts' candidates, of shape (parts, ..., k of a part)."""
    return _row_result(tuple(logits.shape[1:-1]), k, values, logits.dtype, result_dtype(logits.dtype))


def beam_result(logits: Tensor, k: int) -> TopkResult:
    """The shapes and dtypes for the k best over all beams of each batch entry."""
    batch, beams, _ = logits.shape
    dtype = result_dtype(logits.dtype)
    return TopkResult.of((batch, k), dtype, (batch, beams), dtype)


class TopkPlan(NamedTuple):
    """A checked and prepared top-k request. It lacks only the tensors."""

    result: TopkResult
    start: StartTopk

    def run(
        self, logits: Tensor, mask: Tensor | None, row_temperature: Tensor | None, beam_scores: Tensor | None = None
    ) -> TopK:
        """Computes the result into new tensors and returns them."""
        out = self.result.empty(logits.device)
        self.start(logits, out, beam_scores, mask, row_temperature)
        return out

    def run_into(self, out: TopK, logits: Tensor, mask: Tensor | None, row_temperature: Tensor | None) -> None:
        """Computes the result into `out`: in place if `out` is contiguous, else by way of a copy. Other indices than int64
        are a copy of such."""
        values, indices, logsumexp = out
        if not (values.is_contiguous() and logsumexp.is_contiguous()):
            for given, computed in zip(out, self.run(logits, mask, row_temperature), strict=True):
                given.copy_(computed)
            return
        if indices.dtype is torch.int64 and indices.is_contiguous():
            self.start(logits, out, None, mask, row_temperature)
            return
        computed = _empty(size=self.result.indices[0], dtype=torch.int64, device=logits.device)
        self.start(logits, out._replace(indices=computed), None, mask, row_temperature)
        indices.copy_(computed)


@functools.lru_cache(maxsize=4096)
def topk_plan(
    device: torch.device,
    logits: Like,
    k: int,
    temperature: float,
    row_temperature: Like | None,
    mask: Like | None,
    values: str,
    normalize: str,
    backend: str | None,
    beam_scores: Like | None = None,
) -> TopkPlan:
    """The plan of a checked request. The arguments are the fields of :class:`Problem`, with layouts for tensors."""
    rows = logits.meta()
    scores = None if beam_scores is None else beam_scores.meta()
    result = row_result(rows, k, values) if scores is None else beam_result(rows, k)
    chosen = backends.pick(device, logits.dtype, k, backend)
    if rows.numel() == 0:
        return TopkPlan(result, lambda logits, out, beam_scores=None, mask=None, row_temperature=None: None)
    problem = Problem(
        rows,
        k,
        temperature,
        None if row_temperature is None else row_temperature.meta(),
        None if mask is None else mask.meta(),
        values,
        normalize,
    )
    return TopkPlan(result, chosen.prepare_topk(problem, device, scores))


class MergePlan(NamedTuple):
    """A checked and prepared request to merge states. It lacks only the tensors."""

    result: TopkResult
    start: StartMerge

    def run(self, tensors: MergeTensors) -> TopK:
        """Computes the result into new tensors and returns them."""
        out = self.result.empty(tensors.logits.device)
        self.start(tensors, out)
        return out


@functools.lru_cache(maxsize=4096)
def merge_plan(
    device: torch.device,
    logits: Like,
    indices: Like,
    m: Like,
    d: Like,
    lengths: Like | None,
    k: int,
    temperature: float,
    row_temperature: Like | None,
    values: str,
    normalize: str,
    backend: str | None,
) -> MergePlan:
    """The plan of a checked request. The arguments are the fields of :class:`MergeProblem`, with layouts for tensors."""
    lists = logits.meta()
    result = merge_result(lists, k, values)
    chosen = backends.pick(device, logits.dtype, 1, backend)
    if lists.numel() == 0:
        return MergePlan(result, lambda tensors, out: None)
    problem = MergeProblem(
        lists,
        indices.meta(),
        m.meta(),
        d.meta(),
        None if lengths is None else lengths.meta(),
        k,
        temperature,
        None if row_temperature is None else row_temperature.meta(),
        values,
        normalize,
    )
    return MergePlan(result, chosen.prepare_merge(problem, device))


class FullRowPlan(NamedTuple):
    """A checked and prepared request for full rows. It lacks only the tensors."""

    shape: torch.Size  # of the result
    dtype: torch.dtype  # of the result
    is_alike: bool  # whether the result has the shape, the dtype and the strides of the logits
    start: StartFullRows

    def run(self, logits: Tensor, row_temperature: Tensor | None = None) -> Tensor:
        """Computes the result into a new tensor and returns it."""
        # torch.empty_like takes less time than torch.empty.
        is_alike = self.is_alike
        out = _empty_like(logits) if is_alike else _empty(size=self.shape, dtype=self.dtype, device=logits.device)
        self.start(logits, out, row_temperature)
        return out


def full_row_shape(logits: Tensor, values: str) -> torch.Size:
    """The shape of the result."""
    return logits.shape[:-1] if values == "logsumexp" else logits.shape


@functools.lru_cache(maxsize=4096)
def full_row_plan(
    device: torch.device,
    logits: Like,
    temperature: float,
    row_temperature: Like | None,
    values: str,
    dtype: torch.dtype,
    backend: str | None,
) -> FullRowPlan:
    """The plan of a checked request.

    The arguments are the fields of :class:`FullRowProblem`, with layouts for tensors, and the dtype of the result.
    """
    rows = logits.meta()
    shape = full_row_shape(rows, values)
    is_alike = shape == rows.shape and dtype is rows.dtype and rows.is_contiguous()
    chosen = backends.pick(device, logits.dtype, 1, backend)
    if rows.numel() == 0:
        return FullRowPlan(shape, dtype, is_alike, lambda logits, out, row_temperature=None: None)
    temperatures = None if row_temperature is None else row_temperature.meta()
    problem = FullRowProblem(rows, temperature, temperatures, values)
    return FullRowPlan(shape, dtype, is_alike, chosen.prepare_full_rows(problem, device, dtype))

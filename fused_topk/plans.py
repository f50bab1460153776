# SPDX-License-Identifier: Apache-2.0
"""The plan of a request: the shape and dtype of its result, and the function by which its backend computes it.
A plan does not depend on the contents of the tensors. So it is cached and serves every later request with the same
layout: for a short row, planning takes longer than the rest of the call. Plans hold no device memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backends
from .arguments import check_k, check_normalize, check_result_dtype
from .backends.protocol import StartFullRows, StartMerge, StartRouter, StartSample, StartTopk
from .problem import (
    FullRowProblem,
    Kept,
    MergeProblem,
    RouterProblem,
    RouterTopK,
    Sample,
    SampleProblem,
    TopK,
    TopkProblem,
    result_dtype,
)
from .router_arguments import check_router
from .row_arguments import check_rows
from .rows import DTYPES, Like, LogitRows, RowsLayout, like

# The functions of torch at import. accelerate's init_empty_weights() puts others in their places, which make meta tensors.
_empty, _empty_like = torch.empty, torch.empty_like
_new = tuple.__new__
# A result on the CPU of at most this many elements is made by torch.empty_like, in three quarters of the time of torch.empty. The
# tensors that it is made like are views of these, one for each dtype.
_FEW_ELEMENTS = 1024
_memory = {dtype: _empty(size=(_FEW_ELEMENTS,), dtype=dtype, device="cpu") for dtype in (*DTYPES, torch.int64)}


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
        # The size is passed by keyword because torch parses a positional tuple more slowly.
        values = _empty(size=shape, dtype=value_dtype, device=device)
        indices = _empty(size=shape, dtype=torch.int64, device=device)
        return _new(TopK, (values, indices, _empty(size=rows, dtype=dtype, device=device)))


def row_result(logits: Tensor, k: int, values: str) -> TopkResult:
    """The shapes and dtypes for the k best of each row."""
    result = merge_result(logits, k, values)
    return result._replace(logsumexp=((0,), result.logsumexp[1])) if values == "logits" else result


def merge_result(logits: Tensor, k: int, values: str) -> TopkResult:
    """Likewise of a merge of rows like these, which has a logsumexp whatever the values are."""
    rows, dtype = tuple(logits.shape[:-1]), result_dtype(logits.dtype)
    if values == "state":
        return TopkResult.of((*rows, k), logits.dtype, (2, *rows), dtype)
    return TopkResult.of((*rows, k), logits.dtype if values == "logits" else dtype, rows, dtype)


def beam_result(logits: Tensor, k: int) -> TopkResult:
    """The shapes and dtypes for the k best over all beams of each batch entry."""
    batch, beams, _ = logits.shape
    dtype = result_dtype(logits.dtype)
    return TopkResult.of((batch, k), dtype, (batch, beams), dtype)


class TopkPlan(NamedTuple):
    """A checked and prepared top-k request. It lacks only the tensors."""

    result: TopkResult
    start: StartTopk
    # The tensors that those of the result are made like. None: the result's are made by their shapes and dtypes.
    like: tuple[Tensor, ...] | None

    def run(self, rows: LogitRows, beam_scores: Tensor | None = None) -> TopK:
        """Computes the result into new tensors and returns them."""
        like = self.like
        # tuple.__new__ avoids the named tuple's own __new__, which is written in Python.
        out = self.result.empty(rows.logits.device) if like is None else _new(TopK, map(_empty_like, like))
        self.start(rows, out, beam_scores)
        return out

    def run_into(self, out: TopK, rows: LogitRows) -> None:
        """Computes the result into `out`: in place if `out` is contiguous, else by way of a copy. Indices of another
        dtype than int64 are always a copy."""
        values, indices, logsumexp = out
        if not (values.is_contiguous() and logsumexp.is_contiguous()):
            for given, computed in zip(out, self.run(rows), strict=True):
                given.copy_(computed)
            return
        if indices.dtype is torch.int64 and indices.is_contiguous():
            self.start(rows, out)
            return
        computed = _empty(size=self.result.indices[0], dtype=torch.int64, device=rows.logits.device)
        self.start(rows, out._replace(indices=computed))
        indices.copy_(computed)


def _checked(layout: RowsLayout) -> LogitRows:
    """Checked rows of that layout, without memory."""
    rows = check_rows(*layout.given())
    given, wanted = layout.row_temperature, rows.row_temperature
    # A backend reads the temperatures in place, so it cannot convert them.
    if given is not None and wanted is not None and given.dtype is not wanted.dtype:
        raise TypeError(f"`row_temperature` must be {wanted.dtype}, got {given.dtype}; convert it")
    return rows


@functools.lru_cache(maxsize=4096)
def topk_plan(
    device: torch.device,
    layout: RowsLayout,
    k: int,
    values: str,
    normalize: str,
    backend: str | None,
    beam_scores: Like | None = None,
) -> TopkPlan:
    """Checks the layout and the other arguments, and plans the call, once for all calls with the same layout and
    arguments."""
    rows = _checked(layout)
    logits = rows.logits
    scores = None if beam_scores is None else beam_scores.meta()
    if scores is None:
        check_k(k, logits.shape[-1])
        result = row_result(logits, k, values)
    else:
        result = beam_result(logits, k)
    check_normalize(normalize)
    chosen = backends.pick(device, logits.dtype, k, backend)
    if logits.numel() == 0:
        return TopkPlan(result, lambda rows, out, beam_scores=None: None, None)
    start = chosen.prepare_topk(TopkProblem(rows, k, values, normalize), device, scores)
    return TopkPlan(result, start, _few_like(result) if device.type == "cpu" else None)


def _few_like(result: TopkResult) -> tuple[Tensor, ...] | None:
    """Tensors of a short result's shapes and dtypes, without memory of their own. None for a long result."""
    if math.prod(result.values[0]) > _FEW_ELEMENTS or math.prod(result.logsumexp[0]) > _FEW_ELEMENTS:
        return None
    like = tuple(_memory[dtype][: math.prod(shape)].view(shape) for shape, dtype in result)
    # In a mode of torch, such as that of fake tensors, a view may be no plain tensor.
    return like if all(type(x) is Tensor and x.is_cpu for x in like) else None


class MergePlan(NamedTuple):
    """A checked and prepared request to merge states. It lacks only the tensors."""

    result: TopkResult
    start: StartMerge

    def run(self, problem: MergeProblem) -> TopK:
        """Computes the result into new tensors and returns them."""
        out = self.result.empty(problem.logits.device)
        self.start(problem, out)
        return out


def plan_of_merge(problem: MergeProblem, backend: str | None) -> MergePlan:
    """The plan of a checked request. It serves all requests that differ in their tensors alone, not in the tensors' layouts."""
    return merge_plan(
        problem.logits.device, backend, *(like(x) if isinstance(x, Tensor) else x for x in problem.flat())
    )


@functools.lru_cache(maxsize=4096)
def merge_plan(device: torch.device, backend: str | None, *fields: Any) -> MergePlan:
    """fields: those of MergeProblem.flat(), with layouts in place of tensors."""
    problem = MergeProblem.of(*(x.meta() if isinstance(x, Like) else x for x in fields))
    result = merge_result(problem.logits.select(0, 0), problem.k, problem.values)
    chosen = backends.pick(device, problem.logits.dtype, 1, backend)
    if problem.logits.numel() == 0:
        return MergePlan(result, lambda problem, out: None)
    return MergePlan(result, chosen.prepare_merge(problem, device))


class FullRowPlan(NamedTuple):
    """A checked and prepared request for full rows. It lacks only the tensors."""

    shape: torch.Size  # of the result
    dtype: torch.dtype  # of the result
    is_alike: bool  # whether the result has the shape, the dtype and the strides of the logits
    start: StartFullRows

    def run(self, rows: LogitRows) -> Tensor:
        """Computes the result into a new tensor and returns it."""
        logits = rows.logits
        # torch.empty_like takes less time than torch.empty.
        is_alike = self.is_alike
        out = _empty_like(logits) if is_alike else _empty(size=self.shape, dtype=self.dtype, device=logits.device)
        self.start(rows, out)
        return out


def full_row_shape(logits: Tensor, values: str) -> torch.Size:
    """The shape of the result."""
    return logits.shape[:-1] if values == "logsumexp" else logits.shape


@functools.lru_cache(maxsize=4096)
def full_row_plan(
    device: torch.device, layout: RowsLayout, values: str, dtype: torch.dtype | None, backend: str | None
) -> FullRowPlan:
    """As :func:`topk_plan`. dtype: of the result, as the user gives it."""
    rows = _checked(layout)
    logits = rows.logits
    dtype = result_dtype(logits.dtype) if values == "logsumexp" else check_result_dtype(dtype, logits)
    shape = full_row_shape(logits, values)
    is_alike = shape == logits.shape and dtype is logits.dtype and logits.is_contiguous()
    chosen = backends.pick(device, logits.dtype, 1, backend)
    if logits.numel() == 0:
        return FullRowPlan(shape, dtype, is_alike, lambda rows, out: None)
    return FullRowPlan(shape, dtype, is_alike, chosen.prepare_full_rows(FullRowProblem(rows, values), device, dtype))


class RouterResult(NamedTuple):
    """The shape and the dtype of each field of a :class:`RouterTopK`."""

    weights: tuple[tuple[int, ...], torch.dtype]
    experts: tuple[tuple[int, ...], torch.dtype]

    def empty(self, device: torch.device) -> RouterTopK:
        """New uninitialised tensors of these shapes and dtypes."""
        (shape, weight_dtype), (_, index_dtype) = self
        weights = _empty(size=shape, dtype=weight_dtype, device=device)
        return _new(RouterTopK, (weights, _empty(size=shape, dtype=index_dtype, device=device)))


def router_result(logits: Tensor, k: int, index_dtype: torch.dtype) -> RouterResult:
    """The shapes and dtypes for k experts of each row."""
    shape = (*logits.shape[:-1], k)
    return RouterResult((shape, result_dtype(logits.dtype)), (shape, index_dtype))


class RouterPlan(NamedTuple):
    """A checked and prepared choice of experts. It lacks only the tensors."""

    result: RouterResult
    start: StartRouter

    def run(self, rows: LogitRows, bias: Tensor | None) -> RouterTopK:
        """Computes the result into new tensors and returns them."""
        out = self.result.empty(rows.logits.device)
        self.start(rows, bias, out)
        return out

    def run_into(self, out: RouterTopK, rows: LogitRows, bias: Tensor | None) -> None:
        """Computes the result into `out`: in place if it is contiguous, else by way of a copy."""
        if out.weights.is_contiguous() and out.experts.is_contiguous():
            self.start(rows, bias, out)
            return
        for given, computed in zip(out, self.run(rows, bias), strict=True):
            given.copy_(computed)


@functools.lru_cache(maxsize=4096)
def router_plan(
    device: torch.device,
    layout: RowsLayout,
    bias: Like | None,
    request: tuple[Any, ...],
    index_dtype: torch.dtype,
    backend: str | None,
) -> RouterPlan:
    """As :func:`topk_plan`. request: the fields of :class:`RouterProblem` after the bias."""
    rows = _checked(layout)
    logits = rows.logits
    k, *_ = request
    check_router(logits.shape[-1], index_dtype, *request)
    chosen = backends.pick_router(device, logits.dtype, logits.shape[-1], k, backend)
    result = router_result(logits, k, index_dtype)
    if logits.numel() == 0:
        return RouterPlan(result, lambda rows, bias, out: None)
    problem = RouterProblem(rows, None if bias is None else bias.meta(), *request)
    return RouterPlan(result, chosen.prepare_router(problem, device))


class SamplePlan(NamedTuple):
    """A prepared request for draws. It lacks only the seeds, or the noise, and the tensors."""

    start: StartSample

    def run(self, problem: SampleProblem) -> Sample:
        """Draws into new tensors and returns them."""
        out = sample_result(problem)
        self.start(problem, out)
        return out


def sample_result(problem: SampleProblem) -> Sample:
    """New uninitialised tensors for the result, with one leading dimension: the rows."""
    logits, num_samples, k = problem.rows.logits, problem.num_samples, problem.topk
    rows, device, dtype = math.prod(logits.shape[:-1]), logits.device, result_dtype(logits.dtype)
    topk = None
    if k:
        topk = TopkResult.of((rows, k), dtype, (rows,), dtype).empty(device)
    kept = None
    if problem.kept:
        kept = Kept(
            _empty(size=(rows,), dtype=torch.int64, device=device), _empty(size=(rows,), dtype=dtype, device=device)
        )
    return Sample(
        _empty(size=(rows, num_samples), dtype=torch.int64, device=device),
        _empty(size=(rows, num_samples), dtype=dtype, device=device),
        topk,
        kept,
    )


def plan_of_sample(problem: SampleProblem, backend: str | None) -> SamplePlan:
    """The plan of a checked request. It serves all requests that differ in their seeds, their noise and tensors alone, not in the
    tensors' layouts."""
    rows, *filters = problem[:7]
    layouts = (like(x) if isinstance(x, Tensor) else x for x in filters)
    wanted = (problem.num_samples, problem.topk, problem.truncated, problem.kept)
    return sample_plan(rows.logits.device, backend, rows.layout(), *layouts, *wanted)


@functools.lru_cache(maxsize=4096)
def sample_plan(device: torch.device, backend: str | None, layout: RowsLayout, *fields: Any) -> SamplePlan:
    """fields: those of :class:`SampleProblem` but the rows, the seeds, the counters and the noise, with layouts in place of
    tensors."""
    rows, filters, wanted = layout.meta(), fields[:6], fields[6:]
    _, topk, *_ = wanted
    chosen = backends.pick(device, rows.logits.dtype, max(topk, 1), backend)
    if not len(rows.logits):
        return SamplePlan(lambda problem, out: None)
    of_rows = (x.meta() if isinstance(x, Like) else x for x in filters)
    parameters: Any = (*of_rows, 0, None, 0, None, *wanted)
    return SamplePlan(chosen.prepare_sample(SampleProblem(rows, *parameters), device))

# SPDX-License-Identifier: Apache-2.0
"""The k best of every row, and of every sequence's beams: the operators with their plan, and each backend's code.

    row_topk     softmax_topk, log_softmax_topk, topk and topk_state
    beam_topk    beam_topk

gradients.py has their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..arguments import check_k, check_normalize
from ..backends import cpu, cuda
from ..backends.reference import gather, normalizer, ranking, values_of, working_dtype, write_state
from ..layout import topk_launch
from ..layout.launch import row_count
from ..layout.topk_choice import KernelChoice
from ..problem import TopK, TopkProblem, result_dtype
from ..row_arguments import check_layout
from ..rows import ROWS_SCHEMA, Like, LogitRows, RowsLayout, like, unflattened
from . import gradients
from .dispatch import wants_gradient
from .operator import Operator, mapped
from .results import Plan, Start, beam_result, do_nothing, empty, empty_like, row_result

_new = tuple.__new__  # quicker than a named tuple's own, which is written in Python


@functools.lru_cache(maxsize=4096)
def plan(
    device: torch.device,
    layout: RowsLayout,
    k: int,
    values: str,
    normalize: str,
    backend: str | None,
    beam_scores: Like | None = None,
) -> Plan[TopK]:
    """Checks the layout and the other arguments, and plans the call, once for all calls alike. It does not depend on the contents of the
    tensors: for a short row, planning takes longer than the rest of the call."""
    rows = check_layout(layout)
    logits = rows.logits
    scores = None if beam_scores is None else beam_scores.meta()
    if scores is None:
        check_k(k, logits.shape[-1])
        result = row_result(logits, k, values)
    else:
        check_k(k, logits.shape[1] * logits.shape[2], "beams times the vocabulary size")
        result = beam_result(logits, k)
    check_normalize(normalize)
    chosen = backends.pick(device, logits.dtype, k, backend)
    problem = TopkProblem(rows, k, values, normalize)
    return Plan(result, device, PREPARE[chosen](problem, device, scores) if logits.numel() else None)


@functools.lru_cache(maxsize=4096)
def plan_of_logits(
    logits: Like, device: torch.device, k: int, values: str, normalize: str, backend: str | None
) -> Callable[[Tensor], TopK]:
    """plan() of logits alone, at the temperature 1. For a short row on a CPU each function that a call goes through would show."""
    planned = plan(device, RowsLayout(Like(*logits), 1.0, None, None, None), k, values, normalize, backend)
    if planned.like is None:
        return lambda logits: planned.run(LogitRows(logits))
    like_values, like_indices, like_logsumexp = planned.like
    start = planned.start

    def run(logits: Tensor) -> TopK:
        out = _new(TopK, (empty_like(like_values), empty_like(like_indices), empty_like(like_logsumexp)))
        start(_new(LogitRows, (logits, 1.0, None, None, None)), out)
        return out

    return run


def reference(problem: TopkProblem, out: TopK) -> None:
    """The k best of every row, their values, and the row's logsumexp, in torch operations."""
    rows = problem.rows
    candidates = rows.counted()
    indices = ranking(candidates)[..., : problem.k]
    chosen = gather(candidates, indices)
    out.indices.copy_(indices)
    if problem.values == "logits":
        out.values.copy_(chosen)
        return

    dtype = working_dtype(rows.logits)
    scale = rows.scale().with_nan(dtype)
    x = rows.counted(problem.normalize).to(dtype)
    m, d = normalizer(x, scale)
    if problem.values == "state":
        out.values.copy_(chosen)
        write_state(x.amax(-1), d.squeeze(-1), out)
        return
    out.logsumexp.copy_(scale.logsumexp(m, d).squeeze(-1))
    values = values_of(chosen.to(dtype), m, d, scale, problem)
    # A row without a finite normalizer has no probabilities at all, as in torch.softmax.
    out.values.copy_(values.where(d.log().isfinite(), torch.nan))


def reference_of_beams(problem: TopkProblem, beam_scores: Tensor, out: TopK) -> None:
    """The k best continuations of every batch entry over all of its beams: the top-k of each beam, then of those."""
    batch, beams, vocab_size = problem.rows.logits.shape
    dtype = out.values.dtype
    # No beam can contribute more than k, nor more than it has.
    k_of_beam = min(problem.k, vocab_size)
    of_beam = TopK(
        out.values.new_empty(batch, beams, k_of_beam),
        out.indices.new_empty(batch, beams, k_of_beam),
        out.logsumexp,
    )
    reference(problem._replace(k=k_of_beam), of_beam)

    accumulated = (of_beam.values + beam_scores.to(dtype).unsqueeze(-1)).flatten(1)
    first_of_beam = torch.arange(beams, device=out.indices.device).unsqueeze(-1) * vocab_size
    flat_indices = (of_beam.indices + first_of_beam).flatten(1)
    # A stable sort of the beams' lists one after another: equal values go to the smaller beam, then in the row's order.
    best = ranking(accumulated)[:, : problem.k]
    out.values.copy_(accumulated.gather(1, best))
    out.indices.copy_(flat_indices.gather(1, best))


def _prepare_reference(problem: TopkProblem, device: torch.device, beam_scores: Tensor | None = None) -> Start:
    def run(rows: LogitRows, out: TopK, beam_scores: Tensor | None = None) -> None:
        given = problem._replace(rows=rows.broadcast())
        if beam_scores is None:
            reference(given, out)
        else:
            reference_of_beams(given, beam_scores, out)

    return run


def prepare_cpu(
    problem: TopkProblem, device: torch.device, beam_scores: Tensor | None = None, instruction_set: str = ""
) -> Start:
    """instruction_set: one of cpu.instruction_sets() instead of the best, for tests."""
    rows, k, values, normalize = problem
    topk = cpu.native.Topk(
        cpu.layout_of(rows, instruction_set),
        k,
        cpu.VALUE_KINDS[values],
        cpu.NORMALIZE_OVER[normalize],
        () if beam_scores is None else beam_scores.stride(),
    )
    addresses_of, num_threads = cpu.addresses_of, cpu.num_threads
    are_alone = len(rows.tensors()) == 1

    def run(rows: LogitRows, out: TopK, beam_scores: Tensor | None = None) -> None:
        values, indices, logsumexp = out
        topk(
            (rows[0].data_ptr(), 0, 0, 0) if are_alone else addresses_of(rows),
            values.data_ptr(),
            indices.data_ptr(),
            logsumexp.data_ptr(),
            0 if beam_scores is None else beam_scores.data_ptr(),
            num_threads(),
        )

    return run


def prepare_cuda(
    problem: TopkProblem, device: torch.device, beam_scores: Tensor | None = None, choice: KernelChoice | None = None
) -> Start:
    """The merge over beams is part of the same launch. choice: instead of the best one."""
    logits, index = problem.rows.logits, device.index
    itemsize, count = logits.element_size(), row_count(logits.shape)
    if count == 0:
        return do_nothing
    choice = choice or _choice_on(problem, index, beam_scores)
    unaligned, aligned = (topk_launch.plan(problem, is_aligned, choice, beam_scores) for is_aligned in (False, True))

    @functools.cache
    def of_copy(layout: RowsLayout) -> Start:
        return prepare_cuda(problem._replace(rows=layout.meta()), device, beam_scores, choice)

    def run(rows: LogitRows, out: TopK, beam_scores: Tensor | None = None) -> None:
        start = rows.logits.data_ptr()
        planned = unaligned if start % 16 else aligned
        if planned is None or start % itemsize:
            copied = cuda.copied(rows.broadcast())
            of_copy(copied.layout())(copied, out, beam_scores)
            return
        if problem.values == "logits" and not out.logsumexp.numel():
            # The kernels write a logsumexp whatever the values are.
            out = out._replace(logsumexp=empty(size=(count,), dtype=torch.float32, device=rows.logits.device))
        counters = planned.row_tickets + planned.beam_tickets
        workspace, scratch, tickets = cuda.workspace(index, out.values.device, planned.scratch_words, counters)
        filled = planned.fill(rows, beam_scores, scratch, tickets, out)
        cuda.launch(index, planned.kernel, planned.grid, planned.threads, filled, shared_bytes=planned.shared_bytes)

    return run


PREPARE = {"reference": _prepare_reference, "cpu": prepare_cpu, "cuda": prepare_cuda}


def kernel_on(problem: TopkProblem, device: int, beam_scores: Tensor | None = None) -> str:
    """The kernel that a launch asks for, on logits as torch allocates them: contiguous, from a multiple of 16 bytes on. The
    tensors may be meta tensors, and have at least one row."""
    planned = topk_launch.plan(problem, True, _choice_on(problem, device, beam_scores), beam_scores)
    assert planned is not None, "contiguous tensors have one stride"
    return planned.kernel


def _choice_on(problem: TopkProblem, device: int, beam_scores: Tensor | None) -> KernelChoice:
    logits, has_beams = problem.rows.logits, beam_scores is not None
    count, vocab_size = row_count(logits.shape), logits.shape[-1]
    return cuda.topk_choice(count, vocab_size, problem.k, logits.element_size(), device, has_beams)


def run(*arguments: Any) -> TopK:
    """Computes row_topk without torch's dispatcher. `arguments`: the operator's, in its order."""
    rows, request = unflattened(arguments)
    return plan(rows.logits.device, rows.layout(), *request).run(rows)


def run_into(*arguments: Any) -> None:
    """Likewise into the last arguments."""
    rows, (*request, values, indices, logsumexp) = unflattened(arguments)
    plan(rows.logits.device, rows.layout(), *request).run_into(TopK(values, indices, logsumexp), rows)


def _run_beams(*arguments: Any) -> TopK:
    rows, (beam_scores, k, normalize, backend) = unflattened(arguments)
    scores = beam_scores.to(result_dtype(rows.logits.dtype))
    request = k, "log_softmax", normalize, backend, like(scores)
    return plan(rows.logits.device, rows.layout(), *request).run(rows, scores)


def _fake(*arguments: Any) -> TopK:
    rows, (k, values, _, _) = unflattened(arguments)
    return row_result(rows.logits, k, values).empty(rows.logits.device)


def _fake_of_beams(*arguments: Any) -> TopK:
    rows, (_, k, _, _) = unflattened(arguments)
    return beam_result(rows.logits, k).empty(rows.logits.device)


def dim_of_normalizer(values: str) -> int:
    """The dimension of the logsumexp that vmap maps over: the first, or in a state the one behind the dimension of m and d."""
    return int(values == "state")


def _map_rows(run: Any, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    _, (_, values, *_) = unflattened(arguments)
    # Of logits there is no logsumexp, and what is empty is not mapped.
    return run(*mapped(info, in_dims, arguments)), (0, 0, None if values == "logits" else dim_of_normalizer(values))


def _map_beams(run: Any, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Beam search has one batch dimension. The dimension that vmap maps over is folded into it."""
    folded = [x.flatten(0, 1) if isinstance(x, Tensor) else x for x in mapped(info, in_dims, arguments)]
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in run(*folded)), (0, 0, 0)


_REQUEST = f"{ROWS_SCHEMA}, SymInt k, str values, str normalize, str? backend"
_row_topk = Operator(
    f"row_topk({_REQUEST}) -> (Tensor, Tensor, Tensor)",
    run,
    _fake,
    gradients.row_setup_context,
    gradients.row_backward,
    _map_rows,
)
_beam_topk = Operator(
    f"beam_topk({ROWS_SCHEMA}, Tensor beam_scores, SymInt k, str normalize, str? backend) -> (Tensor, Tensor, Tensor)",
    _run_beams,
    _fake_of_beams,
    gradients.beam_setup_context,
    gradients.beam_backward,
    _map_beams,
)


def row_topk(rows: LogitRows, k: int, values: str, normalize: str, backend: str | None) -> TopK:
    """The k best of checked rows. See :class:`TopkProblem`."""
    return TopK(*_row_topk(*rows, k, values, normalize, backend))


def plain_topk(rows: LogitRows, k: int, values: str, normalize: str, backend: str | None) -> TopK:
    """The k best of plain rows, whose plan checks them."""
    if wants_gradient(rows.logits):
        return TopK(*_row_topk.with_gradient(*rows, k, values, normalize, backend))
    return plan(rows.logits.device, rows.layout(), k, values, normalize, backend).run(rows)


def beam_topk(rows: LogitRows, beam_scores: Tensor, k: int, normalize: str, backend: str | None) -> TopK:
    """The k best over the beams of (batch, beams, V)."""
    return TopK(*_beam_topk(*rows, beam_scores, k, normalize, backend))


def plain_beam_topk(rows: LogitRows, beam_scores: Tensor, k: int, normalize: str, backend: str | None) -> TopK:
    """Likewise of plain rows and scores, which are of the result's dtype."""
    if wants_gradient(rows.logits):
        return TopK(*_beam_topk.with_gradient(*rows, beam_scores, k, normalize, backend))
    request = k, "log_softmax", normalize, backend, like(beam_scores)
    return plan(rows.logits.device, rows.layout(), *request).run(rows, beam_scores)

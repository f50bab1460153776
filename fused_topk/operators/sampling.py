# SPDX-License-Identifier: Apache-2.0
"""Draws: the operator `sample` with its plan, and each backend's code.

Its arguments name its random numbers, or have them, so equal arguments give equal results. It has no gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import cpu, cuda, philox
from ..backends.reference import gather, ranking, working_dtype
from ..layout import launch
from ..layout.kernel_arguments import SampleRows, address, with_rows
from ..problem import Kept, Sample, SampleProblem, TopK, TopkProblem, result_dtype
from ..rows import ROWS_SCHEMA, Like, LogitRows, RowsLayout, like, unflattened
from ..scale import Scale
from . import row_topk
from .operator import Operator
from .results import Plan, Result, Start, row_result


def result_of(problem: SampleProblem) -> Result[Any]:
    """The tensors of the result, with one leading dimension: the rows."""
    logits, num_samples, k = problem.rows.logits, problem.num_samples, problem.topk
    rows, dtype = math.prod(logits.shape[:-1]), result_dtype(logits.dtype)
    fields: list[Any] = [((rows, num_samples), torch.int64), ((rows, num_samples), dtype)]
    if k:
        fields += [((rows, k), dtype), ((rows, k), torch.int64), ((rows,), dtype)]
    if problem.kept:
        fields += [((rows,), torch.int64), ((rows,), dtype)]
    return Result(tuple, *fields)


def as_sample(tensors: Sequence[Tensor], problem: SampleProblem) -> Sample:
    """The result that has the tensors of result_of()."""
    tokens, logprobs, *others = tensors
    best = TopK(*others[:3]) if problem.topk else None
    return Sample(tokens, logprobs, best, Kept(*others[-2:]) if problem.kept else None)


def draw(problem: SampleProblem, planned: Plan[Any]) -> Sample:
    """Draws into new tensors and returns them. planned: the plan of such a problem."""
    out = as_sample(planned.empty(), problem)
    planned.start(problem, out)
    return out


def plan_of(problem: SampleProblem, backend: str | None, device: torch.device | None = None) -> Plan[Any]:
    """The plan of a checked request. It serves all requests that differ in their seeds, their noise and tensors alone, not in the
    tensors' layouts. device: of the tensors that a problem of meta tensors stands for."""
    rows, *filters = problem[:7]
    layouts = (like(x) if isinstance(x, Tensor) else x for x in filters)
    wanted = (problem.num_samples, problem.topk, problem.truncated, problem.kept)
    return plan(device or rows.logits.device, backend, rows.layout(), *layouts, *wanted)


@functools.lru_cache(maxsize=4096)
def plan(device: torch.device, backend: str | None, layout: RowsLayout, *fields: Any) -> Plan[Any]:
    """fields: those of :class:`SampleProblem` but the rows, the seeds, the counters and the noise, with layouts in place of
    tensors."""
    rows, filters, wanted = layout.meta(), fields[:6], fields[6:]
    _, topk, *_ = wanted
    chosen = backends.pick(device, rows.logits.dtype, max(topk, 1), backend)
    of_rows = (x.meta() if isinstance(x, Like) else x for x in filters)
    parameters: Any = (*of_rows, 0, None, 0, None, *wanted)
    problem = SampleProblem(rows, *parameters)
    return Plan(result_of(problem), device, PREPARE[chosen](problem, device) if len(rows.logits) else None)


def reference(problem: SampleProblem, out: Sample) -> None:
    """Draws tokens, and lists the best of the model's own distribution, in torch operations."""
    if out.topk is not None:
        own = TopkProblem(problem.rows.unscaled(), problem.topk, "log_softmax", "allowed")
        row_topk.reference(own, out.topk)
    _reference_draws(problem, out)


def _reference_draws(problem: SampleProblem, out: Sample) -> None:
    """Draws tokens, and writes them and their log-probabilities, in several passes and float64.

    Temperature, top-k, top-p and min-p only ever keep the best tokens of a row. So what they keep is a prefix of the row sorted
    in the project's order. Its weights e^((x - m) / T) are then put back in the order of the tokens, and their running sum says
    which token a uniform number u draws: the first whose sum exceeds u times the total. With noise of the caller's no sum is needed:
    the token has the greatest quotient of its weight and its noise.
    """
    p = problem
    rows = p.rows
    vocab_size = rows.logits.shape[-1]
    # The logits of the model's own distribution, from which top-k, top-p and min-p keep a part.
    x = rows.counted()
    dtype = working_dtype(rows.logits)
    order = ranking(x)
    ranked = gather(x, order).to(dtype)
    best = ranked[:, :1]
    temperature = column(*rows.scale(), dtype, x.device)
    m = best.where(best.isfinite(), 0.0)
    scale = _scale_of_draws(temperature)

    weights = scale.weight(ranked, m)
    is_kept = _kept(p, ranked, weights)
    weights = weights * is_kept
    of_token = torch.zeros_like(weights).scatter(1, order, weights)
    sums = of_token.cumsum(1)
    total = sums[:, -1:]
    if p.noise is None:
        u = philox.uniforms(*_names(p, x.device), p.num_samples, dtype)
        # A product that is rounded up to the total would be beyond every token.
        aim = torch.minimum(u * total, total.nextafter(torch.zeros_like(total)))
        drawn = torch.searchsorted(sums, aim, right=True).clamp(max=vocab_size - 1)
    else:
        may_win = torch.zeros_like(is_kept).scatter(1, order, is_kept & (ranked != -torch.inf))
        drawn = _winner(scale.log_weight(x.to(dtype), m) - p.noise.to(dtype).log(), may_win)
    d = (ranked - m).exp().sum(1, keepdim=True)
    counts = (is_kept & (ranked != -torch.inf)).sum(1, keepdim=True)
    of_drawn = x.to(dtype).gather(1, drawn)
    result = finished(drawn, of_drawn, order[:, :1], best, d, temperature, total, counts, p.truncated)
    for given, computed in zip(flat(out._replace(topk=None)), flat(result)):
        given.copy_(computed)


def finished(
    tokens: Tensor,
    logits: Tensor,
    best: Tensor,
    m: Tensor,
    d: Tensor,
    temperature: Tensor,
    total: Tensor,
    counts: Tensor,
    truncated: bool,
) -> Sample:
    """The result of draws, in which rows of temperature 0 and rows without a distribution have their best token.

    tokens, logits: the drawn ones (rows, samples), and their logits. best, m: the row's best token and its logit, (rows, 1) as all that
    follow. d: the sum of exp(x - m) over the row. total, counts: that of exp((x - m) / T) over the tokens that are kept, and their number.
    """
    has_distribution = m.isfinite()
    is_drawn, is_greedy = has_distribution & (temperature > 0), has_distribution & (temperature == 0)
    scale = _scale_of_draws(temperature)
    shifted = logits.where(is_drawn, m) - m
    if truncated:
        logprobs, is_known = (scale.scaled(shifted) - total.log()).where(is_drawn, 0.0), is_drawn | is_greedy
    else:
        logprobs, is_known = shifted - d.log(), has_distribution
    mass = scale.logsumexp(m, total.where(is_drawn, 1.0)).where(is_drawn | is_greedy, torch.nan)
    kept = Kept(counts.where(is_drawn, is_greedy.long()).squeeze(1), mass.squeeze(1))
    return Sample(tokens.where(is_drawn, best), logprobs.where(is_known, torch.nan), None, kept)


def _scale_of_draws(temperature: Tensor) -> Scale:
    # At most the greatest that float32 can divide by: -inf stays -inf.
    return Scale(row_temperature=temperature.where(temperature > 0, 1.0).clamp(max=2.0**126).squeeze(1))


def _winner(scores: Tensor, may_win: Tensor) -> Tensor:
    """The token (R, 1) with the greatest score of those that may win; of equal ones the smallest. NaN counts as -inf."""
    scores = scores.where(may_win & ~scores.isnan(), -torch.inf)
    # argmax gives the first of equal ones.
    return (may_win & (scores == scores.amax(1, keepdim=True))).byte().argmax(1, keepdim=True)


def _kept(p: SampleProblem, ranked: Tensor, weights: Tensor) -> Tensor:
    """bool (R, V): whether top-k, top-p and min-p keep the token of each rank, given the logits and weights of the ranks."""
    dtype, device, vocab_size = weights.dtype, weights.device, weights.shape[1]
    top_k = column(p.top_k, p.row_top_k, torch.int64, device)
    last = (top_k.where((top_k > 0) & (top_k < vocab_size), vocab_size) - 1).expand(len(ranked), 1)
    # All that tie with the k-th, as transformers keeps them.
    is_in_k = ranked >= ranked.gather(1, last)
    sums = (weights * is_in_k).cumsum(1)
    top_p, min_p = column(p.top_p, p.row_top_p, dtype, device), column(p.min_p, p.row_min_p, dtype, device)
    return kept_of(is_in_k, weights, sums, sums[:, -1:], top_p, min_p)


def kept_of(is_in_k: Tensor, weights: Tensor, sums: Tensor, total: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """What top-p and min-p keep of the best tokens, which begin with those that top-k keeps. sums: the running sums of the weights of
    these. total: what top_p is a share of."""
    before = torch.nn.functional.pad(sums, (1, -1))
    # The shortest prefix with at least that share. Not `< top_p`: NaN and 1 and more keep all.
    kept = is_in_k & (~(before >= top_p * total) | ~(top_p < 1)) & ~(weights < min_p)
    kept[:, 0] = True
    return kept


def _names(p: SampleProblem, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The seed, the counter and the stream of each row (philox.uniforms)."""
    seed = column(p.seed, p.row_seed, torch.int64, device)
    counter = column(p.counter, p.row_counter, torch.int64, device)
    first, rows = (p.first_row, p.rows.logits.shape[0]) if p.row_seed is None else (0, 1)
    return seed, counter, torch.arange(first, first + rows, device=device).unsqueeze(1)


def column(number: float, of_rows: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter in a form that broadcasts along rows."""
    if of_rows is None:
        return torch.full((1, 1), number, dtype=dtype, device=device)
    return of_rows.to(dtype).unsqueeze(1)


def prepare_cpu(problem: SampleProblem, device: torch.device, instruction_set: str = "") -> Start:
    """instruction_set: one of cpu.instruction_sets() instead of the best, for tests."""
    layout = cpu.layout_of(problem.rows, instruction_set)

    def run(problem: SampleProblem, out: Sample) -> None:
        p = problem
        cpu.native.sample(
            layout,
            cpu.addresses_of(p.rows),
            p.top_k,
            address(p.row_top_k),
            p.top_p,
            address(p.row_top_p),
            p.min_p,
            address(p.row_min_p),
            p.seed,
            address(p.row_seed),
            p.counter,
            address(p.row_counter),
            p.first_row,
            address(p.noise),
            p.num_samples,
            p.topk,
            p.truncated,
            out.tokens.data_ptr(),
            out.logprobs.data_ptr(),
            *map(address, (None,) * 3 if out.topk is None else out.topk),
            *map(address, (None,) * 2 if out.kept is None else out.kept),
            cpu.num_threads(),
        )

    return run


def prepare_cuda(problem: SampleProblem, device: torch.device) -> Start:
    """One launch without filters, else two: the row's best with its (m, d), and the draws."""
    p, index = problem, device.index
    logits, mask = p.rows.logits, p.rows.mask
    rows, vocab_size = logits.shape
    launch.check_row_count(rows)
    top_k = p.top_k if p.row_top_k is None else None
    has_other_filter = p.row_top_p is not None or p.top_p < 1 or p.row_min_p is not None or p.min_p > 0
    is_whole = launch.draws_from_vocabulary(vocab_size, top_k, has_other_filter)
    length = 0 if is_whole else launch.sample_list_length(vocab_size, top_k)
    if length < p.topk <= launch.LONGEST_LIST and not is_whole:
        length = p.topk
    own = p.rows.unscaled()
    find_list = None if is_whole else _prepare_list(own, length, device)
    find_best = None
    if p.topk > length:
        find_best = row_topk.prepare_cuda(TopkProblem(own, p.topk, "log_softmax", "allowed"), device)
    count = cuda.multiprocessors(index)
    if is_whole:
        blocks = launch.summing_blocks(rows, vocab_size, count)
        scratches = [launch.summing_scratch(rows, vocab_size, blocks, has_noise) for has_noise in (False, True)]
    else:
        blocks = launch.searching_blocks(rows, vocab_size, top_k, count)
        scratches = [launch.searching_scratch(rows, blocks)] * 2
    kernels = [launch.sample_kernel(logits.dtype, is_whole, has_noise) for has_noise in (False, True)]
    is_cooperative = blocks > 1 and not is_whole
    planned = bytes(
        SampleRows(
            row_stride=logits.stride(0),
            V=vocab_size,
            blocks_per_row=blocks,
            num_samples=p.num_samples,
            part_length_log2=launch.part_length_log2(vocab_size),
            one=launch.sample_unit(vocab_size),
            truncated=p.truncated,
            mask_kind=mask is not None and mask.dtype != torch.bool,
            length=length,
            mask_row_stride=0 if mask is None else mask.stride(0),
            mask_element_stride=0 if mask is None else mask.stride(1),
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            logprobs=p.topk,
            rows=rows,
        )
    )
    has_adjacent, itemsize = launch.has_adjacent(logits), logits.element_size()

    def run(problem: SampleProblem, out: Sample) -> None:
        p, given = problem, problem.rows
        if not has_adjacent or given.logits.data_ptr() % itemsize:
            copied = p._replace(rows=cuda.copied(given))
            prepare_cuda(copied, device)(copied, out)
            return
        own = given.unscaled()
        best = out.topk
        if best is not None and find_best is not None:
            find_best(own, best)
            best = None
        listed = None if find_list is None else find_list(own)
        has_noise = p.noise is not None
        workspace, scratch, counters = cuda.workspace(index, given.logits.device, *scratches[has_noise])
        filled = SampleRows.from_buffer_copy(planned)
        filled.scratch, filled.tickets = scratch, counters
        filled.tokens, filled.log_probs = out.tokens.data_ptr(), out.logprobs.data_ptr()
        filled.seed, filled.row_seed = p.seed, address(p.row_seed)
        filled.counter, filled.row_counter = p.counter, address(p.row_counter)
        filled.first_row = p.first_row
        filled.noise = address(p.noise)
        filled.row_top_k, filled.row_top_p, filled.row_min_p = map(address, (p.row_top_k, p.row_top_p, p.row_min_p))
        if listed is not None:
            filled.list_logits, filled.list_indices, filled.list_state = map(address, listed)
        if best is not None:
            filled.best_values, filled.best_indices, filled.best_logsumexp = map(address, best)
        if out.kept is not None:
            filled.kept_counts, filled.kept_logsumexp = map(address, out.kept)
        written = with_rows(filled, given)
        threads = launch.SUMMING_THREADS if is_whole else launch.SEARCHING_THREADS
        cuda.launch(index, kernels[has_noise], (rows, blocks), threads, written, is_cooperative=is_cooperative)

    return run


def _prepare_list(rows: LogitRows, k: int, device: torch.device) -> Callable[[LogitRows], TopK]:
    """A function that finds the best k logits of each row, with m and d (2, rows) in place of the logsumexp."""
    result = row_result(rows.logits, k, "state")
    start = row_topk.prepare_cuda(TopkProblem(rows, k, "state", "allowed"), device)

    def run(rows: LogitRows) -> TopK:
        out = result.empty(rows.logits.device)
        start(rows, out)
        return out

    return run


PREPARE = {"reference": lambda problem, device: reference, "cpu": prepare_cpu, "cuda": prepare_cuda}


def _run(*arguments: Any) -> list[Tensor]:
    rows, (noise, *parameters, backend) = unflattened(arguments)
    fields: Any = (rows, *parameters, 0, noise)
    problem = SampleProblem(*fields)
    return flat(draw(problem, plan_of(problem, backend)))


def _fake(*arguments: Any) -> list[Tensor]:
    rows, (_, *parameters, _) = unflattened(arguments)
    return list(result_of(SampleProblem(rows, *parameters)).empty(rows.logits.device))


def flat(result: Sample) -> list[Tensor]:
    """The tensors of a result, as an operator returns them."""
    return [result.tokens, result.logprobs, *(result.topk or ()), *(result.kept or ())]


# The arguments behind the rows, which are fields of SampleProblem, and the results: the same for every operator that draws.
SCHEMA = (
    "SymInt top_k, Tensor? row_top_k, float top_p, Tensor? row_top_p, float min_p, Tensor? row_min_p, "
    "int seed, Tensor? row_seed, int counter, Tensor? row_counter, SymInt num_samples, SymInt topk, "
    "bool truncated, bool kept, str? backend) -> Tensor[]"
)
_sample = Operator(f"sample({ROWS_SCHEMA}, Tensor? noise, {SCHEMA}", _run, _fake)


def sample(problem: SampleProblem, backend: str | None) -> Sample:
    """Draws into new tensors, of (R, num_samples) and (R, topk)."""
    # Not slices of the problem: torch.compile of torch 2.6 cannot trace one of a named tuple.
    rows, *parameters, _, noise = problem
    return as_sample(_sample(*rows, noise, *parameters, backend), problem)

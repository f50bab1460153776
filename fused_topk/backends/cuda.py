# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: gives the launches that :mod:`fused_topk.layout` plans to :mod:`fused_topk.cuda_runtime`.

A launch goes to torch's current stream on the logits' device, waits for nothing, and takes all its memory from torch's
caching allocator, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from .. import env
from ..cuda_runtime import driver, tickets
from ..layout import full_row_launch, launch, router_launch, topk_launch
from ..layout.full_row_choice import FullRowChoice, choose_full_row
from ..layout.full_row_launch import FullRowLaunch
from ..layout.kernel_arguments import RowSums, SampleRows, TargetRanks, address, rows_writer, with_rows
from ..layout.launch import FORMATS, row_count
from ..layout.topk_choice import MAX_K, KernelChoice, choose
from ..layout.topk_launch import Launch
from ..problem import (
    FullRowProblem,
    MergeProblem,
    RankProblem,
    RouterProblem,
    RouterTopK,
    Sample,
    SampleProblem,
    TokenSumsProblem,
    TopK,
    TopkProblem,
)
from ..rows import LogitRows, RowsLayout
from .protocol import StartFullRows, StartMerge, StartRouter, StartSample, StartTopk

_write_rows_of_draws = rows_writer(SampleRows)
_SHARED_BYTES_UNASKED = 48 << 10  # what a kernel has without asking

unavailable = driver.unavailable


def supports(dtype: torch.dtype, k: int) -> bool:
    """Whether the kernels take logits of that dtype and that k."""
    return dtype in FORMATS and k <= MAX_K


def prepare_topk(
    problem: TopkProblem, device: torch.device, beam_scores: Tensor | None = None, choice: KernelChoice | None = None
) -> StartTopk:
    """See :class:`protocol.Backend`. The merge over beams is part of the same launch. `choice`: instead of the best one."""
    logits, index = problem.rows.logits, device.index
    itemsize, count = logits.element_size(), row_count(logits.shape)
    if count == 0:
        return lambda rows, out, beam_scores=None: None
    if choice is None:
        choice = topk_choice(count, logits.shape[-1], problem.k, itemsize, index, beam_scores is not None)
    unaligned, aligned = (topk_launch.plan(problem, is_aligned, choice, beam_scores) for is_aligned in (False, True))
    has_adjacent = _has_adjacent(logits)

    @cache
    def of_copy(layout: RowsLayout) -> StartTopk:
        return prepare_topk(problem._replace(rows=layout.meta()), device, beam_scores, choice)

    def run(rows: LogitRows, out: TopK, beam_scores: Tensor | None = None) -> None:
        start = rows.logits.data_ptr()
        planned = unaligned if start % 16 else aligned
        if planned is None or not has_adjacent or start % itemsize:
            copied = _copied(problem.rows.at(rows))
            of_copy(copied.layout())(copied, out, beam_scores)
            return
        if problem.values == "logits" and not out.logsumexp.numel():
            # The kernels write a logsumexp whatever the values are.
            out = out._replace(logsumexp=torch.empty(count, dtype=torch.float32, device=rows.logits.device))
        _launch_topk(planned, index, rows, beam_scores, out)

    return run


def prepare_merge(problem: MergeProblem, device: torch.device) -> StartMerge:
    """See :class:`protocol.Backend`."""
    planned, index = launch.plan_merge(problem), device.index
    itemsize = problem.logits.element_size()

    def run(problem: MergeProblem, out: TopK) -> None:
        if planned is None or problem.logits.data_ptr() % itemsize:
            # A copy starts at a multiple of its element's size.
            given = problem.flat()
            copied = MergeProblem.of(
                *(x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x for x in given)
            )
            prepare_merge(copied, device)(copied, out)
            return
        function = driver.function(index, planned.kernel)
        *of_parts, row_temperature = map(address, problem.tensors)
        filled = planned.fill(*of_parts, *map(address, out), row_temperature)
        driver.call(function, planned.grid, planned.threads, (driver.argument(filled),), index)

    return run


def prepare_full_rows(
    problem: FullRowProblem, device: torch.device, dtype: torch.dtype, choice: FullRowChoice | None = None
) -> StartFullRows:
    """See :class:`protocol.Backend`. `choice`: another cut of the rows than the best one."""
    logits, index = problem.rows.logits, device.index
    itemsize = logits.element_size()
    if row_count(logits.shape) == 0:
        return lambda rows, out: None
    if choice is None:
        choice = full_row_choice(index, logits.shape[-1], itemsize)
    unaligned, aligned = (
        full_row_launch.plan(problem, dtype, is_aligned, choice, cache_bytes(index)) for is_aligned in (False, True)
    )
    has_adjacent, is_written = _has_adjacent(logits), problem.values != "logsumexp"

    def run(rows: LogitRows, out: Tensor) -> None:
        start, to = rows.logits.data_ptr(), out.data_ptr()
        planned = unaligned if start % 16 or (is_written and to % 16) else aligned
        if planned is None or not has_adjacent or start % itemsize:
            given = problem.rows.at(rows)
            copied = given._replace(logits=given.logits.clone(memory_format=torch.contiguous_format))
            prepare_full_rows(problem._replace(rows=copied), device, dtype, choice)(copied, out)
            return
        if problem.rows.has_numbers():
            # The kernel reads contiguous numbers alone. Others are rare, so they are copied.
            rows = problem.rows.at(rows).with_adjacent_numbers()
        _launch_full_rows(planned, index, rows, out)

    return run


def prepare_router(problem: RouterProblem, device: torch.device) -> StartRouter:
    """See :class:`protocol.Backend`."""
    p, logits, index = problem, problem.rows.logits, device.index
    itemsize, experts = logits.element_size(), logits.shape[-1]
    of_rows = TopkProblem(p.rows, p.k, "softmax", "allowed")
    planned = topk_launch.plan(of_rows, is_aligned=False, choice=router_launch.CHOICE)
    kernel = router_launch.kernel_name(logits.dtype, experts, p.scoring)
    wanted = router_launch.argument(experts, p.groups, p.topk_groups, p.group_score, p.renormalize, p.scale)
    shared_bytes = router_launch.shared_bytes(experts, itemsize, p.groups)
    has_adjacent = _has_adjacent(logits)

    def run(rows: LogitRows, bias: Tensor | None, out: RouterTopK) -> None:
        if planned is None or not has_adjacent or rows.logits.data_ptr() % itemsize:
            copied = _copied(problem.rows.at(rows))
            prepare_router(problem._replace(rows=copied), device)(copied, bias, out)
            return
        if bias is not None and bias.data_ptr() % router_launch.BIAS_ALIGNMENT:
            bias = bias.clone()
        weights, chosen = out
        # The kernel writes no logsumexp.
        filled = planned.fill(rows, None, 0, 0, TopK(weights, chosen, weights))
        routing = router_launch.filled(wanted, address(bias), chosen.dtype is torch.int32)
        arguments = (driver.argument(filled), driver.argument(routing))
        driver.call(driver.function(index, kernel), planned.grid, planned.threads, arguments, index, shared_bytes)

    return run


def prepare_sample(problem: SampleProblem, device: torch.device) -> StartSample:
    """See :class:`protocol.Backend`. One launch without filters, else two: the row's best with its (m, d), and the draws."""
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
        find_best = prepare_topk(TopkProblem(own, p.topk, "log_softmax", "allowed"), device)
    count = multiprocessors(index)
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
    has_adjacent, itemsize = _has_adjacent(logits), logits.element_size()

    def run(problem: SampleProblem, out: Sample) -> None:
        p, given = problem, problem.rows
        if not has_adjacent or given.logits.data_ptr() % itemsize:
            given = given.with_logits(given.logits.clone(memory_format=torch.contiguous_format))
            copied = p._replace(rows=given)
            prepare_sample(copied, device)(copied, out)
            return
        own = given.unscaled()
        best = out.topk
        if best is not None and find_best is not None:
            find_best(own, best)
            best = None
        listed = None if find_list is None else find_list(own)
        has_noise = p.noise is not None
        words, counters = scratches[has_noise]
        scratch = torch.empty(words, dtype=torch.int64, device=given.logits.device) if words else None
        filled = SampleRows.from_buffer_copy(planned)
        filled.scratch = address(scratch)
        filled.tickets = tickets.zeroed(index, counters) if counters else 0
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
        argument = driver.argument(with_rows(filled, _write_rows_of_draws, given))
        function = driver.function(index, kernels[has_noise])
        threads = launch.SUMMING_THREADS if is_whole else launch.SEARCHING_THREADS
        driver.call(function, (rows, blocks), threads, (argument,), index, is_cooperative=is_cooperative)

    return run


@lru_cache(maxsize=4096)
def _plan_of_ranks(layout: RowsLayout) -> Launch | None:
    """The launch for such rows. Only its struct is used, which says what is read."""
    # With values that are logits there would be no temperature.
    of_rows = TopkProblem(layout.meta(), 1, "softmax", "allowed")
    return topk_launch.plan(of_rows, is_aligned=False, choice=launch.RANK_CHOICE)


def target_ranks(problem: RankProblem, out: Tensor) -> None:
    """See :class:`protocol.Backend`."""
    rows, targets, counts_ties = problem
    logits, index = rows.logits, rows.logits.get_device()
    planned = _plan_of_ranks(rows.layout())
    if planned is None or not _has_adjacent(logits) or logits.data_ptr() % logits.element_size():
        target_ranks(problem._replace(rows=_copied(rows)), out)
        return
    count = targets.numel()
    launch.check_row_count(count)
    blocks = launch.ranking_blocks(count, logits.shape[-1], multiprocessors(index))
    is_shared = blocks > 1
    counts = torch.empty(count * blocks, dtype=torch.int32, device=logits.device) if is_shared else None
    wanted = TargetRanks(
        targets=targets.data_ptr(),
        ranks=out.data_ptr(),
        counts=address(counts),
        tickets=tickets.zeroed(index, count) if is_shared else 0,
        num_targets=targets.shape[-1],
        blocks_per_target=blocks,
        counts_ties=counts_ties,
    )
    # The kernel writes ranks alone.
    filled = planned.fill(rows, None, 0, 0, TopK(out, out, out))
    arguments = (driver.argument(filled), driver.argument(bytes(wanted)))
    function = driver.function(index, launch.rank_kernel(logits.dtype))
    driver.call(function, (count, blocks), launch.RANK_THREADS, arguments, index)


def token_sums(problem: TokenSumsProblem, sums: Tensor, token_logits: Tensor) -> None:
    """See :class:`protocol.Backend`."""
    rows, tokens, normalize, has_tail = problem
    logits, index = rows.logits, rows.logits.get_device()
    planned = _plan_of_ranks(rows.layout())
    if planned is None or not _has_adjacent(logits) or logits.data_ptr() % logits.element_size():
        token_sums(problem._replace(rows=_copied(rows)), sums, token_logits)
        return
    count = row_count(logits.shape)
    launch.check_row_count(count)
    wanted = RowSums(
        tokens=tokens.data_ptr(),
        sums=sums.data_ptr(),
        token_logits=token_logits.data_ptr(),
        num_tokens=tokens.shape[-1],
        sums_all=normalize == "all",
        has_rest=has_tail,
    )
    # The kernel writes none of these.
    filled = planned.fill(rows, None, 0, 0, TopK(sums, sums, sums))
    arguments = (driver.argument(filled), driver.argument(bytes(wanted)))
    driver.call(
        driver.function(index, launch.sums_kernel(logits.dtype)), (count,), launch.SUM_THREADS, arguments, index
    )


def _prepare_list(rows: LogitRows, k: int, device: torch.device) -> Callable[[LogitRows], TopK]:
    """A function that finds the best k logits of each row, with m and d (2, rows) in place of the logsumexp."""
    count, dtype = len(rows.logits), rows.logits.dtype
    start = prepare_topk(TopkProblem(rows, k, "state", "allowed"), device)

    def run(rows: LogitRows) -> TopK:
        out = TopK(
            torch.empty((count, k), dtype=dtype, device=rows.logits.device),
            torch.empty((count, k), dtype=torch.int64, device=rows.logits.device),
            torch.empty((2, count), dtype=torch.float32, device=rows.logits.device),
        )
        start(rows, out)
        return out

    return run


def topk_kernel(problem: TopkProblem, device: int, beam_scores: Tensor | None = None) -> str:
    """The kernel that a launch asks for, on logits as torch allocates them: contiguous, from a multiple of 16 bytes on. The
    tensors may be meta tensors, and have at least one row."""
    logits = problem.rows.logits
    rows, vocab_size = row_count(logits.shape), logits.shape[-1]
    choice = topk_choice(rows, vocab_size, problem.k, logits.element_size(), device, beam_scores is not None)
    planned = topk_launch.plan(problem, True, choice, beam_scores)
    assert planned is not None, "contiguous tensors have one stride"
    return planned.kernel


def full_row_kernel(vocab_size: int, dtype: torch.dtype, device: int) -> str:
    """The kernel that contiguous full rows ask for, with results in their own dtype."""
    choice = full_row_choice(device, vocab_size, dtype.itemsize)
    return full_row_launch.kernel_name(choice, dtype, dtype, is_aligned=vocab_size * dtype.itemsize % 16 == 0)


@cache
def topk_choice(
    rows: int, vocab_size: int, k: int, itemsize: int, device: int, has_beams: bool = False
) -> KernelChoice:
    """How such rows are laid over that GPU."""
    choice = choose(rows, vocab_size, k, itemsize, multiprocessors(device), has_beams)
    if env.print_choice():
        print(
            f"fused_topk: {rows} x {vocab_size} of {itemsize} bytes, k={k}: {choice.regime}, {choice}",
            file=sys.stderr,
        )
    return choice


def multiprocessors(device: int) -> int:
    """How many multiprocessors that GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def cache_bytes(device: int) -> int:
    """The size of that GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@cache
def full_row_choice(device: int, vocab_size: int, itemsize: int) -> FullRowChoice:
    """The cut of full rows on that GPU."""
    shared_bytes, capability = driver.max_shared_bytes_per_block(device), driver.architecture_of(device)
    return choose_full_row(vocab_size, itemsize, shared_bytes, multiprocessors(device), capability)


def _launch_topk(planned: Launch, device: int, rows: LogitRows, beam_scores: Tensor | None, out: TopK) -> None:
    """Launches what is planned, with the addresses of this call."""
    function = driver.function(device, planned.kernel)
    scratch = first_ticket = 0
    if planned.scratch_words:
        workspace = torch.empty(planned.scratch_words, dtype=torch.int64, device=out.values.device)
        scratch = workspace.data_ptr()
        first_ticket = tickets.zeroed(device, planned.row_tickets + planned.beam_tickets)
    argument = driver.argument(planned.fill(rows, beam_scores, scratch, first_ticket, out))
    shared_bytes = planned.shared_bytes
    if shared_bytes > _SHARED_BYTES_UNASKED:
        # On a GPU that has less shared memory than that, the kernel needs less.
        shared_bytes = driver.affordable_shared_bytes(device, planned.kernel, shared_bytes)
    driver.call(function, planned.grid, planned.threads, (argument,), device, shared_bytes)


def _launch_full_rows(planned: FullRowLaunch, device: int, rows: LogitRows, out: Tensor) -> None:
    """Launches the planned softmax of whole rows, with the addresses of this call."""
    function = driver.function(device, planned.kernel)
    scratch = counters = 0
    if planned.scratch_words:
        workspace = torch.empty(planned.scratch_words, dtype=torch.int64, device=out.device)
        scratch = workspace.data_ptr()
        counters = tickets.zeroed(device, planned.counters)
    argument = driver.argument(planned.fill(rows, scratch, counters, out))
    driver.call(
        function,
        planned.grid,
        planned.threads,
        (argument,),
        device,
        planned.shared_bytes,
        is_cooperative=planned.is_cooperative,
    )


def _has_adjacent(logits: Tensor) -> bool:
    """Whether the kernels can read the rows where they lie."""
    return logits.stride(-1) == 1 or logits.shape[-1] == 1


def _copied(rows: LogitRows) -> LogitRows:
    """The same rows in a form that the kernels can read. The logits are copied if the kernels cannot read them in place. If they
    can, the tensors have more unrelated strides than a kernel walks, and all are copied."""
    logits = rows.logits
    if not _has_adjacent(logits) or logits.data_ptr() % logits.element_size():
        return rows._replace(logits=logits.clone(memory_format=torch.contiguous_format))
    return rows.contiguous()

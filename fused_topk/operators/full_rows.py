# SPDX-License-Identifier: Apache-2.0
"""Full rows: softmax, log_softmax and logsumexp. The operator `full_rows` with its gradient, its plan, and each backend's code.

For the gradient g of a result, and p the softmax of the row, that of the logits is (g - sum(g p)) p / T of softmax,
(g - p sum(g)) / T of log_softmax and g p / T of logsumexp. Like torch's, the first two take p from the result that was returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..arguments import check_result_dtype
from ..backends import cpu, cuda
from ..backends.reference import normalizer, working_dtype
from ..cuda_runtime import driver
from ..layout import full_row_choice
from ..layout.full_row_choice import FullRowChoice, choose_full_row
from ..problem import FullRowProblem, result_dtype
from ..row_arguments import check_layout
from ..rows import ROWS_SCHEMA, LogitRows, RowsLayout, unflattened
from .dispatch import wants_gradient
from .gradients import for_inputs, native_gradient, save_rows, saved_rows
from .operator import Operator, map_rows
from .results import Start, do_nothing, empty, empty_like


@functools.lru_cache(maxsize=4096)
def plan(
    device: torch.device, layout: RowsLayout, values: str, dtype: torch.dtype | None, backend: str | None
) -> Callable[[LogitRows], Tensor]:
    """Checks the layout and the other arguments, and plans the call, once for all calls alike. Returns what computes a new result, given
    the tensors. dtype: of the result, as the user gives it."""
    rows = check_layout(layout)
    logits = rows.logits
    dtype = result_dtype(logits.dtype) if values == "logsumexp" else check_result_dtype(dtype, logits)
    shape = _shape(logits, values)
    is_alike = shape == logits.shape and dtype is logits.dtype and logits.is_contiguous()
    chosen = backends.pick(device, logits.dtype, 1, backend)
    start = PREPARE[chosen](FullRowProblem(rows, values), device, dtype) if logits.numel() else do_nothing

    def run(rows: LogitRows) -> Tensor:
        # torch.empty_like takes less time than torch.empty.
        out = empty_like(rows.logits) if is_alike else empty(size=shape, dtype=dtype, device=device)
        start(rows, out)
        return out

    return run


def _shape(logits: Tensor, values: str) -> torch.Size:
    """The shape of the result."""
    return logits.shape[:-1] if values == "logsumexp" else logits.shape


def reference(problem: FullRowProblem, out: Tensor) -> None:
    """Probabilities, log-probabilities or the logsumexp of every row, in torch operations."""
    x = problem.rows.counted().to(working_dtype(problem.rows.logits))
    scale = problem.rows.scale().with_nan(x.dtype)
    m, d = normalizer(x, scale)
    if problem.values == "logsumexp":
        out.copy_(scale.logsumexp(m, d).squeeze(-1))
        return
    log_d = d.log()
    shifted = scale.log_weight(x, m)
    values = shifted.exp() / d if problem.values == "softmax" else shifted - log_d
    out.copy_(values.where(log_d.isfinite(), torch.nan))


def _prepare_reference(problem: FullRowProblem, device: torch.device, dtype: torch.dtype) -> Start:
    return lambda rows, out: reference(problem._replace(rows=rows.broadcast()), out)


def prepare_cpu(problem: FullRowProblem, device: torch.device, dtype: torch.dtype, instruction_set: str = "") -> Start:
    """instruction_set: one of cpu.instruction_sets() instead of the best, for tests."""
    full_rows = cpu.native.FullRows(
        cpu.layout_of(problem.rows, instruction_set), cpu.FULL_ROW_KINDS[problem.values], cpu.DTYPES[dtype]
    )

    def run(rows: LogitRows, out: Tensor) -> None:
        full_rows(cpu.addresses_of(rows), out.data_ptr(), cpu.num_threads())

    return run


def prepare_cuda(
    problem: FullRowProblem, device: torch.device, dtype: torch.dtype, choice: FullRowChoice | None = None
) -> Start:
    """choice: another cut of the rows than the best one."""
    logits, index = problem.rows.logits, device.index
    itemsize = logits.element_size()
    if choice is None:
        choice = choice_on(index, logits.shape[-1], itemsize)
    unaligned, aligned = (
        full_row_choice.plan(problem, dtype, is_aligned, choice, cuda.cache_bytes(index))
        for is_aligned in (False, True)
    )
    is_written = problem.values != "logsumexp"

    def run(rows: LogitRows, out: Tensor) -> None:
        start, to = rows.logits.data_ptr(), out.data_ptr()
        planned = unaligned if start % 16 or (is_written and to % 16) else aligned
        if planned is None or start % itemsize:
            copied = cuda.copied(rows.broadcast())
            prepare_cuda(problem._replace(rows=copied), device, dtype, choice)(copied, out)
            return
        if problem.rows.has_numbers():
            # The kernel reads contiguous numbers alone. Others are rare, so they are copied.
            rows = rows.broadcast().with_adjacent_numbers()
        workspace, scratch, counters = cuda.workspace(index, out.device, planned.scratch_words, planned.counters)
        filled = planned.fill(rows, scratch, counters, out)
        how: Any = {"shared_bytes": planned.shared_bytes, "is_cooperative": planned.is_cooperative}
        cuda.launch(index, planned.kernel, planned.grid, planned.threads, filled, **how)

    return run


@functools.cache
def choice_on(device: int, vocab_size: int, itemsize: int) -> FullRowChoice:
    """The cut of full rows on that GPU."""
    shared_bytes, capability = driver.max_shared_bytes_per_block(device), driver.architecture_of(device)
    return choose_full_row(vocab_size, itemsize, shared_bytes, cuda.multiprocessors(device), capability)


def kernel_on(device: int, vocab_size: int, dtype: torch.dtype) -> str:
    """The kernel that contiguous full rows ask for, with results in their own dtype."""
    choice = choice_on(device, vocab_size, dtype.itemsize)
    return full_row_choice.kernel_name(choice, dtype, dtype, is_aligned=vocab_size * dtype.itemsize % 16 == 0)


PREPARE = {"reference": _prepare_reference, "cpu": prepare_cpu, "cuda": prepare_cuda}


def _run(*arguments: Any) -> Tensor:
    rows, request = unflattened(arguments)
    if rows.mask is not None:
        # The kernels of whole rows read no mask.
        rows = rows.with_logits(rows.counted())._replace(mask=None, lengths=None)
    return plan(rows.logits.device, rows.layout(), *request)(rows)


def _fake(*arguments: Any) -> Tensor:
    rows, (values, dtype, _) = unflattened(arguments)
    return torch.empty(_shape(rows.logits, values), dtype=dtype, device=rows.logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, (ctx.values, _, ctx.backend) = unflattened(inputs)
    ctx.logits_dtype = rows.logits.dtype
    # softmax and log_softmax take p from the result.
    save_rows(ctx, rows if ctx.values == "logsumexp" else rows._replace(logits=output))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, _ = saved_rows(ctx)
    if ctx.values == "logsumexp":
        # As of top-k, of which there is nothing here.
        none = gradient.new_empty((*gradient.shape, 0))
        found = native_gradient(rows, "log_softmax", "allowed", none, none, None, gradient, ctx.backend)
        if found is not None:
            return for_inputs(found, count=3)
    rows = rows.broadcast()
    dtype = result_dtype(ctx.logits_dtype)
    g, hidden = gradient.to(dtype), rows.uncounted()
    # The value of a hidden token is the constant 0 or -inf.
    if hidden is not None and ctx.values != "logsumexp":
        g = g.masked_fill(hidden, 0.0)
    if ctx.values == "logsumexp":
        of_scaled = g.unsqueeze(-1) * full_rows(rows, "softmax", dtype, ctx.backend)
    elif ctx.values == "softmax":
        p = rows.logits.to(dtype)
        g_p = g * p
        of_scaled = g_p - p * g_p.sum(-1, keepdim=True)
    else:
        of_scaled = g - rows.logits.to(dtype).exp() * g.sum(-1, keepdim=True)
    if hidden is not None:
        of_scaled = of_scaled.masked_fill(hidden, 0.0)
    return for_inputs(rows.scale().back(of_scaled).to(ctx.logits_dtype), count=3)


_full_rows = Operator(
    f"full_rows({ROWS_SCHEMA}, str values, ScalarType dtype, str? backend) -> Tensor",
    _run,
    _fake,
    _setup_context,
    _backward,
    map_rows,
)


def full_rows(rows: LogitRows, values: str, dtype: torch.dtype, backend: str | None) -> Tensor:
    """The results for checked rows. See :class:`FullRowProblem`."""
    result: Tensor = _full_rows(*rows, values, dtype, backend)
    return result


def plain_full_rows(rows: LogitRows, values: str, dtype: torch.dtype | None, backend: str | None) -> Tensor:
    """The results for plain rows, whose plan checks them. dtype: as the user gives it."""
    if wants_gradient(rows.logits):
        result: Tensor = _full_rows.with_gradient(*rows, values, dtype, backend)
        return result
    return plan(rows.logits.device, rows.layout(), values, dtype, backend)(rows)

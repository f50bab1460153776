# SPDX-License-Identifier: Apache-2.0
"""The operator of entropies and tails, `token_spread`: both come from the sums of fused_topk/token_sums.py.

With p the softmax of the row, H its entropy, q the softmax of the tokens that are left, and T the temperature, the gradient of the
entropy is -p (log p + H) / T, and that of the tail (q - p) / T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import cpu, cuda
from ..backends.reference import gather, working_dtype
from ..layout import launch
from ..layout.kernel_arguments import RowSums
from ..problem import TokenSumsProblem, result_dtype
from ..rows import ROWS_SCHEMA, LogitRows, unflattened
from ..token_sums import TokenSums, empty_sums, moment, reference_point, without
from .gradients import for_inputs, save_rows, saved_rows, softmax
from .operator import Operator, map_rows
from .ranks import readable


def reference(problem: TokenSumsProblem, sums: Tensor, token_logits: Tensor) -> None:
    """Merges the sums of rows with those that are there, and writes the logits of the tokens that are in them, in torch operations."""
    rows, tokens, normalize, has_tail, start = problem
    tokens = tokens - start
    dtype = working_dtype(rows.logits)
    scale = rows.scale().with_nan(dtype)
    allowed = rows.counted()
    x = (allowed if normalize == "allowed" else rows.counted(normalize)).to(dtype)
    rest = without(allowed.to(dtype), tokens) if has_tail else x[..., :1]
    before = TokenSums.of(sums.to(dtype))
    sums.copy_(torch.stack(before.merged(TokenSums.of_logits(x, rest, scale), scale), -1))
    last = rows.logits.shape[-1] - 1
    is_here = (tokens >= 0) & (tokens <= last)
    token_logits.copy_(gather(allowed, tokens.clamp(0, last)).where(is_here, token_logits))


def on_cpu(problem: TokenSumsProblem, sums: Tensor, token_logits: Tensor, instruction_set: str = "") -> None:
    """instruction_set: one of cpu.instruction_sets() instead of the best, for tests."""
    rows, tokens, normalize, has_tail, start = problem
    if start:
        tokens = tokens - start
    cpu.native.token_sums(
        cpu.layout_of(rows, instruction_set),
        cpu.addresses_of(rows),
        tokens.data_ptr(),
        tokens.shape[-1],
        normalize == "all",
        has_tail,
        sums.data_ptr(),
        token_logits.data_ptr(),
        cpu.num_threads(),
    )


def on_cuda(problem: TokenSumsProblem, sums: Tensor, token_logits: Tensor) -> None:
    rows, tokens, normalize, has_tail, start = problem
    rows, read = readable(rows)
    logits, index = rows.logits, rows.logits.get_device()
    count = launch.row_count(logits.shape)
    launch.check_row_count(count)
    wanted = RowSums(
        tokens=tokens.data_ptr(),
        sums=sums.data_ptr(),
        token_logits=token_logits.data_ptr(),
        first_token=start,
        num_tokens=tokens.shape[-1],
        sums_all=normalize == "all",
        has_rest=has_tail,
    )
    kernel = launch.kernel("tokens::token_sums", logits.dtype)
    cuda.launch(index, kernel, (count,), launch.sum_threads(count), read, bytes(wanted))


ON = {"reference": reference, "cpu": on_cpu, "cuda": on_cuda}


def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    rows, (tokens, normalize, has_tail, backend) = unflattened(arguments)
    logits = rows.logits
    chosen = backends.pick(logits.device, logits.dtype, 1, backend)
    sums = empty_sums(logits.shape[:-1], result_dtype(logits.dtype), logits.device)
    if sums.numel():
        found = torch.empty(tokens.shape, dtype=logits.dtype, device=logits.device)
        ON[chosen](TokenSumsProblem(rows, tokens.contiguous(), normalize, has_tail), sums, found)
    state, scale = TokenSums.of(sums), rows.scale().with_nan(sums.dtype)
    entropy = state.entropy()
    return entropy, state.tail(scale) if has_tail else torch.zeros_like(entropy)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    rows, _ = unflattened(arguments)
    lead, dtype = rows.logits.shape[:-1], result_dtype(rows.logits.dtype)
    return tuple(torch.empty(lead, dtype=dtype, device=rows.logits.device) for _ in range(2))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, (tokens, ctx.normalize, ctx.has_tail, _) = unflattened(inputs)
    save_rows(ctx, rows, tokens, output[1])


def _backward(ctx: Any, grad_entropy: Tensor, grad_tail: Tensor) -> tuple[Tensor | None, ...]:
    rows, (tokens, tail) = saved_rows(ctx)
    gradient = _of_entropy(rows, ctx.normalize, grad_entropy)
    if ctx.has_tail:
        gradient = gradient + _of_tail(rows, ctx.normalize, tokens, grad_tail.where(tail != -torch.inf, 0.0))
    hidden = rows.uncounted(ctx.normalize)
    if hidden is not None:
        gradient = gradient.masked_fill(hidden, 0.0)
    return for_inputs(rows.scale().back(gradient).to(rows.logits.dtype), count=4)


def _of_entropy(rows: LogitRows, normalize: str, grad: Tensor) -> Tensor:
    """With respect to the scaled logits."""
    x = rows.counted(normalize).to(grad.dtype)
    z = rows.scale().log_weight(x, reference_point(x.detach().amax(-1, keepdim=True)))
    weight = z.exp()
    d, moments = weight.sum(-1, keepdim=True), moment(z, weight)
    # log p + H = z - s / d
    return -grad.unsqueeze(-1) * (moments - weight * (moments.sum(-1, keepdim=True) / d)) / d


def _of_tail(rows: LogitRows, normalize: str, tokens: Tensor, grad: Tensor) -> Tensor:
    scale = rows.scale()
    rest = without(rows.counted().to(grad.dtype), tokens)
    # In a row with nothing left the gradient is 0.
    is_left = rest.amax(-1, keepdim=True) != -torch.inf
    p = softmax(scale, rows.counted(normalize).to(grad.dtype))
    return grad.unsqueeze(-1) * (softmax(scale, rest.where(is_left, 0.0)) - p)


_token_spread = Operator(
    f"token_spread({ROWS_SCHEMA}, Tensor tokens, str normalize, bool tail, str? backend) -> (Tensor, Tensor)",
    _run,
    _fake,
    _setup_context,
    _backward,
    map_rows,
)


def token_spread(
    rows: LogitRows, tokens: Tensor, normalize: str, has_tail: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    """The entropy and the tail of each row; without `has_tail` zeros in its place. tokens: (..., n)."""
    entropy, tail = _token_spread(*rows, tokens, normalize, has_tail, backend)
    return entropy, tail

# SPDX-License-Identifier: Apache-2.0
"""The operators of `torch.ops.fused_topk`: what torch.compile, fake tensors, autograd and CUDA graphs see.

    row_topk        softmax_topk, log_softmax_topk and topk
    row_topk_out    the same into given tensors
    beam_topk       beam_topk

Arguments are checked in functional.py; logits have the vocabulary last. Gradients come in closed form: with p the
softmax of the row, the gradient of logsumexp is p / T, and that of the log-probability of token j is (1[i = j] - p_i) / T.
p is computed anew rather than as exp(x / T - logsumexp), which would lose the digits that a large common offset takes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import backends
from ..problem import Problem, TopK

_library = torch.library.Library("fused_topk", "DEF")
_ROW_ARGUMENTS = (
    "Tensor logits, SymInt k, float temperature, Tensor? row_temperature, Tensor? mask, "
    "str values, str normalize, str? backend"
)
_library.define(f"row_topk({_ROW_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"row_topk_out({_ROW_ARGUMENTS}, Tensor(a!) out_values, Tensor(b!) out_indices, Tensor(c!) out_logsumexp) -> ()"
)
_library.define(
    "beam_topk(Tensor logits, Tensor beam_scores, SymInt k, float temperature, Tensor? row_temperature, Tensor? mask, "
    "str normalize, str? backend) -> (Tensor, Tensor, Tensor)"
)


def _keys(*names: str) -> int:
    sets = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in names)
    return functools.reduce(operator.or_, sets)


try:
    # The dispatcher's keys that every dense CPU or CUDA tensor has, and every thread. Any other stands for something that
    # must see the call: a transform, a mode, a tracer, a subclass, a negation that is still to be done.
    _OTHER_TENSOR_KEYS = ~_keys(
        "CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA", "ADInplaceOrView"
    )
    _OTHER_THREAD_KEYS = ~_keys("BackendSelect", "ADInplaceOrView")
    _keys_of_tensor = torch._C._dispatch_keys
    _keys_of_thread = torch._C._dispatch_tls_local_include_set
    _keys_of_tensor(torch.empty(0, device="cpu")).raw_repr(), _keys_of_thread().raw_repr(), forward_ad._current_level
    _sees_keys = True
except (AttributeError, TypeError):
    # A version of torch that has other private names: every call then goes through the dispatcher.
    _sees_keys = False


def need_dispatcher(logits: Tensor, *others: Tensor | None) -> bool:
    """Whether a call with these tensors must go through torch: for gradients, torch.compile, vmap, a mode and the like.

    If not, the operator's implementation may be called directly: the dispatcher takes 40 µs for an operator that is
    written in Python, and torch less than that for all of a short row.
    """
    return (
        not _sees_keys
        or torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or _keys_of_thread().raw_repr() & _OTHER_THREAD_KEYS != 0
        # Written out for the one tensor that every call has, because a call of a short row takes 2 µs.
        or (logits.requires_grad and torch.is_grad_enabled())
        or _keys_of_tensor(logits).raw_repr() & _OTHER_TENSOR_KEYS != 0
        or (bool(others) and any(tensor is not None and need_dispatcher(tensor) for tensor in others))
    )


class RowResult(NamedTuple):
    """What the result of a row operation looks like."""

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    dtype: torch.dtype
    value_dtype: torch.dtype

    @property
    def fields(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of values, indices and logsumexp."""
        return (self.shape, self.value_dtype), (self.shape, torch.int64), (self.rows, self.dtype)

    def empty(self, device: torch.device) -> TopK:
        """Uninitialised tensors for it."""
        shape, rows, dtype, value_dtype = self
        # By keyword: torch takes 1 µs longer to see that a positional tuple is a size. And a named tuple's own __new__ is
        # written in Python.
        values = torch.empty(size=shape, dtype=value_dtype, device=device)
        indices = torch.empty(size=shape, dtype=torch.int64, device=device)
        return tuple.__new__(TopK, (values, indices, torch.empty(size=rows, dtype=dtype, device=device)))


def row_result(logits: Tensor, k: int, values: str) -> RowResult:
    rows, dtype = tuple(logits.shape[:-1]), backends.result_dtype(logits.dtype)
    return RowResult((*rows, k), rows, dtype, logits.dtype if values == "logits" else dtype)


def empty_row_result(logits: Tensor, k: int, values: str) -> TopK:
    """Uninitialised tensors for the result of a row operation."""
    return row_result(logits, k, values).empty(logits.device)


def beam_result(logits: Tensor, k: int) -> RowResult:
    batch, beams, _ = logits.shape
    dtype = backends.result_dtype(logits.dtype)
    return RowResult((batch, k), (batch, beams), dtype, dtype)


def empty_beam_result(logits: Tensor, k: int) -> TopK:
    """Uninitialised tensors for the result of beam_topk."""
    return beam_result(logits, k).empty(logits.device)


def write_into(out: TopK, run: Callable[[TopK], None], result: RowResult) -> None:
    """Has `run` write `out`, or where no backend can write that, a tensor beside it that is then copied."""
    values, indices, logsumexp = out
    is_writable = indices.dtype is torch.int64 and values.is_contiguous()
    if is_writable and indices.is_contiguous() and logsumexp.is_contiguous():
        run(out)
        return
    computed = result.empty(values.device)
    run(computed)
    for given, new in zip(out, computed, strict=True):
        given.copy_(new)


def row_topk(
    logits: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    values: str,
    normalize: str,
    backend: str | None,
) -> TopK:
    out = empty_row_result(logits, k, values)
    if logits.numel():
        problem = Problem(logits, k, temperature, row_temperature, mask, values, normalize)
        backends.pick(logits.device, logits.dtype, k, backend).row_topk(problem, out)
    return out


def row_topk_out(
    logits: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    values: str,
    normalize: str,
    backend: str | None,
    out_values: Tensor,
    out_indices: Tensor,
    out_logsumexp: Tensor,
) -> None:
    out = TopK(out_values, out_indices, out_logsumexp)
    if not logits.numel():
        return
    problem = Problem(logits, k, temperature, row_temperature, mask, values, normalize)
    run = backends.pick(logits.device, logits.dtype, k, backend).row_topk
    write_into(out, lambda result: run(problem, result), row_result(logits, k, values))


def beam_topk(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    normalize: str,
    backend: str | None,
) -> TopK:
    out = empty_beam_result(logits, k)
    if logits.numel():
        problem = Problem(logits, k, temperature, row_temperature, mask, "log_softmax", normalize)
        backends.pick(logits.device, logits.dtype, k, backend).beam_topk(problem, beam_scores.to(out.values.dtype), out)
    return out


def _fake_row_topk(
    logits: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    values: str,
    normalize: str,
    backend: str | None,
) -> TopK:
    return empty_row_result(logits, k, values)


def _fake_row_topk_out(*args: Any) -> None:
    return None


def _fake_beam_topk(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    temperature: float,
    row_temperature: Tensor | None,
    mask: Tensor | None,
    normalize: str,
    backend: str | None,
) -> TopK:
    return empty_beam_result(logits, k)


_library.impl("row_topk", row_topk, "CompositeExplicitAutograd")
_library.impl("row_topk_out", row_topk_out, "CompositeExplicitAutograd")
_library.impl("beam_topk", beam_topk, "CompositeExplicitAutograd")
torch.library.register_fake("fused_topk::row_topk", _fake_row_topk, lib=_library)
torch.library.register_fake("fused_topk::row_topk_out", _fake_row_topk_out, lib=_library)
torch.library.register_fake("fused_topk::beam_topk", _fake_beam_topk, lib=_library)


def _unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """A mask as bool, one a token."""
    if mask.dtype == torch.bool:
        return mask
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask.unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :vocab_size].bool()


def _row_gradient(
    logits: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    normalize: str,
    indices: Tensor,
    grad_log_probabilities: Tensor,
    grad_logsumexp: Tensor,
) -> Tensor:
    """Gradient with respect to the logits, given those with respect to log-probabilities (..., k) and logsumexp (...)."""
    hidden = None if mask is None or normalize == "all" else ~_unpacked(mask, logits.shape[-1])
    scaled = logits.to(grad_log_probabilities.dtype) / temperature
    p = (scaled if hidden is None else scaled.masked_fill(hidden, -torch.inf)).softmax(-1)
    gradient = p * (grad_logsumexp - grad_log_probabilities.sum(-1)).unsqueeze(-1)
    gradient = gradient.scatter_add(-1, indices, grad_log_probabilities) / temperature
    # What the mask hides is a constant -inf to the choice, even where it is among the k.
    return (gradient if hidden is None else gradient.masked_fill(hidden, 0.0)).to(logits.dtype)


def row_setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    logits, _, ctx.temperature, row_temperature, mask, ctx.values, ctx.normalize, _ = inputs
    values, indices, _ = output
    ctx.mark_non_differentiable(indices)
    ctx.save_for_backward(logits, row_temperature, mask, values, indices)


def row_backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_logsumexp: Tensor
) -> tuple[Tensor | None, ...]:
    logits, row_temperature, mask, values, indices = ctx.saved_tensors
    temperature = ctx.temperature if row_temperature is None else row_temperature.unsqueeze(-1)
    # d p = p d(log p)
    grad_log = grad_values * values if ctx.values == "softmax" else grad_values
    if mask is not None:
        # A token that is not allowed has the constant value -inf or 0, and what a loss makes of that is no gradient.
        grad_log = grad_log.where(_unpacked(mask, logits.shape[-1]).gather(-1, indices), 0.0)
    if ctx.values == "logits":
        # The logits themselves: their gradient goes back to where they came from.
        from_values = torch.zeros_like(logits).scatter_add(-1, indices, grad_log)
        zero = torch.zeros_like(indices, dtype=grad_logsumexp.dtype)
        rest = _row_gradient(logits, 1.0, mask, "allowed", indices, zero, grad_logsumexp)
        return from_values + rest, *(None,) * 7
    if ctx.normalize == "topk":
        # Relative to the k chosen: (1[i = j] - p_i) over those k only.
        p = values if ctx.values == "softmax" else values.exp()
        grad_log = grad_log - p * grad_log.sum(-1, keepdim=True)
        zero = torch.zeros_like(grad_log)
        gradient = _row_gradient(logits, temperature, mask, "topk", indices, zero, grad_logsumexp)
        chosen = torch.zeros_like(gradient).scatter_add(-1, indices, (grad_log / temperature).to(gradient.dtype))
        if mask is not None:
            chosen = chosen.where(_unpacked(mask, logits.shape[-1]), 0.0)
        return gradient + chosen, *(None,) * 7
    gradient = _row_gradient(logits, temperature, mask, ctx.normalize, indices, grad_log, grad_logsumexp)
    return gradient, *(None,) * 7


def beam_setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    logits, beam_scores, _, ctx.temperature, row_temperature, mask, ctx.normalize, _ = inputs
    _, indices, _ = output
    ctx.mark_non_differentiable(indices)
    ctx.scores_dtype = beam_scores.dtype
    ctx.save_for_backward(logits, row_temperature, mask, indices)


def beam_backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_logsumexp: Tensor
) -> tuple[Tensor | None, ...]:
    logits, row_temperature, mask, indices = ctx.saved_tensors
    batch, beams, vocab_size = logits.shape
    temperature = ctx.temperature if row_temperature is None else row_temperature.unsqueeze(-1)
    # Spread the k gradients over the beams that they came from: (batch, beams, k), zero for the others.
    is_of_beam = (indices // vocab_size).unsqueeze(1) == torch.arange(beams, device=indices.device).unsqueeze(-1)
    of_beam = grad_values.unsqueeze(1).where(is_of_beam, 0.0)
    tokens = (indices % vocab_size).unsqueeze(1).expand(batch, beams, -1)
    if mask is not None:
        # The value of a token that is not allowed is -inf, whatever the score of its beam.
        of_beam = of_beam.where(_unpacked(mask, vocab_size).gather(-1, tokens), 0.0)
    grad_scores = of_beam.sum(-1).to(ctx.scores_dtype)
    gradient = _row_gradient(logits, temperature, mask, ctx.normalize, tokens, of_beam, grad_logsumexp)
    return gradient, grad_scores, *(None,) * 6


torch.library.register_autograd(
    "fused_topk::row_topk",
    row_backward,
    setup_context=row_setup_context,
    lib=_library,
)
torch.library.register_autograd(
    "fused_topk::beam_topk",
    beam_backward,
    setup_context=beam_setup_context,
    lib=_library,
)

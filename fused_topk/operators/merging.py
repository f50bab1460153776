# SPDX-License-Identifier: Apache-2.0
"""The merge of the states (m, d, T) of a row's parts: the operator `merge_parts` with its gradient, its plan, and each backend's
code. The parts are the first dimension of every tensor.

With M = max m_p, e_p = exp((m_p - M) / T) and D = sum d_p e_p, the gradient of log D + M / T is d_p e_p / (D T) with respect
to m_p, and e_p / D with respect to d_p. A chosen logit has the gradient 1 / T of its log-probability.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..backends import cpu, cuda
from ..backends.reference import gather, ranking, values_of, working_dtype, write_state
from ..layout import launch
from ..layout.kernel_arguments import address
from ..problem import MergeProblem, TopK
from ..rows import Like, like
from ..scale import SCALE_SCHEMA, Scale
from .operator import Operator, mapped
from .results import Plan, Start, merge_result
from .row_topk import dim_of_normalizer


@functools.lru_cache(maxsize=4096)
def plan(device: torch.device, backend: str | None, *fields: Any) -> Plan[TopK]:
    """fields: those of MergeProblem.flat(), with layouts in place of tensors."""
    problem = MergeProblem.of(*(x.meta() if isinstance(x, Like) else x for x in fields))
    result = merge_result(problem.logits.select(0, 0), problem.k, problem.values)
    chosen = backends.pick(device, problem.logits.dtype, 1, backend)
    return Plan(result, device, PREPARE[chosen](problem, device) if problem.logits.numel() else None)


def reference(problem: MergeProblem, out: TopK) -> None:
    """The k best of the parts' candidates, their values, and the normalizer of the whole, in torch operations."""
    candidates, indices = _candidates(problem.logits, problem.indices, problem.part_lengths)
    best = _order(candidates, indices)[..., : problem.k]
    out.indices.copy_(indices.gather(-1, best))
    chosen = gather(candidates, best)

    dtype = working_dtype(problem.logits)
    scale = problem.scale.with_nan(dtype)
    of_parts = problem.m.to(dtype).movedim(0, -1)
    greatest = of_parts.amax(-1, keepdim=True)
    m = greatest.where(greatest.isfinite(), 0.0)
    d = (problem.d.to(dtype).movedim(0, -1) * scale.weight(of_parts, m)).sum(-1, keepdim=True)
    if problem.values == "state":
        out.values.copy_(chosen)
        write_state(greatest.squeeze(-1), d.squeeze(-1), out)
        return
    logsumexp = scale.logsumexp(m, d).where(greatest.isfinite(), scale.scaled(greatest))
    out.logsumexp.copy_(logsumexp.squeeze(-1))
    if problem.values == "logits":
        out.values.copy_(chosen)
        return
    if problem.normalize == "topk":
        # The states may be relative to more than the allowed tokens, so the chosen have a maximum of their own.
        first = chosen[..., :1].to(dtype)
        m = m.where(~first.isfinite(), first)
    values = values_of(chosen.to(dtype), m, d, scale, problem)
    out.values.copy_(values.where(greatest.isfinite() & d.log().isfinite(), torch.nan))


def _candidates(logits: Tensor, indices: Tensor, part_lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The candidates of all parts side by side, (..., parts * k of a part): their logits, and their tokens in the whole
    vocabulary, -1 where there is no candidate."""
    is_none = indices < 0
    if part_lengths is not None:
        lengths = part_lengths.to(torch.int64)
        starts = lengths.cumsum(0) - lengths
        indices = (indices + starts.view(-1, *[1] * (indices.dim() - 1))).masked_fill(is_none, -1)
    return logits.masked_fill(is_none, -torch.inf).movedim(0, -2).flatten(-2), indices.movedim(0, -2).flatten(-2)


def _order(candidates: Tensor, indices: Tensor) -> Tensor:
    """The places of the candidates from the best to the worst."""
    # First by token, then by logit: a stable sort leaves equal logits in the order of their tokens.
    by_token = indices.masked_fill(indices < 0, torch.iinfo(torch.int64).max).sort(dim=-1, stable=True).indices
    return by_token.gather(-1, ranking(gather(candidates, by_token)))


def prepare_cpu(problem: MergeProblem, device: torch.device) -> Start:
    merge = cpu.native.Merge(
        cpu.DTYPES[problem.logits.dtype],
        problem.logits.shape,
        problem.logits.stride(),
        problem.indices.stride(),
        problem.m.stride(),
        problem.d.stride(),
        0 if problem.part_lengths is None else problem.part_lengths.stride(0),
        *cpu.layout_of_scale(problem.scale),
        problem.k,
        cpu.VALUE_KINDS[problem.values],
        problem.normalize == "topk",
    )

    def run(problem: MergeProblem, out: TopK) -> None:
        merge(*map(address, problem.tensors), *map(address, out), cpu.num_threads())

    return run


def prepare_cuda(problem: MergeProblem, device: torch.device) -> Start:
    planned, index = launch.plan_merge(problem), device.index
    itemsize = problem.logits.element_size()

    def run(problem: MergeProblem, out: TopK) -> None:
        if planned is None or problem.logits.data_ptr() % itemsize:
            # A copy starts at a multiple of its element's size.
            given = problem.flat()
            copied = MergeProblem.of(
                *(x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x for x in given)
            )
            prepare_cuda(copied, device)(copied, out)
            return
        *of_parts, row_temperature = map(address, problem.tensors)
        filled = planned.fill(*of_parts, *map(address, out), row_temperature)
        cuda.launch(index, planned.kernel, planned.grid, planned.threads, filled)

    return run


PREPARE = {"reference": lambda problem, device: reference, "cpu": prepare_cpu, "cuda": prepare_cuda}


def run(*arguments: Any) -> TopK:
    """Computes the operator without torch's dispatcher. `arguments`: the operator's, in its order."""
    *fields, backend = arguments
    problem = MergeProblem.of(*fields)
    layouts = (like(x) if isinstance(x, Tensor) else x for x in fields)
    return plan(problem.logits.device, backend, *layouts).run(problem)


def _fake(logits: Tensor, indices: Tensor, m: Tensor, d: Tensor, part_lengths: Any, k: int, *rest: Any) -> TopK:
    values = rest[2]
    return merge_result(logits.select(0, 0), k, values).empty(logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: TopK) -> None:
    logits, indices, m, d, part_lengths, _, ctx.temperature, row_temperature, ctx.values, ctx.normalize, _ = inputs
    values, chosen, _ = output
    ctx.mark_non_differentiable(chosen)
    ctx.save_for_backward(logits, indices, m, d, part_lengths, row_temperature, values, chosen)


def _backward(
    ctx: Any, grad_values: Tensor, grad_indices: Tensor | None, grad_normalizer: Tensor
) -> tuple[Tensor | None, ...]:
    logits, indices, m, d, part_lengths, row_temperature, values, chosen = ctx.saved_tensors
    scale = Scale(ctx.temperature, row_temperature)
    candidates, tokens = _candidates(logits, indices, part_lengths)
    # The places of the chosen candidates, found by their tokens: each token is there once. Sorting by logits, as the reference
    # does, needs a view of their bits, for which older versions of torch have no rule under vmap.
    ascending, by_token = tokens.sort(dim=-1)
    best = by_token.gather(-1, torch.searchsorted(ascending.contiguous(), chosen))
    of_parts, sums = m.movedim(0, -1), d.movedim(0, -1)
    greatest = of_parts.amax(-1, keepdim=True)
    base = greatest.where(greatest != -torch.inf, 0.0)
    e = scale.weight(of_parts, base)
    terms = sums * e
    total = terms.sum(-1, keepdim=True)

    if ctx.values == "state":
        grad_chosen = grad_values
        grad_m, grad_d = grad_normalizer.unsqueeze(-1).unbind(0)
        is_greatest = torch.zeros_like(of_parts).scatter(-1, of_parts.argmax(-1, keepdim=True), 1.0)
        grad_of_d = grad_d * e
        grad_of_m = is_greatest * (grad_m - scale.back(grad_d * total)) + scale.back(grad_d * terms)
    else:
        grad_logsumexp = grad_normalizer.unsqueeze(-1)
        grad_chosen = grad_values
        if ctx.values != "logits":
            # d p = p d(log p)
            grad_log = grad_values * values if ctx.values == "softmax" else grad_values
            # The probability of a logit of -inf is the constant 0.
            grad_log = grad_log.where(candidates.gather(-1, best) != -torch.inf, 0.0)
            if ctx.normalize == "topk":
                p = values if ctx.values == "softmax" else values.exp()
                grad_log = grad_log - p * grad_log.sum(-1, keepdim=True)
            else:
                grad_logsumexp = grad_logsumexp - grad_log.sum(-1, keepdim=True)
            grad_chosen = scale.back(grad_log)
        grad_of_d = grad_logsumexp * e / total
        grad_of_m = scale.back(grad_of_d * sums)
    # An entry that is no candidate is a constant.
    grad_chosen = grad_chosen.where(chosen >= 0, 0.0)
    scattered = torch.zeros_like(candidates).scatter(-1, best, grad_chosen.to(candidates.dtype))
    grad_logits = scattered.unflatten(-1, (logits.shape[0], logits.shape[-1])).movedim(-2, 0)
    of_m, of_d = grad_of_m.to(m.dtype).movedim(-1, 0), grad_of_d.to(d.dtype).movedim(-1, 0)
    return grad_logits, None, of_m, of_d, *(None,) * 7


def _map_parts(run: Any, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """The dimension that vmap maps over becomes the first dimension of the rows, behind the dimension of the parts."""
    of_parts = mapped(info, in_dims, arguments)
    # All rows have parts of the same lengths.
    if in_dims[4] is not None:
        raise ValueError("`part_lengths` must not be mapped over; the parts of all rows begin at the same tokens")
    of_parts[:4] = [x.movedim(0, 1) for x in of_parts[:4]]
    of_parts[4] = arguments[4]
    return run(*of_parts), (0, 0, dim_of_normalizer(arguments[8]))


_merge_parts = Operator(
    f"merge_parts(Tensor logits, Tensor indices, Tensor m, Tensor d, Tensor? part_lengths, SymInt k, {SCALE_SCHEMA}, str values, "
    "str normalize, str? backend) -> (Tensor, Tensor, Tensor)",
    run,
    _fake,
    _setup_context,
    _backward,
    _map_parts,
)


def merge_parts(*arguments: Any) -> TopK:
    """arguments: the fields of :class:`MergeProblem`, then the backend."""
    return TopK(*_merge_parts(*arguments))

# SPDX-License-Identifier: Apache-2.0
"""The choice of experts: the operator `router_topk` with its gradient, its plan, and each backend's code.

The weights have gradients, of which the choice is no part: with g those of the chosen scores s, sigmoid passes on g s (1 - s),
sqrtsoftplus g sigmoid(x) / (2 s), and softmax g s at the chosen, less p times the sum of g s everywhere. The bias has zeros.

The reference, in torch operations, gives in float32 the same bits as the other backends, so the chosen experts are the same, too.
Each of its operations is rounded alone, in the order of csrc/routers/scores.h, which has the polynomials and their errors. Sums
are added in an order that does not depend on the number of lanes: four neighbours, then halves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .. import backends
from ..arguments import check_router
from ..backends import cpu, cuda
from ..backends.reference import gather, ranking, working_dtype
from ..layout import router_launch, topk_launch
from ..layout.kernel_arguments import address
from ..problem import RouterProblem, RouterTopK, TopK, TopkProblem, result_dtype
from ..row_arguments import check_layout
from ..rows import ROWS_FIELDS, ROWS_SCHEMA, Like, LogitRows, RowsLayout, like_given, unflattened
from .gradients import for_inputs, save_rows, saved_rows
from .operator import Operator, mapped, take_turns
from .results import Plan, Result, Start

# As in csrc/routers/scores.h.
_LOG2_E, _LN2_HIGH, _LN2_LOW = (float.fromhex(x) for x in ("0x1.715476p+0", "0x1.62p-1", "0x1.c85fep-10"))
_EXPONENTIAL = tuple(
    map(float.fromhex, ("0x1.6a21acp-10", "0x1.123b6ap-7", "0x1.5558fap-5", "0x1.555490p-3", "0x1.fffffcp-2"))
)
_LOGARITHM = tuple(map(float.fromhex, ("0x1.1ef87ap-11", "0x1.1eb610p-9", "0x1.99d27cp-7", "0x1.555500p-4")))
# Adding it leaves the nearest integer in the low bits, with a float's exponent bias added to it.
_ROUND = 1.5 * 2**23 + 127
_LOWEST = -87.0
# Added to a sum of weights, so that it is never zero, as in DeepSeek-V3.
_LEAST_SUM = 1e-20
# Weights are added as a list of this length, filled up with zeros.
_SUMMED_WEIGHTS = 32


def result_of(logits: Tensor, k: int, index_dtype: torch.dtype) -> Result[RouterTopK]:
    """The shapes and dtypes for k experts of each row."""
    shape = (*logits.shape[:-1], k)
    return Result(RouterTopK, (shape, result_dtype(logits.dtype)), (shape, index_dtype))


@functools.lru_cache(maxsize=4096)
def plan(
    device: torch.device,
    layout: RowsLayout,
    bias: Like | None,
    request: tuple[Any, ...],
    index_dtype: torch.dtype,
    backend: str | None,
) -> Plan[RouterTopK]:
    """Checks the layout and the other arguments, and plans the call, once for all calls alike. request: the fields of
    :class:`RouterProblem` after the bias."""
    rows = check_layout(layout)
    logits = rows.logits
    k, *_ = request
    check_router(logits.shape[-1], index_dtype, request)
    chosen = backends.pick_router(device, logits.dtype, logits.shape[-1], k, backend)
    result = result_of(logits, k, index_dtype)
    problem = RouterProblem(rows, None if bias is None else bias.meta(), *request)
    return Plan(result, device, PREPARE[chosen](problem, device) if logits.numel() else None)


def reference(problem: RouterProblem, out: RouterTopK) -> None:
    """The k experts of every row, and their weights."""
    p = problem
    x = p.rows.counted().to(result_dtype(p.rows.logits.dtype))
    scores = _SCORES[p.scoring](x)
    choice = scores if p.bias is None else scores + p.bias
    # An expert whose logit is -inf is out, whatever its bias.
    choice = choice.masked_fill(x == -torch.inf, -torch.inf)
    if p.groups == 1:
        experts = ranking(choice)[..., : p.k]
    else:
        experts = _experts_of_groups(p, choice)
    weights = scores.gather(-1, experts)
    if p.renormalize:
        weights = weights / (_sum(weights, _SUMMED_WEIGHTS) + _LEAST_SUM)
    out.weights.copy_(weights * p.scale)
    out.experts.copy_(experts)


def _experts_of_groups(p: RouterProblem, choice: Tensor) -> Tensor:
    """The k best experts of the groups that are kept."""
    size = choice.shape[-1] // p.groups
    grouped = choice.reshape(*choice.shape[:-1], p.groups, size)
    best = gather(grouped, ranking(grouped)[..., :2])
    of_groups = best[..., 0] if p.group_score == "max" or size == 1 else best[..., 0] + best[..., 1]
    # In the order of their numbers, so that equal experts stay in theirs.
    kept = ranking(of_groups)[..., : p.topk_groups].sort(-1).values.unsqueeze(-1)
    numbers = (kept * size + torch.arange(size, device=choice.device)).flatten(-2)
    return numbers.gather(-1, ranking(gather(choice, numbers))[..., : p.k])


def _softmax(x: Tensor) -> Tensor:
    e = _exponential(x - x.amax(-1, keepdim=True))
    return e * (1.0 / _sum(e, 4))


def _sigmoid(x: Tensor) -> Tensor:
    e = _exponential(-x.abs())
    of_positive = 1.0 / (1.0 + e)
    return torch.where(x < 0, e * of_positive, of_positive)


def _sqrtsoftplus(x: Tensor) -> Tensor:
    softplus = x.clamp(min=0.0) + _log1p(_exponential(-x.abs()))
    # In float64, because torch's square roots of float32 are not all rounded to nearest on CPUs.
    return softplus.to(working_dtype(x)).sqrt().to(x.dtype)


_SCORES = {"softmax": _softmax, "sigmoid": _sigmoid, "sqrtsoftplus": _sqrtsoftplus}


def _exponential(y: Tensor) -> Tensor:
    """e^y for y <= 0; 0 below e^-87, so that no result is subnormal."""
    if y.dtype == torch.float64:
        return y.exp()
    shifted = y * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = y - n * _LN2_HIGH - n * _LN2_LOW
    power = (shifted.view(torch.int32) << 23).view(torch.float32)
    return ((_polynomial(r, _EXPONENTIAL) * r * r + r + 1.0) * power).masked_fill(y < _LOWEST, 0.0)


def _log1p(e: Tensor) -> Tensor:
    """log(1 + e) for 0 <= e <= 1: 2 artanh(t / 2) of t = 2 e / (2 + e)."""
    if e.dtype == torch.float64:
        return e.log1p()
    t = e * (2.0 / (2.0 + e))
    u = t * t
    return _polynomial(u, _LOGARITHM) * u * t + t


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's rule, from the highest power on."""
    first, *others = coefficients
    result = torch.full_like(x, first)
    for coefficient in others:
        result = result * x + coefficient
    return result


def _sum(x: Tensor, least: int) -> Tensor:
    """The sum along the last dimension, which is kept: of four neighbours, then of the two halves of what is left. Rows are filled
    with zeros, to a power of two that is not less than `least`."""
    width = max(least, 1 << (x.shape[-1] - 1).bit_length())
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    quads = x.view(*x.shape[:-1], -1, 4)
    x = (quads[..., 0] + quads[..., 1]) + (quads[..., 2] + quads[..., 3])
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def _prepare_reference(problem: RouterProblem, device: torch.device) -> Start:
    return lambda rows, out, bias: reference(problem._replace(rows=rows.broadcast(), bias=bias), out)


def prepare_cpu(problem: RouterProblem, device: torch.device, instruction_set: str = "") -> Start:
    """instruction_set: one of cpu.instruction_sets() instead of the best, for tests."""
    p = problem
    route = cpu.native.Router(
        cpu.layout_of(p.rows, instruction_set),
        p.k,
        router_launch.SCORINGS[p.scoring],
        p.groups,
        p.topk_groups,
        p.group_score == "top2",
        p.renormalize,
        p.scale,
    )

    def run(rows: LogitRows, out: RouterTopK, bias: Tensor | None) -> None:
        weights, experts = out
        is_short = experts.dtype is torch.int32
        places = weights.data_ptr(), experts.data_ptr()
        route(cpu.addresses_of(rows), address(bias), *places, is_short, cpu.num_threads())

    return run


def prepare_cuda(problem: RouterProblem, device: torch.device) -> Start:
    p, logits, index = problem, problem.rows.logits, device.index
    itemsize, experts = logits.element_size(), logits.shape[-1]
    of_rows = TopkProblem(p.rows, p.k, "softmax", "allowed")
    planned = topk_launch.plan(of_rows, is_aligned=False, choice=router_launch.CHOICE)
    kernel = router_launch.kernel_name(logits.dtype, experts, p.scoring)
    wanted = router_launch.argument(experts, p.groups, p.topk_groups, p.group_score, p.renormalize, p.scale)
    shared_bytes = router_launch.shared_bytes(experts, itemsize, p.groups)

    def run(rows: LogitRows, out: RouterTopK, bias: Tensor | None) -> None:
        if planned is None or rows.logits.data_ptr() % itemsize:
            copied = cuda.copied(rows.broadcast())
            prepare_cuda(problem._replace(rows=copied), device)(copied, out, bias)
            return
        if bias is not None and bias.data_ptr() % router_launch.BIAS_ALIGNMENT:
            bias = bias.clone()
        weights, chosen = out
        # The kernel writes no logsumexp.
        filled = planned.fill(rows, None, 0, 0, TopK(weights, chosen, weights))
        routing = router_launch.filled(wanted, address(bias), chosen.dtype is torch.int32)
        cuda.launch(index, kernel, planned.grid, planned.threads, filled, routing, shared_bytes=shared_bytes)

    return run


PREPARE = {"reference": _prepare_reference, "cpu": prepare_cpu, "cuda": prepare_cuda}


def _run(*arguments: Any) -> RouterTopK:
    rows, (bias, *request, index_dtype, backend) = unflattened(arguments)
    device, key = rows.logits.device, (rows.layout(), like_given(bias), tuple(request))
    return plan(device, *key, index_dtype, backend).run(rows, bias)


def _fake(*arguments: Any) -> RouterTopK:
    rows, (_, k, *_, index_dtype, _) = unflattened(arguments)
    return result_of(rows.logits, k, index_dtype).empty(rows.logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: RouterTopK) -> None:
    rows, (bias, _, ctx.scoring, _, _, _, ctx.renormalize, ctx.scale, _, _) = unflattened(inputs)
    _, experts = output
    ctx.mark_non_differentiable(experts)
    save_rows(ctx, rows, bias, experts)


def _backward(ctx: Any, grad_weights: Tensor, grad_experts: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, (bias, experts) = saved_rows(ctx)
    of_logits = _logit_gradient(ctx, rows, experts.to(torch.int64), grad_weights * ctx.scale)
    of_bias = None if bias is None else torch.zeros_like(bias)
    return for_inputs(of_logits, of_bias, count=_INPUTS)


def _logit_gradient(ctx: Any, rows: LogitRows, experts: Tensor, g: Tensor) -> Tensor:
    x = rows.counted().to(result_dtype(rows.logits.dtype))
    hidden = rows.uncounted()
    chosen = x.gather(-1, experts)
    if ctx.scoring == "softmax":
        p = x.softmax(-1)
        scores = p.gather(-1, experts)
    else:
        scores = chosen.sigmoid() if ctx.scoring == "sigmoid" else softplus(chosen).sqrt()
    if ctx.renormalize:
        total = scores.sum(-1, keepdim=True) + _LEAST_SUM
        g = g / total
        g = g - (g * scores).sum(-1, keepdim=True) / total
    if ctx.scoring == "softmax":
        g = g * scores
        gradient = (-p * g.sum(-1, keepdim=True)).scatter_add(-1, experts, g)
    else:
        if ctx.scoring == "sigmoid":
            slope = scores * (1 - scores)
        else:
            slope = chosen.sigmoid() / (2 * scores.where(scores > 0, 1.0))
        gradient = torch.zeros_like(x).scatter_add(-1, experts, g * slope)
    return (gradient if hidden is None else gradient.masked_fill(hidden, 0.0)).to(rows.logits.dtype)


def _map_routers(run: Any, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Each bias that vmap maps over is a router of its own."""
    bias = ROWS_FIELDS
    if in_dims[bias] is not None:
        return take_turns(run, info, in_dims, *arguments)
    of_rows = mapped(info, in_dims, arguments)
    of_rows[bias] = arguments[bias]
    return run(*of_rows), (0, 0)


_REQUEST = (
    f"{ROWS_SCHEMA}, Tensor? bias, SymInt k, str scoring, SymInt groups, SymInt topk_groups, str group_score, bool renormalize, "
    "float scale"
)
_INPUTS = 10  # of router_topk, behind the rows
_router_topk = Operator(
    f"router_topk({_REQUEST}, ScalarType index_dtype, str? backend) -> (Tensor, Tensor)",
    _run,
    _fake,
    _setup_context,
    _backward,
    _map_routers,
)


def router_topk(
    rows: LogitRows, bias: Tensor | None, request: tuple[Any, ...], index_dtype: torch.dtype, backend: str | None
) -> RouterTopK:
    """The experts of checked rows. See :class:`RouterProblem`, whose fields after the bias are the request."""
    return RouterTopK(*_router_topk(*rows, bias, *request, index_dtype, backend))

# SPDX-License-Identifier: Apache-2.0
"""The choice of experts written for reading, in torch operations.

In float32 the scores are the same bits as on the other backends, so the chosen experts are too. Each operation below is
rounded alone, in the order of csrc/routers/scores.h, which has the polynomials and their errors. Sums are added in an order that
does not depend on the number of lanes: four neighbours, then halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import RouterProblem, RouterTopK, result_dtype
from .reference_rows import gather, ranking, working_dtype

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


def route(problem: RouterProblem, out: RouterTopK) -> None:
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

# SPDX-License-Identifier: Apache-2.0
"""Routers for tests: random requests with all that can go wrong, and what must come of each, in float64."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_topk import operators
from fused_topk.problem import RouterProblem, RouterTopK
from fused_topk.rows import LogitRows
from oracle import DTYPES, name_of
from rows import INF, NAN

SCORINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x, threshold=1000.0).sqrt(),
}


def random_problem(turn: int, most_experts: int = 1024, **fixed: Any) -> RouterProblem:
    """A request of its own for every number. `fixed`: some of the fields; `experts` and `dtype` of the logits."""
    draw = random.Random(turn)
    generator = torch.Generator().manual_seed(turn)
    sizes = [n for n in (1, 2, 3, 8, 16, 17, 60, 64, 100, 128, 160, 256, 300, 512, 777, 1024) if n <= most_experts]
    experts = fixed.pop("experts", None) or draw.choice(sizes)
    dtype = fixed.pop("dtype", None) or draw.choice(list(DTYPES.values()))
    groups = fixed.get("groups") or draw.choice([n for n in range(1, experts + 1) if experts % n == 0])
    topk_groups = fixed.get("topk_groups") or draw.randint(1, groups)
    k = draw.randint(1, min(32, topk_groups * (experts // groups)))
    shape = (draw.choice([1, 3, 9]), experts)

    def some(share: float) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    x = torch.randn(shape, generator=generator) * draw.choice([0.01, 1.0, 4.0, 30.0, 100.0])
    kind = draw.choice(
        ["random", "random", "ties", "hidden", "infinite", "nan", "mixed", "subnormal", "saturated", "equal"]
    )
    if kind in ("ties", "mixed"):
        x = x.round()
    if kind == "subnormal":
        x = torch.where(some(0.5), x * 1e-39, -77.0 - 20 * torch.rand(shape, generator=generator))
    if kind == "saturated":
        x = torch.where(some(0.5), 100.0, torch.where(some(0.5), -100.0, x))
    if kind == "equal":
        x = torch.full(shape, draw.choice([1.5, -INF, INF, NAN, 0.0]))
    for name, share, value in (("hidden", 0.4, -INF), ("infinite", 0.03, INF), ("nan", 0.03, NAN)):
        if kind in (name, "mixed"):
            x = x.masked_fill(some(share), value)
    bias = None
    if draw.random() < 0.6:
        bias = torch.randn(experts, generator=generator) * draw.choice([0.01, 1.0, 5.0])
        # One that reverses the order of the first row.
        if draw.random() < 0.2:
            bias = -SCORINGS["sigmoid"](x[0].nan_to_num()).float() * 3
        if draw.random() < 0.2:
            bias[::7] = draw.choice([-INF, INF, NAN])
    mask = some(0.7) if draw.random() < 0.2 else None
    lengths = torch.randint(0, experts + 1, shape[:1], generator=generator) if draw.random() < 0.15 else None
    request: dict[str, Any] = {
        "k": k, "scoring": draw.choice(list(SCORINGS)), "groups": groups, "topk_groups": topk_groups,
        "group_score": draw.choice(["top2", "max"]), "renormalize": draw.random() < 0.5,
        "scale": draw.choice([1.0, 2.5, 0.3]),
    }  # fmt: skip
    return RouterProblem(LogitRows(x.to(dtype), mask=mask, lengths=lengths), bias, **{**request, **fixed})


def empty_result(p: RouterProblem, index_dtype: torch.dtype = torch.int64) -> RouterTopK:
    """Memory for the result, filled with what no result is."""
    shape, device = (*p.rows.logits.shape[:-1], p.k), p.rows.logits.device
    dtype = torch.promote_types(p.rows.logits.dtype, torch.float32)
    return RouterTopK(
        torch.full(shape, -9.0, dtype=dtype, device=device), torch.full(shape, -1, dtype=index_dtype, device=device)
    )


def route(backend: Any, p: RouterProblem, index_dtype: torch.dtype = torch.int64, **how: Any) -> RouterTopK:
    """What a backend makes of it."""
    out = empty_result(p, index_dtype)
    operators.routing.PREPARE[name_of(backend)](p, p.rows.logits.device, **how)(p.rows, out, p.bias)
    return out


def assert_same(got: RouterTopK, expected: RouterTopK, what: object = "") -> None:
    """Bit for bit, but for the payloads of NaNs."""
    assert torch.equal(got.experts.long(), expected.experts.long()), f"experts: {what}"
    assert torch.equal(got.weights.nan_to_num(nan=-7.0), expected.weights.nan_to_num(nan=-7.0)), f"weights: {what}"


def choice_of(p: RouterProblem, scores: Tensor) -> Tensor:
    """What experts are chosen by, given their scores."""
    choice = scores if p.bias is None else scores + p.bias.to(scores.dtype)
    return choice.masked_fill(counted(p) == -INF, -INF)


def counted(p: RouterProblem) -> Tensor:
    """The logits in float64, -inf where an expert is not allowed."""
    hidden = p.rows.uncounted()
    x = p.rows.logits.double()
    return x if hidden is None else x.masked_fill(hidden, -INF)


def ranks_before(a: tuple[float, int], b: tuple[float, int]) -> bool:
    """Whether expert or group a, a value and a number, comes before b."""
    values = [INF if value != value else value for value, _ in (a, b)]
    are_nan = [value != value for value, _ in (a, b)]
    if are_nan[0] != are_nan[1]:
        return are_nan[0]
    return values[0] > values[1] or (values[0] == values[1] and a[1] < b[1])


def check_by_rules(p: RouterProblem, got: RouterTopK) -> None:
    """Compares the result with the rules, one row after another and in float64.

    Scores of float32 have the bound of oracle.py's probabilities. What ranks before what is decided by float64 where values are
    further apart than twice that bound; closer ones may be ordered by their rounded values.
    """
    x = counted(p)
    scores = SCORINGS[p.scoring](x)
    choice = choice_of(p, scores)
    u = 2.0**-24
    spread = (
        (x.amax(-1, keepdim=True) - x).nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
        if p.scoring == "softmax"
        else torch.zeros_like(x)
    )
    slack = (
        (7 * spread + 64) * u * scores.nan_to_num(0.0, 0.0).abs()
        + 1.7e-38**0.5 * (p.scoring == "sqrtsoftplus")
        + 1.7e-38
    )
    slack = slack + 4 * u * choice.nan_to_num(0.0, 0.0, 0.0).abs()
    for row, (weights, experts) in enumerate(zip(got.weights.double(), got.experts.tolist(), strict=True)):
        check_row(p, x[row], scores[row], choice[row].tolist(), slack[row].tolist(), weights, experts)


def check_row(
    p: RouterProblem,
    x: Tensor,
    scores: Tensor,
    choice: list[float],
    slack: list[float],
    weights: Tensor,
    experts: list[int],
) -> None:
    count = len(choice)
    assert len(set(experts)) == p.k and all(0 <= e < count for e in experts), experts
    size = count // p.groups
    kept = set(range(p.groups))
    if p.groups > 1:
        kept = {e // size for e in experts}
        assert len(kept) <= p.topk_groups
        groups = [
            sorted((choice[e] for e in range(g * size, (g + 1) * size)), key=lambda c: (c == c, -c))
            for g in range(p.groups)
        ]
        two = p.group_score == "top2" and size > 1
        of_groups = [best[0] + best[1] if two else best[0] for best in groups]
        of_slack = [
            2 * max(slack[g * size : (g + 1) * size])
            + 4 * 2.0**-24 * abs(0.0 if of_groups[g] != of_groups[g] or abs(of_groups[g]) == INF else of_groups[g])
            for g in range(p.groups)
        ]
        for g in kept:
            before = [
                h
                for h in range(p.groups)
                if surely_before((of_groups[h], h), of_slack[h], (of_groups[g], g), of_slack[g])
            ]
            assert len(before) < p.topk_groups, f"group {g} is kept, before it are {before}"
        surely = {
            g
            for g in range(p.groups)
            if sum(
                not surely_before((of_groups[g], g), of_slack[g], (of_groups[h], h), of_slack[h])
                for h in range(p.groups)
            )
            <= p.topk_groups
        }
        kept |= surely
    for first, second in itertools.pairwise(experts):
        assert not surely_before((choice[second], second), slack[second], (choice[first], first), slack[first])
    last = experts[-1]
    for e in range(count):
        if e // size in kept and e not in experts:
            assert not surely_before((choice[e], e), slack[e], (choice[last], last), slack[last]), (
                e,
                choice[e],
                last,
                choice[last],
            )
    expected = scores[experts]
    if p.renormalize:
        expected = expected / (expected.sum() + 1e-20)
    expected = expected * p.scale
    bound = [2 * slack[e] / max(abs(float(scores[e])), 1e-30) if abs(float(scores[e])) != INF else 0.0 for e in experts]
    for i in range(p.k):
        want, have = float(expected[i]), float(weights[i])
        if want != want or have != have or abs(want) == INF:
            assert want == have or (want != want and have != have), (want, have)
            continue
        tolerance = (max(bound) if p.renormalize else bound[i]) + 8 * 2.0**-24
        assert abs(have - want) <= tolerance * abs(want) + 1e-18, (i, want, have)


def surely_before(a: tuple[float, int], slack_a: float, b: tuple[float, int], slack_b: float) -> bool:
    """Whether a ranks before b whatever the rounding of their values."""
    if not ranks_before(a, b):
        return False
    x, y = a[0], b[0]
    if x != x or y != y or x == y:
        # Equal in float64, and so in float32 if they come from equal numbers.
        return x == x or y == y or a[1] < b[1]
    return abs(x) == INF or abs(y) == INF or x - y > slack_a + slack_b

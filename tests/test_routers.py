# SPDX-License-Identifier: Apache-2.0
"""router_topk: its rules, in float64 and one row after another; equal bits on every backend; and all that torch sees of it."""

import pytest
import torch

import fused_topk
from fused_topk import RouterTopK
from fused_topk.backends import cpu, reference
from fused_topk.problem import RouterProblem
from fused_topk.rows import LogitRows
from routing import SCORINGS, assert_same, check_by_rules, random_problem, route
from rows import INF, NAN, packed, random_logits, random_mask, shifted

GROUPED = {"scoring": "sigmoid", "groups": 8, "topk_groups": 4, "renormalize": True, "scale": 2.5}


def of_backend(p: RouterProblem, device: str) -> RouterProblem:
    rows = LogitRows(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in p.rows))
    return p._replace(rows=rows, bias=None if p.bias is None else p.bias.to(device))


def some_bias(experts: int, device: str = "cpu") -> torch.Tensor:
    return random_logits(experts, seed=experts, device=device) / 8


# Of every eighth turn the rules of one row after another are asked, which takes Python's time.
TURNS = [range(24), *(pytest.param(range(i, i + 100), marks=pytest.mark.exhaustive) for i in range(24, 1224, 100))]


@pytest.mark.parametrize("turns", TURNS, ids=lambda turns: f"from-{turns[0]}")
def test_rules(turns):
    for turn in turns:
        p = random_problem(turn, 64 if turn < 24 else 1024)
        check_by_rules(p, route(reference, p))


def test_rules_see_a_wrong_result():
    """Of each rule one result that breaks it."""
    p = random_problem(
        0, experts=64, k=8, scoring="sigmoid", groups=8, topk_groups=2, group_score="top2", renormalize=True
    )
    p = p._replace(rows=LogitRows(random_logits(4, 64)), bias=some_bias(64))
    got = route(reference, p)
    check_by_rules(p, got)
    for others in (
        {"bias": None}, {"group_score": "max"}, {"topk_groups": 3}, {"groups": 1, "topk_groups": 1}, {"renormalize": False},
        {"scale": p.scale * 1.0001}, {"scoring": "softmax"}, {"scoring": "sqrtsoftplus"},
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            check_by_rules(p._replace(**others), got)
    swapped = RouterTopK(got.weights.flip(-1), got.experts.flip(-1))
    with pytest.raises(AssertionError):
        check_by_rules(p, swapped)


TURNS_OF_BITS = [range(150), *(pytest.param(range(i, i + 500), marks=pytest.mark.exhaustive) for i in (150, 650, 1150))]


@pytest.mark.parametrize("turns", TURNS_OF_BITS, ids=lambda turns: f"from-{turns[0]}")
def test_bits_are_those_of_the_reference(native, turns):
    """On every instruction set too."""
    instruction_sets = cpu.native.instruction_sets() if native.name == "cpu" else [""]
    for turn in turns:
        p = random_problem(turn)
        expected = route(reference, p)
        for name in instruction_sets:
            index_dtype = (torch.int64, torch.int32)[turn % 2]
            if native.name == "cpu":
                got = route(cpu, p, index_dtype, instruction_set=name)
            else:
                got = router(native, of_backend(p, native.device), index_dtype)
            assert_same(RouterTopK(*(x.cpu() for x in got)), expected, (turn, name, p))


def router(backend, p: RouterProblem, index_dtype=torch.int64) -> RouterTopK:
    """The public function's result."""
    rows, bias, k, *_ = p
    settings = {
        name: getattr(p, name) for name in ("scoring", "groups", "topk_groups", "group_score", "renormalize", "scale")
    }
    # The function takes no lengths.
    hidden = rows.uncounted()
    mask = rows.mask if rows.lengths is None or hidden is None else ~hidden
    return fused_topk.router_topk(
        rows.logits, k, bias=bias, mask=mask, **settings, index_dtype=index_dtype, backend=backend.name
    )


def test_saturated_scores_tie_by_index(backend):
    x = torch.tensor([[-100.0, 20.0, 100.0, 3.0, 50.0, -99.0, -INF, -88.0]], device=backend.device)
    got = fused_topk.router_topk(x, 7, scoring="sigmoid", backend=backend.name)
    assert got.experts.tolist() == [[1, 2, 4, 3, 0, 5, 7]]
    assert got.weights[0, :3].tolist() == [1.0] * 3 and got.weights[0, 4:].tolist() == [0.0] * 3


def test_rows_without_a_choice(backend):
    """NaN, +inf and only -inf: what the contract says of each."""
    x = torch.zeros(4, 6, device=backend.device)
    x[0, 3], x[1, 2], x[2] = NAN, INF, -INF
    x[3] = torch.tensor([-INF, 1.0, -INF, 2.0, -INF, -INF])
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0, 0.0], device=backend.device)
    for scoring, experts, weights in (
        ("softmax", [[0, 1, 2], [0, 1, 2], [0, 1, 2], [3, 1, 0]], [[NAN] * 3, [NAN] * 3, [NAN] * 3, None]),
        ("sigmoid", [[3, 0, 1], [0, 2, 1], [0, 1, 2], [3, 1, 0]], [[NAN, 0.5, 0.5], [0.5, 1.0, 0.5], [0.0] * 3, None]),
        ("sqrtsoftplus", [[3, 0, 1], [2, 0, 1], [0, 1, 2], [3, 1, 0]], [None, None, [0.0] * 3, None]),
    ):
        got = fused_topk.router_topk(x, 3, scoring=scoring, bias=bias, backend=backend.name)
        assert got.experts.tolist() == experts, scoring
        assert got.weights[3, 2] == 0
        for have, want in zip(got.weights, weights, strict=True):
            if want is not None:
                assert torch.equal(have.nan_to_num(7.0), torch.tensor(want, device=have.device).nan_to_num(7.0))


def test_layouts(backend):
    """Other dimensions, strides, masks and a temporary copy change nothing."""
    x, bias, mask = random_logits(5, 3, 64), some_bias(64), random_mask(5, 3, 64, share=0.8)
    x, bias, mask = (each.to(backend.device) for each in (x, bias, mask))
    expected = fused_topk.router_topk(x, 6, bias=bias, mask=mask, **GROUPED, backend="reference")

    def check(logits, mask, bias=bias, dim=-1, **settings):
        got = fused_topk.router_topk(
            logits, 6, bias=bias, mask=mask, dim=dim, **GROUPED, backend=backend.name, **settings
        )
        assert_same(RouterTopK(*(each.movedim(dim, -1) for each in got)), expected)

    check(x, mask)
    check(x, packed(mask.cpu()).to(backend.device), index_dtype=torch.int32)
    check(x.movedim(-1, 0), mask.movedim(-1, 0), dim=0)
    check(x.transpose(0, 1).contiguous().transpose(0, 1), mask)
    check(torch.cat([x, x], -1)[..., :64], mask)
    check(shifted(x, 1), mask, shifted(bias, 1))
    check(x, mask, torch.stack([bias, bias], 1)[:, 0])
    check(x, mask, bias.double())


@pytest.mark.sanitize
def test_out(backend):
    x, bias = random_logits(5, 64, device=backend.device), some_bias(64, backend.device)
    for index_dtype in (torch.int64, torch.int32):
        expected = fused_topk.router_topk(x, 6, bias=bias, **GROUPED, index_dtype=index_dtype, backend=backend.name)
        for out in (tuple(map(torch.empty_like, expected)), tuple(each.T.contiguous().T for each in expected)):
            for each in out:
                each.fill_(7)
            got = fused_topk.router_topk(x, 6, bias=bias, **GROUPED, backend=backend.name, out=out)
            assert all(a is b for a, b in zip(got, out, strict=True))
            assert_same(got, expected)
            assert got.experts.dtype is index_dtype
    moved = tuple(each.T.contiguous() for each in expected)
    fused_topk.router_topk(x.T, 6, bias=bias, **GROUPED, dim=0, backend=backend.name, out=moved)
    assert_same(RouterTopK(*(each.T for each in moved)), expected)


def test_out_that_overlaps_what_is_read():
    x, bias = random_logits(5, 64), some_bias(64)
    weights, experts = fused_topk.router_topk(x, 6)
    for out, message in (
        ((x[:, :6], experts), "`out.weights` must not overlap `logits`"),
        ((bias[:30].view(5, 6), experts), "`out.weights` must not overlap `bias`"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            fused_topk.router_topk(x, 6, bias=bias, out=out)


def test_groups_of_fewer_experts_than_are_chosen():
    for logits in (random_logits(3, 64), random_logits(3, 64).requires_grad_()):
        for settings, message in (
            ({"k": 9, "groups": 8}, "`topk_groups` groups must have at least k=9 experts, got topk_groups=1 with 8"),
            ({"k": 4, "topk_groups": 2}, "`topk_groups` must satisfy 1 <= topk_groups <= 1"),
        ):
            with pytest.raises(ValueError, match=message):
                fused_topk.router_topk(logits, **settings)


def test_beyond_the_kernels_limits():
    """An automatic choice falls back; an explicit one says why it cannot."""
    for experts, k, dtype in ((1025, 4, torch.float32), (64, 33, torch.float32), (64, 4, torch.float64)):
        x = random_logits(3, experts, dtype=dtype)
        got = fused_topk.router_topk(x, k, scoring="sigmoid")
        assert_same(got, fused_topk.router_topk(x, k, scoring="sigmoid", backend="reference"))
        assert got.weights.dtype is dtype
        with pytest.raises(ValueError, match="leave backend=None to fall back to torch operations"):
            fused_topk.router_topk(x, k, backend="cpu")


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradients(scoring, renormalize):
    """Against differences, the first and the second ones: contract_results.py takes those of the reference."""
    x = random_logits(2, 8, dtype=torch.float64).requires_grad_()
    settings = {"scoring": scoring, "renormalize": renormalize, "groups": 4, "topk_groups": 2, "scale": 1.5}
    bias = some_bias(8).double().requires_grad_()
    mask = random_mask(2, 8, share=0.8)

    def weights(x, bias=None, mask=None):
        return fused_topk.router_topk(x, 3, bias=bias, mask=mask, **settings).weights

    assert torch.autograd.gradcheck(weights, (x, bias))
    assert torch.autograd.gradcheck(lambda x: weights(x, mask=mask), x)
    assert torch.autograd.gradgradcheck(weights, x)
    _, of_bias = torch.autograd.grad(weights(x, bias).sum(), (x, bias))
    assert torch.equal(of_bias, torch.zeros(8, dtype=torch.float64))


def test_gradients_of_extreme_rows_are_finite():
    x = torch.tensor([[-INF, -200.0, 3.0, 200.0, -90.0]]).requires_grad_()
    for scoring in SCORINGS:
        weights = fused_topk.router_topk(x, 5, scoring=scoring, renormalize=True).weights
        (of_logits,) = torch.autograd.grad(weights[0, 0], x)
        assert of_logits.isfinite().all(), scoring


def test_cuda_graph(cuda):
    x, bias = random_logits(64, 256, device="cuda"), some_bias(256, "cuda")

    def call():
        return fused_topk.router_topk(x, 8, bias=bias, **GROUPED, backend="cuda")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    x.copy_(random_logits(64, 256, seed=1))
    graph.replay()
    assert_same(captured, call())

# SPDX-License-Identifier: Apache-2.0
"""The kernels of csrc/routers/route_experts.cu on the emulated machine: every read and write checked, under several schedules,
and the result the reference's, bit for bit."""

import itertools

import pytest
import torch

from fused_topk import operators
from fused_topk.backends import reference
from fused_topk.layout import router_launch
from fused_topk.problem import RouterProblem, RouterTopK
from fused_topk.rows import LogitRows
from oracle import DTYPES
from routing import SCORINGS, assert_same, empty_result, random_problem, route
from rows import NAN, packed, random_logits, random_mask, shifted
from simt.emulate import emulated, recorded, replacing_each
from simt.launch import SCHEDULES, Array, Outcome

CPU = torch.device("cpu")


def run(p: RouterProblem, index_dtype: torch.dtype = torch.int64, **how) -> tuple[RouterTopK, Outcome]:
    """What the kernel makes of CPU tensors, and what the machine has found."""
    out = empty_result(p, index_dtype)
    inputs = {name: x for name, x in (*p.rows._asdict().items(), ("bias", p.bias)) if isinstance(x, torch.Tensor)}
    arrays = [*(Array(name, x, "input") for name, x in inputs.items())]
    arrays += [Array(name, x, "output") for name, x in out._asdict().items()]
    with emulated(arrays, **how) as outcomes:
        operators.routing.prepare_cuda(p, CPU)(p.rows, out, p.bias)
    return out, outcomes[-1]


def check(p: RouterProblem, **how) -> None:
    got, outcome = run(p, **how)
    outcome.check()
    assert_same(got, route(reference, p), p)


# The longest rows of each kernel.
SIZES = (128, 256, 512, 1024)
PLAIN = [("fp32", 128, "softmax"), ("bf16", 256, "sigmoid"), ("fp32", 512, "sqrtsoftplus")]
KERNELS = [
    pytest.param(*case, marks=() if case in PLAIN else pytest.mark.exhaustive)
    for case in itertools.product(DTYPES, SIZES, SCORINGS)
    if case[:2] not in (("fp16", 128), ("bf16", 128))
]


@pytest.mark.parametrize(("dtype", "longest", "scoring"), KERNELS)
def test_bits_are_those_of_the_reference(dtype, longest, scoring):
    """Of random requests, under each schedule."""
    name = router_launch.kernel_name(DTYPES[dtype], longest, scoring)
    for turn, experts in enumerate([longest] * 5 + [longest - 3, longest * 5 // 8, longest // 2 + 1] * 3):
        p = random_problem(turn + longest, experts=experts, dtype=DTYPES[dtype], scoring=scoring)
        with recorded() as names:
            operators.routing.prepare_cuda(p, CPU)(p.rows, empty_result(p), p.bias)
        assert names == [name]
        check(p, schedule=SCHEDULES[turn % 5], seed=turn, index_dtype=(torch.int64, torch.int32)[turn % 2])


@pytest.mark.parametrize("experts", [1, 2, 3, 8, 31, 60])
def test_few_experts(experts):
    for turn in range(6):
        check(random_problem(turn, experts=experts, dtype=torch.bfloat16, scoring="sigmoid"))


def grouped(logits: torch.Tensor, mask: torch.Tensor | None = None, **settings) -> RouterProblem:
    """A request like DeepSeek-V3's."""
    experts = logits.shape[-1]
    fields = {"k": 6, "scoring": "sigmoid", "groups": 8, "topk_groups": 4, "group_score": "top2", "renormalize": True}
    bias = settings.pop("bias", random_logits(experts, seed=1) / 8)
    return RouterProblem(LogitRows(logits, mask=mask), bias, **{**fields, "scale": 2.5, **settings})


def test_layouts():
    """Rows at any address, with any strides and masks; a bias at any address."""
    x = random_logits(2, 3, 64)
    mask = random_mask(2, 3, 64, share=0.7)
    for logits in (x, shifted(x, 1), torch.cat([x, x], -1)[..., :64], x.transpose(0, 1), x[..., :56], x.transpose(1, 2).contiguous().transpose(1, 2)):  # fmt: skip
        experts = logits.shape[-1]
        allowed = mask if logits.shape[:2] == mask.shape[:2] else mask.transpose(0, 1)
        check(grouped(logits))
        check(grouped(logits, allowed[..., :experts]))
        check(grouped(logits, packed(allowed[..., :experts].contiguous())))
    check(grouped(x, bias=shifted(random_logits(64, seed=1), 1)))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_tiny_scores(scoring):
    """Whose remainders are subnormal, and whose sum is 0."""
    x = torch.linspace(-87, -85.5, 64).expand(3, -1).clone()
    x[1], x[2, 1:] = -100.0, -100.0
    for dtype in (torch.float32, torch.bfloat16):
        check(grouped(x.to(dtype), bias=None, groups=1, topk_groups=1, k=32, scoring=scoring))


@pytest.mark.parametrize("groups", [pytest.param(n, marks=() if n == 40 else pytest.mark.exhaustive) for n in (1, 2, 3, 24, 40, 60, 120)])  # fmt: skip
def test_groups_of_all_sizes(groups):
    x = random_logits(2, 120)
    x[1, ::7] = NAN
    for topk_groups in (1, groups // 2, groups):
        if topk_groups:
            k = min(6, topk_groups * (120 // groups))
            check(grouped(x, k=k, groups=groups, topk_groups=topk_groups), schedule="random")


FAULTS = {
    "keys read before they are written": (r"(log2_group_lanes;\s*const u32 groups.*\s*)__syncwarp\(\);", r"\1", {"race", "uninitialised"}),
    "groups compared before they are summed": (r"(scores\[g\] = best;\s*\}\s*)__syncwarp\(\);", r"\1", {"race", "uninitialised"}),
    "keys taken before they are erased": (r"(= kNoKey;\s*\}\s*)__syncwarp\(\);", r"\1", {"race"}),
    "lane that does not join": (r"const u32 greatest = warp_max\(best\.key\)", "const u32 greatest = lane_id() == 7 ? 0 : warp_max(best.key)", {"deadlock", "divergence"}),
    "read past the row": (r"counts = expert < length &&", "counts = expert <= experts &&", {"out of bounds"}),
    "write past the end": (r"const i64 out = i64\(row\) \* k \+", "const i64 out = i64(row + 1) * k +", {"out of bounds"}),
    "result left out": (r"const bool has_expert = lane_id\(\) < k;", "const bool has_expert = lane_id() + 1 < k;", {"not written"}),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("old, new, kinds", FAULTS.values(), ids=list(FAULTS))
def test_fault_is_reported(old, new, kinds):
    # Rows of 60 are no whole vectors of 8.
    p = grouped(random_logits(1, 60, dtype=torch.bfloat16), groups=6, topk_groups=3, bias=None)
    for schedule in SCHEDULES:
        _, outcome = run(p, schedule=schedule, edit=replacing_each(old, new), max_steps=3_000_000)
        assert kinds & {fault.kind for fault in outcome.faults}, (schedule, outcome.faults)

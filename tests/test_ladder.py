# SPDX-License-Identifier: Apache-2.0
"""Every rung of the ladder against float64: on the CPU, on the emulated machine, and on a GPU where there is one."""

import re

import pytest
import torch
from torch import Tensor

import ladder_rungs as ladder
from fused_topk.backends import cpu
from fused_topk.cuda_runtime import driver, kernel_source
from ladder_rungs import BY_NAME, GPU_K, RUNGS
from rows import INF, random_logits
from simt import build
from simt.emulate import emulated, recorded
from simt.launch import SCHEDULES, Array
from test_cuda_compile import assert_no_spills, nvrtc  # noqa: F401  (a fixture)

PLACES = ("cpu", "emulated", "cuda")
SAFE = [rung for rung in RUNGS if rung.name != "naive"]


@pytest.fixture(params=PLACES)
def place(request):
    cause = {
        "cpu": cpu.unavailable(),
        "emulated": build.unavailable(),
        "cuda": None if torch.cuda.is_available() else "no GPU",
    }[request.param]
    if cause:
        pytest.skip(cause)
    return request.param


def climb(place: str, rung: ladder.Rung, logits: Tensor, k: int = 5, schedule: str = "random") -> ladder.Scratch:
    """Runs a rung somewhere, on CPU tensors; skips what there is not."""
    k = k if rung.gives == "topk" else 0
    device = torch.device("cuda" if place == "cuda" else "cpu")
    if place == "emulated":
        if rung.name.startswith("package"):
            pytest.skip("tested by itself")
        if logits.shape[-1] > rung.largest or (rung.name == "registers" and logits.shape[-1] % 4):
            pytest.skip("rows that the rung does not take")
    elif cause := ladder.unavailable(rung, device, logits.shape[-1], k):
        pytest.skip(cause)
    x = logits.to(device)
    scratch = ladder.scratch_for(x, k)
    if place != "emulated":
        ladder.climb(rung, x, scratch)
        return ladder.Scratch(*(tensor.cpu() for tensor in scratch))
    arrays = [Array("x", x, "input")]
    # What a rung's first kernel hands to its second.
    handed = "partial" if rung.name == "split" else "y" if rung.name.endswith("then_topk") else ""
    arrays += [
        Array(name, tensor, "inout" if name == handed else "scratch")
        for name, tensor in scratch._asdict().items()
        if tensor.numel()
    ]
    with emulated(arrays, schedule=schedule) as outcomes:
        ladder._climb_on_gpu(rung, x, scratch)
    for outcome in outcomes:
        outcome.check()
    return scratch


def check(place: str, rung: ladder.Rung, logits: Tensor, k: int = 5, schedule: str = "random") -> None:
    got = climb(place, rung, logits, k, schedule)
    want = logits.double().softmax(-1)
    if rung.gives == "softmax":
        # A few hundred roundings at the most, of 2^-24; terms below 2^-125 may be 0.
        torch.testing.assert_close(got.y.double(), want, rtol=2e-5, atol=1e-37)
        return
    # Ties by the smaller index. Among probabilities, logits that round to the same one tie.
    ranked = (got.y if rung.name.endswith("then_topk") else logits).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(got.indices, ranked.indices[:, :k])
    torch.testing.assert_close(got.values.double(), want.gather(-1, got.indices), rtol=2e-5, atol=1e-37)


@pytest.mark.sanitize
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize(("vocab_size", "schedule"), list(zip((31, 256, 1000, 4100, 9001), SCHEDULES)))
def test_rungs(place, rung, vocab_size, schedule):
    check(place, rung, random_logits(3, vocab_size), schedule=schedule)


@pytest.mark.sanitize
@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.gives == "topk"], ids=lambda rung: rung.name)
@pytest.mark.parametrize("k", GPU_K)
def test_every_k(place, rung, k):
    for vocab_size in (k, 700):
        check(place, rung, random_logits(2, vocab_size), k)


@pytest.mark.parametrize("rung", SAFE, ids=lambda rung: rung.name)
def test_large_logits_and_masked_parts(place, rung):
    logits = random_logits(4, 9000)
    logits[0] += 1e4
    # Whole parts of only -inf: the merge must survive them, wherever they are.
    logits[1, :8500] = -INF
    logits[2, 300:] = -INF
    logits[3, :] = -100.0
    check(place, rung, logits)


@pytest.mark.parametrize("rung", [rung for rung in SAFE if rung.gives == "softmax"], ids=lambda rung: rung.name)
def test_row_of_only_negative_infinity_is_nan(place, rung):
    logits = torch.full((2, 4096), -INF)
    logits[1] = random_logits(4096)
    y = climb(place, rung, logits).y
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1].double(), logits[1].double().softmax(-1), rtol=2e-5, atol=1e-37)


def test_naive_overflows(place):
    """What the second rung is for."""
    logits = torch.zeros(1, 1000)
    logits[0, 3] = 100.0
    y = climb(place, BY_NAME["naive"], logits).y
    assert y[0, 3].isnan() and (y[0, :3] == 0).all()
    y = climb(place, BY_NAME["safe"], logits).y
    assert y[0, 3] == 1.0


def test_accesses_are_those_of_the_paper():
    counts = {rung.name: rung.accesses for rung in RUNGS}
    assert (counts["naive"], counts["safe"], counts["online"]) == (3, 4, 3)
    assert (counts["registers"], counts["package_softmax"], counts["package_topk"]) == (2, 2, 1)
    assert [counts[name] for name in ("safe_then_topk", "online_then_topk", "safe_topk", "online_topk")] == [5, 4, 2, 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", kernel_source.ARCHITECTURES)
def test_kernels_compile_without_spills(nvrtc, architecture):  # noqa: F811
    for kernel in ladder.kernel_names():
        assert_no_spills(kernel, driver.compile_kernel(kernel, architecture)[2])


def test_every_kernel_is_named():
    defined = set(re.findall(r"(\w+_kernel)\(", kernel_source.translation_unit("fused_topk::ladder::")))
    assert {re.split("::|<", name)[2] for name in ladder.kernel_names()} == defined


def test_every_kernel_is_climbed():
    """By test_rungs and test_every_k."""
    with recorded() as launched:
        for rung in RUNGS:
            for k in GPU_K if rung.gives == "topk" else (0,):
                logits = torch.empty(1, 256)
                if not rung.name.startswith("package"):
                    ladder._climb_on_gpu(rung, logits, ladder.scratch_for(logits, k))
    assert set(launched) == set(ladder.kernel_names())

# SPDX-License-Identifier: Apache-2.0
"""The kernel of csrc/sample_rows.cu on the emulated machine: the draws, and every read and write checked."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from fused_topk.backends import cuda, philox, reference
from fused_topk.layout import sample_launch
from fused_topk.problem import Problem, Sample, SampleProblem, TopK
from oracle import DTYPES
from rows import INF, NAN, packed, random_mask
from simt import build, sanitized
from simt.emulate import emulated
from simt.launch import SCHEDULES, Array
from test_sampling import SETTINGS, check_draws, check_is_kept, kept_weights, rows_of, uniforms

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


def listed(logits: Tensor, k: int, mask: Tensor | None, out: TopK | None) -> TopK:
    """The list, which softmax_topk.cu makes on a GPU: that kernel has tests of its own."""
    rows = len(logits)
    # Zeros: the machine takes them for inputs of the launch.
    out = out or TopK(torch.zeros(rows, k), torch.zeros(rows, k, dtype=torch.int64), torch.zeros(rows))
    reference.row_topk(Problem(logits, k, 1.0, None, mask, "log_softmax", "allowed"), out)
    return out


def draw(logits: Tensor, settings: dict, *, name_of=0, mask=None, num_samples=2, truncated=False, longest=None, **how):
    """What the kernel draws, with all that the machine checks. name_of: the seed. longest: of the list."""
    rows = len(logits)

    def parameter(name, default, dtype=torch.float64):
        value = settings.get(name, default)
        return (0, value.to(dtype)) if isinstance(value, Tensor) else (value, None)

    of_seed = (0, name_of) if isinstance(name_of, Tensor) else (name_of, None)
    problem = SampleProblem(
        logits,
        *parameter("temperature", 1.0),
        *parameter("top_k", 0, torch.int64),
        *parameter("top_p", 1.0),
        *parameter("min_p", 0.0),
        mask,
        *of_seed,
        0,
        None,
        num_samples,
        0,
        truncated,
    )
    out = Sample(torch.empty(rows, num_samples, dtype=torch.int64), torch.empty(rows, num_samples), None)
    arrays = [Array("logits", logits, "input"), Array("tokens", out.tokens, "output")]
    arrays.append(Array("log_probs", out.log_probs, "output"))
    arrays += [Array(f"parameter {i}", x, "input") for i, x in enumerate(problem[1:]) if isinstance(x, Tensor)]
    length = sample_launch.list_length

    def short(*arguments) -> int:
        return min(length(*arguments), longest or len(logits[0]))

    with (
        mock.patch.object(cuda, "_log_softmax_topk", listed),
        mock.patch.object(sample_launch, "list_length", short),
        emulated(arrays, **how) as outcomes,
    ):
        cuda.sample(problem, out)
    outcomes[0].check()
    return out


CASES = {
    **SETTINGS,
    "each_its_own": {
        "temperature": torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        "top_k": torch.tensor([0, 3, 0, 5, 0, 700, 0, 2, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.5, 0.9, 0.3, 0.9, 1.0, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0]),
    },
}


def check_case(name: str, dtype: torch.dtype, vocab_size: int, longest: int | None, **how) -> None:
    settings = CASES[name]
    logits = rows_of(vocab_size, dtype)
    seed = torch.arange(len(logits)) + 3
    got = draw(logits, settings, name_of=seed, longest=longest, **how)
    weights = kept_weights(
        logits,
        {k: v.clamp(min=1e-9) if k == "temperature" and isinstance(v, Tensor) else v for k, v in settings.items()},
    )
    check_draws(got.tokens, uniforms(seed, 2), weights)
    check_is_kept(got.tokens, weights, settings.get("top_p"))
    own = logits.double().log_softmax(-1).gather(1, got.tokens)
    torch.testing.assert_close(got.log_probs.double(), own, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("longest", [None, 5], ids=["listed", "searched"])
@pytest.mark.parametrize("name", CASES)
def test_draws(name, longest):
    """With a list of 5 nearly every filter keeps more than is listed."""
    turn = list(CASES).index(name)
    dtype = list(DTYPES.values())[turn % 3]
    check_case(name, dtype, 777, longest, schedule=SCHEDULES[turn % len(SCHEDULES)], seed=turn)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("architecture", [75, 90])
@pytest.mark.parametrize("vocab_size", [1, 31, 9001])
def test_formats_and_lengths(vocab_size, architecture, dtype):
    for name in ("whole", "usual", "top_p_min_p"):
        check_case(name, dtype, vocab_size, 7, schedule="random", architecture=architecture)


def test_masks_strides_and_many_samples():
    logits = rows_of(500).repeat(1, 2)[:4, 3:503]
    mask = random_mask(4, 500, share=0.2)
    seed = torch.arange(4)
    for given in (mask, packed(mask)):
        for name in ("whole", "usual", "top_p"):
            got = draw(logits, SETTINGS[name], name_of=seed, mask=given, num_samples=40, longest=9)
            check_draws(got.tokens, uniforms(seed, 40), kept_weights(logits, SETTINGS[name], mask))


def test_rows_without_a_distribution():
    rows = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    rows[0, 3], rows[1, 4], rows[2] = NAN, INF, -INF
    mask = torch.ones(5, 100, dtype=torch.bool)
    mask[3] = False
    temperature = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])
    for truncated in (False, True):
        got = draw(rows, {"temperature": temperature, "top_p": 0.5}, mask=mask, truncated=truncated)
        assert got.tokens[:, 0].tolist() == [3, 4, 0, 0, int(rows[4].argmax())]
        assert bool(got.log_probs[:4].isnan().all()) and bool(got.log_probs[4].isnan().all()) == truncated


def test_truncated_log_probabilities():
    logits = rows_of(600)[:4]
    for name in ("whole", "usual", "top_p", "min_p"):
        for longest in (None, 4):
            got = draw(logits, SETTINGS[name], truncated=True, longest=longest)
            weights = kept_weights(logits, SETTINGS[name])
            expected = (weights.gather(1, got.tokens) / weights.sum(1, keepdim=True)).log()
            torch.testing.assert_close(got.log_probs.double(), expected, rtol=1e-5, atol=1e-5)


def test_numbers_are_those_of_the_reference():
    """Bit for bit, of seeds and counters with all bits: csrc/philox.h compiled for the GPU draws the same of equal logits."""
    logits = torch.zeros(3, 4096)
    for seed in (-1, 2**63 - 1, 0x123456789ABCDEF):
        got = draw(logits, {}, name_of=seed, num_samples=8)
        streams = torch.arange(3).unsqueeze(1)
        u = philox.uniforms(torch.tensor([[seed]]), torch.zeros(1, 1, dtype=torch.int64), streams, 8, torch.float64)
        assert torch.equal(got.tokens, (u * 4096).long())


@pytest.mark.exhaustive
def test_under_address_sanitizer():
    cases = [("usual", 4), ("top_p", 4), ("whole", None), ("all", None)]
    done = sanitized.call("test_simt_sampling", "run_sanitized", cases)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]


def run_sanitized(name: str, longest: int | None) -> None:
    check_case(name, torch.bfloat16, 333, longest, address_sanitizer=True, schedule="random")


@pytest.mark.parametrize(
    ("vocab_size", "top_k", "has_other_filter", "length"),
    [(1000, 0, False, 1), (1000, 50, True, 72), (1000, None, False, 128), (60, 50, True, 60), (1000, 0, True, 128),
     (10**6, 5000, False, 1024), (5, 7, False, 1)],
)  # fmt: skip
def test_list_length(vocab_size, top_k, has_other_filter, length):
    assert sample_launch.list_length(vocab_size, top_k, has_other_filter) == length


def test_sums_of_weights_fit_64_bits():
    for vocab_size in (1, 2**18, 2**31 - 1):
        unit = sample_launch.unit(vocab_size)
        assert unit * vocab_size < 2**62 and unit >= 2**30

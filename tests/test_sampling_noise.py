# SPDX-License-Identifier: Apache-2.0
"""sample(noise=...): the token with the greatest p_i / noise_i, which torch.multinomial draws of the same numbers."""

import pytest
import torch
from torch import Tensor

import fused_topk
from exact_draws import BROAD, NEAR, SETTINGS, broad_rows, kept_weights, rows_of
from fused_topk.functional import sampling
from fused_topk.operators.sampling import draw
from fused_topk.operators.sampling import plan_of as plan_of_sample
from fused_topk.problem import SampleProblem
from fused_topk.rows import LogitRows
from rows import INF, NAN, also, packed, random_logits, random_mask

# What log p - log noise may be off by in float32, where it is at most 2^5 or so for the winner.
OFF = 2.0**-18


def exponential(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed))


def check_winners(tokens: Tensor, noise: Tensor, logits: Tensor, settings: dict, mask: Tensor | None = None) -> None:
    """Each token has the greatest log p - log noise of what top_p, or one that is as near as NEAR, keeps."""
    top_p = settings.get("top_p", 1.0)
    near = [top_p] if isinstance(top_p, Tensor) or top_p in (0, 1) else [top_p, top_p - NEAR, top_p + NEAR]
    tokens = tokens.cpu()
    is_right = torch.zeros_like(tokens, dtype=torch.bool)
    for share in near:
        scores = kept_weights(logits, {**settings, "top_p": share}, mask).log() - noise.double().log()
        is_right |= scores.gather(1, tokens) >= scores.amax(1, keepdim=True) - OFF
    assert bool(is_right.all()), f"rows {(~is_right).flatten().nonzero().flatten().tolist()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab_size", [1, 5, 300, 9001])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_greatest_quotient_wins(backend, name, vocab_size, dtype):
    logits = rows_of(vocab_size, dtype)
    for seed in range(3):
        noise = exponential(*logits.shape, seed=seed)
        got = backend("sample", logits.to(backend.device), noise=noise.to(backend.device), **SETTINGS[name])
        check_winners(got.tokens, noise, logits, SETTINGS[name])


@pytest.mark.parametrize("name", BROAD)
@pytest.mark.parametrize("vocab_size", [3000, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_broad_rows(backend, vocab_size, dtype, name):
    logits = broad_rows(vocab_size, dtype)
    noise = exponential(*logits.shape)
    got = backend("sample", logits.to(backend.device), noise=noise.to(backend.device), **BROAD[name])
    check_winners(got.tokens, noise, logits, BROAD[name])


def test_long_rows(native):
    logits = random_logits(2, 1_200_001)
    noise = exponential(*logits.shape)
    for settings in ({}, {"top_p": 0.9}):
        got = native("sample", logits.to(native.device), noise=noise.to(native.device), **settings)
        check_winners(got.tokens, noise, logits, settings)


def test_each_row_has_its_own_parameters_and_tokens(backend):
    vocab_size = 5000
    logits = rows_of(vocab_size)
    settings = {
        "temperature": torch.tensor([1.0, 0.5, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        "top_k": torch.tensor([0, 3, 0, 5, 0, 700, 0, 2, 0, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.5, 0.9, 0.3, 0.9, 1.0, 1.0, 1.0, 0.5]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0]),
    }
    mask = random_mask(*logits.shape)
    mask[:, vocab_size // 3] = mask[:, vocab_size // 2] = True
    lengths = torch.full((len(logits),), vocab_size)
    lengths[:3] = torch.tensor([1700, 40, vocab_size - 1])
    allowed = mask & (torch.arange(vocab_size) < lengths.unsqueeze(1))
    noise = exponential(*logits.shape)
    device = backend.device
    on = {name: x.to(device) for name, x in settings.items()}
    for given in (mask, packed(mask)):
        got = backend(
            "sample", logits.to(device), noise=noise.to(device), mask=given.to(device), lengths=lengths.to(device), **on
        )
        check_winners(got.tokens, noise, logits, settings, allowed)


OF_WARPERS = ["whole", "usual", "all", *also("temperature", "top_k", "top_p", "min_p")]
EACH_WARPER = pytest.mark.parametrize("name", OF_WARPERS)


def warped(logits: Tensor, settings: dict) -> Tensor:
    """The probabilities that transformers draws from."""
    process = pytest.importorskip("transformers.generation.logits_process")
    kinds = {
        "temperature": process.TemperatureLogitsWarper,
        "top_k": process.TopKLogitsWarper,
        "top_p": process.TopPLogitsWarper,
        "min_p": process.MinPLogitsWarper,
    }
    scores = logits.float()
    for name, kind in kinds.items():
        if name in settings:
            scores = kind(settings[name])(None, scores)
    return scores.softmax(-1)


def check_as_multinomial(backend, logits: Tensor, settings: dict, seed: int) -> None:
    """At most one of the tokens differs, where two quotients are equal to rounding."""
    probs = warped(logits, settings)
    generator = torch.Generator(logits.device).manual_seed(seed)
    expected = torch.multinomial(probs, 1, generator=generator)
    after = generator.get_state()
    generator.manual_seed(seed)
    noise = torch.empty_like(probs).exponential_(generator=generator)
    assert torch.equal(generator.get_state(), after)
    got = backend("sample", logits, noise=noise, **settings).tokens
    assert got.unique().numel() > 20
    assert int((got != expected).sum()) <= 1


@EACH_WARPER
def test_multinomial_draws_the_same_tokens(backend, name):
    """Also on a GPU, whose torch draws other numbers."""
    logits = random_logits(4000, 500).to(backend.device)
    check_as_multinomial(backend, logits, SETTINGS[name], seed=5)


@EACH_WARPER
def test_multinomial_draws_the_same_tokens_of_a_vocabulary(backend, name):
    # On a GPU torch sorts equal logits in any order, so which of those at top-p's border it keeps is arbitrary. 16 bits have many.
    dtype = torch.bfloat16 if backend.device == "cpu" else torch.float32
    logits = (random_logits(64, 32_000) / 2).to(backend.device, dtype)
    check_as_multinomial(backend, logits, SETTINGS[name], seed=6)


@pytest.mark.parametrize("name", ["whole", "top_p", "usual"])
def test_a_graph_draws_what_multinomial_draws(cuda, name):
    """With a registered generator a replay draws the numbers that torch would draw next."""
    logits = random_logits(300, 32_000).cuda()
    probs = warped(logits, SETTINGS[name])
    generator = torch.Generator("cuda").manual_seed(3)
    cuda("sample", logits, noise=torch.ones_like(probs), **SETTINGS[name])
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        noise = torch.empty_like(probs).exponential_(generator=generator)
        drawn = cuda("sample", logits, noise=noise, **SETTINGS[name]).tokens
    stock = torch.Generator("cuda").manual_seed(3)
    for _ in range(4):
        graph.replay()
        expected = torch.multinomial(probs, 1, generator=stock)
        assert int((drawn != expected).sum()) <= 1


@pytest.mark.parametrize("name", ["whole", "usual", "top_p", "top_p_min_p"])
def test_all_else_is_as_with_a_seed(backend, name):
    logits = rows_of(3000).to(backend.device)
    noise = exponential(*logits.shape).to(backend.device)
    settings = {**SETTINGS[name], "topk": 3, "kept": True}
    for truncated in (False, True):
        got = backend("sample", logits, noise=noise, logprobs="kept" if truncated else "model", ranks=True, **settings)
        other = backend("sample", logits, seed=0, logprobs="kept" if truncated else "model", **settings)
        for mine, others in zip((*got.topk, *got.kept), (*other.topk, *other.kept), strict=True):
            assert torch.equal(mine, others)
        x = logits.double()
        scaled = x / SETTINGS[name].get("temperature", 1.0)
        own = scaled - got.kept.logsumexp.double().unsqueeze(1) if truncated else x.log_softmax(-1)
        torch.testing.assert_close(got.logprobs.double(), own.gather(1, got.tokens), rtol=0, atol=2e-3)
        assert torch.equal(got.ranks, (x >= x.gather(1, got.tokens)).sum(1, keepdim=True))


def ties_and_odd_noise(vocab_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """(logits, noise that no distribution gives, tokens that are drawn): three tokens tie, and no other has a probability."""
    logits = torch.full((7, vocab_size), -INF)
    logits[:, [5, 11, 23]] = 1.0
    noise = torch.ones(7, vocab_size)
    noise[:, :5] = 0.0  # of tokens of probability 0
    noise[1, 5] = 2.0
    noise[2, [5, 11]] = NAN
    noise[3, [5, 23]] = -1.0
    noise[4, 23] = 0.0
    noise[5] = INF
    noise[6] = NAN
    return logits, noise, [5, 11, 23, 11, 23, 5, 5]


@pytest.mark.parametrize("settings", [{}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 1e-4}], ids=str)
def test_ties_and_noise_that_no_distribution_gives(backend, settings):
    # A list of the best has all of the shorter row.
    for vocab_size in (24, 5000):
        logits, noise, expected = ties_and_odd_noise(vocab_size)
        logits, noise = logits.to(backend.device), noise.to(backend.device)
        got = backend("sample", logits, noise=noise, **settings)
        assert got.tokens.flatten().tolist() == expected
        # The same where a mask hides the others, whatever their logits.
        got = backend("sample", torch.ones_like(logits), noise=noise, mask=logits != -INF, **settings)
        assert got.tokens.flatten().tolist() == expected


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}], ids=str)
def test_rows_without_a_draw(backend, settings):
    """Greedy rows, and rows without a distribution, give what they give with a seed."""
    logits = random_logits(5, 3000)
    logits[1, [7, 9]] = NAN
    logits[2, [8, 9]] = INF
    logits[3] = -INF
    given = {"temperature": torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], device=backend.device), **settings}
    noise = exponential(*logits.shape).to(backend.device)
    got = backend("sample", logits.to(backend.device), noise=noise, **given)
    other = backend("sample", logits.to(backend.device), seed=1, **given)
    assert torch.equal(got.tokens[:4], other.tokens[:4])
    assert torch.equal(got.logprobs[:4].nan_to_num(2), other.logprobs[:4].nan_to_num(2))


@pytest.mark.sanitize
def test_rows_that_begin_at_any_address(backend):
    """Logits and noise, of which a kernel reads 16 bytes at a time."""
    for vocab_size, first in ((701, 1), (704, 3), (2050, 0)):
        logits = random_logits(3, vocab_size + 8)[:, first : first + vocab_size].to(torch.bfloat16)
        memory = exponential(3 * vocab_size + 8)
        noise = memory[first : first + 3 * vocab_size].view(3, vocab_size)
        on = memory.to(backend.device)[first : first + 3 * vocab_size].view(3, vocab_size)
        got = backend("sample", logits.to(backend.device), noise=on)
        check_winners(got.tokens, noise, logits, {})


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["whole", "top_p", "usual"])
def test_any_number_of_threads(cpu, threads, name):
    logits = broad_rows(40_000)[:2]
    noise = exponential(*logits.shape)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = cpu("sample", logits, noise=noise, **SETTINGS[name])
    finally:
        torch.set_num_threads(before)
    check_winners(got.tokens, noise, logits, SETTINGS[name])


def test_float64_logits():
    logits = random_logits(2, 50).double().requires_grad_()
    noise = exponential(2, 50)
    got = fused_topk.sample(logits, noise=noise)
    assert torch.equal(got.tokens, (logits.softmax(-1) / noise).argmax(-1, keepdim=True))


def test_compiled_and_fake(native):
    logits, noise = random_logits(3, 500).to(native.device), exponential(3, 500).to(native.device)

    def step(logits, noise):
        return native("sample", logits, top_k=20, top_p=0.9, noise=noise, topk=2)

    expected, got = step(logits, noise), torch.compile(step, fullgraph=True, backend="eager")(logits, noise)
    assert torch.equal(expected.tokens, got.tokens) and torch.equal(expected.logprobs, got.logprobs)
    request = (20, None, 0.9, None, 0.0, None, 0, None, 0, None, 1, 2, False, False, native.name)
    torch.library.opcheck(torch.ops.fused_topk.sample.default, (*LogitRows(logits), noise, *request))


def test_calls_by_a_plan_and_without_one_draw_the_same(backend, monkeypatch):
    logits, noise = random_logits(2, 3, 700).to(backend.device), exponential(2, 3, 700).to(backend.device)
    planned = []
    check = sampling._plan
    monkeypatch.setattr(sampling, "_plan", lambda *key: planned.append(key) or check(*key))
    got = backend("sample", logits, noise=noise, top_k=20, top_p=0.9)
    assert len(planned) == 1
    expected = backend("sample", logits.clone().requires_grad_(), noise=noise, top_k=20, top_p=0.9)
    assert len(planned) == 1 and torch.equal(got.tokens, expected.tokens)
    # Noise that a backend cannot read where it lies.
    strided = noise.mT.contiguous().mT
    assert torch.equal(backend("sample", logits, noise=strided, top_k=20, top_p=0.9).tokens, got.tokens)


def test_the_plan_of_a_checked_request(backend):
    """As a decoding loop calls it: no check, no operator, and one plan for all noise."""
    logits = random_logits(4, 900).to(backend.device)
    plans = set()
    for seed in range(3):
        noise = exponential(4, 900, seed=seed).to(backend.device)
        problem = SampleProblem(
            LogitRows(logits), 50, None, 0.9, None, 0.0, None, 0, None, 0, None, 1, 0, False, noise=noise
        )
        plan = plan_of_sample(problem, backend.name)
        plans.add(id(plan))
        expected = backend("sample", logits, noise=noise, top_k=50, top_p=0.9)
        assert torch.equal(draw(problem, plan).tokens, expected.tokens)
    assert len(plans) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": 1}, ValueError, "`seed` must be None where `noise` is given"),
        ({"seed": torch.ones(2, dtype=torch.int64)}, ValueError, "`seed` must be None where `noise` is given"),
        ({"generator": torch.Generator()}, ValueError, "`generator` must be None where `noise` is given"),
        ({"counter": 1}, ValueError, "`counter` must be 0 where `noise` is given, got 1"),
        ({"counter": 0.0}, ValueError, "`counter` must be 0 where `noise` is given, got 0.0"),
        ({"num_samples": 2}, ValueError, "`num_samples` must be 1 where `noise` is given, got 2; leave it out"),
        ({"noise": torch.ones(10)}, ValueError, r"`noise` must have the shape of `logits`, \(2, 10\), got \(10,\)"),
        ({"noise": torch.ones(2, 10).double()}, TypeError, "`noise` must be float32, got torch.float64; use .float"),
    ],
)
@pytest.mark.parametrize("others", [{}, {"top_k": torch.tensor([1, 2])}], ids=["planned", "not planned"])
def test_what_goes_with_no_noise(arguments, error, message, others):
    with pytest.raises(error, match=message):
        fused_topk.sample(torch.zeros(2, 10), **{"noise": torch.ones(2, 10), **arguments, **others})

# SPDX-License-Identifier: Apache-2.0
"""Sampling: what the warpers keep, the distribution of the draws, and the processor that does it in one pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process as stock

from decoding import FILLS, also, assert_fused, generate_both, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.backends import cpu
from fused_topk.generation import FusedTopKLogitsProcessor, fused_decoding, stats
from fused_topk.generation.choice import masks, selection, tokens, warping
from fused_topk.generation.choice.rows import Rows
from fused_topk.generation.choice.selection import best, logsumexp
from fused_topk.generation.edits import warpers
from fused_topk.generation.edits.plan import Plan
from fused_topk.generation.interception.lazy_scores import LazyScores

CHAINS = {
    "top_k": lambda: [TopKLogitsWarper(7)],
    "top_k_of_one": lambda: [TopKLogitsWarper(1)],
    "top_k_of_more_than_all": lambda: [TopKLogitsWarper(5000)],
    "top_p": lambda: [TopPLogitsWarper(0.8)],
    "top_p_of_little": lambda: [TopPLogitsWarper(0.01, min_tokens_to_keep=3)],
    "min_p": lambda: [MinPLogitsWarper(0.05)],
    "min_p_of_little": lambda: [MinPLogitsWarper(0.999, min_tokens_to_keep=4)],
    "at_least": lambda: [
        TemperatureLogitsWarper(0.3),
        TopKLogitsWarper(2, min_tokens_to_keep=9),
        TopPLogitsWarper(0.05, min_tokens_to_keep=7),
        MinPLogitsWarper(1.0, min_tokens_to_keep=5),
    ],
    # More than the list has room for.
    "at_least_half": lambda: [TopPLogitsWarper(0.01, min_tokens_to_keep=1500)],
    "temperature_top_p": lambda: [TemperatureLogitsWarper(0.6), TopPLogitsWarper(0.9)],
    "temperature_min_p": lambda: [TemperatureLogitsWarper(1.4), MinPLogitsWarper(0.1)],
    "all": lambda: [TemperatureLogitsWarper(0.8), TopKLogitsWarper(50), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    "twice": lambda: [TopKLogitsWarper(40), TemperatureLogitsWarper(0.5), TopKLogitsWarper(20), TopPLogitsWarper(0.7)],
}


def logits_of(vocab_size, step=None, seed=0):
    """float32 [6, V]; with `step` multiples of it, many of which are equal."""
    logits = 2.5 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(seed))
    return logits if step is None else (logits / step).round() * step


def kept_by_lists(filters, logits):
    """What the warpers on lists of the best leave of the logits [R, V], and whether the lists were long enough."""
    rows = Rows(logits, cpu)
    vocab_size = logits.shape[-1]
    found = best(rows, (), warping.list_length(filters, vocab_size), False)
    kept, was_enough = warping.apply(
        filters,
        found.scores,
        vocab_size,
        lambda temperature: logsumexp(rows, (), temperature, False, found.scores[:, :1]),
    )
    return torch.full_like(logits, -math.inf).scatter(1, found.ids, kept), was_enough


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("vocab_size", [29, 3000])
@pytest.mark.parametrize("fill", [None, *FILLS])
def test_lists_of_the_best_keep_what_the_stock_warpers_keep(chain, vocab_size, fill):
    for seed in range(5):
        logits = logits_of(vocab_size, seed=seed)
        if fill is not None:
            logits[:, 100:] = FILLS[fill]
        filters = [each for warper in CHAINS[chain]() for each in warpers.filters_of(warper)]
        expected = LogitsProcessorList(CHAINS[chain]())(None, logits)
        given, was_enough = kept_by_lists(filters, logits)
        if chain == "at_least_half" and vocab_size == 3000 and fill != "inf":
            assert not was_enough.any()
            continue
        assert was_enough is None or was_enough.all()
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-6)


def test_a_second_top_k_may_be_longer_than_the_list_of_the_first():
    chain = [TopKLogitsWarper(10), TopKLogitsWarper(200), TopPLogitsWarper(0.9)]
    logits = logits_of(3000)
    given, was_enough = kept_by_lists([each for warper in chain for each in warpers.filters_of(warper)], logits)
    assert was_enough.all()
    torch.testing.assert_close(given, LogitsProcessorList(chain)(None, logits), rtol=0, atol=1e-6)


def test_all_tokens_that_tie_with_the_kth_are_kept():
    logits = logits_of(3000, step=0.25)
    for k in (5, 30, 200):
        given, was_enough = kept_by_lists([warping.Filter("top_k", k)], logits)
        expected = TopKLogitsWarper(k)(None, logits)
        assert (expected.isfinite().sum(-1) > k).any()
        if bool(was_enough.all()):
            assert torch.equal(given, expected)
    # A row with more ties than there is room for is noticed.
    _, was_enough = kept_by_lists([warping.Filter("top_k", 5)], logits_of(3000, step=100.0))
    assert not was_enough.any()
    # So is a nucleus that is longer than the list.
    _, was_enough = kept_by_lists([warping.Filter("top_p", 0.99)], torch.zeros(2, 3000))
    assert not was_enough.any()


def is_likely(counts, probabilities, draws):
    """Pearson's chi-square test: False for what 1 in 10,000 sets of draws from the distribution would show.

    Tokens with fewer than five draws expected count together.
    """
    expected = probabilities.double() * draws
    assert counts[expected == 0].sum() == 0, "a token with probability 0 was drawn"
    is_rare = expected < 5
    observed = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]]).double()
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    # The upper tail of the chi-square distribution.
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2)) > 1e-4


def first_tokens(model, draws, **options):
    """The first sampled tokens of `draws` copies of one prompt: counts [V]."""
    inputs = inputs_for(model, batch=1, length=1)
    inputs = {name: tensor.expand(draws, *tensor.shape[1:]) for name, tensor in inputs.items()}
    found = model.generate(**inputs, do_sample=True, max_new_tokens=1, **options)
    return found[:, -1].bincount(minlength=model.config.vocab_size)


DRAWS = 10_000


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 20},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 0, "min_p": 0.05},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
        {"top_k": 30, "repetition_penalty": 1.4, "bad_words_ids": [[9], [30]], "min_new_tokens": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_sampled_tokens_have_the_stock_distribution(options):
    model = tiny("llama", vocab_size=1211)
    torch.manual_seed(0)
    stock = model.generate(
        **inputs_for(model, batch=1, length=1),
        do_sample=True,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    probabilities = stock.scores[0][0].softmax(-1)
    assert 3 < (probabilities > 0).sum() < 1211
    stats(reset=True)
    with fused_decoding(model, sampling=True, whole_step=False):
        counts = first_tokens(model, DRAWS, **options)
    steps = stats(reset=True)
    assert steps.fused == 1 and steps.fallback == 0, steps.reasons
    assert is_likely(counts, probabilities, DRAWS)
    # The test can tell: a slightly different distribution fails.
    assert not is_likely(counts, (probabilities * torch.linspace(1, 1.3, 1211)).div(probabilities.sum()), DRAWS)


@pytest.mark.parametrize(
    "options",
    # top_p keeps more than a list would have.
    [
        {},
        {"temperature": 1.7},
        {"suppress_tokens": list(range(0, 1211, 2))},
        {"temperature": 2.0, "top_p": 0.999},
        {"temperature": 2.0, "repetition_penalty": 1.6, "sequence_bias": [[[3], 5.0], [[1210], -2.0]]},
        {"temperature": 2.0, "top_p": 0.999, "repetition_penalty": 1.6, "suppress_tokens": [4, 5]},
        {"forced_eos_token_id": [5, 9]},
    ],
    ids="-".join,
)
def test_the_whole_vocabulary_is_sampled_in_one_read(options):
    model = tiny("llama", vocab_size=1211)
    options = {"top_k": 0, **options}
    torch.manual_seed(0)
    stock = model.generate(
        **inputs_for(model, batch=1, length=1),
        do_sample=True,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    stats(reset=True)
    with fused_decoding(model, sampling=True, whole_step=False):
        counts = first_tokens(model, DRAWS, **options)
    steps = stats(reset=True)
    assert steps.fused == 1 and steps.fallback == 0, steps.reasons
    assert is_likely(counts, stock.scores[0][0].softmax(-1), DRAWS)


VOCAB_SIZE = 300
# By name: the processors before the warpers.
CHANGES = {
    "penalty": lambda: [stock.RepetitionPenaltyLogitsProcessor(1.7)],
    "bias": lambda: [stock.SequenceBiasLogitsProcessor({(0,): 3.0, (VOCAB_SIZE - 1,): 2.5, (8, 9): -2.0})],
    "growth": lambda: [stock.ExponentialDecayLengthPenalty((0, 1.1), [2, 7], 0)],
    "encoder": lambda: [stock.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.tensor([[1, 5, 5, 299]] * 6))],
    "forced": lambda: [stock.ForcedEOSTokenLogitsProcessor(6, [2, 7])],
    "banned": lambda: [stock.SuppressTokensLogitsProcessor([1, 5]), stock.NoRepeatNGramLogitsProcessor(2)],
    # Bans before and after others, of tokens that these touch.
    "chain": lambda: [
        stock.SuppressTokensLogitsProcessor([0, 3]),
        stock.RepetitionPenaltyLogitsProcessor(1.7),
        stock.SequenceBiasLogitsProcessor({(0,): 3.0, (4,): 2.0, (3,): 1.0}),
        stock.NoRepeatNGramLogitsProcessor(1),
    ],
    "after_forced": lambda: [
        stock.SuppressTokensLogitsProcessor([2]),
        stock.ForcedEOSTokenLogitsProcessor(6, [2, 7, 9]),
        stock.SequenceBiasLogitsProcessor({(7,): 1.5, (11,): 5.0}),
        stock.SuppressTokensLogitsProcessor([9]),
    ],
}
TEXTS = torch.tensor([[3, 4, 3, 4, 3]] * 5 + [[299, 0, 1, 5, 299]])


def edits_of(make, logits):
    rows = Rows(logits, cpu)
    plan = Plan(make(), True)
    assert plan.reason is None
    return rows, plan.edits(TEXTS, rows, False), plan.filters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_draws_read_the_scores_of_the_stock_processors(monkeypatch, name, dtype):
    # Few different logits, and of both signs; in one row with -inf.
    logits = logits_of(VOCAB_SIZE, step=0.25).to(dtype)
    logits[2, [4, 5, 8]] = -math.inf
    before = logits.clone()
    read = []

    def sample(rows, parameters, mask, generator, noise):
        scores = rows.logits.float()
        read.append(scores if mask is None else scores.masked_fill(~masks.holds(mask, every_token), -math.inf))

    every_token = torch.arange(VOCAB_SIZE).expand(6, -1)
    monkeypatch.setattr(Rows, "sample", sample)
    rows, edits, _ = edits_of(CHANGES[name], logits)
    selection.sample(rows, edits, {}, None)
    expected = LogitsProcessorList(CHANGES[name]())(TEXTS, logits.float())
    assert not torch.equal(expected, logits.float())
    assert torch.equal(read[0], expected)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("name", ["penalty", "chain", "after_forced"])
def test_tokens_that_tie_after_processors_are_drawn_alike(name):
    logits = logits_of(VOCAB_SIZE, step=1.0)

    def make():
        return [*CHANGES[name](), TemperatureLogitsWarper(3.0), TopKLogitsWarper(9), MinPLogitsWarper(0.02)]

    probabilities = LogitsProcessorList(make())(TEXTS, logits).softmax(-1)
    if name != "after_forced":
        assert (probabilities > 0).sum(-1).max() > 9, "nothing ties with the k-th"
    rows, edits, filters = edits_of(make, logits)
    generator = torch.Generator().manual_seed(0)
    draws = 3000
    drawn = torch.cat([tokens.sampled(rows, edits, filters, generator).tokens for _ in range(draws)], 1)
    for row in range(6):
        assert is_likely(drawn[row].bincount(minlength=VOCAB_SIZE), probabilities[row], draws)


class Waits(TorchDispatchMode):
    """Counts what a device would be waited for: values that come to the host, and shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        depends_on_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        # Of integers the result's shape is known.
        is_index = func is torch.ops.aten.index.Tensor
        if depends_on_values and not (is_index and all(index.dtype is torch.int64 for index in args[1])):
            self.found.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("chain", ["none", "top_k", "top_p", "min_p", "all"])
@pytest.mark.parametrize("name", CHANGES)
def test_draws_wait_for_nothing(name, chain):
    rows, edits, filters = edits_of(
        lambda: CHANGES[name]() + ([] if chain == "none" else CHAINS[chain]()), logits_of(VOCAB_SIZE)
    )
    with Waits() as waits:
        drawn = tokens.sampled(rows, edits, filters)
    assert drawn.tokens.shape == (6, 1)
    assert waits.found == []
    with waits:
        tokens.has_no_distribution(drawn)
    assert waits.found, "a wait is seen"


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_rows_without_a_distribution_are_stocks_errors(value):
    logits = torch.zeros(2, 1, 30)
    logits[1, 0, 4] = value
    scores = LazyScores.of(Rows(logits[:, -1], cpu), logits)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], {}),
        ([("temperature", 0.5), ("top_k", 5), ("top_p", 0.5), ("min_p", 0.5)], None),
        ([("top_k", 5), warping.NORMALIZE, ("min_p", 0.1)], {"top_k": 5, "min_p": 0.1}),
        ([("top_p", 0.5), ("top_k", 5)], "other"),
        ([("top_k", 5), ("temperature", 0.5)], "other"),
        ([("top_k", 5), ("top_k", 3)], "other"),
        ([("top_p", 0.5, 2)], "other"),
        ([("temperature", 1e-40)], "other"),
    ],
)
def test_chains_that_one_call_stands_for(filters, expected):
    chain = [warping.Filter(*each) for each in filters]
    given = warping.parameters(chain)
    assert given == (None if expected == "other" else expected or {kind: number for kind, number, *_ in filters})


def test_beam_sampling_has_the_stock_distribution():
    # The best of two beams after one step, among all pairs of first tokens.
    model = tiny("llama")
    # Of fewer tokens a version that sorts its draws (transformers 5.24) leaves too few different ones to compare.
    options = {"num_beams": 2, "top_k": 12, "eos_token_id": None}
    torch.manual_seed(1)
    stock = first_tokens(model, DRAWS, **options)
    stats(reset=True)
    with fused_decoding(model, sampling=True, whole_step=False):
        fused = first_tokens(model, DRAWS, **options)
    steps = stats(reset=True)
    assert steps.fused == 1 and steps.fallback == 0, steps.reasons
    # Both are samples: the pooled counts are the expectation, with twice the variance of one known exactly.
    pooled = (stock + fused).double() / (2 * DRAWS)
    statistic = ((stock - fused).double() ** 2 / (stock + fused).clamp(min=1)).sum()
    degrees = int((pooled > 0).sum()) - 1
    assert degrees >= 3
    assert float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2)) > 1e-4


@pytest.mark.parametrize("warpers", [{"top_k": 50}, *also({"top_k": 0}, {"top_k": 0, "top_p": 0.9})], ids="-".join)
def test_beam_sampling_of_more_continuations_than_multinomial_takes(warpers):
    # 140 beams of 128256 tokens are more than 2^24.
    model = tiny("llama", vocab_size=128256)
    options = {"num_beams": 140, "do_sample": True, "max_new_tokens": 2, "num_return_sequences": 3, **warpers}
    inputs = inputs_for(model, batch=1)
    with pytest.raises(RuntimeError, match=r"2\^24"):
        model.generate(**inputs, **options)
    stats(reset=True)
    with fused_decoding(model, sampling=True, whole_step=False):
        found = model.generate(**inputs, **options)
    steps = stats(reset=True)
    assert steps.fused == (2 if warpers["top_k"] else 0), steps.reasons
    assert len(found) == 3 and (found >= 0).all() and (found < 128256).all()


def test_a_race_draws_without_replacement_as_multinomial_does(monkeypatch):
    monkeypatch.setattr(tokens, "CATEGORIES", 8)
    monkeypatch.setattr(tokens, "_RACERS", 3)
    probabilities = torch.tensor([0.0, 0.3, 0.05, 0.1, 0.2, 0.0, 0.05, 0.1, 0.2, 0.0])
    rows = probabilities.expand(DRAWS, -1)
    found = tokens.drawn_from(rows, 4, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == 4 for row in found.tolist())
    # The second of the draws is from what the first has left.
    pairs = (found[:, 0] * 10 + found[:, 1]).bincount(minlength=100)
    expected = probabilities[:, None] * probabilities / (1 - probabilities[:, None])
    assert is_likely(pairs, expected.fill_diagonal_(0).flatten(), DRAWS)
    with pytest.raises(RuntimeError, match="nan"):
        tokens.drawn_from(torch.full((1, 10), math.nan), 2)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_chain_that_leaves_one_token_samples_the_stock_sequence(num_beams):
    # With one token left of each row there is nothing random, so fused and stock sequences are comparable.
    options = {"do_sample": True, "top_k": 1, "repetition_penalty": 1.2, "num_beams": num_beams}
    if num_beams > 1:
        # Beam sampling keeps at least one token more than there are end tokens.
        options |= {"top_k": 2, "temperature": 0.01}
    stock, given, steps = generate_both(
        tiny("llama"),
        fused=lambda model: fused_decoding(model, sampling=True, whole_step=False),
        output_scores=False,
        **options,
    )
    assert steps.fused > 0 and steps.fallback == 0, steps.reasons
    if num_beams == 1:
        assert torch.equal(stock["sequences"], given["sequences"])
    assert given["sequences"].shape[0] == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"top_k": 0, "temperature": 1e31}, "sampling from the whole vocabulary"),
        ({"top_k": 0, "remove_invalid_values": True}, "sampling from the whole vocabulary"),
        ({"top_k": 5, "typical_p": 0.5}, "logits processor TypicalLogitsWarper"),
        ({"top_k": 5, "epsilon_cutoff": 0.01}, "logits processor EpsilonLogitsWarper"),
        (
            {"top_k": 0, "temperature": 1e6, "top_p": 0.99, "remove_invalid_values": True},
            "the warpers keep more tokens than were listed",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_other_sampling_draws_the_stock_tokens(options, reason, num_beams):
    model = tiny("llama", vocab_size=3000)
    inputs = inputs_for(model)
    options = {"do_sample": True, "max_new_tokens": 6, "num_beams": num_beams, **options}
    torch.manual_seed(3)
    stock = model.generate(**inputs, **options)
    stats(reset=True)
    torch.manual_seed(3)
    with fused_decoding(model, sampling=True, whole_step=False):
        given = model.generate(**inputs, **options)
    steps = stats(reset=True)
    assert torch.equal(stock, given)
    assert steps.fused == 0 and list(steps.reasons) == [reason]


def test_sampling_without_the_option_draws_the_stock_tokens():
    model = tiny("llama")
    drawn = []
    for fused in (False, True):
        torch.manual_seed(3)
        stats(reset=True)
        if fused:
            with fused_decoding(model, whole_step=False):
                drawn.append(model.generate(**inputs_for(model), do_sample=True, max_new_tokens=6))
        else:
            drawn.append(model.generate(**inputs_for(model), do_sample=True, max_new_tokens=6))
    assert torch.equal(*drawn)
    assert stats(reset=True).reasons == {"do_sample without sampling=True": 6}


def stock_chain(top_k, temperature=1.0, top_p=1.0, min_p=0.0):
    chain = [TemperatureLogitsWarper(float(temperature)), TopKLogitsWarper(top_k)]
    chain += [TopPLogitsWarper(float(top_p))] if top_p < 1 else []
    return LogitsProcessorList(chain + ([MinPLogitsWarper(float(min_p))] if min_p > 0 else []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 50, "temperature": 0.7},
        {"top_k": 20, "temperature": 2.0, "min_p": 0.1},
        {"top_k": 2999},
        {"top_k": 10**6},
        {"top_k": 40, "temperature": 1.3, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_processor_keeps_what_the_chain_of_warpers_keeps(arguments, dtype):
    scores = logits_of(3000).to(dtype)
    before = scores.clone()
    given = FusedTopKLogitsProcessor(**arguments)(None, scores)
    assert torch.equal(scores, before), "scores were changed in place"
    assert given.dtype == dtype and given.shape == scores.shape
    expected = stock_chain(**arguments)(None, scores)
    if dtype == torch.float32 or "top_p" not in arguments:
        assert torch.equal(given, expected)
        return
    # Among equals at the boundary transformers' sort keeps any, the processor those of smaller index: as many, and
    # differences only between equals.
    assert torch.equal(given.sort().values, expected.sort().values)


def test_processor_keeps_ties_beyond_its_room_for_them():
    scores = logits_of(3000, step=100.0)
    assert torch.equal(FusedTopKLogitsProcessor(top_k=5)(None, scores), TopKLogitsWarper(5)(None, scores))


ARGUMENTS = {"top_k": 40, "temperature": 1.3, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize("arguments", [{"top_k": 3}, ARGUMENTS], ids=["top_k", "all"])
def test_float64_scores_stay_exact(arguments):
    # What tells these numbers apart is beyond float32.
    scores = logits_of(3000).double().round() + 1e-12 * torch.arange(3000)
    given = FusedTopKLogitsProcessor(**arguments)(None, scores)
    assert given.dtype == torch.float64
    assert torch.equal(given, stock_chain(**arguments)(None, scores))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3000,), (2, 3, 3000), (3, 2, 1, 3000), (2, 0, 3000)], ids=len)
def test_scores_of_any_number_of_dimensions(shape, dtype):
    scores = logits_of(3000).to(dtype)[: math.prod(shape[:-1])].reshape(shape)
    for arguments in ({"top_k": 7}, {"top_k": 40, "temperature": 1.3, "min_p": 0.01}):
        given = FusedTopKLogitsProcessor(**arguments)(None, scores)
        assert given.shape == shape
        assert torch.equal(given.view(-1, 3000), stock_chain(**arguments)(None, scores.view(-1, 3000)))
    expected = TopKLogitsWarper(7)(None, scores)
    assert torch.equal(FusedTopKLogitsProcessor(7)(None, scores), expected)


def test_processor_takes_numbers_of_numpy():
    scores = logits_of(300)
    given = FusedTopKLogitsProcessor(top_k=np.int64(7), temperature=np.float32(0.5), min_p=np.float64(0.1))
    assert torch.equal(given(None, scores), stock_chain(7, 0.5, min_p=0.1)(None, scores))


def test_processor_keeps_a_least_number_of_tokens():
    scores = logits_of(300)
    given = FusedTopKLogitsProcessor(2, top_p=0.01, min_p=1.0, min_tokens_to_keep=np.int64(6))
    assert given.top_k == TopKLogitsWarper(2, min_tokens_to_keep=6).top_k == 6
    assert (given(None, scores).isfinite().sum(-1) == 6).all()
    given = FusedTopKLogitsProcessor(20, top_p=0.01, min_tokens_to_keep=6)
    expected = LogitsProcessorList([TopKLogitsWarper(20), TopPLogitsWarper(0.01, min_tokens_to_keep=6)])(None, scores)
    assert torch.equal(given(None, scores), expected)


def test_processor_sets_its_filter_value():
    given = FusedTopKLogitsProcessor(top_k=2, filter_value=-7.0)(None, torch.tensor([[1.0, 3.0, 2.0]]))
    assert given.tolist() == [[-7.0, 3.0, 2.0]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "`top_k` must be at least 1, got 0"),
        ({"top_k": 2.0}, TypeError, "`top_k` must be an int, got float"),
        ({"top_k": True}, TypeError, "`top_k` must be an int, got bool"),
        ({"top_k": 2, "min_tokens_to_keep": 0}, ValueError, "`min_tokens_to_keep` must be at least 1, got 0"),
        ({"top_k": 2, "temperature": 0.0}, ValueError, "`temperature` must be positive and finite, got 0.0"),
        ({"top_k": 2, "temperature": "hot"}, TypeError, "`temperature` must be a number, got str"),
        ({"top_k": 2, "top_p": 0.0}, ValueError, "`top_p` must satisfy 0 < top_p <= 1, got 0.0"),
        ({"top_k": 2, "min_p": 1.5}, ValueError, "`min_p` must satisfy 0 <= min_p <= 1, got 1.5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_processor_says_what_is_wrong_with_an_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        FusedTopKLogitsProcessor(**arguments)


def test_processor_in_generate():
    model = tiny("llama")
    processors = LogitsProcessorList([FusedTopKLogitsProcessor(top_k=5, temperature=0.8, top_p=0.9)])
    options = {"do_sample": True, "max_new_tokens": 6, "top_k": 0}
    # In stock generate() it draws what the chain of warpers draws.
    torch.manual_seed(0)
    expected = model.generate(**inputs_for(model), **options | {"top_k": 5, "temperature": 0.8, "top_p": 0.9})
    torch.manual_seed(0)
    assert torch.equal(model.generate(**inputs_for(model), logits_processor=processors, **options), expected)
    # In fused generate() it is fused.
    stats(reset=True)
    with fused_decoding(model, sampling=True, whole_step=False):
        model.generate(**inputs_for(model), logits_processor=processors, **options)
    steps = stats(reset=True)
    assert steps.fused == 6 and steps.fallback == 0, steps.reasons
    # Greedy search takes the best token whatever is filtered.
    steps = generate_both(model, logits_processor=processors)[2]
    assert steps.fused == 10 and steps.fallback == 0, steps.reasons

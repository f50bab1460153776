# SPDX-License-Identifier: Apache-2.0
"""Logits processors as sparse edits: each against transformers' own, alone, in chains, and in generate()."""

from __future__ import annotations

import contextlib
import math
from types import FunctionType

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers
from transformers.generation import logits_process as stock

from decoding import BOS, EOS, FILLS, assert_fused, assert_same, generate_both, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.backends import cpu
from fused_topk.generation import fused_decoding
from fused_topk.generation.choice.edit import NotSparse
from fused_topk.generation.choice.rows import Rows
from fused_topk.generation.choice.selection import best, best_continuations, logsumexp
from fused_topk.generation.edits import adapter, biases, penalties
from fused_topk.generation.edits.plan import Plan

BATCH, BEAMS, VOCAB_SIZE, LENGTH = 3, 2, 101, 12
NUM_ROWS = BATCH * BEAMS
MASKED = -math.inf
# The spacing of float32 beside a number, at most.
ULP = 2.0**-23


def encoder_ids():
    return torch.randint(0, VOCAB_SIZE, (BATCH, 9), generator=torch.Generator().manual_seed(5))


def allowed_tokens(batch, ids):
    # Depends on the prompt and on what was chosen; unsorted.
    return [(7 * batch + 3 * i + int(ids[-1])) % VOCAB_SIZE for i in range(11)]


def sequence_bias(*items):
    return {tuple(tokens): bias for tokens, bias in items}


# Name: the processor, made anew for each test, as some keep state.
PROCESSORS = {
    "min_length": lambda: stock.MinLengthLogitsProcessor(20, [EOS, 9]),
    "min_length_reached": lambda: stock.MinLengthLogitsProcessor(LENGTH, EOS),
    "min_new_tokens": lambda: stock.MinNewTokensLengthLogitsProcessor(4, 10, EOS),
    "min_new_tokens_reached": lambda: stock.MinNewTokensLengthLogitsProcessor(4, 3, EOS),
    "suppress": lambda: stock.SuppressTokensLogitsProcessor([1, 2, 50, 100]),
    "suppress_nothing": lambda: stock.SuppressTokensLogitsProcessor([]),
    "suppress_at_begin": lambda: stock.SuppressTokensAtBeginLogitsProcessor([3, 4], LENGTH),
    "suppress_not_at_begin": lambda: stock.SuppressTokensAtBeginLogitsProcessor([3, 4], 2),
    "suppress_nothing_at_begin": lambda: stock.SuppressTokensAtBeginLogitsProcessor([], LENGTH),
    "no_repeat_1gram": lambda: stock.NoRepeatNGramLogitsProcessor(1),
    "no_repeat_2gram": lambda: stock.NoRepeatNGramLogitsProcessor(2),
    "no_repeat_20gram": lambda: stock.NoRepeatNGramLogitsProcessor(20),
    "encoder_no_repeat_1gram": lambda: stock.EncoderNoRepeatNGramLogitsProcessor(1, encoder_ids()),
    "encoder_no_repeat_2gram": lambda: stock.EncoderNoRepeatNGramLogitsProcessor(2, encoder_ids()),
    "repetition_penalty": lambda: stock.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition_reward": lambda: stock.RepetitionPenaltyLogitsProcessor(0.4),
    "repetition_penalty_after_prompt": lambda: stock.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=5),
    # Another number than above: tokens in both texts would be back at their scores, but for rounding.
    "encoder_repetition_penalty": lambda: stock.EncoderRepetitionPenaltyLogitsProcessor(1.6, encoder_ids()),
    "encoder_repetition_reward_of_row": lambda: stock.EncoderRepetitionPenaltyLogitsProcessor(0.4, history()),
    "exponential_decay": lambda: stock.ExponentialDecayLengthPenalty((4, 1.2), [9, EOS, 9], 5),
    "exponential_decay_later": lambda: stock.ExponentialDecayLengthPenalty((LENGTH, 1.2), EOS, 0),
    "no_bad_words": lambda: stock.NoBadWordsLogitsProcessor([[8], [10]], EOS),
    "no_bad_phrases": lambda: stock.NoBadWordsLogitsProcessor([[8], [11, 12], [13, 14, 15]], EOS),
    "sequence_bias": lambda: stock.SequenceBiasLogitsProcessor(
        sequence_bias(([20], 5.0), ([11, 21], -3.0), ([11, 20], 2.0), ([30, 31, 32], 9.0), ([33], MASKED))
    ),
    "forced_bos": lambda: stock.ForcedBOSTokenLogitsProcessor(BOS),
    "forced_eos": lambda: stock.ForcedEOSTokenLogitsProcessor(LENGTH + 1, [EOS, 9]),
    "forced_eos_later": lambda: stock.ForcedEOSTokenLogitsProcessor(40, EOS),
    "prefix_constrained": lambda: stock.PrefixConstrainedLogitsProcessor(allowed_tokens, BEAMS),
}
CHAINS = [
    ("repetition_penalty", "no_repeat_2gram", "min_length"),
    ("sequence_bias", "repetition_penalty", "suppress"),
    ("no_bad_phrases", "encoder_no_repeat_2gram", "no_repeat_1gram", "min_new_tokens"),
    ("sequence_bias", "no_bad_words", "min_length", "prefix_constrained"),
    ("repetition_reward", "sequence_bias", "repetition_penalty"),
    ("repetition_penalty", "forced_eos", "suppress"),
    ("encoder_repetition_penalty", "repetition_penalty", "exponential_decay", "no_repeat_2gram"),
    ("forced_eos", "min_length"),
    ("forced_eos", "sequence_bias", "repetition_reward"),
    ("prefix_constrained", "repetition_penalty", "min_length"),
    tuple(name for name in PROCESSORS if not name.startswith(("forced", "prefix", "exponential"))),
]


def history():
    """Input ids [R, LENGTH] with repetitions, and with the beginnings of the phrases above."""
    ids = torch.randint(0, 12, (NUM_ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    ids[0, -1], ids[1, -2:], ids[2, -2:] = 11, torch.tensor([13, 14]), torch.tensor([30, 31])
    ids[3] = 7
    return ids


def logits_of(dtype, fill=None):
    """Logits [R, V]. With `fill` most of them are that: of every other row all but the tokens of most texts."""
    logits = 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    # Coarse, so that many are equal.
    logits = (logits.mul(4).round() / 4).to(dtype) if dtype == torch.bfloat16 else logits.to(dtype)
    if fill is not None:
        logits[::2, 12:] = logits[1::2, 64:] = fill
    return logits


def processed(names, scores):
    return transformers.LogitsProcessorList([PROCESSORS[name]() for name in names])(history(), scores)


def stock_scores(names, logits, are_log_probs):
    return processed(names, logits.float().log_softmax(-1) if are_log_probs else logits.float())


def planned(names, logits, are_log_probs):
    rows = Rows(logits, cpu)
    plan = Plan([PROCESSORS[name]() for name in names], is_sampling=False)
    assert plan.reason is None
    return rows, plan.edits(history(), rows, are_log_probs)


def assert_best(scores, ids, dense):
    """The scores [R, k] of the tokens `ids` are the greatest of `dense` [R, V]; of equal ones the smaller index first."""
    is_nan = dense.isnan().any(-1)
    assert scores[is_nan, 0].isnan().all()
    scores, ids, dense = scores[~is_nan], ids[~is_nan], dense[~is_nan]
    k = ids.shape[1]
    expected = dense.sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(scores, expected.values[:, :k], rtol=ULP, atol=1e-5)
    torch.testing.assert_close(scores, dense.gather(1, ids), rtol=ULP, atol=1e-5)
    # Log-probabilities may differ from transformers' in the last places, and then what is that close changes places.
    ordered = expected.values.nan_to_num()
    gaps = ordered.diff().abs()
    is_clear = ((gaps == 0) | (gaps > 1e-5 + ULP * ordered[:, 1:].abs())).float()
    one = torch.ones(len(dense), 1)
    is_clear = (torch.cat([one, is_clear], 1) * torch.cat([is_clear, one], 1)).bool()[:, :k]
    assert not len(dense) or is_clear.float().mean() > 0.9
    assert torch.equal(ids[is_clear], expected.indices[:, :k][is_clear])
    assert all(len(set(row)) == k for row in ids.tolist())


ALL = [(name,) for name in PROCESSORS] + CHAINS
NAMED = pytest.mark.parametrize("names", ALL, ids=lambda names: "-".join(names) if len(names) < 9 else "all")


@NAMED
@pytest.mark.parametrize("are_log_probs", [True, False], ids=["log_probs", "logits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fill", [None, *FILLS])
def test_edits_choose_what_the_stock_processors_leave_best(names, are_log_probs, dtype, fill):
    logits = logits_of(dtype, FILLS.get(fill))
    dense = stock_scores(names, logits, are_log_probs)
    with may_be_dense(names, fill):
        rows, edits = planned(names, logits, are_log_probs)
        assert_chosen_well(rows, edits, dense, are_log_probs)


@contextlib.contextmanager
def may_be_dense(names, fill):
    """Around what may be left to the stock processors, where no token that a prefix allows has a finite score."""
    try:
        yield
    except NotSparse as cause:
        assert fill in ("inf", "min") and str(cause) == "no allowed token has a finite score", cause


def assert_chosen_well(rows, edits, dense, are_log_probs):
    for k in (1, 5, 40, VOCAB_SIZE):
        found = best(rows, edits, k, are_log_probs)
        assert_best(found.scores, found.ids, dense)
    # Sampling needs the sum over all tokens, too.
    for temperature in (1.0, 0.7):
        expected = (dense.double() / temperature).logsumexp(-1, keepdim=True)
        total = logsumexp(rows, edits, temperature, are_log_probs)
        torch.testing.assert_close(total, expected.float(), rtol=ULP, atol=1e-5)


@NAMED
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_common_offset_costs_no_digits(names, temperature):
    # The spacing of float32 at 1e4 is 1e-3: what logit - logsumexp would be off by.
    logits = logits_of(torch.float32) + 1e4
    for are_log_probs in (True, False):
        scores = logits.double().log_softmax(-1).float() if are_log_probs else logits
        dense = processed(names, scores).double()
        rows, edits = planned(names, logits, are_log_probs)
        found = best(rows, edits, 20, are_log_probs)
        at = dense.gather(1, found.ids)
        torch.testing.assert_close(found.scores.double(), at, rtol=ULP, atol=1e-5)
        expected = ((dense - at[:, :1]) / temperature).logsumexp(-1, keepdim=True)
        total = logsumexp(rows, edits, temperature, are_log_probs, at[:, :1].float())
        torch.testing.assert_close(total.double(), expected, rtol=0, atol=1e-5, equal_nan=True)


@NAMED
@pytest.mark.parametrize("renormalizes", [False, True], ids=["", "renormalized"])
@pytest.mark.parametrize("fill", [None, *FILLS])
def test_best_continuations_over_all_beams(names, renormalizes, fill):
    logits = logits_of(torch.float32, FILLS.get(fill))
    dense = stock_scores(names, logits, True)
    # What is added to -1e9 becomes equal. Where a row may have nothing else, that would be asked for.
    beam_scores = torch.tensor([[-1.0, -2.5], [0.0, -1e9 if fill is None else -9.0], [-3.0, -3.0]])
    total = dense.log_softmax(-1) if renormalizes else dense
    total = (total.view(BATCH, BEAMS, -1) + beam_scores[..., None]).flatten(1)
    with may_be_dense(names, fill):
        rows, edits = planned(names, logits, True)
        for k in (1, 2 * BEAMS, 3 * BEAMS):
            values, indices = best_continuations(rows, edits, beam_scores, k, renormalizes)
            assert_best(values, indices, total)


@pytest.mark.parametrize(
    "names", [(), ("suppress",), ("repetition_penalty",), ("sequence_bias", "suppress"), ("forced_eos",)], ids="-".join
)
@pytest.mark.parametrize("layout", ["transposed", "expanded", "every_other", "of_rows"])
def test_scores_of_beams_of_any_layout(layout, names):
    # Row b of the logits belongs to beam b % BEAMS, however the beams' scores lie in memory.
    numbers = torch.tensor([[-1.0, -2.5], [0.0, -9.0], [-3.0, -4.0]])
    beam_scores = {
        "transposed": lambda: numbers.t().contiguous().t(),
        "expanded": lambda: numbers[:1].expand(BATCH, BEAMS),
        "every_other": lambda: torch.stack([numbers, numbers + 50], -1)[..., 0],
        "of_rows": lambda: torch.cat([numbers, numbers + 50], 1)[:, :BEAMS],
    }[layout]()
    assert not beam_scores.is_contiguous()
    logits = logits_of(torch.float32)
    total = (stock_scores(names, logits, True).view(BATCH, BEAMS, -1) + beam_scores[..., None]).flatten(1)
    rows, edits = planned(names, logits, True)
    values, indices = best_continuations(rows, edits, beam_scores, 2 * BEAMS)
    assert_best(values, indices, total)


def test_scores_of_beams_of_another_layout_in_the_next_call():
    # What is kept of the first call must not serve the second, which differs in one thing.
    logits = logits_of(torch.float32)
    numbers = torch.tensor([[-1.0, -2.5], [0.0, -9.0], [-3.0, -4.0]])
    expected = best_continuations(Rows(logits, cpu), [], numbers, 4)
    for layout in (numbers.t().contiguous().t(), torch.cat([numbers, numbers + 50], 1)[:, :BEAMS], numbers):
        found = best_continuations(Rows(logits, cpu), [], layout, 4)
        assert all(map(torch.equal, found, expected)), layout.stride()


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 12},
        {"min_new_tokens": 8},
        {"suppress_tokens": list(range(8, 60))},
        {"begin_suppress_tokens": list(range(8, 120))},
        {"suppress_tokens": [], "begin_suppress_tokens": []},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"bad_words_ids": [[i] for i in range(8, 80)]},
        {"bad_words_ids": [[i] for i in range(8, 80)] + [[100, 101], [102, 103, 104]]},
        {"sequence_bias": [[[20], 4.0], [[20, 21], 6.0], [[21, 22], -6.0]]},
        {"forced_eos_token_id": EOS},
        {"prefix_allowed_tokens_fn": lambda batch, ids: range(8 + int(ids[-1]) % 5, 100, 3)},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [10 + len(ids)]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 6, "bad_words_ids": [[9], [17, 18]]},
    ],
    ids=lambda options: "-".join(options),
)
def test_generate_with_processors(options, num_beams):
    for name, padding in (("llama", 2), ("gpt2", 0)):
        model = tiny(name)
        assert_fused(model, inputs_for(model, padding=padding), num_beams=num_beams, **options)


@pytest.mark.parametrize("options", [{"exponential_decay_length_penalty": (1, 1.3)}, {"min_length": 12}], ids="-".join)
def test_a_text_that_no_token_ends(options):
    assert_fused(tiny("llama"), eos_token_id=[], **options)


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"forced_bos_token_id": 9},
        {"forced_bos_token_id": 9, "forced_eos_token_id": EOS, "no_repeat_ngram_size": 3},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    ],
    ids=lambda options: "-".join(options),
)
def test_generate_with_processors_of_encoder_decoders(options, num_beams):
    for name in ("bart", "t5"):
        assert_fused(tiny(name), num_beams=num_beams, **options)


def test_whisper_with_its_suppressed_tokens():
    model = tiny("whisper")
    for num_beams in (1, 4):
        assert_fused(model, num_beams=num_beams, suppress_tokens=[7, 8, 9], begin_suppress_tokens=[10, EOS])


class Doubled(stock.RepetitionPenaltyLogitsProcessor):
    """A subclass that does something else."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, super().__call__(input_ids, scores))


def flipped(ids, scores):
    return scores.flip(-1)


def with_extra_attribute():
    processor = stock.RepetitionPenaltyLogitsProcessor(1.5)
    processor.option_of_a_later_version = True
    return processor


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logits_processor": [Doubled(1.5)]}, f"logits processor {__name__}.Doubled"),
        ({"logits_processor": [with_extra_attribute()]}, "logits processor RepetitionPenaltyLogitsProcessor"),
        ({"logits_processor": [flipped]}, f"logits processor {__name__}.flipped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_any_other_processor_runs_stock_operations(options, reason):
    for num_beams in (1, 4):
        if "logits_processor" in options:
            options = {"logits_processor": transformers.LogitsProcessorList(options["logits_processor"])}
        stock_result, given, steps = generate_both(tiny("llama"), num_beams=num_beams, **options)
        assert_same(stock_result, given)
        assert steps.fused == 0 and list(steps.reasons) == [reason]


def test_a_processor_function_without_a_module():
    made_by_hand = FunctionType((lambda ids, scores: scores).__code__, {}, "by_hand")
    assert made_by_hand.__module__ is None
    for num_beams in (1, 3):
        processors = transformers.LogitsProcessorList([made_by_hand])
        stock_result, given, steps = generate_both(tiny("llama"), num_beams=num_beams, logits_processor=processors)
        assert_same(stock_result, given)
        assert list(steps.reasons) == [f"logits processor {made_by_hand.__qualname__}"]


PROBES = (
    adapter._leaves_out_foreign,
    biases._least_length,
    penalties._keeps_infinite,
    penalties._repeats_encoder_ids,
    penalties._takes_tensors,
)


@pytest.mark.parametrize("name", [name for name in PROCESSORS if name not in ("sequence_bias", "no_bad_words")])
def test_edits_are_made_where_the_logits_are_whatever_the_users_default_device(name):
    logits = logits_of(torch.float32)
    rows, text, plan = Rows(logits, cpu), history(), Plan([PROCESSORS[name]()], is_sampling=False)
    for probe in PROBES:
        probe.cache_clear()
    with torch.device("meta"):
        found = best(rows, plan.edits(text, rows, True), 5, True)
    assert_best(found.scores, found.ids, stock_scores((name,), logits, True))


def test_no_allowed_token_left_is_for_the_stock_processor():
    # Nothing of what the prefix allows survives the processor before it.
    model = tiny("llama")
    options = {"bad_words_ids": [[20], [21]], "prefix_allowed_tokens_fn": lambda batch, ids: [20, 21]}
    try:
        stock_result, given, steps = generate_both(model, num_beams=3, **options)
    except (ValueError, RuntimeError):
        pytest.skip("this version of transformers refuses it")
    assert_same(stock_result, given)
    assert steps.fused == 0 and list(steps.reasons) == ["no allowed token has a finite score"]


@pytest.mark.parametrize(
    "options", [{"sequence_bias": [[[300], 2.0]]}, {"bad_words_ids": [[9], [8, 300]]}], ids="-".join
)
def test_tokens_outside_the_vocabulary_are_the_error_of_stock(options):
    for block in (contextlib.nullcontext(), fused_decoding(tiny("llama"), whole_step=False)):
        with block, pytest.raises(ValueError, match="300"):
            tiny("llama").generate(**inputs_for(tiny("llama")), **options)


def test_an_empty_list_among_the_bad_words_is_what_it_is_in_stock():
    options = {"bad_words_ids": [[9], [], [10, 11]], "max_new_tokens": 4, "do_sample": False}
    found = []
    for block in (contextlib.nullcontext(), fused_decoding(tiny("llama"), whole_step=False)):
        with block:
            try:
                found.append(tiny("llama").generate(**inputs_for(tiny("llama")), **options).tolist())
            except IndexError as error:
                found.append(str(error))
    assert found[0] == found[1]

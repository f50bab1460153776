# SPDX-License-Identifier: Apache-2.0
"""TrieLogitsProcessor: generate() gives what it gives with a prefix_allowed_tokens_fn that reads the same items."""

import contextlib
import copy
import random
from unittest import mock

import pytest
import torch
from transformers.generation import logits_process as stock

from captured import Waits, graphs_of
from decoding import TOLERANCE, SmallerIndexFirst, also, inputs_for, one_thread, stats  # noqa: F401
from fused_topk.generation import TokenTrie, TrieLogitsProcessor, fused_decoding
from fused_topk.generation.whole_step import compiled, graphs
from fused_topk.generation.whole_step import kept as kept_steps
from tries import TOKENS, Items, catalogue
from whole_steps import encoder_decoder, family, source_for

END = 5
# Beams that do not exist have scores of -1e9, divided by the text's length or its powers.
NO_SCORE = -1e6


@contextlib.contextmanager
def kept():
    """Steps that are kept, which are run as they are instead of being compiled."""
    with (
        mock.patch.object(compiled.Codes, "of", lambda codes, function, key: function),
        mock.patch.object(kept_steps, "OneGraph", graphs.Bound),
    ):
        yield True


@contextlib.contextmanager
def captured():
    with graphs_of():
        yield False


def generate(way: str, model, inputs, **options):
    """What a way of decoding gives, and the steps of it.

    Args:
        way: "plain" without this package, or a way of whole steps.
    """
    options = {"do_sample": False, "return_dict_in_generate": True, **options}
    options.setdefault("num_return_sequences", options.get("num_beams", 1))
    # Drawn numbers depend on it.
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(SmallerIndexFirst())
        if way != "plain":
            ways = {"kept": kept, "captured": captured, "compiled": lambda: contextlib.nullcontext(True)}
            is_compiled = stack.enter_context(ways[way]()) if way in ways else False
            stack.enter_context(fused_decoding(model, compile=is_compiled))
        stats(reset=True)
        return model.generate(**inputs, **options), stats(reset=True)


def texts_of(result, width: int) -> list[list[int]]:
    return [row + [END] * (width - len(row)) for row in result.sequences.tolist()]


def assert_same_items(expected, given, is_exact: bool) -> None:
    """Where there are fewer items than beams, which other texts are listed, and in which order, is of no account: they tie."""
    width = max(expected.sequences.shape[1], given.sequences.shape[1])
    scores = expected.get("sequences_scores")
    counts = [True] * len(expected.sequences) if scores is None or is_exact else (scores > NO_SCORE).tolist()
    pairs = zip(texts_of(expected, width), texts_of(given, width), counts)
    assert [text for text, _, is_text in pairs if is_text] == [
        text for text, is_text in zip(texts_of(given, width), counts) if is_text
    ]
    if scores is not None and given.get("sequences_scores") is not None:
        assert torch.equal(given.sequences_scores > NO_SCORE, scores > NO_SCORE)
        real = scores > NO_SCORE
        torch.testing.assert_close(given.sequences_scores[real], scores[real], atol=TOLERANCE, rtol=5e-7)


MODELS = [
    *((family, name) for name in ("Llama", "GPT2", "Gemma2")),
    *((encoder_decoder, name) for name in ("Bart", "Marian")),
]
WHOLE = ("eager", "kept", "captured")


class Configuration:
    """A model, a catalogue and the options of a call, drawn at random."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        made, self.name = draw.choice(MODELS)
        self.model = made(self.name, seed=draw.randrange(3))
        is_both = self.model.config.is_encoder_decoder
        batch = draw.randint(1, 3)
        padded = {} if is_both else {"padding": draw.choice([0, 3])}
        self.inputs = (source_for if is_both else inputs_for)(self.model, batch, **padded)
        self.begin = 1 if is_both else self.inputs["input_ids"].shape[1]
        tokens = draw.choice([TOKENS, [*range(97)]])
        self.items = catalogue(draw, END, most=draw.choice([3, 40, 400]), tokens=tokens)
        self.way = draw.choice(["plain", *WHOLE])
        beams = draw.choice([1, 2, 3, 8])
        self.options = {"num_beams": beams, "max_new_tokens": draw.choice([1, 3, 6, 7])}
        # With nothing else, steps that are kept take the mask of the trie.
        has_more = draw.random() < 0.5
        if beams > 1:
            self.options |= {
                "length_penalty": draw.choice([1.0, 0.0, 1.5]),
                "early_stopping": draw.choice([False, False, "never"]),
                "output_scores": self.way == "plain" or has_more,
            }
        self.before, self.after = [], []
        if not has_more:
            return
        if draw.random() < 0.5:
            self.before = draw.choice([[stock.RepetitionPenaltyLogitsProcessor(1.3)], [_bias()]])
        if draw.random() < 0.5:
            self.after = [_bias()]
        if draw.random() < 0.3:
            self.options["renormalize_logits"] = True
        if beams == 1 and draw.random() < 0.6:
            self.options |= {"do_sample": True, "top_k": draw.choice([0, 5]), "top_p": draw.choice([1.0, 0.8])}

    def run(self, processor, way=None):
        options = dict(self.options)
        if self.options["num_beams"] > 1 and processor is not None and type(processor) is not TrieLogitsProcessor:
            options["output_scores"] = True
        return generate(
            way or self.way,
            self.model,
            self.inputs,
            logits_processor=[*self.before, processor, *self.after],
            **options,
        )

    def check(self) -> None:
        begin, beams = self.begin, self.options["num_beams"]
        known = Items(self.items, END)
        by_function = stock.PrefixConstrainedLogitsProcessor(known.prefix_fn(begin), beams)
        # Draws are those of the same way.
        way = self.way if self.options.get("do_sample") else "plain"
        expected, _ = self.run(by_function, way)
        given, steps = self.run(TrieLogitsProcessor(TokenTrie(self.items, END), begin))
        if self.way != "plain":
            assert steps.whole > 0 and steps.stock == 0 and not steps.reasons, steps
            assert (steps.compiled > 0) == (self.way == "kept")
            assert (steps.captured > 0) == (self.way == "captured")
        if self.options.get("do_sample") or self.way == "plain":
            assert torch.equal(given.sequences, expected.sequences)
        else:
            assert_same_items(expected, given, is_exact=False)


def _bias():
    return stock.SequenceBiasLogitsProcessor([[[31], 2.0], [[64], -3.0], [[8, 32], 4.0]])


@pytest.mark.parametrize("seeds", [range(10), *also(*(range(n, n + 100) for n in range(0, 400, 100)))])
def test_random_configurations(seeds):
    for seed in seeds:
        Configuration(seed).check()


def both_ways(way, model, inputs, items, begin, **options):
    """Stock generate() with the function, and a way with the trie. Gives the steps of the latter."""
    options = {"output_scores": options.get("num_beams", 1) > 1, **options}
    expected, _ = generate(
        "plain", model, inputs, prefix_allowed_tokens_fn=Items(items, END).prefix_fn(begin), **options
    )
    options["output_scores"] = False
    processor = TrieLogitsProcessor(TokenTrie(items, END), begin)
    given, steps = generate(way, model, inputs, logits_processor=[processor], **options)
    assert_same_items(expected, given, is_exact=way == "plain")
    return steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_beams", [40])
def test_compiled_steps(num_beams):
    """The compiler's own code. 40 beams are more than a head that is a product takes without logits."""
    model = family("Llama", 1)
    items = catalogue(random.Random(3), END, most=200, longest=4)
    inputs = inputs_for(model, 3, padding=2)
    for _ in range(2):
        steps = both_ways("compiled", model, inputs, items, 6, num_beams=num_beams, max_new_tokens=5)
        assert steps.compiled == steps.whole > 0 and not steps.reasons


def test_begin_index():
    model = family("Llama")
    inputs = inputs_for(model, batch=1)
    last = inputs["input_ids"][0, -1].item()
    items = [[last, 8, 31], [last, 64], [96, 7]]
    for way in ("plain", *WHOLE):
        # The last token of the prompt is the first one of an item. Or some generated tokens come before it.
        for begin in (5, 8):
            for num_beams in (1, 2):
                both_ways(way, model, inputs, items, begin, num_beams=num_beams, max_new_tokens=4)


def test_scores_that_earlier_processors_have_banned():
    processor = TrieLogitsProcessor(TokenTrie([[3], [7]], END), 1)
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[nan, 1.0, inf, -inf, 2.0, 3.0, -1.0, nan], [0.0, 0.0, 0.0, -inf, 0.0, 0.0, 0.0, -inf]])
    before = scores.clone()
    given = processor(torch.tensor([[1], [1]]), scores)
    torch.testing.assert_close(scores, before, equal_nan=True)
    torch.testing.assert_close(given[0], torch.tensor([*[-inf] * 7, nan]), equal_nan=True)
    assert given[1].isneginf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_the_processor_returns(dtype):
    items = catalogue(random.Random(1), END)
    known, trie = Items(items, END), TokenTrie(items, END)
    texts = torch.tensor([[1, *item][:3] + [7] * (2 - len(item)) for item in items])
    scores = torch.randn(len(texts), 97, dtype=dtype)
    given = TrieLogitsProcessor(trie, 1)(texts, scores)
    assert given.dtype == dtype
    for text, row, of in zip(texts.tolist(), given, scores):
        allowed = sorted(known.after(text[1:]))
        assert row.isfinite().nonzero()[:, 0].tolist() == allowed
        assert torch.equal(row[allowed], of[allowed])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_nothing_waits_for_the_device(num_beams):
    """As many reads of tensors by the host as without the trie, but for those of the end of plain loops."""
    model = family("Llama", 1)
    # Texts that do not end before the call does.
    items = [[first] * 9 for first in range(8, 90)]
    waits = []
    for processors in ([], [TrieLogitsProcessor(TokenTrie(items, END), 6)]):
        options = {"num_beams": num_beams, "max_new_tokens": 6, "logits_processor": processors, "eos_token_id": None}
        generate("captured", model, inputs_for(model), **options)
        with Waits() as counted:
            generate("captured", model, inputs_for(model), **options)
        waits.append(counted.count)
    # Not NaN on a CPU, which beams are looked through for.
    assert waits[0] >= waits[1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[8]], 1), TypeError, "`trie` must be a TokenTrie, got list"),
        ((TokenTrie([[8]], END), -1), ValueError, "`begin_index` must not be negative, got -1"),
        ((TokenTrie([[8]], END), 1.0), TypeError, "`begin_index` must be an integer, got float"),
    ],
)
def test_arguments_of_another_kind(arguments, error, message):
    with pytest.raises(error, match=message):
        TrieLogitsProcessor(*arguments)


@pytest.mark.parametrize("way", ["plain", "eager", "kept"])
def test_tokens_that_the_model_has_not(way):
    model = family("Llama")
    processor = TrieLogitsProcessor(TokenTrie([[97]], END), 6)
    with pytest.raises(ValueError, match="`vocab_size` must be greater than the trie's tokens, got 97 and a token 97"):
        generate(way, model, inputs_for(model), logits_processor=[processor], max_new_tokens=4)


@pytest.mark.parametrize("num_beams", [1, 4, 40])
def test_generate_on_a_gpu(cuda, num_beams):
    """Sums are rounded otherwise there, so results are compared by score."""
    model = copy.deepcopy(family("Llama", 1)).cuda()
    inputs = inputs_for(model, 3, padding=2)
    known = Items(catalogue(random.Random(4), END, most=200, longest=4), END)
    trie = TokenTrie(known.items, END).to("cuda")
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 5, "do_sample": False}
    options |= {"return_dict_in_generate": True}
    expected = model.generate(
        **inputs, **options, output_scores=num_beams > 1, prefix_allowed_tokens_fn=known.prefix_fn(6)
    )
    with fused_decoding(model):
        for _ in range(2):
            given = model.generate(**inputs, **options, logits_processor=[TrieLogitsProcessor(trie, 6)])
    steps = stats(reset=True)
    assert steps.stock == 0 and steps.captured == steps.whole > 0
    for prompt in range(3):
        of_prompt = slice(prompt * num_beams, (prompt + 1) * num_beams)
        texts, found = (each.sequences[of_prompt, 6:].tolist() for each in (expected, given))
        if num_beams == 1:
            assert texts == found
            continue
        scores = expected.sequences_scores[of_prompt].tolist()
        score_of = {tuple(text): score for text, score in zip(texts, scores) if score > NO_SCORE}
        for score, text in zip(scores, found):
            assert score < NO_SCORE or score_of[tuple(text)] == pytest.approx(score, abs=TOLERANCE)


def test_on_a_gpu_a_step_waits_for_nothing_and_is_captured(cuda):
    items = catalogue(random.Random(1), END, most=60)
    trie = TokenTrie(items, END)
    texts = torch.tensor([[*item][:2] + [7] * (2 - len(item)) for item in items])
    nodes = trie.nodes(texts[:, :1])
    after = trie.step(nodes, texts[:, 1])
    on_gpu, nodes, tokens = trie.to("cuda"), nodes.cuda(), texts[:, 1].cuda()

    def run():
        stepped = on_gpu.step(nodes, tokens)
        return stepped, on_gpu.allowed_mask(stepped, 97)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        given = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    for stepped, mask in (given, captured):
        assert torch.equal(stepped.cpu(), after) and torch.equal(mask.cpu(), trie.allowed_mask(after, 97))

# SPDX-License-Identifier: Apache-2.0
"""What each process of a tensor-parallel model checks of whole steps (test_whole_step_parallel.py)."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import tensor_parallel_checks
from captured import StandIn, graphs_of
from fused_topk.generation import TokenTrie, TrieLogitsProcessor, disable, enable, fused_decoding, stats
from fused_topk.generation.whole_step import drop, entry, graphs, trial
from tensor_parallel_checks import (
    EOS,
    LLAMA,
    NEW_TOKENS,
    PROMPTS,
    QWEN,
    VOCAB_SIZE,
    Collectives,
    assert_equal_everywhere,
    models,
    sequences,
)

FOLDER = ""  # that all processes can write
ALONE = "a trial that has failed on another process"
UNLIKE = "a call that is not the same on all processes"


class Never(StoppingCriteria):
    """Ends no text."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Dying(BaseStreamer):
    """Ends the process in the middle of a call."""

    def __init__(self):
        self.left = 12

    def put(self, value):
        self.left -= 1
        if not self.left:
            os._exit(1)

    def end(self):
        pass


def spread(*args):
    tensor_parallel_checks.FOLDER = FOLDER
    return models(*args)


def whole(model, prompts=PROMPTS, sampling=False, way="eager", **options):
    """What a call in whole steps gives. Every step of it is one."""
    stats(reset=True)
    with fused_decoding(model, sampling=sampling, whole_step=way):
        got = sequences(model, prompts, **options)
    steps = stats(reset=True)
    assert steps.not_whole == {} and steps.whole == steps.fused > 0, (options, steps)
    return got


def assert_as_stock(model, options) -> None:
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    got, expected = whole(model, **options, **kept), sequences(model, **options, **kept)
    assert torch.equal(got.sequences, expected.sequences), options
    for name in ("scores", "logits"):
        for of_step, of_stock in zip(got[name], expected[name], strict=True):
            torch.testing.assert_close(of_step, of_stock, rtol=1e-5, atol=1e-5)
    if "num_beams" in options:
        torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.beam_indices, expected.beam_indices)
    # Without them the choice is made from columns.
    assert torch.equal(whole(model, **options), expected.sequences), options


def greedy_and_beams(rank: int, size: int) -> None:
    """Of every kind of head, embedding and bias; texts that end early, and those that do not."""
    for family, vocab_size, tied in ((LLAMA, VOCAB_SIZE, False), (QWEN, 208, False), (LLAMA, 212, True)):
        model, _ = spread(family, vocab_size, tied)
        for options in ({}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}):
            assert_as_stock(model, options)
            assert_as_stock(model, {**options, "eos_token_id": None, "max_new_tokens": 3})
    # Ends in the first of its steps, as tokens say.
    first = sequences(spread()[0], max_new_tokens=1)[:, -1].tolist()
    assert whole(spread()[0], eos_token_id=first, max_new_tokens=50).shape[1] == PROMPTS.shape[1] + 1


def what_is_exchanged(rank: int, size: int) -> None:
    """Two questions the first time and one later, and in each step the candidates: no gather of logits behind the prompt."""
    model, _ = spread(LLAMA, 204)
    options = {"eos_token_id": None, "max_new_tokens": 5}
    given = []
    for _ in range(2):
        with Collectives() as collectives:
            whole(model, **options)
        given.append(collectives.given)
    assert given[1][0] == 16 and given[0][0] == 16, given
    logits = 2 * 204 // size * 4
    frames = {each for each in given[1][1:] if each != logits}
    assert len(given[1]) == 6 and len(frames) == 1, given
    assert len(given[0]) > len(given[1])


def processors(rank: int, size: int) -> None:
    model, _ = spread()
    tokens = torch.tensor([0, 31, 32, 104, 105, 106, 107, 210])
    trie = TokenTrie(torch.cartesian_prod(tokens, tokens, tokens), end_token_id=EOS)
    for options in (
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [3, 40], [200]], "sequence_bias": {(210,): 3.0, (33, 4): 9.0}},
        {"logits_processor": [TrieLogitsProcessor(trie, PROMPTS.shape[1])]},
    ):
        for beams in (1, 3):
            assert_as_stock(model, {**options, **({} if beams == 1 else {"num_beams": beams})})


def sampling(rank: int, size: int) -> None:
    """The first process's draws on all of them, whatever the others' random numbers; of the tokens that warpers keep."""
    model, alone = spread()
    prompts = PROMPTS[:1].expand(400, -1)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(1000 * seed + (0 if rank == 0 else rank + 7 * seed))
        options = {"do_sample": True, "top_k": 6, "temperature": 2.0, "max_new_tokens": 2}
        found.append(whole(model, prompts, sampling=True, **options))
        assert_equal_everywhere(found[-1])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    best = (alone(PROMPTS[:1]).logits[0, -1] / 2.0).topk(6)
    counts = torch.stack([(each[:, PROMPTS.shape[1]] == best.indices.unsqueeze(1)).sum(1) for each in found[1:]]).sum(0)
    expected = best.values.softmax(-1) * 800
    # Of 5 degrees of freedom: more in 1 of a million.
    assert counts.sum() == 800 and ((counts - expected) ** 2 / expected).sum() < 37, (counts, expected)
    for options in ({"top_p": 0.7, "top_k": 0}, {"top_k": 0}, {"top_k": 5, "repetition_penalty": 1.2}):
        torch.manual_seed(rank)
        assert_equal_everywhere(whole(model, sampling=True, do_sample=True, **options))


def processes_that_differ(rank: int, size: int) -> None:
    """Whatever differs, all run the other loop, and the next call is whole."""
    model, alone = spread()
    expected, is_last = sequences(alone), rank == size - 1

    def call(way, **options):
        with fused_decoding(model, whole_step=way):
            got = sequences(model, **options)
        steps = stats(reset=True)
        assert torch.equal(getattr(got, "sequences", got), expected), options
        assert steps.whole == 0 and steps.fused + steps.fallback == NEW_TOKENS, steps
        # Who is not served for a reason of its own says that.
        assert list(steps.not_whole) == [UNLIKE] or is_last, steps

    def goes_on():
        with fused_decoding(model, whole_step="eager"):
            assert torch.equal(sequences(model), expected)
        return stats(reset=True).whole == NEW_TOKENS

    stats(reset=True)
    for way, options in (
        # Before the trial.
        (False, {}),
        ("eager", {"max_time": 1000.0}),
        ("eager", {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(VOCAB_SIZE))}),
        (False, {}),
        ("eager", {"stopping_criteria": [Never()]}),
    ):
        call(way if is_last else "eager", **(options if is_last else {}))
        assert goes_on()
    # What both would serve, but not together, might be what they keep. So there is a trial again.
    for options in (
        {"repetition_penalty": 1.0 + 1e-7},
        {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.0 + 1e-7)]},
        {"output_scores": True},
    ):
        call("eager", return_dict_in_generate=True, **(options if is_last else {}))
        assert goes_on()
    # A record of the best tokens, for which a step gathers logits.
    with fused_decoding(model, whole_step="eager", topk_per_step=4 * is_last):
        assert torch.equal(sequences(model), expected)
    assert list(stats(reset=True).not_whole) == [UNLIKE]
    assert goes_on()
    # A process that has forgotten what it knew of the model, when the others have not.
    if is_last:
        drop(model)
    call("eager")
    assert goes_on()
    # One whose trial fails alone.
    for name, wrong in (("head", None), ("reason_against_parts", "wrong"), ("reason_against", "wrong")):
        drop(model)
        with pytest.MonkeyPatch.context() as patch:
            right = getattr(trial, name)
            patch.setattr(trial, name, lambda *args, right=right, wrong=wrong: (right(*args), wrong)[is_last])
            with fused_decoding(model, whole_step="eager"):
                assert torch.equal(sequences(model), expected)
        reasons = list(stats(reset=True).not_whole)
        assert reasons == [UNLIKE if name == "head" else ALONE if not is_last else "wrong"], (name, reasons)
        if name != "head":
            drop(model)
        assert goes_on()


def calls_after_each_other(rank: int, size: int) -> None:
    """Of other lengths, batches and ends; of a cache to go on with."""
    model, _ = spread()
    generator = torch.Generator().manual_seed(3)
    for batch, length, new, beams in ((1, 3, 4, 1), (3, 20, 30, 2), (2, 9, 1, 1), (4, 33, 20, 3), (1, 3, 4, 1)):
        prompts = torch.randint(6, VOCAB_SIZE, (batch, length), generator=generator)
        options = {"num_beams": beams, "max_new_tokens": new}
        assert torch.equal(whole(model, prompts, **options), sequences(model, prompts, **options)), (batch, length)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), PROMPTS], 1)
    padded[1, :3] = 7
    mask = (padded != 0).long()
    for beams in (1, 3):
        options = {"attention_mask": mask, "num_beams": beams, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        with fused_decoding(model, whole_step="eager"):
            got = model.generate(padded, **options)
        assert torch.equal(got, model.generate(padded, **options))
    assert stats(reset=True).not_whole == {}
    stats(reset=True)
    first = whole(model, return_dict_in_generate=True)
    of_stock = sequences(model, return_dict_in_generate=True)
    name = "cache" if "cache" in first else "past_key_values"
    for own, stock in zip(first[name].layers, of_stock[name].layers, strict=True):
        torch.testing.assert_close(own.keys, stock.keys, rtol=1e-5, atol=1e-5)


class Failing(StandIn):
    """A capture that fails, when all is said that other processes wait for."""

    def __init__(self, run, device, beside):
        super().__init__(run, device, beside)
        raise RuntimeError("no memory for a graph")


def captured_steps(rank: int, size: int) -> None:
    """Kept on all processes or on none, and replayed by later calls of a block."""
    model, _ = spread()
    drop(model)
    is_last = rank == size - 1
    for options in ({}, {"num_beams": 3}, {"num_beams": 3, "max_new_tokens": 80, "eos_token_id": None}):
        expected = sequences(model, **options)
        with graphs_of(), fused_decoding(model, whole_step=True):
            for is_first in (True, False):
                before = StandIn.made
                with Collectives() as collectives:
                    assert torch.equal(sequences(model, **options), expected), options
                steps = stats(reset=True)
                assert steps.captured == steps.whole > 0 and steps.not_whole == steps.not_compiled == {}, steps
                assert (StandIn.made > before) == is_first
        # The question, the logits of the prompt, and as many steps as there are or some more in vain.
        assert steps.whole <= len(collectives.given) - 1 <= steps.whole + graphs.LATENESS, collectives.given
        # NCCL waits for graphs that nobody needs.
        assert len(entry.ready_for(model).store._kept) == 0
    enable(model, whole_step=True, sampling=True)
    with graphs_of():
        sequences(model)
        # What one process has dropped.
        if is_last:
            entry.ready_for(model).store.release()
        for reasons in ([], [UNLIKE], []):
            assert list(stats(reset=True).not_whole) == reasons
            sequences(model)
        tokens = torch.tensor([31, 32, 104, 105, 106, 107, 210])
        trie = TokenTrie(torch.cartesian_prod(tokens, tokens, tokens), end_token_id=EOS)
        for options in ({}, {"num_beams": 3}):
            stats(reset=True)
            options["logits_processor"] = [TrieLogitsProcessor(trie, PROMPTS.shape[1])]
            got = sequences(model, **options)
            assert stats(reset=True).captured > 0
            with fused_decoding(model, whole_step=False):
                assert torch.equal(got, sequences(model, **options))
        torch.manual_seed(rank)
        stats(reset=True)
        assert_equal_everywhere(sequences(model, do_sample=True, top_k=20))
        assert stats(reset=True).captured > 0
    disable(model)
    drop(model)
    expected = sequences(model)
    with graphs_of(Failing if is_last else StandIn), fused_decoding(model, whole_step=True):
        for _ in range(2):
            assert torch.equal(sequences(model), expected)
            steps = stats(reset=True)
            error = "no memory for a graph" if is_last else "a capture on another process"
            assert list(steps.not_compiled) == [f"a step that is to be captured raises RuntimeError: {error}"], steps
            assert steps.captured == 0 and steps.whole == NEW_TOKENS
    drop(model)


def what_is_not_served(rank: int, size: int) -> None:
    model, alone = spread()
    expected = sequences(alone)
    for way, reason in (
        (None, "a tensor-parallel model on a CPU"),
        ("eager", "max_time or stop_strings in a tensor-parallel model"),
    ):
        stats(reset=True)
        with fused_decoding(model, whole_step=way):
            assert torch.equal(sequences(model, max_time=1000.0), expected)
        steps = stats(reset=True)
        assert steps.whole == 0 and steps.not_whole == {reason: 1} and steps.sharded == NEW_TOKENS, steps
    # What is to be compiled runs without.
    for way in (True, "compiled"):
        with fused_decoding(model, whole_step=way):
            assert torch.equal(sequences(model), expected)
        steps = stats(reset=True)
        assert steps.whole == NEW_TOKENS and steps.compiled == 0, steps
        assert steps.not_compiled == {"a tensor-parallel model": 1}
    # A weight that somebody has spread in another way.
    forward = model.model.layers[0].mlp.up_proj.forward
    model.model.layers[0].mlp.up_proj.forward = lambda x: forward(x)
    with fused_decoding(model, whole_step="eager"):
        assert torch.equal(sequences(model), expected)
    assert stats(reset=True).not_whole == {"a tensor-parallel Linear of an unknown plan": 1}
    model.model.layers[0].mlp.up_proj.forward = forward
    # Weights that have changed in place are the twin's, too.
    with torch.no_grad():
        norm = model.model.norm.weight
        norm.mul_(-1)
        model.model.layers[0].mlp.up_proj.weight.to_local().mul_(2)
        changed = sequences(model)
        assert not torch.equal(changed, expected) and torch.equal(whole(model), changed)
        norm.mul_(-1)
        model.model.layers[0].mlp.up_proj.weight.to_local().div_(2)


def a_process_dies(rank: int, size: int) -> None:
    """The others get an error."""
    model, _ = spread()
    enable(model, whole_step="eager")
    streamer = Dying() if rank == size - 1 else None
    with pytest.raises(RuntimeError):
        sequences(model, max_new_tokens=60, eos_token_id=None, streamer=streamer)

# SPDX-License-Identifier: Apache-2.0
"""What each process of a tensor-parallel model checks of captured steps, with a GPU of its own (test_whole_step_parallel_cuda.py)."""

import faulthandler

import pytest
import torch
import torch.distributed as dist
from transformers import LogitsProcessorList

import whole_parallel_checks
from decoding import stats
from fused_topk.distributed import collective
from fused_topk.generation import disable, enable, fused_decoding
from fused_topk.generation.whole_step import entry, graphs
from fused_topk.generation.whole_step.entry import drop
from whole_parallel_checks import (
    CLOCK,
    LLAMA,
    NEW_TOKENS,
    POSITIONAL,
    QWEN,
    UNLIKE,
    VOCAB_SIZE,
    Dying,
    assert_equal_everywhere,
    fused,
    models,
    sequences,
)

FOLDER = ""  # that all processes can write
BEAMS = {"num_beams": 4}
# Where each thread is, should a collective wait for a process that does not come.
faulthandler.dump_traceback_later(50, repeat=True)


def model_and_prompts(family=LLAMA, vocab_size=VOCAB_SIZE, tied=False, rows=8, length=20):
    whole_parallel_checks.FOLDER = FOLDER
    model, _ = models(family, vocab_size, tied)
    prompts = torch.randint(6, vocab_size, (rows, length), generator=torch.Generator().manual_seed(rows + length))
    return model, prompts.to(model.device)


def assert_captured(model, prompts, **options) -> None:
    """In a block: the tokens and scores of stock generate(), from graphs alone. The second call makes none."""
    kept = {"return_dict_in_generate": True, "output_scores": True, **options}
    for asked in (options, kept):
        expected = sequences(model, prompts, **asked)
        with fused_decoding(model):
            for is_first in (True, False):
                graphs_before = count_of_graphs.made
                stats(reset=True)
                got = sequences(model, prompts, **asked)
                steps = stats(reset=True)
                assert steps.reasons == {}, steps
                assert steps.captured == steps.whole > 0, steps
                assert (count_of_graphs.made > graphs_before) == is_first, (is_first, options)
        if asked is options:
            assert torch.equal(got, expected), options
            continue
        assert torch.equal(got.sequences, expected.sequences)
        for own, stock in zip(got.scores, expected.scores, strict=True):
            torch.testing.assert_close(own, stock, rtol=1e-4, atol=1e-4)


class count_of_graphs(graphs.Graph):
    """A graph, which counts how many there have been."""

    made = 0

    def __init__(self, *args):
        super().__init__(*args)
        count_of_graphs.made += 1


graphs.Graph = count_of_graphs


def greedy(rank: int, size: int) -> None:
    for family, vocab_size, tied in ((LLAMA, VOCAB_SIZE, False), (QWEN, 208, False), (LLAMA, 212, True)):
        model, prompts = model_and_prompts(family, vocab_size, tied)
        assert_captured(model, prompts)
        assert_captured(model, prompts, eos_token_id=None)


def beams(rank: int, size: int) -> None:
    for family, vocab_size, tied in ((LLAMA, VOCAB_SIZE, False), (QWEN, 208, False)):
        model, prompts = model_and_prompts(family, vocab_size, tied)
        assert_captured(model, prompts, **BEAMS)
        assert_captured(model, prompts, **BEAMS, num_return_sequences=2, length_penalty=0.5, eos_token_id=None)


def room_grows_and_lengths_differ(rank: int, size: int) -> None:
    model, prompts = model_and_prompts()
    assert_captured(model, prompts, max_new_tokens=150, eos_token_id=None)
    enable(model)
    for rows, length, new in ((8, 20, 9), (3, 33, 70), (8, 20, 9), (1, 4, 1)):
        _, prompts = model_and_prompts(rows=rows, length=length)
        for options in ({}, BEAMS):
            got = sequences(model, prompts, max_new_tokens=new, **options)
            assert_equal_everywhere(got)
    assert stats(reset=True).reasons == {}
    disable(model)
    assert len(entry.ready_for(model).store._kept) == 0


def draws_and_processors(rank: int, size: int) -> None:
    model, prompts = model_and_prompts()
    assert_captured(model, prompts, repetition_penalty=1.3)
    assert_captured(model, prompts, **BEAMS, no_repeat_ngram_size=2)
    for options in ({"top_k": 20}, {"top_k": 0, "top_p": 0.9}):
        torch.manual_seed(3)
        expected = sequences(model, prompts, do_sample=True, **options)
        # The first process's numbers decide.
        torch.manual_seed(3 + rank)
        got, steps = fused(model, prompts, do_sample=True, **options)
        assert torch.equal(got, expected) and steps.captured > 0, (options, steps)


def processes_that_differ(rank: int, size: int) -> None:
    """All run stock's generate(), and then go on."""
    model, prompts = model_and_prompts()
    expected, is_last = sequences(model, prompts), rank == size - 1
    for reason, args, own in (
        (POSITIONAL, (None, LogitsProcessorList()), {}),
        (CLOCK, (), {"max_time": 1000.0}),
        (UNLIKE, (), {"repetition_penalty": 1.0 + 1e-7}),
    ):
        got, steps = fused(model, prompts, *(args if is_last else ()), **(own if is_last else {}))
        assert torch.equal(got, expected)
        assert steps.whole == 0 and steps.reasons == {reason if is_last else UNLIKE: 1}, steps
        got, steps = fused(model, prompts)
        assert torch.equal(got, expected) and steps.captured == steps.whole > 0, steps


def a_capture_that_fails_in_one_process(rank: int, size: int) -> None:
    model, prompts = model_and_prompts()
    drop(model)
    expected = sequences(model, prompts)

    class Failing(count_of_graphs):
        def __init__(self, *args):
            super().__init__(*args)
            raise RuntimeError("no memory for a graph")

    with pytest.MonkeyPatch.context() as patch:
        if rank == size - 1:
            patch.setattr(graphs, "Graph", Failing)
        got, steps = fused(model, prompts)
        assert torch.equal(got, expected)
        assert steps.whole == 0 < steps.stock and len(steps.reasons) == 1, steps
    drop(model)


def a_group_is_destroyed(rank: int, size: int) -> None:
    """NCCL waits for graphs that use it: after a block there are none."""
    model, prompts = model_and_prompts()
    with fused_decoding(model):
        sequences(model, prompts, max_new_tokens=NEW_TOKENS)
    assert stats(reset=True).captured > 0
    torch.cuda.synchronize()
    dist.destroy_process_group()


def a_process_dies(rank: int, size: int) -> None:
    """The others get an error within the group's limit, though graphs wait without end."""
    model, prompts = model_and_prompts()
    streamer = Dying() if rank == size - 1 else None
    enable(model)
    options = {"max_new_tokens": 60, "eos_token_id": None}
    expected = sequences(model, prompts, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "_time_limit", lambda *args: 5.0)
        with pytest.raises(RuntimeError, match="got no answer of some within 5 s"):
            sequences(model, prompts, **options, streamer=streamer)
    # The process ends without an abort of the group, which would wait for the graphs.
    assert expected.shape[1] == prompts.shape[1] + 60

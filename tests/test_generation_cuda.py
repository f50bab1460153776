# SPDX-License-Identifier: Apache-2.0
"""The selection step on a GPU: no synchronisation, capture in a CUDA graph, scratch memory, and generate() as a whole."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from transformers.generation import logits_process as stock

from decoding import NAMES, SmallerIndexFirst, assert_fused, inputs_for, tiny
from fused_topk import topk
from fused_topk.backends import cuda as cuda_backend
from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.choice.rows import _ARGMAX_VOCAB_SIZE, Rows

_DEMOS = Path(__file__).parents[1] / "demos"
if not _DEMOS.is_dir():
    pytest.skip("the demos are only in a checkout", allow_module_level=True)
sys.path.insert(0, str(_DEMOS))

selection_step = importlib.import_module("selection_step")
VOCAB_SIZE = 32000


def processors(name):
    return {
        "none": lambda: [],
        "suppress": lambda: [stock.SuppressTokensLogitsProcessor([1, 5, 700])],
        "min_length": lambda: [stock.MinLengthLogitsProcessor(40, [2, 3], device="cuda")],
        "repetition": lambda: [stock.RepetitionPenaltyLogitsProcessor(1.3)],
        "ngrams": lambda: [stock.NoRepeatNGramLogitsProcessor(2)],
        "bias": lambda: [stock.SequenceBiasLogitsProcessor({(7,): 3.0, (8, 9): -2.0})],
        "forced": lambda: [stock.ForcedEOSTokenLogitsProcessor(13, 2, device="cuda")],
        "chain": lambda: [
            stock.RepetitionPenaltyLogitsProcessor(1.3),
            stock.NoRepeatNGramLogitsProcessor(3),
            stock.MinLengthLogitsProcessor(40, [2, 3], device="cuda"),
        ],
    }[name]()


PROCESSORS = pytest.mark.parametrize(
    "name", ["none", "suppress", "min_length", "repetition", "ngrams", "bias", "forced", "chain"]
)
STEPS = pytest.mark.parametrize("kind", ["beam", "greedy"])
ALL_STEPS = pytest.mark.parametrize("kind", ["beam", "greedy", "sampling"])


def made(kind, name):
    if kind == "beam":
        return selection_step.BeamStep(4, 4, VOCAB_SIZE, processors=processors(name))
    if kind == "sampling":
        return selection_step.SamplingStep(8, VOCAB_SIZE, 50, 0.9, processors=processors(name))
    return selection_step.GreedyStep(8, VOCAB_SIZE, processors=processors(name))


def stock_of(step):
    with SmallerIndexFirst():
        return step.stock()


def assert_candidates(given, expected):
    torch.testing.assert_close(given[0], expected[0], rtol=0, atol=2e-5)
    # Where scores are clear of each other, the tokens too.
    gaps = expected[0].diff().abs().nan_to_num() > 1e-4
    is_clear = torch.nn.functional.pad(gaps, (1, 0), value=True) & torch.nn.functional.pad(gaps, (0, 1), value=False)
    assert torch.equal(given[1][is_clear], expected[1][is_clear])


@ALL_STEPS
@PROCESSORS
def test_selection_does_not_wait_for_the_gpu(cuda, kind, name):
    step = made(kind, name)
    stats(reset=True)
    # The first call compiles kernels and brings tables to the GPU.
    step.fused()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.fused()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.session.close()
    assert stats(reset=True) == (2, 0, {})


@STEPS
@PROCESSORS
def test_selection_is_captured_in_a_graph_and_replayed(cuda, kind, name):
    step = made(kind, name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.fused()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = step.fused()
    for seed in range(3):
        torch.manual_seed(seed)
        step.logits.normal_(std=2.0)
        step.beam_scores.uniform_(-3, 0)
        step.input_ids.random_(0, 50)
        graph.replay()
        torch.cuda.synchronize()
        if kind == "greedy":
            assert torch.equal(given[1], stock_of(step)[1])
        else:
            assert_candidates(given, stock_of(step))


@PROCESSORS
def test_scratch_memory_does_not_grow_with_the_vocabulary(cuda, name):
    peaks = []
    for vocab_size in (VOCAB_SIZE, 8 * VOCAB_SIZE):
        step = selection_step.BeamStep(8, 4, vocab_size, processors=processors(name))
        step.fused()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.fused()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        # Bit masks of rows: an eighth of a byte a token, and what combines them.
        assert peaks[-1] < 2**20 + step.logits.numel(), "more than a byte for a logit"
        del step
    if name in ("none", "suppress", "min_length", "forced"):
        assert peaks[1] <= peaks[0] + 2**18, peaks


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_generate_on_the_gpu_gives_the_stock_sequences(cuda, name, num_beams):
    model = tiny(name).to("cuda")
    try:
        assert_fused(model, inputs_for(model), num_beams=num_beams, repetition_penalty=1.2)
        assert_fused(model, inputs_for(model), num_beams=num_beams)
    finally:
        # The model is shared with tests on the CPU.
        model.to("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, _ARGMAX_VOCAB_SIZE, _ARGMAX_VOCAB_SIZE + 1])
def test_greedy_selection_takes_the_first_of_equal_logits(cuda, vocab_size, dtype):
    """Whichever kernel reads them; NaN is the greatest of all."""
    logits = torch.randint(-3, 3, (9, vocab_size)).to("cuda", dtype)
    logits[1] = -torch.inf
    logits[2, 7:] = logits[2, 9000] = torch.inf
    logits[3, 5], logits[3, 8000:8003] = torch.inf, torch.nan
    logits[4], logits[4, 3:] = -0.0, 0.0
    expected = topk(logits.cpu(), 1, backend="reference").indices[:, 0]
    assert expected[[1, 2, 3, 4]].tolist() == [0, 7, 8000, 0]
    assert torch.equal(Rows(logits, cuda_backend).greatest().cpu(), expected)
    every_other = logits[:, ::2]
    expected = topk(every_other.cpu(), 1, backend="reference").indices[:, 0]
    assert torch.equal(Rows(every_other, cuda_backend).greatest().cpu(), expected)


def test_static_cache_compiles_the_model_and_is_fused(cuda):
    model = tiny("llama").to("cuda")
    try:
        options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
        expected = model.generate(**inputs_for(model), **options)
        stats(reset=True)
        with fused_decoding(model, whole_step=False):
            given = model.generate(**inputs_for(model), **options)
        assert stats(reset=True) == (6, 0, {})
        assert torch.equal(given, expected)
    finally:
        model.to("cpu")


def test_sampling_on_the_gpu(cuda):
    model = tiny("llama", vocab_size=3000).to("cuda")
    try:
        stats(reset=True)
        with fused_decoding(model, sampling=True, whole_step=False):
            for num_beams in (1, 3):
                options = {"do_sample": True, "top_k": 40, "top_p": 0.9, "num_beams": num_beams}
                found = model.generate(**inputs_for(model), max_new_tokens=5, **options)
                assert (found >= 0).all() and (found < 3000).all()
        assert stats(reset=True) == (10, 0, {})
    finally:
        model.to("cpu")


def test_scores_stay_where_the_loop_has_taken_them(cuda):
    """Also after the choice, when they are made anew from logits on the model's device."""
    from fused_topk.backends import cuda as kernels
    from fused_topk.generation.interception.lazy_scores import LazyScores

    logits = torch.randn(3, 2, 211)
    taken = logits[:, -1].to(cuda.device)
    lazy = LazyScores.of(Rows(taken, kernels), logits)
    assert torch.equal(torch.argmax(lazy, dim=-1), taken.argmax(-1))
    assert torch.equal(lazy + 0, taken)

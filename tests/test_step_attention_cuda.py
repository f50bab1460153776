# SPDX-License-Identifier: Apache-2.0
"""Attention of a step on a GPU, by itself and in whole steps."""

import copy

import pytest
import torch

import whole_steps
from attention_by_table import attention, case, seen_by
from decoding import inputs_for, stats
from fused_topk.generation import fused_decoding
from fused_topk.layout import attention_launch
from fused_topk.operators import attention as by_table
from test_whole_step_cuda import rescored

pytestmark = pytest.mark.usefixtures("cuda")
CASES = [
    {"beams": 1, "groups": 1, "prompt": 3, "written": 1},
    {"beams": 4, "groups": 4, "prompt": 513, "written": 60, "room": 64},
    {"beams": 3, "groups": 7, "prompt": 5000, "written": 2},
    {"beams": 64, "groups": 7, "prompt": 300, "written": 3, "room": 4},
    {"batch": 1, "beams": 2, "groups": 2, "prompt": 20_000, "written": 8},
]


def on_gpu(given):
    return [each.cuda() for each in given[:4]]


@pytest.mark.sanitize
@pytest.mark.parametrize("dim", attention_launch.DIMS)
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_against_float64(shape, dim):
    for dtype in attention_launch.DTYPES:
        given = case(dim=dim, dtype=dtype, **shape)
        sinks = torch.linspace(-2, 2, given.query.shape[1]).to(dtype)
        for window, cap, sink in ((0, 0.0, None), (37, 0.0, sinks), (0, 3.0, None)):
            found = by_table.run(*on_gpu(given), dim**-0.5, cap, window, None if sink is None else sink.cuda())
            want = attention(*given[:3], seen_by(given, window), dim**-0.5, cap, sink)
            # As in test_simt_attention.py.
            torch.testing.assert_close(found.double().cpu(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_the_same_bits_in_every_run_batch_and_graph():
    given = on_gpu(case(batch=4, beams=2, prompt=3000))
    whole = by_table.run(*given, 0.125)
    alone = by_table.run(given[0][2:4], *(each[1:2] for each in given[1:]), 0.125)
    assert torch.equal(whole[2:4], alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = by_table.run(*given, 0.125)
    compiled = torch.compile(by_table.step_attention, fullgraph=True)(*given, 0.125, 0.0, 0, None)
    assert torch.equal(compiled, whole)
    for _ in range(20):
        graph.replay()
        assert torch.equal(captured, whole)
        assert torch.equal(by_table.run(*given, 0.125), whole)


@pytest.fixture
def _wide_heads(monkeypatch):
    """Heads of 32 dimensions, of which the families of the other tests have 8."""
    for key in ("hidden_size", "head_dim"):
        monkeypatch.setitem(whole_steps._SHAPE, key, {"hidden_size": 128, "head_dim": 32}[key])
    monkeypatch.setitem(whole_steps.FAMILIES, "GPT2", {**whole_steps.FAMILIES["GPT2"], "n_embd": 128})


@pytest.mark.usefixtures("_wide_heads")
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", whole_steps.SERVED)
def test_families_read_their_keys_by_a_table(name, num_beams, monkeypatch):
    calls = []
    run = by_table.run
    monkeypatch.setattr(by_table, "run", lambda *args: calls.append(args) or run(*args))
    for dtype in attention_launch.DTYPES:
        steps = generated(name, num_beams, dtype)
        if name in ("Mixtral", "Qwen3Moe") and steps.whole == 0:
            continue  # Their experts may ask the device.
        assert steps.whole > 0 and steps.stock == 0 and calls, steps


@pytest.mark.usefixtures("_wide_heads")
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Mistral"])
def test_compiled_layers_read_their_keys_by_a_table(name, num_beams):
    steps = generated(name, num_beams, torch.bfloat16, compile=True)
    assert steps.compiled == steps.captured == steps.whole > 0, steps


def generated(name, num_beams, dtype, **how):
    """What the steps of a call were, whose scores are those of its texts."""
    model = copy.deepcopy(whole_steps.family.__wrapped__(name, 1)).to("cuda", dtype)
    inputs = {key: each.cuda() for key, each in inputs_for(model, 4, padding=2).items()}
    options = {"num_beams": num_beams, "max_new_tokens": 12, "do_sample": False, "output_scores": True}
    stats(reset=True)
    with fused_decoding(model, **how), torch.no_grad():
        found = model.generate(**inputs, **options, return_dict_in_generate=True)
    steps = stats(reset=True)
    if num_beams > 1:
        with torch.no_grad():
            expected = rescored(model, inputs, found, num_beams)
        torch.testing.assert_close(found.sequences_scores, expected, rtol=0, atol=0.1)
    return steps

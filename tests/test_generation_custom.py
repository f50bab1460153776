# SPDX-License-Identifier: Apache-2.0
"""The fused path through transformers' hook custom_generate=, and the traps of that hook."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers

from decoding import OPTIONS, Recorder, one_prompt, one_thread, own_model, run, tiny  # noqa: F401
from fused_topk.generation import enable, generate


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", ["llama", "t5", "whisper"])
def test_custom_generate_gives_the_stock_sequences(name, num_beams):
    model = tiny(name)
    expected, _ = run(model, num_beams=num_beams, suppress_tokens=[20, 21])
    given, steps = run(model, num_beams=num_beams, suppress_tokens=[20, 21], custom_generate=generate, whole_step=False)
    assert torch.equal(given, expected)
    assert steps == (6, 0, {})


def test_custom_generate_samples_where_asked_to(model):
    _, steps = run(model, do_sample=True, top_k=3, custom_generate=generate, whole_step=False, sampling=True)
    assert steps == (6, 0, {})
    _, steps = run(
        model, do_sample=True, top_k=3, num_beams=2, custom_generate=generate, whole_step=False, sampling=True
    )
    assert steps == (6, 0, {})


def test_custom_generate_of_an_enabled_model(model):
    enable(model, whole_step=False)
    assert run(model, custom_generate=generate, whole_step=False)[1] == (6, 0, {})
    assert run(model)[1] == (6, 0, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "`do_sample` must be False unless sampling=True is given"),
        (
            {"prompt_lookup_num_tokens": 2},
            "`custom_generate` of fused_topk serves greedy search.*got assisted_generation",
        ),
        ({"num_beams": 3, "sampling": "yes"}, "`sampling` must be a bool, got str"),
        ({"num_beams": 2, "streamer": Recorder()}, "streamer"),
    ],
    ids=["do_sample", "assisted", "sampling", "streamer"],
)
def test_custom_generate_refuses_what_it_does_not_serve(model, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        model.generate(**one_prompt(model), custom_generate=generate, whole_step=False, **{**OPTIONS, **options})


def test_custom_generate_refuses_an_assistant(model):
    with pytest.raises(ValueError, match="got assisted_generation"):
        model.generate(
            **one_prompt(model),
            custom_generate=generate,
            whole_step=False,
            assistant_model=tiny("llama", seed=1),
            **OPTIONS,
        )


@pytest.mark.parametrize("num_beams", [1, 3])
def test_custom_generate_passes_synced_gpus_on(model, monkeypatch, num_beams):
    seen = []
    name = "_beam_search" if num_beams > 1 else "_sample"
    loop = getattr(type(model), name)

    def recording(self, *args, synced_gpus=False, **kwargs):
        seen.append(synced_gpus)
        return loop(self, *args, **kwargs)

    monkeypatch.setattr(type(model), name, recording)
    run(model, num_beams=num_beams, custom_generate=generate, whole_step=False, synced_gpus=True)
    run(model, num_beams=num_beams, custom_generate=generate, whole_step=False)
    assert seen == [True, False]


def test_custom_generate_without_its_loop_says_what_to_do(model, monkeypatch):
    monkeypatch.delattr(transformers.GenerationMixin, "_beam_search")
    with pytest.raises(RuntimeError, match="this version of transformers has no _beam_search; use fused_decoding"):
        run(model, num_beams=3, custom_generate=generate, whole_step=False)

# SPDX-License-Identifier: Apache-2.0
"""Whole steps on a GPU: CUDA graphs, their results by score, their memory, and what waits for the device."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from decoding import NAMES, Recorder, assert_same_cache, assert_whole, inputs_for, stats, tiny
from fused_topk.generation import disable, enable, fused_decoding
from fused_topk.generation.whole_step import entry, graphs, kept
from whole_steps import encoder_decoder, family, source_for

WAYS = {
    "captured": functools.partial(fused_decoding),
    "compiled": functools.partial(fused_decoding, compile=True),
}
MODELS = ["Llama", "Gemma2", "GPT2", "Mixtral", "Bart", "Marian", "M2M100", "Whisper"]
BOTH = ("Bart", "Marian", "M2M100", "Whisper")


# Which experts a token takes decides the shapes of Mixtral's products, in some versions of transformers.
NOT_CAPTURED = ("Mixtral",)
# M2M100 compares positions with a number in some versions; then its steps do not compile in one piece.
NOT_COMPILED = ("Mixtral", "M2M100")


def on_gpu(name, dtype=torch.float32, seed=1):
    """A model of its own, and inputs of four sequences."""
    made = encoder_decoder if name in BOTH else family
    model = copy.deepcopy(made(name, seed)).to("cuda", dtype)
    inputs = source_for(model, 4) if name in BOTH else inputs_for(model, 4, padding=2)
    return model, {name: each.to("cuda") for name, each in inputs.items()}


def rescored(model, inputs, found, beams, length_penalty=1.0):
    """float32 [n]: the scores that the model by itself gives to the texts, read at once, without a cache."""
    count = found.sequences.shape[0] // next(iter(inputs.values())).shape[0]
    inputs = {name: each.repeat_interleave(count, 0) for name, each in inputs.items()}
    texts, is_token = found.sequences, found.beam_indices >= 0
    num_new = is_token.shape[1]
    if "decoder_input_ids" in model.forward.__code__.co_varnames or model.config.is_encoder_decoder:
        logits = model(**inputs, decoder_input_ids=texts, use_cache=False).logits
    else:
        mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(len(texts), num_new)], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=texts, attention_mask=mask, position_ids=positions, use_cache=False).logits
    scores = logits[:, -num_new - 1 : -1].float().log_softmax(-1).gather(2, texts[:, -num_new:, None]).squeeze(2)
    return (scores * is_token).sum(1) / is_token.sum(1) ** length_penalty


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_texts_have_the_scores_that_are_reported_and_stocks_on_average(cuda, name, way):
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.1)):
        model, inputs = on_gpu(name, dtype)
        options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12, "do_sample": False}
        options |= {"return_dict_in_generate": True, "output_scores": True}
        with torch.no_grad():
            stock = model.generate(**inputs, **options)
        stats(reset=True)
        with WAYS[way](model), torch.no_grad():
            # Twice: captured, and replayed by a later call.
            for _ in range(2):
                found = model.generate(**inputs, **options)
        steps = stats(reset=True)
        # What cannot be captured runs as stock.
        is_stock = name in NOT_CAPTURED and steps.whole == 0
        assert steps.captured == steps.whole > 0 or is_stock, steps.reasons
        if name not in NOT_COMPILED:
            assert (steps.compiled > 0) == (way == "compiled"), steps.reasons
        if name != "Whisper":
            # Whisper's scores are those of its processors.
            with torch.no_grad():
                expected = rescored(model, inputs, found, 4)
            torch.testing.assert_close(found.sequences_scores, expected, rtol=0, atol=tolerance)
        assert found.sequences_scores.mean() >= stock.sequences_scores.mean() - tolerance


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_is_one_call_gives_what_single_operations_give(cuda, name, num_beams, monkeypatch):
    model, inputs = on_gpu(name)
    options = {"num_beams": num_beams, "max_new_tokens": 20, "do_sample": False}
    with monkeypatch.context() as patch, fused_decoding(model):
        patch.setattr(graphs, "is_cuda", lambda device: False)
        expected = model.generate(**inputs, **options)
    stats(reset=True)
    with WAYS["captured"](model):
        for _ in range(3):
            assert torch.equal(model.generate(**inputs, **options), expected)
    steps = stats(reset=True)
    assert steps.captured > 0 or (name in NOT_CAPTURED and steps.reasons)


@pytest.mark.parametrize("num_beams", [1, 4, "streamed"])
def test_the_loop_does_not_wait(cuda, num_beams, monkeypatch):
    model, inputs = on_gpu("Llama")
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    if num_beams == "streamed":
        options["streamer"], inputs = Recorder(), {name: each[:1] for name, each in inputs.items()}
    else:
        options["num_beams"] = num_beams
    with WAYS["captured"](model):
        model.generate(**inputs, **options)
        advance = kept.KeptStep.advance
        goes_on = graphs.EndFlag.goes_on

        def strict(function):
            def run(*args):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return function(*args)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            return run

        monkeypatch.setattr(kept.KeptStep, "advance", strict(advance))
        monkeypatch.setattr(graphs.EndFlag, "goes_on", strict(goes_on))
        stats(reset=True)
        model.generate(**inputs, **options)
        assert stats(reset=True).captured == 24


def test_a_cache_goes_from_call_to_call(cuda, monkeypatch):
    model, inputs = on_gpu("Llama")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    found = []
    stats(reset=True)
    for is_captured in (False, True):
        cache, texts, mask = DynamicCache(), inputs["input_ids"], inputs["attention_mask"]
        with monkeypatch.context() as patch, fused_decoding(model):
            patch.setattr(graphs, "is_cuda", lambda device, is_captured=is_captured: is_captured)
            for _ in range(3):
                texts = model.generate(input_ids=texts, attention_mask=mask, past_key_values=cache, **options)
                texts = torch.cat([texts, texts[:, :3]], 1)
                mask = torch.nn.functional.pad(mask, (0, texts.shape[1] - mask.shape[1]), value=1)
        assert stats().whole == 24 and not stats(reset=True).reasons
        found.append((texts, cache))
    assert torch.equal(found[0][0], found[1][0])
    assert_same_cache(found[0][1], found[1][1], 1e-4)


def test_weights_that_lie_elsewhere_are_captured_anew(cuda):
    model, inputs = on_gpu("Llama")
    options = {"num_beams": 4, "max_new_tokens": 12, "do_sample": False}
    with WAYS["captured"](model):
        before = model.generate(**inputs, **options)
    model.lm_head.weight.data = -model.lm_head.weight.data
    with fused_decoding(model):
        expected = model.generate(**inputs, **options)
    stats(reset=True)
    with WAYS["captured"](model):
        found = model.generate(**inputs, **options)
    assert stats(reset=True).captured > 0
    assert torch.equal(found, expected) and not torch.equal(found, before)


def test_other_threads_use_the_device_while_a_step_is_captured(cuda):
    model, inputs = on_gpu("Llama")
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = {beams: model.generate(**inputs, num_beams=beams, **options) for beams in (2, 3, 4, 5)}
    is_over = threading.Event()

    def work():
        while not is_over.is_set():
            # No random numbers: while a graph is captured, torch gives none to other threads.
            torch.ones(1000, 1000, device="cuda").sum().item()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        stats(reset=True)
        with WAYS["captured"](model):
            for beams, of_stock in expected.items():
                found = model.generate(**inputs, num_beams=beams, **options)
                assert found.shape == of_stock.shape
    finally:
        is_over.set()
        thread.join()
    steps = stats(reset=True)
    assert steps.captured == steps.whole > 0, steps.reasons


def test_a_step_works_in_memory_of_its_own(cuda):
    """torch.compile frees what cuBLAS works in where it captures for itself. Of that nothing may be a captured step's."""
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=8192, hidden_size=2048, intermediate_size=5632, num_hidden_layers=1)
    model = LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.randint(3, 8192, (8, 64), device="cuda")
    for _ in range(2):
        with WAYS["captured"](model):
            expected = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.full((32 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(8)]
        stats(reset=True)
        with WAYS["captured"](model):
            found = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
        assert stats(reset=True).captured > 0
        assert torch.equal(found, expected) and all(bool((other == 7).all()) for other in others)
        disable(model)


def test_sampling_is_repeatable_and_captured(cuda):
    model, inputs = on_gpu("Llama")
    options = {"do_sample": True, "top_k": 20, "max_new_tokens": 12}
    found = []
    stats(reset=True)
    with fused_decoding(model):
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(model.generate(**inputs, **options))
    steps = stats(reset=True)
    assert steps.captured == steps.whole > 0, steps.reasons
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("num_beams", [1, 4])
# Mixtral's experts ask the device in float32.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mamba", "mixtral")])
def test_generate_on_the_gpu_gives_the_stock_sequences(cuda, name, num_beams):
    model = tiny(name).to("cuda")
    try:
        assert_whole(model, inputs_for(model), num_beams=num_beams, repetition_penalty=1.2)
        assert_whole(model, inputs_for(model), num_beams=num_beams)
    finally:
        # The model is shared with tests on the CPU.
        model.to("cpu")


def test_graphs_are_dropped(cuda):
    model, inputs = on_gpu("Llama")
    enable(model)
    model.generate(**inputs, num_beams=4, max_new_tokens=8, do_sample=False)
    assert len(entry._ready.get(model).store._kept) == 1
    disable(model)
    assert entry._ready.get(model) is None

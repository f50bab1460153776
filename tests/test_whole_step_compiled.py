# SPDX-License-Identifier: Apache-2.0
"""Whole steps as one compiled call a token: the results of stock, and what is kept for later calls."""

import copy
import functools

import pytest
import torch

from decoding import also, assert_same, assert_whole, generate_both, inputs_for, one_thread, stats, stock_gap  # noqa: F401
from fused_topk.generation.whole_step import compiled, entry
from fused_topk.generation.whole_step.room import rounded_up
from whole_steps import (  # noqa: F401
    OTHER_LAYERS,
    SERVED_WITH_SOURCE,
    compiling,
    encoder_decoder,
    family,
    own_model,
    source_for,
    swaps,
    traced_only,
)

OPTIONS = {"max_new_tokens": 12, "eos_token_id": [5, 6, 7, 8], "output_scores": False}


def assert_compiled(model, inputs, **options):
    return assert_whole(model, inputs, compile=True, kinds=["compiled"], **{**OPTIONS, **options})


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "num_beams"), [("Llama", 1), ("Gemma2", 4)])
def test_compiled_steps_give_the_stock_sequences(name, num_beams):
    """Each takes a minute. The graphs of other models and numbers of beams are run as they are traced."""
    model = family(name)
    crossed = 0
    for length, room in ((6, 12), (9, 16), (1, 1)):
        result = assert_compiled(
            model, inputs_for(model, 3, length, padding=min(2, length - 1)), num_beams=num_beams, max_new_tokens=room
        )
        crossed += 0 if num_beams == 1 else swaps(result, num_beams)
    assert num_beams == 1 or crossed > 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_beams", [3, 1])
@pytest.mark.parametrize(
    "name", ["Llama", "GPT2", "Gemma2", "Mistral", "Gemma3", "Qwen3", "Phi", *sorted({"Gemma3n"} & {*OTHER_LAYERS})]
)
def test_traced_steps_give_the_stock_sequences(name, num_beams, traced):
    model = family(name, seed=1)
    for length, room in ((6, 12), (9, 16), (1, 1)):
        inputs = inputs_for(model, 3, length, padding=min(2, length - 1))
        assert_compiled(model, inputs, num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=room)


def test_calls_that_compile_nothing(model, traced, caplog):
    """Other lengths, batches, beams, room, and what a step has in tensors. No call gets what another has left."""
    first = assert_compiled(model, inputs_for(model, 2, 6), num_beams=3)
    lengths = [(2, 9, 16), (2, 16, 3), (2, 17, 12), (4, 40, 12), (3, 6, 40)]
    others = [
        {"length_penalty": 2.0},
        {"early_stopping": True},
        {"early_stopping": "never"},
        {"eos_token_id": [1, 2, 3, 4]},
        {"pad_token_id": 3},
        {"output_scores": True},
        {"repetition_penalty": 1.5},
        {},
    ]
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, num_beams in ((2, 1), (2, 5), (1, 4)):
            assert_compiled(model, inputs_for(model, batch, 6), num_beams=num_beams)
        for batch, length, most in lengths:
            assert_compiled(model, inputs_for(model, batch, length, padding=2), num_beams=3, max_new_tokens=most)
        for options in others:
            last = assert_compiled(model, inputs_for(model, 2, 6), num_beams=3, **options)
    assert torch.equal(first["sequences"], last["sequences"])
    assert sum("was compiled" in message for message in caplog.messages) == 1
    store = entry._ready.get(model).store
    of_three = [(shape.batch, shape.prompt) for shape in store._kept if shape.beams == 3]
    assert of_three == [(2, 24), (4, 48), (3, 16), (2, 16)]
    assert len(store._codes) == 1
    # To read all of a tensor, inductor needs other code.
    for step in store._kept.values():
        assert all(layer.keys.shape[2] > step.decoder._places.end for layer in step.decoder._layers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["decoder", "both"])
def test_nan_in_the_call_before(kind, traced):
    """Keys that are NaN, in places that the next call, whose texts are shorter, does not write to."""
    made, inputs_of = (
        (family, inputs_for) if kind == "decoder" else (encoder_decoder, functools.partial(source_for, padding=0))
    )
    model = copy.deepcopy(made("Phi" if kind == "decoder" else "Bart", 1))
    inputs, poisoned = inputs_of(model, 3, 5), inputs_of(model, 3, 12)
    before = assert_compiled(model, inputs)
    token = next(token for token in range(8, 97) if token not in inputs["input_ids"])
    poisoned["input_ids"][:] = token
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    with compiling(model):
        model.generate(**poisoned, **OPTIONS, do_sample=False)
    assert torch.equal(assert_compiled(model, inputs)["sequences"], before["sequences"])


def assert_not_compiled(model, reason, **options):
    """Gives the reasons. Args: reason: the one that is to be; None for any."""
    stock, given, steps = generate_both(model, fused=compiling, **{**OPTIONS, "num_beams": 3, **options})
    assert_same(stock, given)
    assert steps.whole > 0 and steps.compiled == 0
    assert reason is None or steps.reasons == {reason: 1}
    return steps.reasons


@pytest.mark.parametrize("num_beams", [1, *also(3)])
@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.5, "output_scores": True}, *also({"output_scores": True}, {"no_repeat_ngram_size": 2})],
    ids=lambda options: "-".join(options),
)
def test_calls_whose_choice_takes_more_compile_the_forward_pass(options, num_beams, model, traced):
    assert_compiled(model, inputs_for(model, 2, 6), num_beams=num_beams, **options)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_compiled(model, inputs_for(model, 2, 9), num_beams=num_beams, **options)


@pytest.mark.parametrize("num_beams", [1, *also(3)])
@pytest.mark.parametrize("name", ["Bart", *also(*(name for name in SERVED_WITH_SOURCE if name != "Bart"))])
def test_traced_steps_of_encoder_decoders(name, num_beams, traced):
    model = encoder_decoder(name, 1)
    for length, padding in ((7, 2), (5, 0), (20, 4)):
        # Padding of its sounds is not served.
        inputs = source_for(model, 3, length, 0 if name == "Speech2Text" else padding)
        if stock_gap(model, inputs, num_beams=num_beams, max_new_tokens=12) > 2e-5:
            assert_compiled(model, inputs, num_beams=num_beams, num_return_sequences=num_beams)


@pytest.mark.exhaustive
@pytest.mark.parametrize("output_scores", [False, True])
def test_weights_are_inputs_of_the_code_where_a_user_freezes_them(output_scores, model, monkeypatch):
    """They may change in place."""
    from torch._inductor import config

    held = []
    monkeypatch.setattr(compiled, "_inductor", lambda graph, inputs: held.extend(graph.parameters()) or graph)
    with config.patch(freezing=True):
        assert_compiled(model, inputs_for(model, 2), output_scores=output_scores)
        assert config.freezing and not held


@pytest.mark.exhaustive
def test_a_compiler_that_does_not_know_the_best_instructions_of_the_cpu(model, monkeypatch):
    """Inductor finds that out in the second attempt, and whenever a user compiles later."""
    from torch._inductor import cpu_vec_isa

    tried = []
    best = cpu_vec_isa.VecAVX512()
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [best])
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda *args: False)
    monkeypatch.setattr(
        cpu_vec_isa.VecISA, "_VecISA__bool__impl", lambda self, is_ok: tried.append(is_ok) or bool(is_ok)
    )
    cpu_vec_isa.valid_vec_isa_list.cache_clear()

    def compile(graph, inputs):
        cpu_vec_isa.valid_vec_isa_list()
        if best:
            raise RuntimeError("C++ compile error")
        return graph

    monkeypatch.setattr(compiled, "_inductor", compile)
    type(best).__bool__.cache_clear()
    assert_compiled(model, inputs_for(model, 2))
    assert None in tried
    type(best).__bool__.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


@pytest.mark.parametrize("output_scores", [False, *also(True)])
@pytest.mark.parametrize("switch", ["disable", *also("suppress_errors"), "stance"])
def test_a_compiler_that_is_switched_off(switch, output_scores, model, monkeypatch, caplog):
    def fail(graph, inputs):
        raise OSError("no compiler")

    monkeypatch.setattr(compiled, "_inductor", fail)
    if switch == "stance":
        block = torch.compiler.set_stance("force_eager")
    else:
        # As TORCH_COMPILE_DISABLE=1 does, and what runs without where the compiler fails.
        block = torch._dynamo.config.patch(**{switch: True})
    with block:
        (reason,) = assert_not_compiled(model, None, output_scores=output_scores)
    # Some versions of torch raise an error of their own. One graph is compiled whatever suppress_errors says.
    told = "OSError: no compiler" if switch == "suppress_errors" else "torch.compile"
    assert reason.startswith("a step that is to be compiled raises ") and told in reason
    assert not any("was compiled" in message for message in caplog.messages)


def test_lengths_are_rounded_up_to_few():
    sizes = [rounded_up(length) for length in range(1, 3000)]
    assert all(size >= length for length, size in enumerate(sizes, 1))
    assert all(size < 1.5 * length for length, size in enumerate(sizes, 1) if length > 16)
    assert sorted(set(sizes))[:6] == [16, 24, 32, 48, 64, 96] and len(set(sizes)) == 16

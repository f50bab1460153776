# SPDX-License-Identifier: Apache-2.0
"""What a user, or a library, may have changed that the loops of transformers honour: known or declined, with stock's results."""

import copy
import functools

import pytest
import torch
import transformers
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from decoding import assert_whole, inputs_for, one_thread, stats  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import reasons
from whole_steps import assert_declined, encoder_decoder, family, own_model, source_for, whole  # noqa: F401

BEAMS = {"num_beams": 3, "max_new_tokens": 6}


def of_another_class(model, **methods):
    """The model, of a class of the user's that overrides these."""
    model.__class__ = type("Own", (type(model),), methods)
    return model


def with_other_tokens(original):
    @functools.wraps(original)
    def prepared(*args, **kwargs):
        inputs = original(*args, **kwargs)
        name = "input_ids" if inputs.get("input_ids") is not None else "inputs_embeds"
        return {**inputs, name: (inputs[name] * 3 + 1) % 97}

    return prepared


@pytest.mark.parametrize("method", reasons._METHODS)
def test_a_method_that_the_loops_call_is_the_users(method, model):
    def own(self, *args, **kwargs):
        return getattr(transformers.LlamaForCausalLM, method)(self, *args, **kwargs)

    assert reasons.of_model(of_another_class(model, **{method: own})) == f"{method}() of Own"


@pytest.mark.parametrize("num_beams", [1, 3])
def test_inputs_of_a_step_that_the_model_itself_prepares_otherwise(num_beams, model):
    # As PEFT does it for prompts that are learned.
    name = "prepare_inputs_for_generation"
    options = {**BEAMS, "num_beams": num_beams}
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    # The class's own, as PEFT leaves it behind.
    assert_whole(model, **options)
    model.prepare_inputs_for_generation = with_other_tokens(model.prepare_inputs_for_generation)
    assert_declined(model, f"{name}() of a LlamaForCausalLM that has been replaced", **options)
    del model.prepare_inputs_for_generation
    assert_whole(model, **options)


@pytest.mark.parametrize("of", ["model", "class"])
def test_a_generate_that_takes_only_what_it_knows(of, model):
    stock = transformers.LlamaForCausalLM.generate

    def generate(self, input_ids, attention_mask, num_beams, max_new_tokens, do_sample):
        return stock(
            self, (input_ids * 3 + 1) % 97, num_beams=num_beams, max_new_tokens=max_new_tokens, do_sample=False
        )

    if of == "class":
        model = of_another_class(model, generate=generate)
    else:
        model.generate = generate.__get__(model)
    expected = model.generate(**inputs_for(model), **BEAMS, do_sample=False)
    with whole(model):
        assert torch.equal(model.generate(**inputs_for(model), **BEAMS, do_sample=False), expected)
    assert stats(reset=True).reasons == {"a generate() that takes no custom_generate": 1}


class Reversed(transformers.LogitsProcessorList):
    """A list of processors that does something of its own."""

    def __call__(self, input_ids, scores, **kwargs):
        return -super().__call__(input_ids, scores, **kwargs)


def test_a_list_of_processors_that_a_models_own_method_gives(model):
    given = Reversed([transformers.SuppressTokensLogitsProcessor([8])])
    model = of_another_class(model, _get_logits_processor=lambda self, *args, **kwargs: given)
    assert_declined(model, "logits processors in a Reversed", num_beams=3, max_new_tokens=6, output_scores=False)


def test_a_method_that_is_patched_for_all_models(model, monkeypatch):
    name = "prepare_inputs_for_generation"
    assert_whole(model, **BEAMS)
    with monkeypatch.context() as patch:
        patch.setattr(
            transformers.GenerationMixin, name, with_other_tokens(getattr(transformers.GenerationMixin, name))
        )
        assert_declined(model, f"{name}() of LlamaForCausalLM", **BEAMS)
    # It still runs what it is given to run.
    generate = transformers.GenerationMixin.generate
    monkeypatch.setattr(transformers.GenerationMixin, "generate", lambda *args, **kwargs: generate(*args, **kwargs))
    assert_whole(model, **BEAMS)


TRLS = """
import functools, types

def add(model, is_used):
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def _fused_forward(self, *args, fused_lm_head=IS_USED, **kwargs):
        return None if fused_lm_head else original_forward(*args, **kwargs)

    model.forward = types.MethodType(_fused_forward, model)
"""


def test_the_forward_of_trls_trainers(model):
    """It runs the model's own forward() unless it is asked for losses: tests/clients.py has the real one."""
    found: dict = {}
    for file, is_used, is_known in (
        ("/x/trl/trainer/utils.py", False, True),
        ("/x/trl/trainer/utils.py", True, False),
        ("/x/mine/utils.py", False, False),
    ):
        exec(compile(TRLS.replace("IS_USED", str(is_used)), file, "exec"), found)
        own = copy.deepcopy(model)
        found["add"](own, is_used)
        with whole(own):
            stats(reset=True)
            if is_used:
                assert reasons.of_model(own) is not None
                continue
            given = own.generate(**inputs_for(own), **BEAMS, do_sample=False)
        assert (stats(reset=True).whole > 0) == is_known
        assert torch.equal(given, model.generate(**inputs_for(model), **BEAMS, do_sample=False))
        # One that runs another forward() than the class's.
        found["add"](own, is_used)
        assert reasons.of_model(own) is not None


@pytest.mark.parametrize(
    ("register", "hook"),
    [
        (register_module_forward_hook, lambda module, args, output: -output),
        (register_module_forward_pre_hook, lambda module, args: (-args[0],)),
    ],
    ids=["after", "before"],
)
def test_hooks_of_all_modules(register, hook, model):
    assert_whole(model, **BEAMS)
    kind = type(model.model.layers[0].mlp)
    handle = register(lambda module, *args: hook(module, *args) if type(module) is kind else None)
    try:
        assert_declined(model, "a forward hook of all modules", **BEAMS)
    finally:
        handle.remove()
    assert_whole(model, **BEAMS)


def test_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        assert_declined(model, "autocast", max_new_tokens=6)


def test_processes_that_wait_for_each_other(model):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert_declined(model, "synced_gpus", synced_gpus=True, max_new_tokens=6)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_windows_of_the_cache_alone(num_beams, model):
    # Llama's attention knows none, but the cache that generate() makes for such a configuration forgets.
    model.config.sliding_window = 5
    reason = "LlamaForCausalLM has windows that its attention does not say"
    assert_declined(model, reason, inputs_for(model, length=12), num_beams=num_beams, max_new_tokens=12)


def test_windows_of_another_size_than_that_of_the_mask():
    model = copy.deepcopy(family("Gemma2"))
    assert_whole(model, **BEAMS)
    model.model.layers[0].self_attn.sliding_window = 3
    assert_declined(model, "Gemma2ForCausalLM has windows that its attention does not say", **BEAMS)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sources_of_padding_alone(attention, num_beams):
    model = encoder_decoder("Bart", 1, attn_implementation=attention)
    inputs = source_for(model, 2)
    options = {**BEAMS, "num_beams": num_beams}
    assert_whole(model, inputs, **options)
    inputs["attention_mask"][0] = 0
    assert_declined(model, "a source of padding alone", inputs, **options)


def of_a_class_of_transformers(model, generate):
    """The model, of a class that is written as those of transformers are."""
    generate.__module__ = "transformers.models.of_a_test"
    return of_another_class(model, generate=generate)


def test_a_generate_that_hands_on_to_the_one_above(model):
    class Above(transformers.LlamaForCausalLM):
        def generate(self, *args, **kwargs):
            kwargs.pop("input_features", None)
            return super().generate(*args, **kwargs)

    Above.generate.__module__ = "transformers.models.of_a_test"
    model.__class__ = Above
    assert_whole(model, **BEAMS, input_features=None)


def test_a_generate_that_hands_nothing_on_never_gets_a_loop(model):
    def own(self, inputs=None, **kwargs):
        if "custom_generate" in kwargs:
            raise ValueError("custom_generate are not used by the model")
        return transformers.LlamaForCausalLM.generate(self, inputs, **kwargs)

    assert_declined(of_a_class_of_transformers(model, own), "generate() of Own", **BEAMS)


def test_a_generate_that_calls_that_of_a_part(model):
    """As models that read images do. What the part's call says is all that is counted."""

    class OfParts(transformers.LlamaForCausalLM):
        def generate(self, **kwargs):
            return self.part.generate(**kwargs)

    whole_model = OfParts(model.config).eval()
    whole_model.part = model
    assert_whole(whole_model, **BEAMS)
    assert_declined(whole_model, "output_attentions", **BEAMS, output_attentions=True)


def test_a_loop_that_is_handed_on_to_a_part_looks_at_the_part(model):
    class Above(transformers.LlamaForCausalLM):
        def generate(self, *args, **kwargs):
            return self.part.generate(*args, **kwargs) if hasattr(self, "part") else super().generate(*args, **kwargs)

    Above.generate.__module__ = "transformers.models.of_a_test"
    whole_model = Above(model.config).eval()
    whole_model.part = model
    name = "prepare_inputs_for_generation"
    reason = f"{name}() of a {type(model).__name__} that has been replaced"
    for is_replaced in (False, True):
        if is_replaced:
            setattr(model, name, with_other_tokens(getattr(type(model), name)).__get__(model))
        expected = model.generate(**inputs_for(model), **BEAMS)
        stats(reset=True)
        with fused_decoding(whole_model):
            assert torch.equal(whole_model.generate(**inputs_for(model), **BEAMS), expected)
        steps = stats(reset=True)
        assert (steps.whole == 0) == is_replaced == (reason in steps.reasons)

# SPDX-License-Identifier: Apache-2.0
"""How fused decoding is turned on and off, what it counts, and what it leaves to the stock operations."""

import contextlib
import copy
import functools
import gc
import inspect
import warnings

import pytest
import torch
import transformers

from decoding import OPTIONS, inputs_for, one_thread, own_model, run, stats, tiny  # noqa: F401
from fused_topk import generation
from fused_topk.generation import disable, enable, fused_decoding


def test_enable_and_disable(model):
    stock, steps = run(model, num_beams=3)
    assert steps[:3] == (0, 0, {})
    # What another test has kept of the model goes, too.
    disable(model)
    before = dict(model.__dict__)
    enable(model)
    found, steps = run(model, num_beams=3)
    assert torch.equal(found, stock)
    assert steps[:3] == (6, 0, {})
    enable(model)
    assert run(model, do_sample=True)[1][:3] == (6, 0, {})
    disable(model)
    disable(model)
    assert run(model, num_beams=3)[1][:3] == (0, 0, {})
    assert model.__dict__.keys() == before.keys()
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("options", [{}, {"output_attentions": True}], ids=str)
def test_a_warning_of_transformers_names_the_users_line(options, model):
    def call():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            # An enabled model and a plain one warn of this line.
            cache = transformers.DynamicCache()
            texts, _ = run(model, past_key_values=cache, **options)
        lines = [(each.category, each.filename, each.lineno) for each in found]
        return lines, cache.get_seq_length(), getattr(texts, "sequences", texts).tolist()

    stock = call()
    with fused_decoding(model):
        assert call() == stock


def test_calls_outside_generate_are_not_touched(model):
    enable(model)
    output = model(**inputs_for(model), labels=inputs_for(model)["input_ids"])
    assert type(output.logits) is torch.Tensor
    output.loss.backward()
    assert run(model)[1][:3] == (6, 0, {})
    assert type(model(**inputs_for(model)).logits) is torch.Tensor


def test_a_model_within_a_module_is_found(model):
    outer = torch.nn.ModuleDict({"language": model, "head": torch.nn.Linear(2, 2)})
    with fused_decoding(outer):
        assert run(model)[1][:3] == (6, 0, {})
    assert run(model)[1][:3] == (0, 0, {})


@pytest.mark.parametrize("function", [enable, disable])
def test_what_cannot_generate_is_refused(function):
    with pytest.raises(TypeError, match="`model` must be a transformers model, got str"):
        function("gpt2")
    with pytest.raises(TypeError, match=r"`model` must have a generate\(\) of transformers"):
        function(torch.nn.Linear(2, 2))


def test_options_are_checked(model):
    with pytest.raises(TypeError, match="`compile` must be a bool, got int"):
        enable(model, compile=1)
    for gone in ("sampling", "whole_step"):
        with pytest.raises(TypeError, match=f"`{gone}` is no argument of .*; leave it out"):
            enable(model, **{gone: True})
        with pytest.raises(TypeError, match=f"`{gone}` is no argument of"), fused_decoding(model, **{gone: True}):
            pass
    with pytest.raises(AttributeError, match="write `with fused_decoding"):
        _ = generation.generate


def test_generate_is_a_method_of_the_model(model):
    """Also for those who ask: inspect, functools.partial, a replica, gradients through generate()."""
    # Models that other tests have enabled.
    gc.collect()
    stock, unwrapped = type(model).generate, inspect.unwrap(type(model).generate)
    ids = inputs_for(model)["input_ids"]
    expected = model.generate(ids, **OPTIONS)
    with fused_decoding(model):
        assert inspect.ismethod(model.generate) and model.generate.__self__ is model
        assert model.generate.__wrapped__ is unwrapped and type(model).generate is stock
        assert inspect.signature(model.generate) == inspect.signature(functools.partial(stock, model))
        assert torch.equal(functools.partial(model.generate, **OPTIONS)(ids), expected)
        kept = model.generate
        assert torch.equal(model.generate.__wrapped__(model, ids, **OPTIONS), expected)
        replica = model._replicate_for_data_parallel()
        assert "generate" not in vars(replica)
        stats(reset=True)
        replica.generate.__func__(model, ids, **OPTIONS)
        assert stats(reset=True).whole == 0
        kept(ids, **OPTIONS)
        assert stats(reset=True).whole == 6
    assert "generate" not in vars(type(model)) and "generate" not in vars(model)
    assert torch.equal(kept(ids, **OPTIONS), expected) and stats(reset=True)[:3] == (0, 0, {})


def test_models_of_a_class_and_of_its_base(model):
    """Each call runs once, and only of the models that are enabled."""
    derived, other = copy.deepcopy(model), copy.deepcopy(model)
    derived.__class__ = type("Derived", (type(model),), {"__module__": type(model).__module__})
    expected, _ = run(model)
    for enabled, whole in (([model], [1, 0, 0]), ([derived], [0, 1, 0]), ([model, derived], [1, 1, 0])):
        with contextlib.ExitStack() as stack:
            for each in enabled:
                stack.enter_context(fused_decoding(each))
            for each, is_whole in zip((model, derived, other), whole, strict=True):
                found, steps = run(each)
                assert torch.equal(found, expected) and steps[:3] == (6 * is_whole, 0, {}), steps


# What is not served runs as it would.


@pytest.mark.parametrize("option", ["prompt_lookup_num_tokens", "assistant_model"])
def test_assisted_decoding_runs_stock_operations(model, option):
    is_model = option == "assistant_model"
    options = {option: copy.deepcopy(tiny("llama", seed=1)) if is_model else 2, **OPTIONS}
    expected = model.generate(**inputs_for(model, 1), **options)
    with fused_decoding(model):
        assert torch.equal(model.generate(**inputs_for(model, 1), **options), expected)
    steps = stats(reset=True)
    assert steps.whole == 0 and steps.stock > 0
    assert list(steps.reasons) == [option if is_model else f"another mode of generate(), {option}"]


def letter(token):
    return chr(ord("a") + token - 2) if token < 28 else chr(0x100 + token)


def tokenizer():
    """One letter a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = {"<pad>": 0, "<s>": 1, **{letter(token): token for token in range(2, 211)}}
    made = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>")


def test_pipelines(model):
    answer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    expected = answer("hello", num_beams=3, **OPTIONS)
    with fused_decoding(model):
        assert answer("hello", num_beams=3, **OPTIONS) == expected
    assert stats(reset=True)[:3] == (6, 0, {})

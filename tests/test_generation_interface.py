# SPDX-License-Identifier: Apache-2.0
"""How fused decoding is turned on and off, what it counts, and what it leaves to the stock operations."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import textwrap
import threading

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

import transformers
from transformers import LogitsProcessorList
from transformers.generation import utils as generation_utils

from decoding import (  # noqa: F401
    OPTIONS,
    Recorder,
    assert_same,
    generate_both,
    inputs_for,
    one_prompt,
    one_thread,
    own_model,
    run,
    tiny,
)
from fused_topk.generation import disable, enable, fused_decoding, generate, statistics, stats


def test_enable_and_disable(model):
    stock, steps = run(model, num_beams=3)
    assert steps == (0, 0, {})
    # What another test has kept of the model goes, too.
    disable(model)
    before = dict(model.__dict__)
    enable(model, whole_step=False)
    found, steps = run(model, num_beams=3)
    assert torch.equal(found, stock)
    assert steps == (6, 0, {})
    enable(model, sampling=True, whole_step=False)
    assert run(model, do_sample=True)[1] == (6, 0, {})
    disable(model)
    disable(model)
    assert run(model, num_beams=3)[1] == (0, 0, {})
    assert model.__dict__.keys() == before.keys()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_block_within_an_enabled_model_leaves_it_enabled(model):
    enable(model, sampling=True, whole_step=False)
    with fused_decoding(model, whole_step=False) as given:
        assert run(model, do_sample=True)[1].reasons == {"do_sample without sampling=True": 6}
        with fused_decoding(model, topk_per_step=2, whole_step=False):
            run(model)
    assert given.topk == []
    assert run(model, do_sample=True)[1] == (6, 0, {})


def test_calls_outside_generate_are_not_touched(model):
    enable(model, whole_step=False)
    output = model(**inputs_for(model), labels=inputs_for(model)["input_ids"])
    assert type(output.logits) is torch.Tensor
    output.loss.backward()
    assert run(model)[1] == (6, 0, {})
    assert type(model(**inputs_for(model)).logits) is torch.Tensor


def test_a_failing_call_leaves_no_trace(model):
    class Failure(Exception):
        pass

    def fail(input_ids, scores):
        raise Failure

    with fused_decoding(model, whole_step=False):
        with pytest.raises(Failure):
            run(model, logits_processor=LogitsProcessorList([fail]))
        stats(reset=True)
        assert type(model(**inputs_for(model)).logits) is torch.Tensor
        assert run(model)[1] == (6, 0, {})
    assert run(model)[1] == (0, 0, {})


def test_a_model_within_a_module_is_found(model):
    outer = torch.nn.ModuleDict({"language": model, "head": torch.nn.Linear(2, 2)})
    with fused_decoding(outer, whole_step=False):
        assert run(model)[1] == (6, 0, {})
    assert run(model)[1] == (0, 0, {})


@pytest.mark.parametrize("function", [enable, disable])
def test_what_cannot_generate_is_refused(function):
    with pytest.raises(TypeError, match="`model` must be a transformers model, got str"):
        function("gpt2")
    with pytest.raises(TypeError, match=r"`model` must have a generate\(\) of transformers"):
        function(torch.nn.Linear(2, 2))


def test_options_are_checked(model):
    with pytest.raises(TypeError, match="`sampling` must be a bool, got int"):
        enable(model, sampling=1, whole_step=False)


def test_threads_are_apart(model):
    expected, _ = run(model, num_beams=3)
    found = {}

    def decode(name):
        with torch.no_grad():
            found[name] = model.generate(**inputs_for(model), num_beams=3, **OPTIONS)

    with fused_decoding(model, whole_step=False):
        stats(reset=True)
        workers = [threading.Thread(target=decode, args=(name,)) for name in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert stats(reset=True) == (18, 0, {})
    assert all(torch.equal(each, expected) for each in found.values()) and len(found) == 3


def test_the_first_fallback_of_a_kind_is_logged_once(model, caplog, monkeypatch):
    monkeypatch.setattr(statistics, "_told", set())
    epsilon = transformers.LogitsProcessorList([transformers.EpsilonLogitsWarper(1e-4)])
    typical = transformers.LogitsProcessorList([transformers.TypicalLogitsWarper(0.5)])
    with caplog.at_level(logging.WARNING, "fused_topk.generation"), fused_decoding(model, whole_step=False):
        for _ in range(2):
            assert run(model, logits_processor=epsilon)[1].fallback == 6
            assert run(model, num_beams=2, logits_processor=typical)[1].fallback == 6
    assert [record.message for record in caplog.records] == [
        "fused_topk: a decoding step runs stock operations: logits processor EpsilonLogitsWarper",
        "fused_topk: a decoding step runs stock operations: logits processor TypicalLogitsWarper",
    ]


def test_all_that_was_counted_is_printed():
    stats(reset=True)
    assert repr(stats()) == "Stats(fused=0, fallback=0)"
    statistics.count_whole(5, are_compiled=True, are_captured=False)
    statistics.count_whole(7, are_compiled=False, are_captured=True)
    statistics.count_fused(is_sharded=True)
    for reason, count in {
        "hooks": statistics.count_fallback,
        "a mask": functools.partial(statistics.count_not_whole, whole_step=True),
        "a sum": statistics.count_not_compiled,
        "a scale": statistics.count_gathered,
    }.items():
        count(reason)
    counted = stats(reset=True)
    assert repr(counted) == (
        "Stats(fused=13, fallback=1, reasons={'hooks': 1}, whole=12, not_whole={'a mask': 1}, compiled=5, captured=7, "
        "not_compiled={'a sum': 1}, sharded=1, gathered={'a scale': 1})"
    )
    assert set(type(counted).__annotations__) == set(vars(counted)), "a field that is not printed"
    assert counted == (13, 1, {"hooks": 1})


# What is not served runs as it would.


def test_streamers_get_the_tokens(model):
    def streamed(**options):
        recorder = Recorder()
        stats(reset=True)
        model.generate(**one_prompt(model), streamer=recorder, **OPTIONS, **options)
        return recorder.pieces

    expected = streamed()
    assert len(expected) == 1 + 6 + 1 and expected[-1] == "end"
    with fused_decoding(model, whole_step=False):
        assert streamed() == expected
        assert stats() == (6, 0, {})
    assert streamed(custom_generate=generate, whole_step=False) == expected
    assert stats() == (6, 0, {})


@pytest.mark.parametrize(
    "options", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": "tiny"}], ids=["lookup", "assistant"]
)
def test_assisted_decoding_runs_stock_operations(model, options):
    if "assistant_model" in options:
        options = {"assistant_model": copy.deepcopy(tiny("llama", seed=1))}
    expected = model.generate(**one_prompt(model), **OPTIONS, **options)
    stats(reset=True)
    with fused_decoding(model, whole_step=False):
        given = model.generate(**one_prompt(model), **OPTIONS, **options)
    steps = stats(reset=True)
    assert torch.equal(given, expected)
    assert steps.fused == 0 and steps.fallback > 0, "a fallback that is not counted"


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


def test_stop_strings(model):
    for num_beams in (1, 3):
        free, _ = run(model, num_beams=num_beams)
        stop = letter(int(free[0, -3]))
        options = {"num_beams": num_beams, "stop_strings": [stop], "tokenizer": tokenizer()}
        stock, given, steps = generate_both(model, inputs_for(model, batch=1), **options)
        assert_same(stock, given)
        assert steps.fused and not steps.fallback


def test_whisper_with_timestamps():
    # Its processor of timestamps compares sums of probabilities; short and long form.
    whisper = copy.deepcopy(tiny("whisper"))
    config = whisper.generation_config
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 190, 10
    config.begin_suppress_tokens, config.eos_token_id = None, 5
    for inputs in (inputs_for(whisper), {"input_features": torch.randn(1, 8, 100)}):
        options = {**OPTIONS, "return_timestamps": True, "num_beams": 2}
        expected = whisper.generate(**inputs, **options)
        stats(reset=True)
        with fused_decoding(whisper, whole_step=False):
            given = whisper.generate(**inputs, **options)
        steps = stats(reset=True)
        assert torch.equal(given, expected)
        assert steps.fused > 0 and steps.fallback == 0, steps.reasons


def test_pipelines(model):
    answer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    expected = answer("hello", num_beams=3, **OPTIONS)
    stats(reset=True)
    with fused_decoding(model, whole_step=False):
        assert answer("hello", num_beams=3, **OPTIONS) == expected
    assert stats(reset=True) == (6, 0, {})


class OwnLoop(transformers.LlamaForCausalLM):
    """Takes its logits in another way than transformers' loops."""

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        for _ in range(3):
            logits = self(input_ids).logits[:, -1].float()
            input_ids = torch.cat([input_ids, logits_processor(input_ids, logits).argmax(-1, keepdim=True)], 1)
        return input_ids


def test_a_loop_that_is_not_recognised_runs_as_it_is(model):
    own = OwnLoop(model.config).eval()
    own.load_state_dict(model.state_dict())
    expected, _ = run(own)
    with fused_decoding(own, whole_step=False):
        given, steps = run(own)
    assert torch.equal(given, expected)
    assert steps.fused == 0
    assert steps.reasons == {"the loop of OwnLoop does not take the last logits as transformers' loops do": 3}


@pytest.mark.parametrize(
    "use",
    [
        lambda scores: scores * 2,
        lambda scores: 2 * scores,
        lambda scores: scores[:, :],
        lambda scores: torch.where(scores > 0, scores, scores),
        lambda scores: torch.cat([scores[:, :100], scores[:, 100:]], dim=1),
        lambda scores: scores.sub_(1.0),
        lambda scores: scores.view(-1, scores.shape[-1]),
        lambda scores: torch.from_numpy(scores.numpy()),
        lambda scores: scores.masked_fill(scores > 1e9, 0.0) if (scores < 1e9).all() else None,
    ],
    ids=lambda use: inspect.getsource(use).strip().removeprefix("lambda scores: ").rstrip(",")[:30],
)
def test_any_operation_on_lazy_scores_is_that_on_the_tensor(use, monkeypatch):
    # As if a later version of a loop did something new between the processors and the choice.
    from fused_topk.backends import cpu
    from fused_topk.generation.choice.rows import Rows
    from fused_topk.generation.interception.lazy_scores import LazyScores

    logits = torch.randn(3, 211, generator=torch.Generator().manual_seed(0))
    lazy = LazyScores.of(Rows(logits, cpu), logits.unsqueeze(1))
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.ndim, len(lazy)) == ((3, 211), torch.float32, logits.device, 2, 3)
    stats(reset=True)
    assert torch.equal(use(lazy), use(logits.clone()))
    assert stats(reset=True).fallback == 1
    # The choice is made from what the operations have left.
    assert torch.equal(torch.argmax(lazy, dim=-1), torch.argmax(logits, dim=-1))


def test_scores_kept_beyond_their_step_say_so():
    from fused_topk.backends import cpu
    from fused_topk.generation.choice.rows import Rows
    from fused_topk.generation.interception.lazy_scores import LazyScores

    logits = torch.randn(3, 2, 211)
    lazy = LazyScores.of(Rows(logits[:, -1], cpu), logits)
    expected = logits[:, -1].argmax(-1)
    assert torch.equal(lazy.argmax(-1), expected)
    # As long as the loop has the model's output, so do they.
    assert torch.equal(lazy + 0, logits[:, -1])
    lazy = LazyScores.of(Rows(logits[:, -1], cpu), logits)
    assert torch.equal(torch.argmax(lazy, dim=-1), expected)
    del logits
    with pytest.raises(RuntimeError, match="used after the model's output had been dropped"):
        lazy.sum()


def compiling(model, **options):
    """The model's own compiled call, as decoding with a static cache makes it on a GPU."""
    model._valid_auto_compile_criteria = lambda *args: True
    model.get_compiled_call = lambda config: torch.compile(model.__call__, backend="eager", fullgraph=True)
    return run(model, cache_implementation="static", **options)


def test_a_compiled_forward_is_fused_where_its_logits_come_out(model):
    expected, _ = compiling(copy.deepcopy(model))
    model._valid_auto_compile_criteria = lambda *args: True
    model.get_compiled_call = lambda config: torch.compile(model.__call__, backend="eager", fullgraph=True)
    with fused_decoding(model, whole_step=False):
        given, steps = run(model, cache_implementation="static")
    assert torch.equal(given, expected)
    assert steps == (6, 0, {})


# Names of transformers that may go.


def without(monkeypatch, name):
    """transformers as if a private method had another name."""
    renamed = f"{name}_of_tomorrow"
    mixin = transformers.GenerationMixin
    source = textwrap.dedent(inspect.getsource(mixin.generate)).replace(f"self.{name}", f"self.{renamed}")
    namespace = dict(generation_utils.__dict__)
    exec(source, namespace)
    monkeypatch.setattr(mixin, "generate", namespace["generate"])
    monkeypatch.setattr(mixin, renamed, getattr(mixin, name), raising=False)
    monkeypatch.delattr(mixin, name)


def test_without_the_private_name_generate_is_stock_with_one_warning(model, caplog, monkeypatch):
    expected, _ = run(model, num_beams=3)
    monkeypatch.setattr(statistics, "_told", set())
    without(monkeypatch, "_get_logits_processor")
    with caplog.at_level(logging.WARNING, "fused_topk.generation"):
        for _ in range(2):
            with fused_decoding(model, whole_step=False):
                given, steps = run(model, num_beams=3)
            assert torch.equal(given, expected)
            assert steps == (0, 0, {})
            given, steps = run(model, num_beams=3, custom_generate=generate, whole_step=False)
            assert torch.equal(given, expected)
        enable(model, whole_step=False)
        disable(model)
    assert [record.message for record in caplog.records] == [
        "fused_topk: generate() stays stock: this version of transformers has no _get_logits_processor"
    ]


@pytest.mark.parametrize("name", ["get_compiled_call"])
def test_without_optional_names_decoding_is_fused(model, monkeypatch, name):
    owner = next(cls for cls in type(model).__mro__ if name in cls.__dict__)
    monkeypatch.delattr(owner, name)
    with fused_decoding(model, whole_step=False):
        assert run(model, num_beams=3)[1] == (6, 0, {})

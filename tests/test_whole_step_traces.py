# SPDX-License-Identifier: Apache-2.0
"""What users' own code in a model keeps, counts or draws: texts and the state after a call are those of stock generate()."""

import contextlib
import copy
import signal
import threading

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decoding import inputs_for, stats
from fused_topk.generation import disable, enable, fused_decoding
from whole_steps import family

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Keeping(nn.Module):
    """A layer that keeps what it saw."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.seen = layer, None

    def forward(self, *args, **kwargs):
        self.seen = self.layer(*args, **kwargs)
        return self.seen


class Listing(Keeping):
    """One that appends to a list."""

    def __init__(self, layer):
        super().__init__(layer)
        self.notes = []

    def forward(self, *args, **kwargs):
        self.notes.append(len(self.notes))
        return self.layer(*args, **kwargs)


class Buffered(Keeping):
    """One that writes to a buffer."""

    def __init__(self, layer):
        super().__init__(layer)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, *args, **kwargs):
        self.passes += 1
        return self.layer(*args, **kwargs)


class NormHead(nn.Linear):
    """A head that normalizes its weight once, in the first pass after training, as that of Baichuan2."""

    is_first = True

    def forward(self, hidden):
        if self.is_first:
            self.is_first = False
            self.weight.data = nn.functional.normalize(self.weight.data)
        return nn.functional.linear(hidden, self.weight)


def with_layer(kind):
    def make(model):
        model.model.layers[1].mlp = kind(model.model.layers[1].mlp)

    return make


def with_head(model):
    head = NormHead(32, 97, bias=False)
    head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.lm_head = head


def with_dropout(model):
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.3).train())


CHANGES = {kind.__name__: with_layer(kind) for kind in (Keeping, Listing, Buffered)}
CHANGES |= {"NormHead": with_head, "dropout": with_dropout}


def state_of(model):
    """All that hangs at the modules, values included."""

    def value(each):
        return each.tolist() if isinstance(each, torch.Tensor) else repr(each)

    found = {name: each.tolist() for name, each in model.state_dict().items()}
    for name, module in model.named_modules():
        own = {key: each for key, each in vars(module).items() if not key.startswith("_") and key != "config"}
        found |= {f"{name}.{key}": value(each) for key, each in own.items() if key != "generation_config"}
    return found


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_texts_and_the_state_after_a_call_are_stocks(change, num_beams):
    stock, fused = (copy.deepcopy(family("Llama")) for _ in range(2))
    inputs, found = inputs_for(stock, 2), []
    for model in (stock, fused):
        CHANGES[change](model)
    enable(fused)
    for model in (stock, fused):
        torch.manual_seed(3)
        texts = [model.generate(**inputs, **OPTIONS, num_beams=num_beams) for _ in range(2)]
        found.append((texts, torch.randn(2)))
    disable(fused)
    assert all(map(torch.equal, *(texts for texts, _ in found)))
    # The draws after the calls, too.
    assert torch.equal(found[0][1], found[1][1])
    assert state_of(stock) == state_of(fused)


def test_a_trial_leaves_no_trace_and_is_not_repeated(monkeypatch):
    from fused_topk.generation.whole_step import trial

    model, tried = copy.deepcopy(family("Llama")), []
    with_layer(Listing)(model)
    layer = model.model.layers[1].mlp
    reason_against = trial.reason_against
    monkeypatch.setattr(trial, "reason_against", lambda *args, **kw: tried.append(1) or reason_against(*args, **kw))
    with fused_decoding(model):
        for _ in range(3):
            model.generate(**inputs_for(model, 1), **OPTIONS)
    assert len(layer.notes) == 3 * 6 and len(tried) == 1
    assert "a forward pass that" in str(stats(reset=True).reasons)


def test_a_trial_leaves_the_draws_of_all_threads_as_they_are(monkeypatch):
    from fused_topk.generation.whole_step import trial

    model, drawn, reason = copy.deepcopy(family("Llama")), [], trial._reason

    def while_another_thread_draws(*args):
        thread = threading.Thread(target=lambda: drawn.append(torch.randn(3)))
        thread.start()
        thread.join()
        return reason(*args)

    monkeypatch.setattr(trial, "_reason", while_another_thread_draws)
    torch.manual_seed(1)
    expected = torch.randn(3), torch.randn(3)
    torch.manual_seed(1)
    with fused_decoding(model):
        model.generate(**inputs_for(model, 1), **OPTIONS)
    assert torch.equal(drawn[0], expected[0]) and torch.equal(torch.randn(3), expected[1])
    assert stats(reset=True).whole == 6


def test_a_model_in_training_mode_without_dropout_is_served():
    model = copy.deepcopy(family("Llama")).train()
    inputs = inputs_for(model, 2)
    expected = model.generate(**inputs, **OPTIONS)
    with fused_decoding(model):
        assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    assert stats(reset=True).whole == 6 and model.training


@pytest.mark.parametrize("place", ["attention", "class", "cache", "layer"])
def test_a_function_of_the_users_own_is_called_as_in_stock(place, monkeypatch):
    """Attention, and update() of caches."""
    model, calls, counts = copy.deepcopy(family("Llama")), [], []

    def counted(of):
        return lambda *args, **kwargs: calls.append(1) or of(*args, **kwargs)

    if place == "attention":
        AttentionInterface.register("mine_of_a_test", counted(sdpa_attention_forward))
        model.config._attn_implementation = "mine_of_a_test"
    elif place == "class":
        monkeypatch.setattr(DynamicCache, "update", counted(DynamicCache.update))
    for block in (contextlib.nullcontext(), fused_decoding(model)):
        calls.clear()
        given = {}
        if place in ("cache", "layer"):
            given["past_key_values"] = DynamicCache(config=model.config)
            of = given["past_key_values"] if place == "cache" else given["past_key_values"].layers[0]
            of.update = counted(of.update)
        with block:
            model.generate(**inputs_for(model, 2), **OPTIONS, **given)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0
    assert place != "attention" or "attention of your own" in str(stats().reasons)


class Late(Exception):
    pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_an_exception_of_an_alarm_reaches_the_caller(monkeypatch):
    from fused_topk.generation.whole_step import trial

    model = copy.deepcopy(family("Llama"))
    inputs = inputs_for(model, 1)
    expected = model.generate(**inputs, **OPTIONS)

    def ring(*_):
        raise Late

    reason = trial._reason
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with fused_decoding(model):
            with monkeypatch.context() as patch, pytest.raises(Late):
                patch.setattr(trial, "_reason", lambda *_: signal.raise_signal(signal.SIGALRM))
                model.generate(**inputs, **OPTIONS)
            assert trial._reason is reason
            assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert stats(reset=True).whole == 6

# SPDX-License-Identifier: Apache-2.0
"""Room for new tokens that grows as texts do: the results of stock across each size, and memory that follows the texts."""

import copy

import pytest
import torch

from decoding import Recorder, also, assert_whole, inputs_for, one_thread, stock_gap  # noqa: F401
from fused_topk.generation.whole_step import entry, room, shape
from fused_topk.generation.whole_step.beams import Rules
from whole_steps import SERVED, SERVED_WITH_SOURCE, compiling, encoder_decoder, family, source_for, traced_only  # noqa: F401

# To trace a step takes seconds.
WAYS = [pytest.param(False, id="operations"), pytest.param(True, id="kept", marks=pytest.mark.exhaustive)]
OPTIONS = {"max_new_tokens": 40, "eos_token_id": None}


@pytest.fixture(autouse=True)
def little_room(traced, monkeypatch):
    """Sizes of 1, 5, 9 and so on, or, of what is kept, of 16 and 32; and steps are traced, but not compiled."""
    monkeypatch.setattr(room, "FIRST", 4)
    monkeypatch.setattr(room, "MORE", 4)


def model_and_inputs(name):
    is_both = name in SERVED_WITH_SOURCE
    model = (encoder_decoder if is_both else family)(name, 1)
    return model, source_for(model) if is_both else inputs_for(model, 3, padding=2)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("Llama", False),
        *also(*((name, False) for name in (*SERVED, *SERVED_WITH_SOURCE) if name != "Llama")),
        *also(*((name, True) for name in ("Llama", "Gemma2", "GPT2", "Bart", "Whisper"))),
    ],
)
def test_texts_longer_than_the_first_room(name, way, num_beams):
    model, inputs = model_and_inputs(name)
    for ends in (None, [5, 6, 7, 8]):
        options = {**OPTIONS, "num_beams": num_beams, "num_return_sequences": num_beams, "eos_token_id": ends}
        if stock_gap(model, inputs, **options) > 2e-5:
            assert_whole(model, inputs, compile=way, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [1, 2, 4, 5, *also(3, 7, 8, 9, 15, 16, 17, 31, 32, 33)])
def test_a_limit_beside_a_size(most, way):
    model, inputs = model_and_inputs("Llama")
    for beams in (1, 3):
        found = assert_whole(model, inputs, compile=way, num_beams=beams, max_new_tokens=most, eos_token_id=None)
        assert found["sequences"].shape[1] == 6 + most


@pytest.mark.exhaustive
def test_an_exception_leaves_a_step_as_it_was(monkeypatch):
    class Failing(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.pieces) == 9:
                raise OSError("gone")

    model, inputs = copy.deepcopy(family("Llama")), inputs_for(family("Llama"), 2)
    options = {**OPTIONS, "num_beams": 1}
    assert_whole(model, inputs, compile=True, **options)
    (step,) = entry._ready.get(model).store._kept.values()

    for _ in range(2):
        with compiling(model), pytest.raises(OSError, match="gone"):
            model.generate(**inputs, **options, do_sample=False, streamer=Failing())
        assert [*entry._ready.get(model).store._kept.values()] == [step]
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_whole(model, inputs, compile=True, **options)


def test_few_tokens_of_many_beams_get_few_places():
    assert [room.rounded_up(length, 4) for length in (1, 4, 5, 7, 9, 13, 17)] == [4, 4, 6, 8, 12, 16, 24]
    for beams, most in ((shape._WIDE, 16), (shape._WIDE + 1, 4)):
        assert shape.most_room(Rules(beams, 3, (), 1.0, False)) == most


def test_memory_that_is_spare_is_room_up_to_a_bound():
    assert [room.after(1, most, spare) for most, spare in ((60, 0), (60, 2), (60, 100), (3, 100))] == [2, 4, 5, 3]

# SPDX-License-Identifier: Apache-2.0
"""Many beams: their new tokens are masked where they are few, and gathered where they are many."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import assert_whole, inputs_for, one_thread, stock_gap  # noqa: F401
from fused_topk.generation.whole_step import ancestry, shape
from fused_topk.generation.whole_step.beams import Rules
from fused_topk.generation.whole_step.room import rounded_up
from fused_topk.generation.whole_step.shape import most_room
from whole_steps import encoder_decoder, family, source_for, swaps


@pytest.fixture(name="gathered")
def always_gathered(monkeypatch):
    monkeypatch.setattr(ancestry, "_PAIR_GATHERED", 0)
    monkeypatch.setattr(ancestry, "_PLACE_GATHERED", 0)


@pytest.mark.parametrize("num_beams", [3, 8])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Gemma3", "Mistral", "GPT2", "Bart", "M2M100"])
def test_gathered_tokens_give_the_stock_sequences(name, num_beams, gathered):
    crossed = compared = 0
    is_both = name in ("Bart", "M2M100")
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 14}
    for seed in range(6):
        model = (encoder_decoder if is_both else family)(name, seed)
        inputs = source_for(model) if is_both else inputs_for(model, batch=3, padding=3)
        if compared < 2 and stock_gap(model, inputs, **options) > 2e-5:
            crossed += swaps(assert_whole(model, inputs, **options), num_beams)
            compared += 1
    assert compared == 2 and crossed >= 15


def test_the_cap_of_scores_where_tokens_are_gathered(gathered):
    for attention in (None, "eager"):
        assert_whole(family("Gemma2", attention=attention), num_beams=4, max_new_tokens=14)


@pytest.mark.parametrize(
    ("beams", "room", "prompt", "masked_by_gathered"),
    [
        (4, 64, 16, 0.64),
        (4, 1024, 64, 0.22),
        (16, 1024, 64, 0.30),
        (64, 256, 64, 0.82),
        (128, 4, 1024, 0.71),
        (128, 64, 64, 1.48),
        (512, 4, 1024, 0.77),
        (512, 16, 64, 3.94),
        (512, 64, 1024, 3.90),
    ],
)
def test_the_choice_is_the_quicker_way_of_those_that_were_measured(beams, room, prompt, masked_by_gathered):
    assert ancestry.gathers(prompt, beams, room) == (masked_by_gathered > 1)


def test_few_tokens_of_many_beams_get_few_places():
    assert [rounded_up(length, 4) for length in (1, 4, 5, 7, 9, 13, 17)] == [4, 4, 6, 8, 12, 16, 24]
    for beams, room in ((shape._WIDE, 16), (shape._WIDE + 1, 4)):
        assert most_room(Rules(beams, 3, (), 1.0, False)) == room

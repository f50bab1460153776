# SPDX-License-Identifier: Apache-2.0
"""Steps whose attention reads keys by a table of ancestors, as on a GPU: here a stand-in computes what the kernel does."""

import pytest
import torch

import attention_by_table
from decoding import also, assert_whole, inputs_for
from fused_topk.generation import disable
from fused_topk.generation.whole_step.ancestry import Table
from fused_topk.operators import attention as by_table
from whole_steps import OTHER_LAYERS, SERVED, SERVED_WITH_SOURCE, encoder_decoder, family, source_for


@pytest.fixture
def tables(monkeypatch):
    """The tables that attention gets, in the order of the calls."""
    seen = []

    def stand_in(query, key, value, table, *others):
        seen.append(table)
        return attention_by_table.step_attention(query, key, value, table, *others)

    monkeypatch.setattr(by_table, "serves", lambda *args: True)
    monkeypatch.setattr(by_table, "run", stand_in)
    return seen


def assert_stocks_texts(model, inputs, tables, **options):
    # What another test has kept for the model reads a mask.
    disable(model)
    try:
        assert_whole(model, inputs, max_new_tokens=14, **options)
    finally:
        disable(model)
    assert tables


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("name", ["Gemma2", *also(*(name for name in SERVED if name != "Gemma2"))])
def test_families(name, num_beams, tables):
    model = family(name)
    assert_stocks_texts(model, inputs_for(model, batch=3, padding=3), tables, num_beams=num_beams)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["Bart", *also(*(name for name in SERVED_WITH_SOURCE if name != "Bart"))])
def test_encoder_decoders(name, num_beams, tables):
    model = encoder_decoder(name)
    assert_stocks_texts(model, source_for(model), tables, num_beams=num_beams)


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_keys_and_values_of_other_sizes_take_a_mask(name, tables):
    """Of a layer whose keys have another size than its values. Layers that read the keys of others have tables."""
    model = family(name)
    disable(model)
    assert_whole(model, inputs_for(model, padding=2), max_new_tokens=6)
    disable(model)
    assert bool(tables) == (name != "DeepseekV3")


def test_a_table_says_what_the_steps_have_written():
    """Beam 1 goes on from beam 0, then beam 0 from beam 1: each finds its past where its ancestors wrote it."""
    is_text = torch.tensor([[False, True, True], [True, True, True]])
    table = Table(is_text, 2)
    table.begin()
    parents = torch.tensor([[[0, 0, 1, 9], [0, 0, 1, 9]], [[0, 0, 0, 9], [0, 1, 1, 9]]])
    found = table(parents, torch.tensor([2]), 3)
    assert found.shape == (2, 1, 2, 2 + 1 + 3) and found.dtype == torch.int32
    # Places of the prompt; tokens written; bits; the writers of tokens 0 and 1, and the beam itself for token 2.
    assert found[:, 0].tolist() == [[[3, 3, 6, 0, 1, 0], [3, 3, 6, 0, 1, 1]], [[3, 3, 7, 0, 0, 0], [3, 3, 7, 1, 1, 1]]]
    # The next prompt has other padding. Bit 31 makes a negative number.
    wide = torch.ones(1, 40, dtype=torch.bool)
    table = Table(wide, 1)
    table.begin()
    assert table(None, torch.tensor([0]), 1).tolist() == [[[[40, 1, -1, 255]]]]
    wide[0, :32] = False
    table.begin()
    assert table(None, torch.tensor([4]), 5).tolist() == [[[[40, 5, 0, 255]]]]

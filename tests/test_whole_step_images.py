# SPDX-License-Identifier: Apache-2.0
"""Whole steps of models that read images, and of those that prepare their inputs by themselves."""

import copy
import itertools

import pytest
import torch
import transformers

from decoding import BOS, EOS, PAD, VERSION, also, assert_whole, inputs_for
from fused_topk.generation.whole_step import entry
from fused_topk.generation.whole_step.prompts import prepared
from fused_topk.generation.whole_step.reasons import Declined
from multimodal import MULTIMODAL, encoder_of_images, images_for, multimodal
from whole_steps import assert_declined, swaps

# Its prompts are not causal there, and Qwen3-VL gives no positions to its steps.
_LATER = {"PaliGemma": (5, 17), "Qwen3VL": (5, 0)}
SERVED = [name for name in MULTIMODAL if _LATER.get(name, (0, 0)) <= VERSION]
_QUICK = {("Llava", 3), ("Qwen2VL", 3), ("Gemma3", 1)}


def _cases():
    for name, beams in itertools.product(SERVED, (1, 3)):
        marks = () if (name, beams) in _QUICK else pytest.mark.exhaustive
        yield pytest.param(name, beams, marks=marks, id=f"{name}-{beams}")


@pytest.mark.parametrize(("name", "num_beams"), list(_cases()))
def test_images(name, num_beams):
    model = multimodal(name)
    options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 12}
    texts = []
    # With images, then with others and without padding, then without any.
    for inputs in (
        images_for(model),
        images_for(model, padding=0, seed=1),
        images_for(model, has_images=False),
    ):
        stock = assert_whole(model, inputs, **options)
        texts.append(stock["sequences"][:, inputs["input_ids"].shape[1] :].tolist())
        if num_beams > 1:
            assert swaps(stock, num_beams) > 0
    blank = images_for(model)
    blank["pixel_values"] = torch.zeros_like(blank["pixel_values"])
    other = model.generate(**blank, do_sample=False, pad_token_id=PAD, **options)
    # Texts are of the images.
    assert texts[0] != other[:, blank["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("num_beams", [3, *also(1)])
@pytest.mark.parametrize("decoder", ["GPT2", *also("Bert")])
def test_an_encoder_of_images(decoder, num_beams):
    model = encoder_of_images(decoder)
    texts = []
    for seed in range(2):
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}
        options = {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 12}
        texts.append(assert_whole(model, inputs, **options)["sequences"].tolist())
    assert texts[0] != texts[1]


@pytest.mark.parametrize("name", ["Llava", *also("Qwen2VL")])
def test_the_users_model_is_tried_once(name, monkeypatch):
    model = copy.deepcopy(multimodal(name))
    tried = []
    made = entry._made_ready
    monkeypatch.setattr(entry, "_made_ready", lambda model: tried.append(1) or made(model))
    for seed in range(3):
        assert_whole(model, images_for(model, seed=seed), num_beams=2, max_new_tokens=4)
    # generate() leaves the last prompt's shift of positions in models of Qwen-VL's kind.
    assert len(tried) == 1


def test_images_of_some_prompts_only():
    model = multimodal("Llava")
    with_image, without = images_for(model, batch=1, padding=0), images_for(model, batch=1, padding=0, has_images=False)
    padding = with_image["input_ids"].shape[1] - without["input_ids"].shape[1]
    rows = {}
    for name in ("input_ids", "attention_mask"):
        rows[name] = torch.cat([with_image[name], torch.nn.functional.pad(without[name], (padding, 0))])
    assert_whole(model, {**rows, "pixel_values": with_image["pixel_values"]}, num_beams=1, max_new_tokens=8)


def _bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        is_decoder=True, initializer_range=0.3, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    return transformers.BertLMHeadModel(config).eval()


def test_a_tensor_that_steps_look_at():
    model = _bert()
    inputs = inputs_for(model)
    assert entry.ready_for(model).twin is not None
    inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
    assert_declined(model, "steps with token_type_ids", inputs, num_beams=3)


class _Asked:
    """Prepares what it is told to."""

    def __init__(self, **of_steps):
        self._of_steps = of_steps
        self._number = -1

    def forward(self, input_ids=None, past_key_values=None, position_ids=None):
        raise AssertionError

    def prepare_inputs_for_generation(self, ids, **inputs):
        self._number += 1
        last = ids[:, -1:]
        of_step = {
            "input_ids": last,
            "position_ids": torch.full_like(last, ids.shape[1] - 1),
            "attention_mask": torch.ones_like(ids),
            "use_cache": True,
            "images": None,
        }
        own = {name: make(self._number, of_step.get(name)) for name, make in self._of_steps.items()}
        return {**of_step, **own} if self._number else {"input_ids": ids, "images": 3}

    def _update_model_kwargs_for_generation(self, outputs, inputs, **options):
        return inputs


_IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
_ALL = torch.ones(2, 3, dtype=torch.bool)


def _raises(*_):
    raise ValueError("no more")


@pytest.mark.parametrize(
    ("of_steps", "reason"),
    [
        ({"position_ids": lambda number, of: of * 2}, "positions that do not go up by one"),
        ({"position_ids": lambda number, of: of if number == 1 else None}, "positions that do not go up by one"),
        ({"position_ids": lambda number, of: of.T}, "positions of another shape"),
        ({"input_ids": lambda *_: _IDS}, "steps of more than a token"),
        ({"attention_mask": lambda number, of: of * 0}, "steps with a mask of their own"),
        ({"attention_mask": lambda number, of: {"full": of}}, "steps with a mask of their own"),
        ({"images": lambda *_: [3]}, "steps with images"),
        ({"images": _raises}, "a preparation that raises ValueError: no more"),
    ],
    ids=["fast", "missing", "shape", "tokens", "mask", "masks", "images", "raises"],
)
def test_steps_that_are_not_of_text(of_steps, reason):
    with pytest.raises(Declined, match=reason):
        prepared(_Asked(**of_steps), _IDS, _ALL, {})

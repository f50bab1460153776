# SPDX-License-Identifier: Apache-2.0
"""generate() of small models on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import NAMES, assert_whole, inputs_for, stats, tiny
from fused_topk.generation import fused_decoding


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


def test_sampling_on_the_gpu(cuda):
    model = tiny("llama", vocab_size=3000).to("cuda")
    try:
        stats(reset=True)
        with fused_decoding(model):
            for num_beams in (1, 3):
                options = {"do_sample": True, "top_k": 40, "top_p": 0.9, "num_beams": num_beams}
                found = model.generate(**inputs_for(model), max_new_tokens=5, **options)
                assert (found >= 0).all() and (found < 3000).all()
        assert stats(reset=True)[:3] == (10, 0, {})
    finally:
        model.to("cpu")

# SPDX-License-Identifier: Apache-2.0
"""generate() of small models on a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import NAMES, assert_whole, inputs_for, tiny


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

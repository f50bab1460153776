# SPDX-License-Identifier: Apache-2.0
"""Greedy and beam search of fused generate() against stock, over models, options and inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="4.57", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import NAMES, assert_fused, assert_same, generate_both, inputs_for, tiny

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("num_beams", [1, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_generate_gives_the_stock_sequences(name, num_beams, dtype):
    # bfloat16 logits tie at the k-th place in most rows.
    for seed in range(2):
        assert_fused(tiny(name, dtype, seed=seed), num_beams=num_beams, num_return_sequences=min(2, num_beams))

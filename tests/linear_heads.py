# SPDX-License-Identifier: Apache-2.0
"""LM heads for tests: hidden states and weights whose products add up exactly, and small pieces."""

import torch
from torch import Tensor

from fused_topk.functional import linear as functional
from fused_topk.layout import linear_pieces as layout
from oracle import DTYPES

ENTRIES = {"linear_softmax_topk": "softmax_topk", "linear_log_softmax_topk": "log_softmax_topk", "linear_topk": "topk"}
ALL_DTYPES = {**DTYPES, "fp64": torch.float64}


def exact_head(rows: tuple[int, ...] | int, depth: int, vocab_size: int, dtype: torch.dtype, device="cpu", seed=0):
    """Hidden states, weight and bias of which every sum of products is exact in float32, whatever its order.

    They are multiples of 1/8 and 1/4 below 1 and 2: so are the products, of 1/32, and 600 of them stay below 2^11.
    """
    generator = torch.Generator().manual_seed(seed)
    lead = (rows,) if isinstance(rows, int) else rows
    hidden = torch.randint(-7, 8, (*lead, depth), generator=generator) / 8
    weight = torch.randint(-7, 8, (vocab_size, depth), generator=generator) / 4
    bias = torch.randint(-7, 8, (vocab_size,), generator=generator) / 4
    return tuple(x.to(dtype).to(device) for x in (hidden, weight, bias))


def exact_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    logits = hidden.double() @ weight.double().T
    return (logits if bias is None else logits + bias.double()).to(hidden.dtype)


def gradients_in_pieces(monkeypatch, rows: int, tokens: int) -> None:
    """The backward pass of torch operations, and that of the kernel."""
    for name in ("backward_pieces", "in_place_pieces"):
        monkeypatch.setattr(layout, name, lambda *sizes: layout.Pieces(rows, min(tokens, sizes[1]), 1, blocks=2))


def without_the_native_kernel(monkeypatch) -> None:
    monkeypatch.setattr(layout, "_NATIVE_ROWS", 0)
    # The plan of a head is made anew, and the test's own does not stay.
    monkeypatch.setattr(functional, "_plan", functional._plan.__wrapped__)


def merged_in_pieces(monkeypatch, rows: int, tokens: int, states: int) -> None:
    without_the_native_kernel(monkeypatch)
    monkeypatch.setattr(
        layout, "forward_pieces", lambda *sizes: layout.Pieces(rows, min(tokens, sizes[1]), states, blocks=2)
    )

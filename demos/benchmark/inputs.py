# SPDX-License-Identifier: Apache-2.0
"""Logits to time on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .suites import ROUTERS, Case

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Each input of a rotation is aligned as a new tensor of torch's allocator is.
_ALIGNMENT_BYTES = 512
# More inputs make graphs of tens of thousands of nodes, which take seconds to capture and no longer change the time.
_MAX_ROTATION = 4096


def rotation_count(input_bytes: int, cache_bytes: int, free_bytes: int) -> int:
    """How many inputs to rotate over so that each comes from memory: together they exceed three times the cache.

    At most a third of the free memory goes to them, so that peers have room for what they make of one.
    """
    wanted = 3 * cache_bytes // max(input_bytes, 1) + 1
    affordable = max(free_bytes // 3 // max(input_bytes, 1), 1)
    return min(wanted, affordable, _MAX_ROTATION)


def fits_in_cache(input_bytes: int, cache_bytes: int) -> bool:
    """Whether an input read over and over stays in the cache, with room for the results."""
    return input_bytes <= 0.7 * cache_bytes


def make_inputs(case: Case, device: torch.device, count: int) -> list[Tensor]:
    """`count` distinct inputs of shape (rows, V), or (rows, beams, V) for a beam case."""
    dtype = DTYPES[case.dtype]
    generator = torch.Generator(device).manual_seed(0)
    numel = case.num_rows * case.vocab
    step = math.ceil(numel * dtype.itemsize / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES // dtype.itemsize
    storage = torch.empty((count, step), dtype=dtype, device=device)
    shape = (case.rows, case.beams, case.vocab) if case.beams else (case.rows, case.vocab)
    inputs = [row[:numel].view(shape) for row in storage.unbind(0)]
    for logits in inputs:
        fill(logits, case.distribution, generator)
        if case.is_ragged:
            # Peers that know no lengths then have the same answer.
            beyond = torch.arange(case.vocab, device=device) >= lengths_of(case, device).unsqueeze(-1)
            logits.masked_fill_(beyond, -math.inf)
    return inputs


def lengths_of(case: Case, device: torch.device) -> Tensor:
    """The rows' lengths, int32 (rows,), the same in every run."""
    generator = torch.Generator().manual_seed(case.rows)
    return torch.randint(case.vocab + 1, (case.rows,), generator=generator, dtype=torch.int32).to(device)


def router_settings(case: Case, device: torch.device) -> dict[str, Any]:
    """What router_topk() is asked for, with the bias, the same in every run."""
    settings = dict(ROUTERS[case.router])
    if settings.get("bias"):
        generator = torch.Generator().manual_seed(case.vocab)
        settings["bias"] = torch.randn(case.vocab, generator=generator).mul_(0.1).to(device)
    return settings


def fill(logits: Tensor, distribution: str, generator: torch.Generator) -> None:
    """Draws `logits` (..., V) in place."""
    # In float32 whatever the logits' type: torch's CPU generator has only 256 distinct uniform numbers in bfloat16.
    drawn = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if distribution == "equal":
        drawn.fill_(1.0)
    elif distribution == "peaked":
        # A trained model's: probabilities fall as rank^-1.5 (Zipf). Drawing each token's rank needs no permutation.
        drawn.uniform_(generator=generator).mul_(logits.shape[-1]).log1p_().mul_(-1.5)
    elif distribution in ("normal", "ascending", "descending", "sparse"):
        drawn.normal_(0.0, 2.0, generator=generator)
    else:
        raise ValueError(f"unknown distribution {distribution!r}")
    if distribution in ("ascending", "descending"):
        drawn = drawn.sort(dim=-1, descending=distribution == "descending").values
    elif distribution == "sparse":
        # 90 % -inf, as a grammar or a top-p filter leaves them.
        dropped = torch.rand(logits.shape, device=logits.device, generator=generator) < 0.9
        drawn.masked_fill_(dropped, -math.inf)
    logits.copy_(drawn)

# SPDX-License-Identifier: Apache-2.0
"""What is timed on: logits of each distribution, hidden states, and what else a case gives. All are the same in every run."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .cases import ROUTERS, Case

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Each input of a rotation is aligned as a new tensor of torch's allocator is.
_ALIGNMENT_BYTES = 512
# More inputs make graphs of tens of thousands of nodes, which take seconds to capture and no longer change the time.
_MAX_ROTATION = 4096


def rotation_count(input_bytes: int, cache_bytes: int, free_bytes: int) -> int:
    """How many inputs to rotate over so that each comes from memory: together they exceed three times the cache.

    At most a third of the free memory goes to them, so that rivals have room for what they make of one.
    """
    wanted = 3 * cache_bytes // max(input_bytes, 1) + 1
    affordable = max(free_bytes // 3 // max(input_bytes, 1), 1)
    return min(wanted, affordable, _MAX_ROTATION)


def inputs_from_memory(case: Case, device: torch.device) -> list[Tensor]:
    """On a GPU as many inputs as it takes that each, in its turn, comes from memory; on a CPU one."""
    if device.type == "cpu" or case.depth or dist.is_initialized():
        return make_inputs(case, device, 1)
    torch.cuda.empty_cache()  # The last case's inputs and its graphs' memory.
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return make_inputs(case, device, rotation_count(case.logit_bytes, cache_bytes, torch.cuda.mem_get_info(device)[0]))


def make_inputs(case: Case, device: torch.device, count: int) -> list[Tensor]:
    """`count` distinct inputs: hidden states (rows, depth), or logits (rows, V) or (rows, beams, V). A process of several has its
    columns of the logits."""
    if case.depth:
        return [_exact(case, device, case.rows, 2.0**-3, seed=0)]
    dtype = DTYPES[case.dtype]
    generator = torch.Generator(device).manual_seed(0)
    numel = case.num_rows * case.vocab
    step = math.ceil(numel * dtype.itemsize / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES // dtype.itemsize
    storage = torch.empty((count, step), dtype=dtype, device=device)
    shape = (case.rows, case.beams, case.vocab) if case.beams else (case.rows, case.vocab)
    inputs = [row[:numel].view(shape) for row in storage.unbind(0)]
    for logits in inputs:
        fill(logits, case.data, generator)
        if case.kind == "ragged":
            # Rivals that know no lengths then have the same answer.
            beyond = torch.arange(case.vocab, device=device) >= lengths_of(case, device).unsqueeze(-1)
            logits.masked_fill_(beyond, -math.inf)
    if dist.is_initialized():
        return [x.tensor_split(dist.get_world_size(), -1)[dist.get_rank()].contiguous() for x in inputs]
    return inputs


def fill(logits: Tensor, data: str, generator: torch.Generator) -> None:
    """Draws `logits` (..., V) in place."""
    # In float32 whatever the logits' type: torch's CPU generator has only 256 distinct uniform numbers in bfloat16.
    drawn = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if data == "equal":
        drawn.fill_(1.0)
    elif data == "peaked":
        # A trained model's: probabilities fall as rank^-1.5 (Zipf). Drawing each token's rank needs no permutation.
        drawn.uniform_(generator=generator).mul_(logits.shape[-1]).log1p_().mul_(-1.5)
    elif data in ("normal", "ascending", "descending", "sparse"):
        drawn.normal_(0.0, 2.0, generator=generator)
    else:
        raise ValueError(f"unknown distribution {data!r}")
    if data in ("ascending", "descending"):
        drawn = drawn.sort(dim=-1, descending=data == "descending").values
    elif data == "sparse":
        # 90 % -inf, as a grammar or a top-p filter leaves them.
        dropped = torch.rand(logits.shape, device=logits.device, generator=generator) < 0.9
        drawn.masked_fill_(dropped, -math.inf)
    logits.copy_(drawn)


def lengths_of(case: Case, device: torch.device) -> Tensor:
    """The rows' lengths, int32 (rows,)."""
    generator = torch.Generator().manual_seed(case.rows)
    return torch.randint(case.vocab + 1, (case.rows,), generator=generator, dtype=torch.int32).to(device)


def beam_scores(case: Case, device: torch.device) -> Tensor:
    """Scores (texts, beams) of beams that are some tokens long."""
    generator = torch.Generator().manual_seed(case.rows * 1000 + case.beams)
    return (torch.rand((case.rows, case.beams), generator=generator) * -10.0).to(device)


def router_settings(case: Case, device: torch.device) -> dict[str, Any]:
    """What router_topk() is asked for, with the bias."""
    settings = dict(ROUTERS[case.kind])
    if settings.get("bias"):
        generator = torch.Generator().manual_seed(case.vocab)
        settings["bias"] = torch.randn(case.vocab, generator=generator).mul_(0.1).to(device)
    return settings


def target_tokens(case: Case, device: torch.device) -> Tensor:
    """A token of each row, int64 (rows,)."""
    return torch.randint(case.vocab, (case.rows,), generator=torch.Generator().manual_seed(case.rows)).to(device)


@lru_cache(maxsize=1)
def weight_of(case: Case, device: torch.device) -> Tensor:
    """The weight (V, depth) of an LM head, one for all that is timed of a case."""
    return _exact(case, device, case.vocab, 2.0**-5, seed=1)


def _exact(case: Case, device: torch.device, rows: int, unit: float, seed: int) -> Tensor:
    """Numbers whose products add up exactly in float32 in any order, so that answers can be compared."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randint(-7, 8, (rows, case.depth), generator=generator, device=device)
    return (drawn * unit).to(DTYPES[case.dtype])

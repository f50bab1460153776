# SPDX-License-Identifier: Apache-2.0
"""Attention of the newest token of each beam to its text, in one launch: the operator `step_attention`. It has no gradient, and is for GPUs
alone."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..backends import cuda
from ..cuda_runtime import driver, tickets
from ..layout import attention_launch
from ..layout.attention_launch import AttentionLaunch
from ..layout.kernel_arguments import StepAttention, address
from .operator import Operator

_plan = lru_cache(maxsize=4096)(attention_launch.plan)


def serves(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether there is a kernel for heads of that size on that GPU."""
    return (
        device.type == "cuda"
        and dtype in attention_launch.DTYPES
        and dim in attention_launch.DIMS
        and driver.unavailable(device) is None
        and driver.architecture_of(device.index or 0) >= attention_launch.OLDEST_ARCHITECTURE
    )


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [batch * beams, heads, dim] of each beam to its text, a state (m, d, o) that merges: csrc/attention/step_attention.cu.

    Args:
        query: [batch * beams, heads, dim], 16 bits, adjacent along dim, as all tensors.
        key: [batch, key heads, places, dim].
        value: like `key`.
        table: int32 [batch, beams, 2 + words + written]: how many places the prompt has; how many tokens are written behind it; a bit
            for each place of the prompt, 32 a word, whether it is text; and, unless there is one beam, among which beam's places
            each written token of this beam's past lies. Token t of beam j lies at place prompt + t * beams + j.
        scale: of the scores.
        cap: scores are cap * tanh(scale * score / cap); 0 for none.
        window: how many of the last tokens are looked at; 0 for all.
        sinks: [heads], scores that have no key, in the dtype of `query`.
    """
    (rows, heads, dim), (batch, key_heads, places, _) = query.shape, key.shape
    if query.stride(2) != 1 or any(stride % 8 for stride in query.stride()[:2]) or query.data_ptr() % 16:
        # The kernel loads vectors of 16 bytes.
        query = query.contiguous()
    index = query.get_device()
    of_gpu = cuda.multiprocessors(index)
    planned: AttentionLaunch = _plan(batch, rows // batch, key_heads, heads // key_heads, dim, places, of_gpu)
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    states = torch.empty(planned.state_words, dtype=torch.float32, device=query.device) if planned.state_words else None
    argument = StepAttention(
        queries=query.data_ptr(),
        keys=key.data_ptr(),
        values=value.data_ptr(),
        table=table.data_ptr(),
        sinks=address(sinks),
        out=out.data_ptr(),
        states=address(states),
        tickets=tickets.zeroed(index, planned.tickets) if planned.tickets else 0,
        query_strides=query.stride()[:2],
        key_strides=key.stride()[:3],
        value_strides=value.stride()[:3],
        table_strides=table.stride()[:2],
        beams=rows // batch,
        key_heads=key_heads,
        groups=heads // key_heads,
        warps_in_rows=planned.warps_in_rows,
        keys_of_part=planned.keys_of_part,
        parts=planned.parts,
        parts_of_block=planned.parts_of_block,
        window=window,
        scale=scale,
        cap=cap,
    )
    kernel, shared = attention_launch.kernel_name(query.dtype, dim), attention_launch.shared_bytes(dim)
    cuda.launch(index, kernel, planned.grid, attention_launch.THREADS, bytes(argument), shared_bytes=shared)
    return out


# torch.compile sees one operation of it.
step_attention = Operator(
    "step_attention(Tensor query, Tensor key, Tensor value, Tensor table, float scale, float cap, int window, Tensor? sinks) -> Tensor",
    lambda *arguments: run(*arguments),
    lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
)

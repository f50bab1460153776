# SPDX-License-Identifier: Apache-2.0
"""Attention of a step by a table (:class:`ancestry.Table`) in torch operations, for machines without the kernel; and cases of it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """What attention is computed of."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor
    seen: Tensor  # bool [batch, beams, places]
    order: Tensor  # int64 [places], the number of each place's token


def case(
    batch=2, beams=3, key_heads=2, groups=2, dim=64, prompt=45, written=5, room=8, dtype=torch.bfloat16, seed=0
) -> Case:
    """A random one. The first text has padding on the left, the last one has padding within."""
    g = torch.Generator().manual_seed(seed)
    places = prompt + room * beams
    query = torch.randn(batch * beams, key_heads * groups, dim, generator=g).to(dtype)
    key, value = (torch.randn(batch, key_heads, places, dim, generator=g).to(dtype) for _ in range(2))
    is_text = torch.ones(batch, prompt, dtype=torch.bool)
    is_text[0, : prompt // 3] = False
    is_text[-1, prompt // 2 : prompt // 2 + 3] = False
    writers = torch.randint(beams, (batch, beams, written), generator=g)
    words = (prompt + 31) // 32
    bits = torch.zeros(batch, 32 * words, dtype=torch.int64)
    bits[:, :prompt] = is_text
    packed = (bits.view(batch, words, 32) << torch.arange(32)).sum(-1)
    head = torch.tensor([prompt, written]).expand(batch, 2)
    table = torch.cat([head, packed], 1)[:, None].expand(-1, beams, -1)
    table = torch.cat([table, writers, torch.full((batch, beams, room - written), 7)], -1).to(torch.int32)
    seen = torch.zeros(batch, beams, places, dtype=torch.bool)
    seen[:, :, :prompt] = is_text[:, None]
    order = torch.cat([torch.arange(prompt), prompt + torch.arange(room).repeat_interleave(beams)])
    for t in range(written):
        seen.scatter_(2, prompt + t * beams + writers[:, :, t : t + 1], True)
    # What no beam looks at may be anything.
    hidden = ~seen.any(1)[:, None, :, None]
    return Case(query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.nan), table, seen, order)


def seen_by(given: Case, window: int) -> Tensor:
    """What each beam may look at, not read from the table."""
    length = int(given.table[0, 0, 0] + given.table[0, 0, 1])
    return given.seen & (given.order >= length - window) if window else given.seen


def seen_places(table: Tensor, places: int, window: int = 0) -> Tensor:
    """bool [batch, beams, places]: what each beam may look at. Args: see :func:`fused_topk.operators.attention.run`."""
    batch, beams, _ = table.shape
    prompt, written = (int(each) for each in table[0, 0, :2])
    words = -(-prompt // 32)
    seen = torch.zeros(batch, beams, places, dtype=torch.bool)
    bits = (table[..., 2 : 2 + words, None] >> torch.arange(32)) & 1
    seen[..., :prompt] = bits.flatten(-2)[..., :prompt].bool()
    for token in range(written):
        writers = table[..., 2 + words + token] if beams > 1 else torch.zeros_like(table[..., 0])
        seen.scatter_(2, (prompt + token * beams + writers).long().unsqueeze(-1), True)
    order = torch.arange(places)
    order[prompt:] = prompt + (order[prompt:] - prompt) // beams
    return seen & (order >= prompt + written - window) if window else seen


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same [batch * beams, heads, dim] in float64, of the places that each beam may look at."""
    (batch, beams, _), (heads, dim) = seen.shape, query.shape[1:]
    # What nobody looks at may be NaN.
    keys, values = (each.double().nan_to_num().repeat_interleave(heads // key.shape[1], 1) for each in (key, value))
    scores = torch.einsum("bjhd,bhpd->bjhp", query.double().view(batch, beams, heads, dim), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, 1, -1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return torch.einsum("bjhp,bhpd->bjhd", weights, values).reshape(batch * beams, heads, dim)


def step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    scale: float,
    cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """In the place of :func:`fused_topk.operators.attention.run`."""
    return attention(query, key, value, seen_places(table, key.shape[2], window), scale, cap, sinks).to(query.dtype)

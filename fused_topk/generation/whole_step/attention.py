# SPDX-License-Identifier: Apache-2.0
"""Attention of all beams of a sequence to keys that they share, through transformers' attention interface.

In a step, queries have batch * beams rows, and keys have `batch` rows (:mod:`cache`), both of texts and of sources. The queries of
all beams and of all heads that share a key head are read as one block, so that each key is read once for all of them, and nothing
is copied for grouped heads. A prompt has as many rows of queries as of keys, and is read as transformers' own functions do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ...operators import attention as by_table
from ...operators.operator import Operator
from ...tracing import is_traced_by_dynamo
from .compiled import is_in_code_of_a_cpu

# The names of our two functions. PLAIN forms scores as transformers' function for `sdpa` does, which has no cap of the
# scores. CAPPED forms them as all others do.
PLAIN = "fused_topk_shared_prompt"
CAPPED = "fused_topk_shared_prompt_capped"


class AttentionCall(NamedTuple):
    """What a layer has asked of our attention."""

    groups: int  # query heads to a key head
    window: int | None  # how many of the last places may be looked at


# Tensors that models hand to every attention function. A function reads them only where several texts share a row, or never.
_NOT_READ = frozenset({"position_ids", "cache_position"})

# The calls of attention in a block of watched(); None outside of one.
_calls: ContextVar[list[AttentionCall] | None] = ContextVar("fused_topk_attention_calls", default=None)


@contextmanager
def watched() -> Iterator[list[AttentionCall]]:
    """A with block that gives the list of the calls of attention in it."""
    calls: list[AttentionCall] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def reads_tables(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether steps read these keys and values [batch, heads, places, dim] by a table (:class:`ancestry.Table`), in one launch a layer on a
    GPU."""
    return all(
        keys.shape[-1] == values.shape[-1] and by_table.serves(keys.device, keys.dtype, keys.shape[-1])
        for keys, values in pairs
    )


def plain(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of models whose implementation is `sdpa`."""
    if options.get("s_aux") is not None:
        raise ValueError("attention with s_aux, which transformers' function for `sdpa` leaves out")
    options["softcap"] = None
    return capped(module, query, key, value, attention_mask, **options)


def capped(
    module: Any,
    query: Tensor,  # [rows, heads, length, dim]
    key: Tensor,  # [batch, key heads, places, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,  # [heads], the scores of sinks
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of models of any other implementation."""
    # Such as a bias of positions. A trial might not show that it is left out.
    unknown = [name for name, value in options.items() if isinstance(value, Tensor) and name not in _NOT_READ]
    if unknown:
        raise ValueError(f"attention with {unknown[0]}")
    mask = attention_mask
    length = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    if not is_traced_by_dynamo() and (calls := _calls.get()) is not None:
        calls.append(AttentionCall(groups, sliding_window))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if length > 1:
        if groups > 1:
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        # Attention to a source is not causal.
        is_causal = mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        sink = None if s_aux is None else s_aux.view(-1, 1, 1)
        return _weighted(query, key, value, mask, scale, softcap, sink, is_causal).transpose(1, 2).contiguous(), None
    if mask is not None and mask.dtype == torch.int32:
        # No mask, but a table: see `ancestry.Table`.
        table, sinks = mask.squeeze(1), None if s_aux is None else s_aux.to(query.dtype)
        found = by_table.step_attention(
            query.squeeze(2), key, value, table, scale, softcap or 0.0, sliding_window or 0, sinks
        )
        return found.unsqueeze(1), None
    if mask is not None and mask.shape[1] > 1:
        # The second mask is for layers with a window: see `ancestry.Mask`.
        mask = mask[:, -1:] if sliding_window is not None else mask[:, :1]
    of_step = _of_step_as_one if is_in_code_of_a_cpu(query) else _of_step
    return of_step(query, key, value, mask, scale, softcap, s_aux), None


def _of_step(
    query: Tensor,  # [rows, heads, 1, dim]
    key: Tensor,  # [batch, key heads, places, dim]
    value: Tensor,
    mask: Tensor | None,  # [batch, 1, heads / key heads * beams, places that are looked at]
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:
    """[rows, 1, heads, dim]."""
    rows, heads, _, dim = query.shape
    batch, key_heads = key.shape[:2]
    groups, beams = heads // key_heads, rows // batch
    if beams == 1:
        # The same in fewer operations.
        query = query.reshape(batch, key_heads, groups, dim)
        sink = None if sinks is None else sinks.view(key_heads, groups, 1)
        return _weighted(query, key, value, mask, scale, softcap, sink, False).reshape(rows, 1, heads, -1)
    sink = None if sinks is None else sinks.view(key_heads, groups, 1, 1).expand(-1, -1, beams, -1).flatten(1, 2)
    block = query.view(batch, beams, key_heads, groups, dim).permute(0, 2, 3, 1, 4)
    block = block.reshape(batch, key_heads, groups * beams, dim)
    found = _weighted(block, key, value, mask, scale, softcap, sink, False)
    found = found.view(batch, key_heads, groups, beams, -1).permute(0, 3, 1, 2, 4)
    return found.reshape(rows, 1, heads, -1)


def _of_places(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Any) -> Tensor:
    """The same with keys and values of all places, of which those of the mask are looked at."""
    end = key.shape[2] if mask is None else mask.shape[3]
    return _of_step(query, key[:, :, :end], value[:, :, :end], mask, *others)


_of_step_as_one = Operator(
    "masked_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, float? softcap, Tensor? sinks) -> Tensor",
    _of_places,
    lambda query, key, value, *_: query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3]),
)


def _weighted(
    query: Tensor,  # [batch, heads, queries, dim]
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,  # [heads, queries or 1, 1]
    is_causal: bool,
) -> Tensor:
    if softcap is None and sink is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, is_causal=is_causal)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        # A finite number: a row of padding may look at nothing, and -inf everywhere would make NaN of it.
        scores = scores.masked_fill(~mask if mask.dtype == torch.bool else mask < 0, torch.finfo(scores.dtype).min)
    if sink is not None:
        # One more score, whose weight goes to no value.
        scores = torch.cat([scores, sink.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


for _name, _function in ((PLAIN, plain), (CAPPED, capped)):
    AttentionInterface.register(_name, _function)
    # This makes the prompt's mask. The mask of a step has four dimensions, and models hand it on as it is.
    AttentionMaskInterface.register(_name, sdpa_mask)

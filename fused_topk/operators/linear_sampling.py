# SPDX-License-Identifier: Apache-2.0
"""The operator of draws from an LM head's logits, `linear_sample`.

The logits of some rows, as many as the scratch memory holds, are computed and drawn from before those of the next rows take
their place. Pieces of the vocabulary would need the product twice: only their merged states say which piece holds a draw, and
every row must then have that piece again. They would need a third product where top_p or min_p keep more than a list has. Rows
need the weight once for each 64 MB of logits, and a row is drawn from as :func:`fused_topk.sample` does it, whatever it keeps.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from .. import backends, plans
from ..backends import reference
from ..layout import launch
from ..layout import linear_pieces as layout
from ..problem import LinearProblem, Sample, SampleProblem, changed
from ..rows import ROWS_SCHEMA, unflattened
from . import linear_pieces, sampling
from .dispatch import library, register

library.define(f"linear_sample({ROWS_SCHEMA}, Tensor weight, Tensor? bias, {sampling.SCHEMA}")

# What the reference computes of a logit, and of a draw's random number: most of it float64 and int64 tensors, of which 80 and
# 150 bytes are there at once.
_REFERENCE_LOGIT_BYTES = 96
_REFERENCE_DRAW_BYTES = 192
# What the CUDA backend has of the blocks that share the rows: two a multiprocessor, of a GPU of up to 160.
_BLOCK_BYTES = 320 * launch.SEARCHING_BLOCK_BYTES
_INDEX_BYTES = 8
_LISTS = 3
# What a request has one a row of, beside its rows.
_NUMBERS = ("row_top_k", "row_top_p", "row_min_p", "row_seed", "row_counter")


def draw(request: SampleProblem, weight: Tensor, bias: Tensor | None, backend: str | None) -> Sample:
    """Draws into new tensors, of (R, num_samples) and (R, logprobs). The request has the hidden states (..., H) in the place of
    the logits, and a mask of (..., V) or (..., words)."""
    hidden = request.rows.logits
    head = LinearProblem(request.rows, weight, bias, None, "allowed")
    rows, vocab_size = head.row_count, len(weight)
    chosen = backends.pick(hidden.device, hidden.dtype, max(request.logprobs, 1), backend)
    out = plans.sample_result(request)
    if not rows:
        return out
    itemsize = hidden.element_size()
    logit_bytes = itemsize + request.rows.hides()
    listed = max(min(vocab_size, launch.LONGEST_LIST), request.logprobs)
    # What a search has of a row, and its lists, which are there with a copy and scratch. A block's hidden states may be a copy.
    row_bytes = launch.SEARCHING_ROW_BYTES + _LISTS * listed * (itemsize + _INDEX_BYTES) + hidden.shape[-1] * itemsize
    if chosen is reference:
        logit_bytes += _REFERENCE_LOGIT_BYTES
        row_bytes += _REFERENCE_DRAW_BYTES * request.num_samples
    other_bytes = _BLOCK_BYTES if hidden.is_cuda and chosen is not reference else 0
    size = layout.whole_rows(rows, vocab_size, logit_bytes, row_bytes, other_bytes)
    buffer = hidden.new_empty(size * vocab_size)
    for block in linear_pieces.blocks(head, size):
        part = block.part
        logits = linear_pieces.product(block.hidden, head, 0, vocab_size, buffer)
        numbers: Any = {name: x[part] for name in _NUMBERS if (x := getattr(request, name)) is not None}
        rows_of_block = block.of.of_tokens(logits, 0, vocab_size)
        of_block = request._replace(rows=rows_of_block, first_row=part.start, **numbers)
        plans.plan_of_sample(of_block, backend).start(of_block, changed(out, operator.itemgetter(part)))
    return out


def linear_sample(*arguments: Any) -> tuple[Tensor, ...]:
    rows, (weight, bias, *parameters, backend) = unflattened(arguments)
    return sampling.flat(draw(SampleProblem(rows, *parameters), weight, bias, backend))


def _fake_linear_sample(*arguments: Any) -> tuple[Tensor, ...]:
    rows, (_, _, *parameters, _) = unflattened(arguments)
    return sampling.flat(plans.sample_result(SampleProblem(rows, *parameters)))


register("linear_sample", linear_sample, _fake_linear_sample)

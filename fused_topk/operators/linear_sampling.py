# SPDX-License-Identifier: Apache-2.0
"""The operator of draws from an LM head's logits, `linear_sample`.

The rows are taken in blocks, as many at a time as the scratch memory holds logits for. Tokens are drawn from a block before the
logits of the next one take its place. So the weight is read once for each 64 MB of logits, and each row is drawn from as
:func:`fused_topk.sample` does it, whatever it keeps.

Pieces of the vocabulary, as linear_topk has them, would need the product twice: only the merged states of all pieces say which
piece holds a draw, and that piece must then be computed again. Where top_p or min_p keep more than a list has, they would need
it three times.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from .. import backends
from ..layout import launch
from ..layout import linear_pieces as layout
from ..problem import LinearProblem, Sample, SampleProblem, changed
from ..rows import ROWS_SCHEMA, unflattened
from . import linear_pieces, sampling
from .dispatch import is_seen_by_torch
from .operator import Operator

# The memory that the reference takes for a logit, and for a random number: float64 and int64 tensors, of which up to 80 and 150
# bytes are there at once.
_REFERENCE_LOGIT_BYTES = 96
_REFERENCE_DRAW_BYTES = 192
# The scratch memory of the CUDA backend for the blocks that share rows: two a multiprocessor, on a GPU that has up to 160.
_BLOCK_BYTES = 320 * launch.SEARCHING_BLOCK_BYTES
_INDEX_BYTES = 8
_LISTS = 3
# The fields of a request, beside its rows, that may have one number a row.
_NUMBERS = ("row_top_k", "row_top_p", "row_min_p", "row_seed", "row_counter")


def _draw(request: SampleProblem, weight: Tensor, bias: Tensor | None, backend: str | None) -> Sample:
    """Draws into new tensors, of (R, num_samples) and (R, topk). The request has the hidden states (..., H) in the place of
    the logits, and a mask of (..., V) or (..., words)."""
    hidden = request.rows.logits
    head = LinearProblem(request.rows, weight, bias, None, "allowed")
    rows, vocab_size = head.row_count, len(weight)
    chosen = backends.pick(hidden.device, hidden.dtype, max(request.topk, 1), backend)
    out = sampling.as_sample(sampling.result_of(request).empty(hidden.device), request)
    if not rows:
        return out
    itemsize = hidden.element_size()
    logit_bytes = itemsize + request.rows.hides()
    listed = max(min(vocab_size, launch.LONGEST_LIST), request.topk)
    # Of a row: the scratch of a search; its list, a copy of it and scratch; and its hidden states, which may be a copy.
    row_bytes = launch.SEARCHING_ROW_BYTES + _LISTS * listed * (itemsize + _INDEX_BYTES) + hidden.shape[-1] * itemsize
    if chosen == "reference":
        logit_bytes += _REFERENCE_LOGIT_BYTES
        row_bytes += _REFERENCE_DRAW_BYTES * request.num_samples
    other_bytes = _BLOCK_BYTES if hidden.is_cuda and chosen != "reference" else 0
    size = layout.whole_rows(rows, vocab_size, logit_bytes, row_bytes, other_bytes)
    buffer = hidden.new_empty(size * vocab_size)
    for block in linear_pieces.blocks(head, size):
        part = block.part
        logits = linear_pieces.product(block.hidden, head, 0, vocab_size, linear_pieces.room(buffer, block, vocab_size))
        numbers: Any = {name: x[part] for name in _NUMBERS if (x := getattr(request, name)) is not None}
        rows_of_block = block.of.of_tokens(logits, 0, vocab_size)
        of_block = request._replace(rows=rows_of_block, first_row=part.start, **numbers)
        sampling.plan_of(of_block, backend).start(of_block, changed(out, operator.itemgetter(part)))
    return out


def _run(*arguments: Any) -> list[Tensor]:
    rows, (weight, bias, *parameters, backend) = unflattened(arguments)
    return sampling.flat(_draw(SampleProblem(rows, *parameters), weight, bias, backend))


def _fake(*arguments: Any) -> list[Tensor]:
    rows, (_, _, *parameters, _) = unflattened(arguments)
    return list(sampling.result_of(SampleProblem(rows, *parameters)).empty(rows.logits.device))


_linear_sample = Operator(f"linear_sample({ROWS_SCHEMA}, Tensor weight, Tensor? bias, {sampling.SCHEMA}", _run, _fake)


def linear_sample(problem: SampleProblem, weight: Tensor, bias: Tensor | None, backend: str | None) -> Sample:
    """Draws into new tensors, of (R, num_samples) and (R, topk)."""
    rows, *parameters, _, _ = problem
    if is_seen_by_torch(*(x for x in (*rows, weight, bias, *parameters) if isinstance(x, Tensor))):
        return sampling.as_sample(_linear_sample(*rows, weight, bias, *parameters, backend), problem)
    return _draw(problem, weight, bias, backend)

# SPDX-License-Identifier: Apache-2.0
"""An LM head in pieces: the library multiplies some rows by some of the vocabulary at a time, and no piece is kept.

A piece of the logits goes into the rows' states (m, d, T), and the states of a row's pieces are merged. The backward pass
(linear_backward.py) has pieces of its own. Scratch memory is bounded by `SCRATCH_BYTES` of layout/linear_pieces.py. Nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import cpu as native
from ..backends import cuda, cuda_pieces
from ..layout import linear_pieces
from ..problem import LinearProblem, TopK, result_dtype
from ..rows import LogitRows, RowsBlock, some_rows
from ..scale import Scale
from . import merging, row_topk
from .results import row_result

# The memory that the reference takes for a logit: float64 copies, integers to sort by, and their order.
_REFERENCE_LOGIT_BYTES = 64
# For a logit: the comparisons that count a target's rank.
_RANK_BYTES = 3
# For a target: its place in a piece, and its logit.
_TARGET_BYTES = 48
# The weights of so many targets are copied at a time that they have this many elements: 4 MB of float32.
_COPIED_ELEMENTS = 1 << 20
_COPIED_BYTES = 12 * _COPIED_ELEMENTS  # with copies of them and of their hidden states in their own dtype


class LinearResult(NamedTuple):
    """The results of the operator. Of the last four, those that nobody asked for are empty tensors."""

    values: Tensor  # (..., k)
    indices: Tensor  # (..., k)
    logsumexp: Tensor  # (...); empty for values that are logits
    target_logprobs: Tensor  # (..., n)
    target_ranks: Tensor  # (..., n)
    state: Tensor  # (..., 2), the row's m and d


class Block(NamedTuple):
    """Some rows, without leading dimensions."""

    of: RowsBlock
    hidden: Tensor  # (rows, H)
    targets: Tensor | None  # (rows, n)

    @property
    def part(self) -> slice:
        return self.of.part


def empty_result(
    hidden: Tensor, k: int, values: str, targets: Tensor | None, has_ranks: bool, keeps_state: bool
) -> LinearResult:
    """Uninitialised tensors for the result."""
    lead, device = hidden.shape[:-1], hidden.device
    dtype = result_dtype(hidden.dtype)
    nobody, are_logits = (0,), values in ("logits", "state")
    of_targets = nobody if targets is None else targets.shape
    return LinearResult(
        torch.empty((*lead, k), dtype=hidden.dtype if are_logits else dtype, device=device),
        torch.empty((*lead, k), dtype=torch.int64, device=device),
        torch.empty(nobody if are_logits else lead, dtype=dtype, device=device),
        torch.empty(of_targets, dtype=dtype, device=device),
        torch.empty(of_targets if has_ranks else nobody, dtype=torch.int64, device=device),
        torch.empty((*lead, 2) if keeps_state else nobody, dtype=dtype, device=device),
    )


def forward(
    head: LinearProblem, k: int, values: str, backend: str | None, ties: str | None, keeps_state: bool
) -> LinearResult:
    """The k best of every row, and the other results that are asked for.

    ties: which of the tokens that tie with a target count in its rank, as :func:`token_logprobs` has it; None: no ranks.
    values: "state" is for a part of a vocabulary. It gives the logits of the k best, the logits of the targets in place of their
    log-probabilities, and m and d at the temperature.
    """
    has_ranks = ties is not None
    out = empty_result(head.hidden, k, values, head.targets, has_ranks, keeps_state)
    rows = head.row_count
    chosen = backends.pick(head.hidden.device, head.hidden.dtype, k, backend)
    if rows == 0:
        return out
    itemsize = head.hidden.element_size()
    if (
        chosen == "cpu"
        and head.targets is None
        and linear_pieces.is_for_the_native_kernel(rows, k)
        and native.multiplies(head.hidden, head.weight, head.bias)
    ):
        given = head
        if head.hidden.dim() != 2:
            every = next(blocks(head, rows))
            given = head._replace(rows=every.of.of_tokens(every.hidden, 0, len(head.weight)))
        native.linear_topk(given, k, values, TopK(*out[:3]), out.state if keeps_state else None)
        return out
    lead = head.hidden.dim() - 1
    flat = LinearResult(*(x.reshape(-1, *x.shape[lead:]) if x.numel() else x for x in out))
    logit_bytes = itemsize + (_RANK_BYTES if has_ranks else 0) + head.rows.hides()
    row_bytes = 0 if head.targets is None else head.targets.shape[-1] * _TARGET_BYTES
    if chosen == "reference":
        logit_bytes += _REFERENCE_LOGIT_BYTES
    vocab_size = len(head.weight)
    pieces = linear_pieces.forward_pieces(
        rows, vocab_size, k, itemsize, logit_bytes, row_bytes, head.hidden.device.type == "cpu"
    )
    # The kernel counts the ranks of one target a row, as places in the order.
    counts_ranks = not has_ranks or (ties == "index" and head.targets is not None and head.targets.shape[-1] == 1)
    if chosen == "cuda" and counts_ranks and not head.rows.hides() and pieces.tokens < vocab_size:
        count = cuda.multiprocessors(head.hidden.get_device())
        copied = _COPIED_BYTES * has_ranks
        accumulated = linear_pieces.accumulated_pieces(rows, vocab_size, k, itemsize, row_bytes, copied, count)
        pieces = accumulated or pieces
    buffer = head.hidden.new_empty(pieces.rows * min(pieces.tokens, vocab_size))
    for block in blocks(head, pieces.rows):
        if pieces.tokens >= vocab_size and head.targets is None and not keeps_state:
            logits = product(block.hidden, head, 0, vocab_size, buffer)
            best = TopK(flat.values[block.part], flat.indices[block.part], flat.logsumexp[block.part])
            of_block = block.of.of_tokens(logits, 0, vocab_size)
            row_topk.run_into(*of_block, k, values, head.normalize, backend, *best)
        else:
            _forward_block(head, block, pieces, k, values, backend, ties, buffer, flat)
    return out


def _forward_block(
    head: LinearProblem,
    block: Block,
    pieces: linear_pieces.Pieces,
    k: int,
    values: str,
    backend: str | None,
    ties: str | None,
    buffer: Tensor,
    out: LinearResult,
) -> None:
    vocab_size, part, normalize = len(head.weight), block.part, head.normalize
    target = None if block.targets is None else _Targets(head, block, ties, is_whole=pieces.tokens >= vocab_size)
    are_merged = pieces.states > 0
    # row_result() uses the leading dimensions and the dtype alone, which the hidden states share with the logits.
    states = [] if are_merged else [row_result(block.hidden, k, "state").empty(block.hidden.device)]
    for start in range(0, vocab_size, pieces.tokens):
        end = min(start + pieces.tokens, vocab_size)
        logits = product(block.hidden, head, start, end, buffer, 0 if are_merged else pieces.tokens)
        rows = block.of.of_tokens(logits, start, end)
        if are_merged:
            states.append(row_topk.run(*rows, min(k, end - start), "state", normalize, backend))
            states[-1].indices.add_(start)
        else:
            of_targets = None if target is None else target.tensors
            cuda_pieces.accumulate_piece(rows, start, states[0], of_targets)
        if are_merged and target is not None:
            target.look_at(rows, start)
        if len(states) == pieces.states and end < vocab_size:
            states = [_merged(states, k, rows.scale(), "state", normalize, backend)]
    kind = "logits" if values == "state" else values
    best = _merged(states, k, rows.scale(), kind, normalize, backend)
    for given, computed in zip(out, best):
        if given.numel():
            given[part].copy_(computed)
    if target is None and not out.state.numel():
        return
    merged = states[0] if len(states) == 1 else _merged(states, 1, rows.scale(), "state", normalize, backend)
    state = merged.logsumexp.t()
    if out.state.numel():
        out.state[part].copy_(state)
    if target is not None and values == "state":
        out.target_logprobs[part].copy_(target.logits)
    elif target is not None:
        ranks = None if ties is None else out.target_ranks[part]
        target.write(state, rows.scale(), out.target_logprobs[part], ranks)


def _merged(
    states: Sequence[TopK],
    k: int,
    scale: Scale,
    values: str,
    normalize: str,
    backend: str | None,
) -> TopK:
    """`states`: the logits (rows, k), indices, and m and d (2, rows) of pieces that follow each other."""
    logits, indices, normalizer = _stacked(states)
    m, d = normalizer.unbind(1)
    k = min(k, len(states) * indices.shape[-1])
    over = "topk" if normalize == "topk" else "all"
    return merging.run(logits, indices, m, d, None, k, *scale, values, over, backend)


def _stacked(states: Sequence[TopK]) -> tuple[Tensor, Tensor, Tensor]:
    """The logits and indices (states, rows, width), and m and d (states, 2, rows)."""
    if len(states) == 1:
        logits, indices, normalizer = (x.unsqueeze(0) for x in states[0])
        return logits, indices, normalizer
    width = max(state.indices.shape[-1] for state in states)
    shape = len(states), states[0].indices.shape[0], width
    logits = states[0].values.new_full(shape, -torch.inf)
    # An index of -1 marks an entry that is no candidate.
    indices = states[0].indices.new_full(shape, -1)
    for i, state in enumerate(states):
        held = state.indices.shape[-1]
        logits[i, :, :held].copy_(state.values)
        indices[i, :, :held].copy_(state.indices)
    return logits, indices, torch.stack([state.logsumexp for state in states])


class _Targets:
    """The logits of a block's targets (rows, n), and their ranks."""

    def __init__(self, head: LinearProblem, block: Block, ties: str | None, is_whole: bool) -> None:
        assert block.targets is not None
        self._has_target = block.targets >= 0
        self._tokens = block.targets.clamp(0, len(head.weight) - 1).contiguous()
        self._ties = ties
        # A target counts itself, whatever its logit in a piece is.
        self._ranks = None if ties is None else torch.ones_like(self._tokens)
        self.logits = block.hidden.new_empty(self._tokens.shape)
        if ties is not None and not is_whole:
            self._multiply(head, block)

    def _multiply(self, head: LinearProblem, block: Block) -> None:
        """Computes the targets' logits ahead, because pieces before a target's own compare their logits with its. They may differ
        in the last place from those in the pieces."""
        wide = result_dtype(block.hidden.dtype)
        tokens, found = self._tokens.flatten(), self.logits.view(-1)
        of_row = self._tokens.shape[-1]
        # A part of the targets at a time, because their weights are copied.
        size = max(1, _COPIED_ELEMENTS // head.weight.shape[1])
        for first in range(0, len(tokens), size):
            part = slice(first, min(first + size, len(tokens)))
            rows = torch.arange(part.start, part.stop, device=tokens.device) // of_row
            logits = head.weight[tokens[part]].to(wide).mul_(block.hidden[rows]).sum(-1)
            if head.bias is not None:
                logits += head.bias[tokens[part]]
            found[part] = logits.to(found.dtype)
        counted = block.of.counted_at(self._tokens)
        if counted is not None:
            self.logits.masked_fill_(~counted, -torch.inf)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The targets' tokens, logits and ranks, for a kernel that computes the last two."""
        return self._tokens, self.logits, self._ranks

    def look_at(self, rows: LogitRows, start: int) -> None:
        """Finds the targets in a piece of the logits, and counts the piece's tokens for their ranks. It may change the piece."""
        logits, hidden = rows.logits, rows.uncounted()
        tokens = logits.shape[-1]
        if hidden is not None:
            logits.masked_fill_(hidden, -torch.inf)
        place = self._tokens - start
        is_here = (place >= 0) & (place < tokens)
        place.clamp_(0, tokens - 1)
        self.logits = logits.gather(-1, place).where(is_here, self.logits)
        if self._ranks is None:
            return
        places = torch.arange(start, start + tokens, device=logits.device)
        # One target of each row after the other, so that memory does not grow with their number.
        for own, token, rank in zip(self.logits.split(1, -1), self._tokens.split(1, -1), self._ranks.split(1, -1)):
            counts = logits == own
            counts &= places != token if self._ties == "last" else places < token
            counts |= logits > own
            rank += counts.sum(-1, keepdim=True)

    def write(self, state: Tensor, scale: Scale, logprobs: Tensor, ranks: Tensor | None) -> None:
        """state: (rows, 2), of the whole rows."""
        m, d = state.unsqueeze(-2).unbind(-1)
        log_d = d.log()
        # As for the k best, a row without a finite normalizer has no probabilities.
        is_known = self._has_target & m.isfinite() & log_d.isfinite()
        logprobs.copy_((scale.log_weight(self.logits.to(m.dtype), m) - log_d).where(is_known, torch.nan))
        if ranks is not None and self._ranks is not None:
            ranks.copy_(self._ranks.where(self._has_target, 0))


def product(hidden: Tensor, head: LinearProblem, start: int, end: int, buffer: Tensor, row_stride: int = 0) -> Tensor:
    """The logits (rows, end - start), in the buffer. row_stride: 0 for rows without gaps."""
    rows = len(hidden)
    stride = row_stride or end - start
    out = buffer[: rows * stride].view(rows, stride)[:, : end - start]
    weight = head.weight[start:end].t()
    if head.bias is None:
        return torch.mm(hidden, weight, out=out)
    return torch.addmm(head.bias[start:end], hidden, weight, out=out)


def blocks(head: LinearProblem, size: int) -> Iterator[Block]:
    """The rows, `size` at a time."""
    for first in range(0, head.row_count, size):
        part = slice(first, min(first + size, head.row_count))
        yield Block(
            RowsBlock.of(head.rows, part),
            some_rows(head.hidden, 1, part),
            None if head.targets is None else some_rows(head.targets, 1, part),
        )

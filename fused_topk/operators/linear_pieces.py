# SPDX-License-Identifier: Apache-2.0
"""An LM head in pieces: the library multiplies some rows by some of the vocabulary at a time, and no piece is kept.

A piece of the logits goes into the rows' states (m, d, T), and the states of a row's pieces are merged. The backward pass
(linear_backward.py) has pieces of its own. Scratch memory is bounded by `SCRATCH_BYTES` of layout/linear_pieces.py. Nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import cpu as native
from ..backends import cuda, cuda_pieces
from ..layout import linear_pieces
from ..problem import LinearProblem, TokenSumsProblem, TopK, result_dtype
from ..rows import LogitRows, RowsBlock, cut, some_rows
from ..scale import Scale
from ..token_sums import TokenSums, empty_sums
from . import merging, row_topk, token_spread
from .results import Plan, row_result

# The memory that the reference takes for a logit: float64 copies, integers to sort by, and their order.
_REFERENCE_LOGIT_BYTES = 64
# For a logit: the comparisons that count a target's rank.
_RANK_BYTES = 3
# For a target: its place in a piece, and its logit.
_TARGET_BYTES = 48
# The weights of so many targets are copied at a time that they have this many elements: 4 MB of float32.
_COPIED_ELEMENTS = 1 << 20
_COPIED_BYTES = 12 * _COPIED_ELEMENTS  # with copies of them and of their hidden states in their own dtype


class Wanted(NamedTuple):
    """What is asked of the operator: its arguments behind the problem."""

    k: int  # 0 only with targets
    # "softmax", "log_softmax", "logits", or "state" for a part of a vocabulary: the logits of the k best, the logits of the targets
    # in place of their log-probabilities, and the state at the temperature.
    values: str
    backend: str | None = None
    # Which of the tokens that tie with a target count in its rank, as token_logprobs() has it. None: no ranks.
    ties: str | None = None
    keeps_state: bool = False
    entropy: bool = False
    tail: bool = False
    keeps_logits: bool = False

    @property
    def held(self) -> int:
        """How many candidates a state has. Where ranks are counted it has one at least."""
        return max(self.k, int(self.ties is not None))


class LinearResult(NamedTuple):
    """The results of the operator. Those that nobody asked for are empty tensors."""

    values: Tensor  # (..., k)
    indices: Tensor  # (..., k)
    logsumexp: Tensor  # (...); empty for values that are logits
    target_logprobs: Tensor  # (..., n)
    target_ranks: Tensor  # (..., n)
    state: Tensor  # (..., 2), the row's m and d; with targets (..., 5), its TokenSums
    entropy: Tensor  # (...)
    tail: Tensor  # (...)
    logits: Tensor  # (..., V), in the dtype of the hidden states


class Block:
    """Some rows, without leading dimensions. Tensors whose rows do not merge are copied when they are asked for."""

    def __init__(self, head: LinearProblem, part: slice) -> None:
        self._head, self.part, self.count = head, part, part.stop - part.start
        self.of = RowsBlock.of(head.rows, part)

    @cached_property
    def hidden(self) -> Tensor:
        """(rows, H)"""
        return some_rows(self._head.hidden, 1, self.part)

    @cached_property
    def targets(self) -> Tensor | None:
        """(rows, n)"""
        return None if self._head.targets is None else some_rows(self._head.targets, 1, self.part)

    def within(self, larger: Block) -> slice:
        """Where these rows are among those of a larger block."""
        return slice(self.part.start - larger.part.start, self.part.stop - larger.part.start)


def empty_result(head: LinearProblem, wanted: Wanted) -> LinearResult:
    """Uninitialised tensors for the result."""
    hidden, targets, k = head.hidden, head.targets, wanted.k
    lead, device = hidden.shape[:-1], hidden.device
    dtype = result_dtype(hidden.dtype)
    nobody, are_logits, is_part = (0,), wanted.values in ("logits", "state"), wanted.values == "state"
    of_targets = nobody if targets is None else targets.shape
    width = 2 if targets is None else len(TokenSums._fields)
    return LinearResult(
        torch.empty((*lead, k), dtype=hidden.dtype if are_logits else dtype, device=device),
        torch.empty((*lead, k), dtype=torch.int64, device=device),
        torch.empty(nobody if are_logits else lead, dtype=dtype, device=device),
        torch.empty(of_targets, dtype=dtype, device=device),
        torch.empty(of_targets if wanted.ties is not None else nobody, dtype=torch.int64, device=device),
        torch.empty((*lead, width) if wanted.keeps_state else nobody, dtype=dtype, device=device),
        torch.empty(lead if wanted.entropy and not is_part else nobody, dtype=dtype, device=device),
        torch.empty(lead if wanted.tail and not is_part else nobody, dtype=dtype, device=device),
        torch.empty(
            (*lead, head.weight.shape[0]) if wanted.keeps_logits else nobody, dtype=hidden.dtype, device=device
        ),
    )


def forward(head: LinearProblem, wanted: Wanted) -> LinearResult:
    """The k best of every row, and the other results that are asked for."""
    out, rows = empty_result(head, wanted), head.row_count
    chosen = backends.pick(head.hidden.device, head.hidden.dtype, max(wanted.k, 1), wanted.backend)
    if rows == 0:
        return out
    if _is_for_the_native_kernel(head, wanted.k, chosen):
        best = TopK(out.values, out.indices, out.logsumexp)
        _multiply_natively(head, wanted.k, wanted.values, best, out.state if wanted.keeps_state else None)
        return out
    lead = head.hidden.dim() - 1
    flat = LinearResult(*(x.reshape(-1, *x.shape[lead:]) if x.numel() else x for x in out))
    vocab_size, pieces = len(head.weight), _pieces(head, wanted, chosen)
    buffer = None if wanted.keeps_logits else head.hidden.new_empty(pieces.rows * min(pieces.tokens, vocab_size))
    for together in blocks(head, pieces.rows * pieces.blocks):
        targets = None
        if head.targets is not None:
            targets = _Targets.of(head, together, wanted, is_whole=pieces.tokens >= vocab_size)
        for block in blocks(head, pieces.rows, together.part):
            if pieces.tokens >= vocab_size and targets is None and not wanted.keeps_state and buffer is not None:
                logits = product(block.hidden, head, 0, vocab_size, room(buffer, block, vocab_size))
                best = TopK(flat.values[block.part], flat.indices[block.part], flat.logsumexp[block.part])
                of_block = block.of.of_tokens(logits, 0, vocab_size)
                row_topk.run_into(*of_block, wanted.k, wanted.values, head.normalize, wanted.backend, *best)
            else:
                own = None if targets is None else targets.some(block.within(together))
                _forward_block(head, block, pieces, wanted, chosen, own, buffer, flat)
        if targets is not None:
            targets.write(together.of.rows.scale(), wanted, together.part, flat)
    return out


def native_plan(
    device: torch.device, head: LinearProblem, k: int, values: str, backend: str | None
) -> Plan[TopK] | None:
    """The plan of the k best by the CPU's own kernel, which keeps no logits; None where it does not serve the call, or only rows that
    are copied. The tensors, without memory here, must have whole elements where they lie."""
    hidden, rows = head.hidden, head.rows
    if not _is_for_the_native_kernel(head, k, backends.pick(device, hidden.dtype, k, backend)):
        return None
    if hidden.dim() != 2 and (rows.tensors()[1:] or not hidden.is_contiguous()):
        return None
    if hidden.stride(-1) != 1:
        return None
    flat = head._replace(rows=rows.with_logits(hidden if hidden.dim() == 2 else hidden.view(-1, hidden.shape[-1])))
    # row_result() uses the leading dimensions and the dtype alone, which the hidden states share with the logits.
    return Plan(row_result(hidden, k, values), device, native.prepare_linear_topk(flat, k, values))


def _is_for_the_native_kernel(head: LinearProblem, k: int, chosen: str) -> bool:
    return (
        chosen == "cpu"
        and head.row_count > 0
        and head.targets is None
        and linear_pieces.is_for_the_native_kernel(head.row_count, k)
        and native.multiplies(head.hidden, head.weight, head.bias)
    )


def _multiply_natively(head: LinearProblem, k: int, values: str, best: TopK, state: Tensor | None) -> None:
    if head.hidden.dim() != 2:
        every = next(blocks(head, head.row_count))
        head = head._replace(rows=every.of.of_tokens(every.hidden, 0, len(head.weight)))
    native.linear_topk(head, k, values, best, state)


def _pieces(head: LinearProblem, wanted: Wanted, chosen: str) -> linear_pieces.Pieces:
    rows, vocab_size, itemsize, held = head.row_count, len(head.weight), head.hidden.element_size(), wanted.held
    has_ranks = wanted.ties is not None
    logit_bytes = itemsize + has_ranks * _RANK_BYTES + head.rows.hides() * (1 + has_ranks * itemsize)
    row_bytes = 0 if head.targets is None else head.targets.shape[-1] * _TARGET_BYTES
    if chosen == "reference":
        logit_bytes += _REFERENCE_LOGIT_BYTES
    pieces = linear_pieces.forward_pieces(
        rows, vocab_size, held, itemsize, logit_bytes, row_bytes, head.hidden.device.type == "cpu"
    )
    if wanted.keeps_logits and not held and chosen == "cuda" and not head.rows.hides():
        # No piece stays in a cache for long, and a product of whole rows is the quickest.
        return pieces._replace(tokens=vocab_size)
    # The kernel counts the ranks of one target a row, as places in the order.
    counts_ranks = not has_ranks or (
        wanted.ties == "index" and head.targets is not None and head.targets.shape[-1] == 1
    )
    if chosen == "cuda" and held and counts_ranks and not head.rows.hides() and pieces.tokens < vocab_size:
        count = cuda.multiprocessors(head.hidden.get_device())
        copied = _COPIED_BYTES * has_ranks
        pieces = linear_pieces.accumulated_pieces(rows, vocab_size, held, itemsize, row_bytes, copied, count) or pieces
    return pieces


def _forward_block(
    head: LinearProblem,
    block: Block,
    pieces: linear_pieces.Pieces,
    wanted: Wanted,
    chosen: str,
    targets: _Targets | None,
    buffer: Tensor | None,
    out: LinearResult,
) -> None:
    """targets: those of the block. buffer: memory for a piece. None: the logits are kept where the result has them."""
    vocab_size, part, normalize, backend = len(head.weight), block.part, head.normalize, wanted.backend
    held, has_ranks, are_merged = wanted.held, wanted.ties is not None, pieces.states > 0
    # row_result() uses the leading dimensions and the dtype alone, which the hidden states share with the logits.
    states = [] if are_merged else [row_result(block.hidden, held, "state").empty(block.hidden.device)]
    for start in range(0, vocab_size, pieces.tokens):
        end = min(start + pieces.tokens, vocab_size)
        if buffer is None:
            place = out.logits[part, start:end]
        else:
            place = room(buffer, block, end - start, 0 if are_merged else pieces.tokens)
        rows = block.of.of_tokens(product(block.hidden, head, start, end, place), start, end)
        if targets is not None:
            targets.look_at(rows, start, wanted, normalize, chosen)
        if held and are_merged:
            states.append(row_topk.run(*rows, min(held, end - start), "state", normalize, backend))
            states[-1].indices.add_(start)
            if targets is not None and has_ranks:
                targets.count_ranks(rows, start, wanted.ties)
        elif held:
            cuda_pieces.accumulate_piece(
                rows, start, states[0], targets.counted if targets is not None and has_ranks else None
            )
        if len(states) == pieces.states and end < vocab_size:
            states = [_merged(states, held, rows.scale(), "state", normalize, backend)]
    scale = rows.scale()
    if wanted.k:
        kind = "logits" if wanted.values == "state" else wanted.values
        best = _merged(states, wanted.k, scale, kind, normalize, backend)
        for given, computed in zip(out, best):
            if given.numel():
                given[part].copy_(computed)
    if targets is None and out.state.numel():
        merged = states[0] if len(states) == 1 else _merged(states, 1, scale, "state", normalize, backend)
        out.state[part].copy_(merged.logsumexp.t())


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


class _Targets(NamedTuple):
    """What is found out about the targets of some rows."""

    tokens: Tensor  # (rows, n), contiguous; negative: none
    sums: Tensor  # (rows, 5): TokenSums of the pieces up to now
    logits: Tensor  # (rows, n), in the logits' dtype
    ranks: Tensor | None  # (rows, n): 1, and the tokens up to now that come before the target

    @staticmethod
    def of(head: LinearProblem, block: Block, wanted: Wanted, is_whole: bool) -> _Targets:
        """Those of a block. is_whole: whether its rows are one piece."""
        assert block.targets is not None
        # A token beyond the vocabulary is not found out on a GPU.
        tokens = block.targets.clamp(max=len(head.weight) - 1).contiguous()
        sums = empty_sums(tokens.shape[:1], result_dtype(head.hidden.dtype), tokens.device)
        logits = head.hidden.new_zeros(tokens.shape)
        if wanted.ties is None:
            return _Targets(tokens, sums, logits, None)
        # A target counts itself, whatever its logit in a piece is.
        targets = _Targets(tokens, sums, logits, torch.ones_like(tokens))
        if not is_whole:
            targets._multiply(head, block)
        return targets

    def some(self, rows: slice) -> _Targets:
        return _Targets._make(cut(self, rows))

    def _multiply(self, head: LinearProblem, block: Block) -> None:
        """Computes the targets' logits ahead, because pieces before a target's own compare their logits with its. They may differ
        in the last place from those in the pieces."""
        wide = result_dtype(block.hidden.dtype)
        tokens, found = self.tokens.clamp(min=0).flatten(), self.logits.view(-1)
        of_row = self.tokens.shape[-1]
        # A part of the targets at a time, because their weights are copied.
        size = max(1, _COPIED_ELEMENTS // head.weight.shape[1])
        for first in range(0, len(tokens), size):
            part = slice(first, min(first + size, len(tokens)))
            rows = torch.arange(part.start, part.stop, device=tokens.device) // of_row
            logits = head.weight[tokens[part]].to(wide).mul_(block.hidden[rows]).sum(-1)
            if head.bias is not None:
                logits += head.bias[tokens[part]]
            found[part] = logits.to(found.dtype)
        counted = block.of.counted_at(tokens.view(self.tokens.shape))
        if counted is not None:
            self.logits.masked_fill_(~counted, -torch.inf)

    @property
    def counted(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The targets' tokens, logits and ranks, for a kernel that counts the ranks."""
        return self.tokens, self.logits, self.ranks

    def look_at(self, rows: LogitRows, start: int, wanted: Wanted, normalize: str, chosen: str) -> None:
        """Adds a piece of the logits to the sums, and finds the targets that are in it."""
        problem = TokenSumsProblem(rows, self.tokens, normalize, wanted.tail, start)
        token_spread.ON[chosen](problem, self.sums, self.logits)

    def count_ranks(self, rows: LogitRows, start: int, ties: str | None) -> None:
        """Counts the piece's tokens for the targets' ranks, after look_at()."""
        assert self.ranks is not None
        logits, tokens = rows.counted(), rows.logits.shape[-1]
        places = torch.arange(start, start + tokens, device=logits.device)
        # One target of each row after the other, so that memory does not grow with their number.
        for own, token, rank in zip(self.logits.split(1, -1), self.tokens.split(1, -1), self.ranks.split(1, -1)):
            counts = logits == own
            counts &= places != token if ties == "last" else places < token
            counts |= logits > own
            rank += counts.sum(-1, keepdim=True)

    def write(self, scale: Scale, wanted: Wanted, part: slice, out: LinearResult) -> None:
        """Writes the results of the rows, all of whose pieces have been looked at."""
        sums, has_target = TokenSums.of(self.sums), self.tokens >= 0
        if out.state.numel():
            out.state[part].copy_(self.sums)
        if self.ranks is not None:
            out.target_ranks[part].copy_(self.ranks.where(has_target, 0))
        if wanted.values == "state":
            out.target_logprobs[part].copy_(self.logits)
            return
        out.logsumexp[part].copy_(sums.logsumexp(scale))
        if wanted.entropy:
            out.entropy[part].copy_(sums.entropy())
        if wanted.tail:
            out.tail[part].copy_(sums.tail(scale))
        m, log_d = sums.m.unsqueeze(-1), sums.d.log().unsqueeze(-1)
        # As for the k best, a row without a finite normalizer has no probabilities.
        is_known = has_target & m.isfinite() & log_d.isfinite()
        logprobs = scale.log_weight(self.logits.to(m.dtype), m) - log_d
        out.target_logprobs[part].copy_(logprobs.where(is_known, torch.nan))


def room(buffer: Tensor, block: Block, tokens: int, row_stride: int = 0) -> Tensor:
    """(rows, tokens) of the buffer, for a piece. row_stride: 0 for rows without gaps."""
    rows, stride = block.count, row_stride or tokens
    return buffer[: rows * stride].view(rows, stride)[:, :tokens]


def product(hidden: Tensor, head: LinearProblem, start: int, end: int, out: Tensor) -> Tensor:
    """The logits (rows, end - start), written into `out`."""
    weight = head.weight[start:end].t()
    if head.bias is None:
        return torch.mm(hidden, weight, out=out)
    return torch.addmm(head.bias[start:end], hidden, weight, out=out)


def blocks(head: LinearProblem, size: int, within: slice | None = None) -> Iterator[Block]:
    """The rows, or a range of them, `size` at a time."""
    within = within or slice(0, head.row_count)
    for first in range(within.start, within.stop, size):
        yield Block(head, slice(first, min(first + size, within.stop)))

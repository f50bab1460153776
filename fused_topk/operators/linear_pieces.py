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
from ..problem import LinearProblem, TokenSumsProblem, TopK, result_dtype
from ..rows import LogitRows, RowsBlock, some_rows
from ..scale import Scale
from ..token_sums import TokenSums, empty_sums
from . import merging, row_topk, token_spread
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


class Block(NamedTuple):
    """Some rows, without leading dimensions."""

    of: RowsBlock
    hidden: Tensor  # (rows, H)
    targets: Tensor | None  # (rows, n)

    @property
    def part(self) -> slice:
        return self.of.part


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
    for block in blocks(head, pieces.rows):
        if pieces.tokens >= vocab_size and head.targets is None and not wanted.keeps_state and buffer is not None:
            logits = product(block.hidden, head, 0, vocab_size, room(buffer, block, vocab_size))
            best = TopK(flat.values[block.part], flat.indices[block.part], flat.logsumexp[block.part])
            of_block = block.of.of_tokens(logits, 0, vocab_size)
            row_topk.run_into(*of_block, wanted.k, wanted.values, head.normalize, wanted.backend, *best)
        else:
            _forward_block(head, block, pieces, wanted, chosen, buffer, flat)
    return out


def by_the_native_kernel(head: LinearProblem, k: int, values: str, backend: str | None) -> TopK | None:
    """The k best by the CPU's own kernel, which keeps no logits; None where it does not serve the call."""
    chosen = backends.pick(head.hidden.device, head.hidden.dtype, k, backend)
    if not _is_for_the_native_kernel(head, k, chosen):
        return None
    # row_result() uses the leading dimensions and the dtype alone, which the hidden states share with the logits.
    best = row_result(head.hidden, k, values).empty(head.hidden.device)
    _multiply_natively(head, k, values, best, None)
    return best


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
    buffer: Tensor | None,
    out: LinearResult,
) -> None:
    """buffer: memory for a piece. None: the logits are kept where the result has them."""
    vocab_size, part, normalize, backend = len(head.weight), block.part, head.normalize, wanted.backend
    held, has_ranks, are_merged = wanted.held, wanted.ties is not None, pieces.states > 0
    target = None if block.targets is None else _Targets(head, block, wanted, is_whole=pieces.tokens >= vocab_size)
    # row_result() uses the leading dimensions and the dtype alone, which the hidden states share with the logits.
    states = [] if are_merged else [row_result(block.hidden, held, "state").empty(block.hidden.device)]
    for start in range(0, vocab_size, pieces.tokens):
        end = min(start + pieces.tokens, vocab_size)
        if buffer is None:
            place = out.logits[part, start:end]
        else:
            place = room(buffer, block, end - start, 0 if are_merged else pieces.tokens)
        rows = block.of.of_tokens(product(block.hidden, head, start, end, place), start, end)
        if target is not None:
            target.look_at(rows, start, normalize, chosen)
        if held and are_merged:
            states.append(row_topk.run(*rows, min(held, end - start), "state", normalize, backend))
            states[-1].indices.add_(start)
            if target is not None and has_ranks:
                target.count(rows, start)
        elif held:
            cuda_pieces.accumulate_piece(rows, start, states[0], target.tensors if target and has_ranks else None)
        if len(states) == pieces.states and end < vocab_size:
            states = [_merged(states, held, rows.scale(), "state", normalize, backend)]
    scale = rows.scale()
    if wanted.k:
        kind = "logits" if wanted.values == "state" else wanted.values
        best = _merged(states, wanted.k, scale, kind, normalize, backend)
        for given, computed in zip(out, best):
            if given.numel():
                given[part].copy_(computed)
    if target is not None:
        target.write(scale, wanted, part, out)
    elif out.state.numel():
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


class _Targets:
    """The sums of a block's rows (rows, 5), the logits of its targets (rows, n), and their ranks."""

    def __init__(self, head: LinearProblem, block: Block, wanted: Wanted, is_whole: bool) -> None:
        assert block.targets is not None
        self._has_target = block.targets >= 0
        # A token beyond the vocabulary is not found out on a GPU.
        self._targets = block.targets.clamp(max=len(head.weight) - 1)
        self._tokens = self._targets.clamp(min=0).contiguous()
        self._ties, self._tail = wanted.ties, wanted.tail
        # A target counts itself, whatever its logit in a piece is.
        self._ranks = None if self._ties is None else torch.ones_like(self._tokens)
        dtype = result_dtype(block.hidden.dtype)
        self._sums = empty_sums(self._tokens.shape[:1], dtype, block.hidden.device)
        self.logits = block.hidden.new_zeros(self._tokens.shape)
        if self._ties is not None and not is_whole:
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
        """The targets' tokens, logits and ranks, for a kernel that counts the ranks."""
        return self._tokens, self.logits, self._ranks

    def look_at(self, rows: LogitRows, start: int, normalize: str, chosen: str) -> None:
        """Adds a piece of the logits to the sums, and finds the targets that are in it."""
        token_spread.ON[chosen](
            TokenSumsProblem(rows, self._targets - start, normalize, self._tail), self._sums, self.logits
        )

    def count(self, rows: LogitRows, start: int) -> None:
        """Counts the piece's tokens for the targets' ranks, after look_at()."""
        assert self._ranks is not None
        logits, tokens = rows.counted(), rows.logits.shape[-1]
        places = torch.arange(start, start + tokens, device=logits.device)
        # One target of each row after the other, so that memory does not grow with their number.
        for own, token, rank in zip(self.logits.split(1, -1), self._tokens.split(1, -1), self._ranks.split(1, -1)):
            counts = logits == own
            counts &= places != token if self._ties == "last" else places < token
            counts |= logits > own
            rank += counts.sum(-1, keepdim=True)

    def write(self, scale: Scale, wanted: Wanted, part: slice, out: LinearResult) -> None:
        """Writes the results of the rows, all of whose pieces have been looked at."""
        sums = TokenSums.of(self._sums)
        if out.state.numel():
            out.state[part].copy_(self._sums)
        if self._ranks is not None:
            out.target_ranks[part].copy_(self._ranks.where(self._has_target, 0))
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
        is_known = self._has_target & m.isfinite() & log_d.isfinite()
        logprobs = scale.log_weight(self.logits.to(m.dtype), m) - log_d
        out.target_logprobs[part].copy_(logprobs.where(is_known, torch.nan))


def room(buffer: Tensor, block: Block, tokens: int, row_stride: int = 0) -> Tensor:
    """(rows, tokens) of the buffer, for a piece. row_stride: 0 for rows without gaps."""
    rows, stride = len(block.hidden), row_stride or tokens
    return buffer[: rows * stride].view(rows, stride)[:, :tokens]


def product(hidden: Tensor, head: LinearProblem, start: int, end: int, out: Tensor) -> Tensor:
    """The logits (rows, end - start), written into `out`."""
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

# SPDX-License-Identifier: Apache-2.0
"""Top-k functions of a vocabulary whose columns are spread over a process group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..arguments import (
    check_backend,
    check_beam_scores,
    check_common_normalize,
    check_k,
    check_logits,
    check_normalize,
)
from ..operators import merging, row_topk
from ..operators.dispatch import is_seen_by_torch
from ..problem import TopK, TopKLogits, result_dtype
from ..row_arguments import check_rows
from ..rows import LogitRows
from ..tracing import is_traced
from .collective import check, exchange, group_of, headers
from .packing import Header, Packing, Parts, header_words

_row_topk = torch.ops.fused_topk.row_topk.default
_NO_TOKEN = -1


def softmax_topk(
    local_logits: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    group: Any = None,
) -> TopK:
    """The k largest probabilities of the whole vocabulary, the same on every process of the group.

    >>> softmax_topk(local_logits, k=8).indices  # doctest: +SKIP

    The other arguments, the same on all processes, and the errors are those of :func:`fused_topk.softmax_topk`.

    Every process calls it with its columns of the same rows. The whole vocabulary is those of rank 0, then those of rank 1,
    and so on. One all-gather moves 8 + k (8 + the bytes of a logit) bytes a row and process, and 16 a call. On a CPU that is rounded
    up to a power of two, 4 KB at least, and a call of more bytes than the one before it has a second all-gather.

    Args:
        local_logits: shape (..., V_local), this process's columns, on the group's device. V_local may differ between
            processes, and may be 0.
        k: the number of results per row, at most the size of the whole vocabulary; the same on all processes. Compiled calls,
            and those in a CUDA graph, cannot check it: they fill the result up with the value of a logit of -inf and the index -1.
        mask: of this process's columns, packed int32 with the process's first column first.
        lengths: how many of this process's first columns there are, one number a row, 0 <= length <= V_local.
        group: the process group; by default the one of all processes.

    Returns:
        TopK as :func:`fused_topk.softmax_topk` returns it for the whole vocabulary.

    Raises:
        ValueError: on every process, if they pass another k, dtype, number of rows or normalize. On a CPU every call compares
            them. On a GPU the first call of a kind does so, by a second, small collective. Where a process changes its calls
            later, and buffers of another size meet, NCCL may hang; FUSED_TOPK_CHECK_DISTRIBUTED=1 compares at every call.
        RuntimeError: that of torch.distributed, if a process dies or does not call in time. A new group then works.

    Contract:
        Indices are exactly those of the unsharded call, ties included. The rest is the contract of
        :func:`fused_topk.merge_topk`. Gradients with respect to a process's columns are those of a loss that every process
        computes alike from the result. Second derivatives are refused. A call does not wait for the GPU, except the first of a kind,
        and calls with k > V_local. It can be captured in a CUDA graph after such a first call, and compiled with
        fullgraph=True.
    """
    return row("softmax", _checked(local_logits, temperature, mask, lengths), k, normalize, backend, group)


def log_softmax_topk(
    local_logits: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    group: Any = None,
) -> TopK:
    """The k largest log-probabilities of the whole vocabulary, the same on every process of the group.

    >>> log_softmax_topk(local_logits, k=8).indices  # doctest: +SKIP

    Arguments, errors and contract are those of :func:`softmax_topk`, the result is that of :func:`fused_topk.log_softmax_topk`.
    """
    return row("log_softmax", _checked(local_logits, temperature, mask, lengths), k, normalize, backend, group)


def topk(
    local_logits: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    backend: str | None = None,
    group: Any = None,
) -> TopKLogits:
    """The k largest logits of the whole vocabulary, bit for bit, the same on every process of the group.

    >>> topk(local_logits, k=8).indices  # doctest: +SKIP

    Arguments, errors and contract are those of :func:`softmax_topk`, the result is that of :func:`fused_topk.topk`.
    """
    values, indices, _ = row("logits", _checked(local_logits, 1.0, mask, lengths), k, "allowed", backend, group)
    return TopKLogits(values, indices)


def beam_topk(
    local_logits: Tensor,
    beam_scores: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
    group: Any = None,
) -> TopK:
    """One step of beam search over the whole vocabulary: the k best continuations, the same on every process of the group.

    >>> beam_topk(local_logits, beam_scores, k=8).indices  # doctest: +SKIP

    The other arguments, errors and contract are those of :func:`softmax_topk`, the result is that of :func:`fused_topk.beam_topk`.

    Args:
        local_logits: shape (batch, beams, V_local).
        beam_scores: shape (batch, beams), the same on all processes.
        k: the number of results per sequence, at most beams times the size of the whole vocabulary.
        normalize: "allowed" or "all".

    Contract:
        Each process sums the exponentials of its columns. So totals of beams that are a rounding apart may change places with
        those of the unsharded call. Compiled and captured calls cannot check that k is at most beams times the vocabulary:
        what is too much has the index -1.
    """
    check_logits(local_logits, "local_logits")
    check_beam_scores(beam_scores, local_logits)
    check_common_normalize(normalize, "beam_topk")
    return best_of_beams(_checked(local_logits, temperature, mask, lengths), beam_scores, k, normalize, backend, group)


def _checked(
    local_logits: Tensor, temperature: float | Tensor, mask: Tensor | None, lengths: Tensor | None
) -> LogitRows:
    check_logits(local_logits, "local_logits")
    return check_rows(local_logits, temperature, mask, lengths, may_be_empty=True)


def row(values: str, rows: LogitRows, k: int, normalize: str, backend: str | None, group: Any) -> TopK:
    """The k best of rows of which each process has some columns."""
    check_normalize(normalize)
    call = gather_states(rows, k, normalize, backend, group)
    return merging.merge_parts(*call.parts, k, *rows.scale(), values, normalize, backend)


def best_of_beams(
    rows: LogitRows, beam_scores: Tensor, k: int, normalize: str, backend: str | None, group: Any
) -> TopK:
    """Likewise over the beams of (batch, beams, V)."""
    beams = rows.logits.shape[1]
    call = gather_states(rows, k, normalize, backend, group, of_row=beams)
    parts, vocab_size = call.parts, call.vocab_size
    k_of_beam = k if vocab_size is None else min(k, vocab_size)
    of_beam = merging.merge_parts(*parts, k_of_beam, *rows.scale(), "log_softmax", normalize, backend)
    scores = beam_scores.to(of_beam.values.dtype).unsqueeze(-1)
    accumulated = (of_beam.values + scores).flatten(1)
    ranked = accumulated.detach()
    of_beams = torch.arange(beams, device=accumulated.device).unsqueeze(-1)
    tokens = of_beams * (parts.lengths.sum() if vocab_size is None else vocab_size) + of_beam.indices
    if vocab_size is None:
        # A list that is longer than the vocabulary ends with places that have no token. They rank below every token, also
        # below those with -inf.
        is_void = of_beam.indices < 0
        ranked = ranked.clamp(min=torch.finfo(ranked.dtype).min).masked_fill(is_void.flatten(1), -torch.inf)
        tokens = tokens.masked_fill(is_void, _NO_TOKEN)
    # Of equal scores the one that is earlier in the lists comes first: the smaller beam, and within a beam the row's order.
    best = row_topk.row_topk(LogitRows(ranked), k, "logits", "allowed", backend).indices
    return TopK(accumulated.gather(1, best), tokens.flatten(1).gather(1, best), of_beam.logsumexp)


class Gathered(NamedTuple):
    """The states of all processes, and what else their merge needs."""

    parts: Parts
    tails: Tensor | None  # (processes, *shape), the tensor that each process sent along
    vocab_size: int | None  # of the whole vocabulary; None: not known on the host, but no less than k


def gather_states(
    rows: LogitRows,
    k: int,
    normalize: str,
    backend: str | None,
    group: Any,
    of_row: int | None = 1,
    tail: Tensor | None = None,
    others: tuple[Any, ...] = (),
) -> Gathered:
    """Exchanges the states of the processes' columns, of which `rows` has this process's.

    of_row: the number of rows that k is chosen from, one or the beams; None where k may exceed the vocabulary. tail: a tensor to
    exchange along with the states, of one shape and dtype on all processes. others: plain values that must be the same on all
    processes, too.
    """
    group = group_of(group)
    check_k(k, 2**31 - 1, "what an exchange takes")
    check_backend(backend)
    local_logits = rows.logits
    length, device = local_logits.shape[-1], local_logits.device
    packing = Packing(tuple(local_logits.shape[:-1]), k, local_logits.dtype, 0 if tail is None else tail.nbytes)
    header = Header.of(length, k, packing.rows, local_logits.dtype, normalize, _beside(tail, others))
    held = min(k, length)
    has_gradient = torch.is_grad_enabled() and local_logits.requires_grad
    state = None
    if has_gradient or is_seen_by_torch(*rows.tensors()):
        state = _state(rows, k, held, normalize, backend)
        buffer = packing.packed(header, TopK(*(x.detach() for x in state)), tail)
    else:
        buffer = torch.empty(packing.words, dtype=torch.int64, device=device)
        buffer[:2].copy_(header_words(header, buffer))
        write_state(rows, held, normalize, backend, packing.state(buffer))
        if tail is not None:
            packing.tails(buffer.unsqueeze(0))[0].copy_(tail.contiguous().view(-1).view(torch.uint8))
    everywhere = exchange(buffer, header, group)
    parts = packing.parts(everywhere)
    tails = None if tail is None else _tails(everywhere, packing, tail)
    if state is not None and has_gradient:
        parts = _with_own(parts, dist.get_rank(group), state)

    return Gathered(parts, tails, _vocab_size(everywhere, k, length, of_row))


def exchange_state(
    state: TopK, length: int, normalize: str, group: Any, tail: Tensor | None
) -> tuple[Parts, Tensor | None]:
    """Exchanges a given state of `length` tokens, and a tail as for gather_states(). state: the logits (..., k), their tokens,
    counted from the process's first one, and (m, d) (2, ...)."""
    *leading, k = state.indices.shape
    dtype = state.values.dtype
    packing = Packing(tuple(leading), k, dtype, 0 if tail is None else tail.nbytes)
    header = Header.of(length, k, packing.rows, dtype, normalize, _beside(tail))
    everywhere = exchange(packing.packed(header, state, tail), header, group)
    _vocab_size(everywhere, k, length)
    return packing.parts(everywhere), None if tail is None else _tails(everywhere, packing, tail)


def _beside(tail: Tensor | None, others: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
    """The values that the header compares of a tail and of `others`. None: there is no tail."""
    if tail is None:
        return None
    # A GPU's header is not read in each call, and a header with new values would have to be copied to the GPU.
    is_read = tail.device.type == "cpu" and not is_traced()
    return (tuple(tail.shape), str(tail.dtype), *others) if is_read else ()


def _tails(everywhere: Tensor, packing: Packing, tail: Tensor) -> Tensor:
    """(processes, *shape of the tail)."""
    return packing.tails(everywhere).view(tail.dtype).view(len(everywhere), *tail.shape)


def _vocab_size(everywhere: Tensor, k: int, length: int, of_row: int | None = 1) -> int | None:
    """The vocab_size of :class:`Gathered`. Where it reads the headers of the processes, it also compares them."""
    # Reading headers waits for a GPU, so it is done only where k may exceed the vocabulary. is_traced() is asked first, because
    # torch.compile does not trace the question about a capture.
    if is_traced() or (everywhere.device.type != "cpu" and (k <= length or torch.cuda.is_current_stream_capturing())):
        return None
    said = headers(everywhere)
    check(said)
    vocab_size = sum(of_rank.length for of_rank in said)
    if vocab_size == 0:
        raise ValueError("the vocabulary must have at least one token, got none on any process; leave the call out")
    if of_row is not None:
        check_k(k, of_row * vocab_size, "the whole vocabulary" if of_row == 1 else "beams times the whole vocabulary")
    return vocab_size


def _state(rows: LogitRows, k: int, held: int, normalize: str, backend: str | None) -> TopK:
    """The state of this process's columns, as differentiable tensors with k entries a row."""
    local_logits = rows.logits
    leading, dtype = local_logits.shape[:-1], result_dtype(local_logits.dtype)
    if held == 0:
        sums = local_logits.sum(-1).to(dtype)
        return TopK(
            local_logits.new_full((*leading, k), -torch.inf),
            torch.full((*leading, k), _NO_TOKEN, device=local_logits.device),
            torch.stack((sums - torch.inf, sums)),
        )
    return padded(TopK(*_row_topk(*rows, held, "state", normalize, backend)), k)


def padded(state: TopK, k: int) -> TopK:
    """The state with k entries a row. Entries that are missing have the logit -inf and no token."""
    best, indices, normalizer = state
    pad = torch.nn.functional.pad
    missing = (0, k - best.shape[-1])
    return TopK(pad(best, missing, value=-torch.inf), pad(indices, missing, value=_NO_TOKEN), normalizer)


def write_state(rows: LogitRows, held: int, normalize: str, backend: str | None, out: TopK) -> None:
    """Writes the state of this process's columns into the tensors of a buffer."""
    best, indices, normalizer = out
    if held < indices.shape[-1]:
        best.fill_(-torch.inf)
        indices.fill_(_NO_TOKEN)
    if held == 0:
        normalizer[0].fill_(-torch.inf)
        normalizer[1].zero_()
        return
    written = TopK(best[..., :held], indices[..., :held], normalizer)
    row_topk.run_into(*rows, held, "state", normalize, backend, *written)


def _with_own(parts: Parts, rank: int, own: TopK) -> Parts:
    """The parts with this process's state in place of its copy, so that gradients reach the logits."""
    values, normalizer = _OnceDifferentiable.apply(own.values, own.logsumexp)  # type: ignore[no-untyped-call]
    live = (values, own.indices, *normalizer.unbind(0))
    # Not a slice: torch.compile of torch 2.6 cannot trace one of a named tuple.
    *of_parts, lengths = parts
    logits, indices, m, d = (
        torch.cat((of_all[:rank], of_own.unsqueeze(0), of_all[rank + 1 :])) for of_all, of_own in zip(of_parts, live)
    )
    return Parts(logits, indices, m, d, lengths)


class _OnceDifferentiable(torch.autograd.Function):
    """The same tensors. A second derivative would lack the terms of the other processes."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients

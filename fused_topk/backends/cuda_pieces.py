# SPDX-License-Identifier: Apache-2.0
"""Launches for a piece of an LM head's logits, which only the CUDA backend has. The rules of cuda.py hold here, too."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import launch
from ..layout.kernel_arguments import LogitGradients, Piece, address, with_rows
from ..problem import LogitGradientProblem, TopK
from ..rows import LogitRows
from . import cuda


def accumulate_piece(
    rows: LogitRows,
    first_token: int,
    state: TopK,
    targets: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> None:
    """Takes a piece of the vocabulary into the rows' states, by csrc/linear/accumulate_piece.cu.

    Args:
        rows: of (rows, tokens), at least one, without a mask; each row starts at a multiple of 16 bytes.
        first_token: the first token of the piece, in a vocabulary of less than 2^31 tokens. For 0, the first piece, the state is
            not read.
        state: values (rows, k) in the logits' dtype, indices (rows, k), -1 where there is no entry yet, and m and d (2, rows)
            in place of the logsumexp, each contiguous, with k at most launch.MOST_K_OF_PIECES.
        targets: (tokens, logits, ranks), each contiguous. The tokens are int64 (rows, n). The logits (rows, n) are written for
            the tokens that are in the piece. The ranks are None, or for n = 1 int64 (rows, 1): the number of the piece's tokens
            that come before the target is added to them. For that, the target's logit must be there before the first piece.
    """
    rows, logits = rows.with_adjacent_numbers(), rows.logits
    device = logits.get_device()
    count, tokens = logits.shape
    target_tokens, target_logits, ranks = targets or (None, None, None)
    filled = Piece(
        row_stride=logits.stride(0),
        values=state.values.data_ptr(),
        indices=state.indices.data_ptr(),
        state=state.logsumexp.data_ptr(),
        targets=address(target_tokens),
        target_logits=address(target_logits),
        target_ranks=address(ranks),
        rows=count,
        tokens=tokens,
        k=state.values.shape[1],
        num_targets=0 if target_tokens is None else target_tokens.shape[1],
        first_token=first_token,
        is_first=first_token == 0,
    )
    kernel = launch.kernel("pieces::accumulate_piece", logits.dtype, ranks is not None)
    shared_bytes = launch.piece_shared_bytes(logits.dtype)
    written = with_rows(filled, rows)
    cuda.launch(device, kernel, (launch.piece_blocks(count),), launch.PIECE_THREADS, written, shared_bytes=shared_bytes)


def logit_gradients(problem: LogitGradientProblem, rows: LogitRows, start: int, sums_all: bool = False) -> None:
    """Turns logits (rows, tokens), which begin at token `start` and are adjacent in a row, into their gradient. It is 0 at hidden
    tokens; with `sums_all` only the rest is."""
    rows, logits, mask = rows.with_adjacent_numbers(), rows.logits, rows.mask
    p, index = problem, logits.get_device()
    count, tokens = logits.shape
    filled = LogitGradients(
        m=p.m.data_ptr(),
        coefficient=p.coefficient.data_ptr(),
        slope=address(p.slope),
        rest_m=address(p.rest_m),
        rest=address(p.rest),
        listed=p.listed.data_ptr(),
        row_stride=logits.stride(0),
        mask_row_stride=0 if mask is None else mask.stride(0),
        mask_element_stride=0 if mask is None else mask.stride(1),
        tokens=tokens,
        start=start,
        length=p.listed.shape[1],
        mask_kind=mask is not None and mask.dtype != torch.bool,
        sums_all=sums_all,
    )
    grid = count, -(-tokens * logits.element_size() // launch.GRADIENT_SPAN_BYTES)
    written = with_rows(filled, rows)
    cuda.launch(index, launch.kernel("gradients::logit_gradient", logits.dtype), grid, launch.GRADIENT_THREADS, written)

# SPDX-License-Identifier: Apache-2.0
"""The gradient of an LM head in pieces: logits that are computed again become their own gradient, and are multiplied.

With T the temperature of a row, p the softmax of its scaled logits and q that of the tokens that are left for the tail, the
gradient of the logits x is

    ((c - h z) p + t q + a) / T        z = (x - m) / T

c, h and t are the incoming gradients of the row's normalizer, entropy and tail. a is that of some tokens: the chosen ones and the
targets. On a GPU a kernel computes the gradient in place (csrc/linear/logit_gradient.cu), elsewhere torch operations do. Nothing waits
for the device.

Logits that were kept become their gradient all at once. Then a product has all rows, and rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..backends import cuda, cuda_pieces
from ..layout import linear_pieces as layout
from ..problem import LinearProblem, LogitGradientProblem, result_dtype
from ..rows import LogitRows, cut, some_rows
from ..token_sums import TokenSums, reference_point, without
from .linear_pieces import Block, blocks, product, room

# For the kernel rows of logits begin at multiples of so many elements, which are 16 bytes or more, so that it can read vectors. Elsewhere
# rows have no gaps: a CPU's product of bfloat16 (AMX, torch 2.13) reads into them, and NaN there is NaN in its result.
_STRIDE_MULTIPLE = 8
# Tokens of this number on belong to another part of a vocabulary: twice a token fits into 32 bits.
_MOST_LISTED_TOKENS = 2**30


class _OfRows(NamedTuple):
    """The terms of the gradient of some rows' logits."""

    m: Tensor  # (rows,)
    coefficient: Tensor  # (rows,): c / d
    slope: Tensor | None  # (rows,): -h / d
    rest_m: Tensor | None  # (rows,): the greatest logit of those that are left
    rest: Tensor | None  # (rows,): t / d of those that are left
    targets: Tensor | None  # (rows, n)
    # Tokens (rows, n), and the amount that is added at each. A token that is out of range stands for none.
    added: list[tuple[Tensor, Tensor]]

    def some(self, rows: slice) -> _OfRows:
        added = [(tokens[rows], amounts[rows]) for tokens, amounts in self.added]
        return _OfRows._make([*cut(self[:-1], rows), added])


class Incoming(NamedTuple):
    """The tensors of all rows that linear_topk_backward is given."""

    indices: Tensor  # (..., k)
    state: Tensor  # (..., 2), or (..., 5): TokenSums
    grad_chosen: Tensor  # (..., k)
    grad_target: Tensor | None  # (..., n)
    grad_normalizer: Tensor  # (...)
    grad_entropy: Tensor | None  # (...)
    grad_tail: Tensor | None  # (...)

    def of(self, block: Block) -> _OfRows:
        def of_block(x: Tensor | None) -> Tensor | None:
            return None if x is None else some_rows(x, 0, block.part)

        state = some_rows(self.state, 1, block.part)
        m, d, *_ = state.unbind(-1)
        added = [(some_rows(self.indices, 1, block.part), some_rows(self.grad_chosen, 1, block.part))]
        if self.grad_target is not None and block.targets is not None:
            added.append((block.targets, some_rows(self.grad_target, 1, block.part)))
        entropy, tail, rest_m, rest = of_block(self.grad_entropy), of_block(self.grad_tail), None, None
        if tail is not None:
            sums = TokenSums.of(state)
            rest_m, rest = sums.rest_m, tail / sums.rest_d.where(sums.rest_d != 0, 1.0)
        slope = None if entropy is None else -entropy / d
        coefficient = some_rows(self.grad_normalizer, 0, block.part) / d
        return _OfRows(m, coefficient, slope, rest_m, rest, block.targets, added)


class _Sums(NamedTuple):
    """The gradients while they are summed. None for one that is not wanted."""

    hidden: Tensor | None  # (rows, H)
    weight: Tensor | None  # (V, H)
    bias: Tensor | None  # (V,) float32, or float64


# Given a piece of logits and its first token, computes the gradient of the piece: in float32 (float64), and rounded to the logits'
# dtype. Both may be one tensor.
_Gradient = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def backward(
    head: LinearProblem, incoming: Incoming, backend: str | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias. An empty tensor stands for one that is not wanted."""
    hidden, (vocab_size, depth), rows = head.hidden, head.weight.shape, head.row_count
    of_hidden, of_weight, of_bias = _results(hidden, head.weight, wanted)
    if rows == 0:
        return of_hidden, of_weight, of_bias
    dtype = result_dtype(hidden.dtype)
    has_kernel, pieces = _pieces(head, incoming, backend, wanted[2])
    sums = _Sums(
        of_hidden.view(rows, depth) if wanted[0] else None,
        of_weight if wanted[1] else None,
        of_bias.to(dtype) if wanted[2] else None,
    )
    multiple = _STRIDE_MULTIPLE if has_kernel else 1
    buffer = hidden.new_empty(pieces.rows * _row_stride(min(pieces.tokens, vocab_size), multiple))
    wide = _wide(hidden, buffer.numel(), has_kernel)
    for together in blocks(head, pieces.rows * pieces.blocks):
        gradient_of = _gradients(head, together, incoming, has_kernel, wide)
        for block in blocks(head, pieces.rows, together.part):
            _add_block(head, block, pieces.tokens, multiple, gradient_of(block), buffer, sums)
        # Freed before the next rows' lists are made, so that both are never in memory together.
        del gradient_of
    if sums.bias is not None and sums.bias is not of_bias:
        of_bias.copy_(sums.bias)
    return of_hidden, of_weight, of_bias


def turn_into_gradient(head: LinearProblem, incoming: Incoming, backend: str | None, kept: Tensor) -> None:
    """Puts the gradient of the logits into the place of the logits (..., V)."""
    rows, vocab_size = head.row_count, len(head.weight)
    if rows == 0:
        return
    has_kernel, pieces = _pieces(head, incoming, backend, False)
    size, tokens = pieces.rows, pieces.tokens
    if has_kernel and not head.rows.hides():
        # Nothing is copied.
        size, tokens = pieces.rows * pieces.blocks, vocab_size
    logits = kept.view(rows, vocab_size)
    wide = _wide(head.hidden, size * min(tokens, vocab_size), has_kernel)
    for block in blocks(head, size):
        gradient = _gradients(head, block, incoming, has_kernel, wide)(block)
        for start in range(0, vocab_size, tokens):
            gradient(logits[block.part, start : start + tokens], start)
        del gradient


def products(hidden: Tensor, weight: Tensor, gradient: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`backward`, given the gradient of all logits (..., V)."""
    of_hidden, of_weight, of_bias = _results(hidden, weight, wanted)
    g, rows = gradient.flatten(0, -2) if gradient.dim() > 1 else gradient.unsqueeze(0), math.prod(hidden.shape[:-1])
    if rows == 0:
        return of_hidden, of_weight, of_bias
    # Autocast converts the operands of a product, unless `out` is given.
    with torch.no_grad():
        if wanted[0]:
            torch.mm(g, weight, out=of_hidden.view(rows, -1))
        if wanted[1]:
            torch.mm(g.t(), hidden.reshape(rows, -1), out=of_weight)
        if wanted[2]:
            of_bias.copy_(g.sum(0, dtype=result_dtype(hidden.dtype)))
    return of_hidden, of_weight, of_bias


def _results(hidden: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    # Without rows nothing is added to the gradients, and nothing else would write them.
    make = hidden.new_empty if hidden.numel() else hidden.new_zeros
    of_hidden, of_weight, of_bias = (make(shape if is_wanted else 0) for shape, is_wanted in zip(shapes, wanted))
    return of_hidden, of_weight, of_bias


def _pieces(head: LinearProblem, incoming: Incoming, backend: str | None, has_bias: bool) -> tuple[bool, layout.Pieces]:
    """Whether a kernel computes the gradient in place, and the pieces. has_bias: whether the bias has a gradient."""
    hidden, (vocab_size, depth), rows = head.hidden, head.weight.shape, head.row_count
    itemsize = hidden.element_size()
    if backends.pick(hidden.device, hidden.dtype, 1, backend) == "cuda" and vocab_size < _MOST_LISTED_TOKENS:
        listed = incoming.indices.shape[-1] + (0 if head.targets is None else head.targets.shape[-1])
        of_call = has_bias, head.rows.hides(), not hidden.is_contiguous(), _adds_in_place(hidden)
        count = cuda.multiprocessors(hidden.get_device())
        return True, layout.in_place_pieces(rows, vocab_size, depth, itemsize, listed, *of_call, count)
    return False, layout.backward_pieces(rows, vocab_size, depth, itemsize, hidden.device.type == "cpu")


def _wide(hidden: Tensor, size: int, has_kernel: bool) -> Tensor | None:
    """Memory of a piece to compute in. None: the logits are computed in place."""
    dtype = result_dtype(hidden.dtype)
    return None if has_kernel or dtype == hidden.dtype else torch.empty(size, dtype=dtype, device=hidden.device)


def _gradients(
    head: LinearProblem, together: Block, incoming: Incoming, has_kernel: bool, wide: Tensor | None
) -> Callable[[Block], _Gradient]:
    """For the blocks of some rows."""
    of_rows = incoming.of(together)
    if not has_kernel:
        return lambda block: _in_torch(head, block, of_rows.some(block.within(together)), wide)
    m, coefficient, slope, rest_m, rest, *_, added = of_rows
    problem = LogitGradientProblem(
        m.contiguous(), coefficient, slope, None if rest_m is None else rest_m.contiguous(), rest, _listed(added)
    )
    return lambda block: _by_kernel(head, block, problem.some(block.within(together)))


def _adds_in_place(hidden: Tensor) -> bool:
    """Whether the library adds a product of 16-bit tensors to a float32 one."""
    return hidden.device.type == "cuda" and hidden.element_size() == 2 and hasattr(torch.ops.aten.addmm, "dtype_out")


def _row_stride(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple


def _add_block(
    head: LinearProblem, block: Block, size: int, multiple: int, gradient: _Gradient, buffer: Tensor, sums: _Sums
) -> None:
    """Adds what some rows contribute, `size` tokens at a time. The first rows overwrite what they find. Rows of logits begin at a
    `multiple` of elements."""
    hidden, vocab_size, adds_in_place = block.hidden, len(head.weight), _adds_in_place(block.hidden)
    of_hidden = None
    if sums.hidden is not None:
        of_hidden = torch.zeros(hidden.shape, dtype=result_dtype(hidden.dtype), device=hidden.device)
    for start in range(0, vocab_size, size):
        end = min(start + size, vocab_size)
        logits = product(hidden, head, start, end, room(buffer, block, end - start, _row_stride(end - start, multiple)))
        g, rounded = gradient(logits, start)
        is_first = block.part.start == 0
        if sums.bias is not None and is_first:
            torch.sum(g, 0, dtype=sums.bias.dtype, out=sums.bias[start:end])
        elif sums.bias is not None:
            sums.bias[start:end] += g.sum(0, dtype=sums.bias.dtype)
        if of_hidden is not None and of_hidden.dtype == hidden.dtype:
            of_hidden.addmm_(rounded, head.weight[start:end])
        elif of_hidden is not None and adds_in_place:
            torch.ops.aten.addmm.dtype_out(of_hidden, rounded, head.weight[start:end], of_hidden.dtype, out=of_hidden)
        elif of_hidden is not None:
            # Autocast converts the operands of a product, unless `out` is given.
            of_hidden += torch.mm(rounded, head.weight[start:end], out=torch.empty_like(hidden))
        if sums.weight is not None and is_first:
            torch.mm(rounded.t(), hidden, out=sums.weight[start:end])
        elif sums.weight is not None:
            sums.weight[start:end].addmm_(rounded.t(), hidden)
    if of_hidden is not None and sums.hidden is not None:
        sums.hidden[block.part].copy_(of_hidden)


def _by_kernel(head: LinearProblem, block: Block, problem: LogitGradientProblem) -> _Gradient:
    """Computes the gradient in the place of the logits. Only the rounded gradient is ever in memory."""

    def gradient(logits: Tensor, start: int) -> tuple[Tensor, Tensor]:
        rows = block.of.of_tokens(logits, start, start + logits.shape[-1])
        sums_all = head.normalize == "all"
        if sums_all and problem.rest is None:
            rows = rows._replace(mask=None)
        cuda_pieces.logit_gradients(problem, rows, start, sums_all)
        return logits, logits

    return gradient


def _listed(added: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The list of LogitGradientProblem. added: tokens (rows, n) and amounts of the chosen ones, then of the given ones."""
    rows, length = added[0][0].shape[0], sum(tokens.shape[-1] for tokens, _ in added)
    pairs = torch.empty((rows, length, 2), dtype=torch.int32, device=added[0][0].device)
    first = 0
    for is_given, (tokens, amounts) in enumerate(added):
        part = slice(first, first + tokens.shape[-1])
        first = part.stop
        pairs.view(torch.float32)[:, part, 0].copy_(amounts)
        pairs[:, part, 1].copy_(tokens.clamp(-1, _MOST_LISTED_TOKENS - 1).mul_(2).add_(is_given))
    return pairs.view(torch.int64).squeeze(-1).sort(-1).values


def _in_torch(head: LinearProblem, block: Block, of_rows: _OfRows, wide: Tensor | None) -> _Gradient:
    """wide: float32 memory for a piece. None if the logits have the gradient's dtype: it then takes their place."""
    base, coefficient = reference_point(of_rows.m).unsqueeze(-1), of_rows.coefficient.unsqueeze(-1)

    def gradient(logits: Tensor, start: int) -> tuple[Tensor, Tensor]:
        rows = block.of.of_tokens(logits, start, start + logits.shape[-1])
        scale, tail = rows.scale(), _of_tail(rows, of_rows, start)
        g = logits if wide is None else wide[: logits.numel()].view(logits.shape)
        if of_rows.slope is None:
            scale.weight(logits, base, out=g).mul_(coefficient)
        else:
            z = scale.log_weight(logits, base, out=g)
            weight = z.exp()
            # Of z = -inf nothing is left.
            z.clamp_(min=torch.finfo(z.dtype).min).mul_(of_rows.slope.unsqueeze(-1)).add_(coefficient).mul_(weight)
        if tail is not None:
            g += tail
        for tokens, amounts in of_rows.added:
            _add_at(g, tokens, amounts, start)
        scale.back(g, out=g)
        hidden = rows.uncounted(head.normalize)
        if hidden is not None:
            g.masked_fill_(hidden, 0.0)
        return g, logits if wide is None else logits.copy_(g)

    return gradient


def _of_tail(rows: LogitRows, of_rows: _OfRows, start: int) -> Tensor | None:
    """t q of a piece of the logits."""
    if of_rows.rest is None or of_rows.rest_m is None or of_rows.targets is None:
        return None
    left = without(rows.counted().to(of_rows.rest.dtype), of_rows.targets - start)
    weight = rows.scale().weight(left, reference_point(of_rows.rest_m).unsqueeze(-1), out=left)
    return weight.mul_(of_rows.rest.unsqueeze(-1))


def _add_at(x: Tensor, tokens: Tensor, what: Tensor, start: int) -> None:
    """Adds `what` at the tokens (rows, k) that lie in the piece x, whose first token is `start`."""
    place = tokens - start
    is_here = (place >= 0) & (place < x.shape[-1])
    x.scatter_add_(-1, place.clamp(0, x.shape[-1] - 1), what.to(x.dtype).where(is_here, 0.0))

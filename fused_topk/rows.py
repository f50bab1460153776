# SPDX-License-Identifier: Apache-2.0
"""What a call reads: rows of logits, how they are scaled, and which of them count. It is the same for every family
of functions.

One value, :class:`LogitRows`, travels from the check of the arguments to the kernels. The other half of a call, what is
wanted, is a small class for each family (:mod:`fused_topk.problem`).

A new field of LogitRows needs a check in ``check_rows()`` and in ``plain_rows()`` of row_arguments.py, a layout in
:class:`RowsLayout`, a type in ``ROWS_SCHEMA``, and a place in ``flat()``, ``layout()`` and ``given()``. A field that says how logits are
scaled belongs to :class:`fused_topk.scale.Scale`, too. Besides these files those that plan a launch name the fields
(``topk_launch.py``, ``launch.py``, ``backends/cpu.py``), and those that take a scale apart: ``grep -rn row_temperature fused_topk``.
All others make rows from other rows by the methods below, which keep every field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scale import SCALE_SCHEMA, Scale

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # of logits, and of hidden states
_WORD = 32  # tokens in a word of a packed mask
_NUMBERS = ("row_temperature", "lengths")  # the fields of LogitRows that are tensors with one number a row
_new = tuple.__new__


class Like(NamedTuple):
    """The layout of a tensor: all that a plan knows of it."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def meta(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class LogitRows(NamedTuple):
    """Checked rows of logits. The other tensors are broadcast to the leading dimensions of the logits, without a copy.

    All fields but the logits are given by name.
    """

    logits: Tensor  # (..., V), or for an LM head the hidden states (..., H); all tensors here may have any strides
    temperature: float = 1.0  # positive and finite (0 too for draws); ignored where row_temperature is given
    row_temperature: Tensor | None = None  # (...), float32, or float64 for float64 logits and for draws
    mask: Tensor | None = None  # bool (..., V), or int32 (..., ceil(V / 32))
    # (...), int32 or int64: tokens from a row's length on count as -inf and are not read. Lengths outside of 0 to V are clamped.
    lengths: Tensor | None = None

    # Not a property, which torch.compile of torch 2.6 cannot read from a named tuple.
    def scale(self) -> Scale:
        """The fields that say how the logits are scaled."""
        return Scale(self.temperature, self.row_temperature)

    def with_logits(self, logits: Tensor) -> LogitRows:
        """The same rows with another tensor in the place of the logits."""
        # Not by _replace(), which torch.compile of torch 2.6 cannot trace.
        _, *others = self
        return LogitRows(logits, *others)  # type: ignore[arg-type]

    def unscaled(self) -> LogitRows:
        """The same rows at temperature 1."""
        return self._replace(temperature=1.0, row_temperature=None)

    def uncounted(self, normalize: str = "allowed") -> Tensor | None:
        """bool (..., V): the tokens whose logits count as -inf in m and d. None if there are no such tokens. With normalize="all"
        the mask says only which tokens may be chosen, and hides none from m and d."""
        vocab_size, hidden = self.logits.shape[-1], None
        if self.lengths is not None:
            hidden = torch.arange(vocab_size, device=self.lengths.device) >= self.lengths.unsqueeze(-1)
        if self.mask is None or normalize == "all":
            return hidden
        by_mask = ~unpacked(self.mask, vocab_size)
        return by_mask if hidden is None else by_mask | hidden

    def counted(self, normalize: str = "allowed") -> Tensor:
        """The logits, with -inf for tokens that do not count. By default they are the logits to choose from. With `normalize` they
        are those that m and d sum up."""
        hidden = self.uncounted(normalize)
        return self.logits if hidden is None else self.logits.masked_fill(hidden, -torch.inf)

    def counted_at(self, tokens: Tensor) -> Tensor | None:
        """bool (..., n): which of the tokens (..., n) count. None if all do."""
        within = None if self.lengths is None else tokens < self.lengths.unsqueeze(-1)
        if self.mask is None:
            return within
        if self.mask.dtype == torch.bool:
            allowed = self.mask.gather(-1, tokens)
        else:
            allowed = bits_at(self.mask.gather(-1, tokens // _WORD), tokens)
        return allowed if within is None else allowed & within

    def tensors(self) -> list[Tensor]:
        """The fields that are tensors, the logits first."""
        return [x for x in self if isinstance(x, Tensor)]

    def broadcast(self) -> LogitRows:
        """The same rows, whose other tensors have the leading dimensions of the logits, without a copy."""
        logits, temperature, row_temperature, mask, lengths = self
        lead = logits.shape[:-1]
        if mask is not None:
            mask = mask.expand(logits.shape if mask.dtype == torch.bool else (*lead, mask.shape[-1]))
        return LogitRows(
            logits,
            temperature=temperature,
            row_temperature=None if row_temperature is None else row_temperature.expand(lead),
            mask=mask,
            lengths=None if lengths is None else lengths.expand(lead),
        )

    def has_numbers(self) -> bool:
        """Whether there is a tensor with one number a row."""
        return any(getattr(self, name) is not None for name in _NUMBERS)

    def with_numbers(self, change: Callable[[Tensor], Tensor]) -> LogitRows:
        """The same rows, with `change` of each tensor that has one number a row."""
        changed: Any = {name: change(x) for name in _NUMBERS if (x := getattr(self, name)) is not None}
        return self._replace(**changed)

    def with_adjacent_numbers(self) -> LogitRows:
        """The same rows, whose tensors with one number a row are contiguous."""
        return self.with_numbers(Tensor.contiguous)

    def flat(self) -> LogitRows:
        """The same rows with one leading dimension, whose tensors with one number a row are contiguous."""
        # Written out, because torch.compile of torch 2.6 cannot trace _replace().
        logits, temperature, row_temperature, mask, lengths = self
        return LogitRows(
            logits.reshape(-1, logits.shape[-1]),
            temperature=temperature,
            row_temperature=None if row_temperature is None else row_temperature.reshape(-1).contiguous(),
            mask=None if mask is None else mask.reshape(-1, mask.shape[-1]),
            lengths=None if lengths is None else lengths.reshape(-1).contiguous(),
        )

    def contiguous(self) -> LogitRows:
        """The same rows, all of whose tensors are contiguous."""
        return LogitRows(*(x.contiguous() if isinstance(x, Tensor) else x for x in self))  # type: ignore[arg-type]

    def hides(self) -> bool:
        """Whether some tokens may be hidden."""
        return self.mask is not None or self.lengths is not None

    def layout(self) -> RowsLayout:
        """The key of these rows' plans."""
        logits, temperature, row_temperature, mask, lengths = self
        # Written out, and by tuple.__new__, which avoids the named tuple's own __new__ in Python: a call of a short row takes 5 µs.
        of_logits = _new(Like, (logits.dtype, logits.shape, logits.stride()))
        if row_temperature is None and mask is None and lengths is None:
            return _new(RowsLayout, (of_logits, temperature, None, None, None))
        others = like_given(row_temperature), like_given(mask), like_given(lengths)
        return _new(RowsLayout, (of_logits, temperature, *others))


class RowsBlock(NamedTuple):
    """A range of an LM head's rows, whose logits are computed for some tokens at a time. They have no lengths."""

    # Tensors with one number a row are those of the range. The mask is that of all rows. The field `logits` is not used.
    rows: LogitRows
    part: slice  # the range, where rows are numbered as with one leading dimension

    @staticmethod
    def of(rows: LogitRows, part: slice) -> RowsBlock:
        return RowsBlock(rows.with_numbers(lambda numbers: some_rows(numbers, 0, part).contiguous()), part)

    def of_tokens(self, logits: Tensor, start: int, end: int) -> LogitRows:
        """The rows of the range with the tokens `start` to `end` alone, given their logits (rows, tokens). `start` is a multiple
        of 32."""
        mask = self.rows.mask
        if mask is not None:
            tokens = slice(start, end) if mask.dtype == torch.bool else slice(start // _WORD, -(-end // _WORD))
            # The tokens are cut first: some_rows() may copy, and a copy of all tokens may be too large.
            mask = some_rows(mask[..., tokens], 1, self.part)
        return self.rows._replace(logits=logits, mask=mask)

    def counted_at(self, tokens: Tensor) -> Tensor | None:
        """bool (rows, n): which of the tokens (rows, n) count. None if all do."""
        mask = self.rows.mask
        if mask is None:
            return None
        places = [place.unsqueeze(-1) for place in _places(mask.shape[:-1], self.part, tokens.device)]
        if mask.dtype == torch.bool:
            return mask[(*places, tokens)]
        return bits_at(mask[(*places, tokens // _WORD)], tokens)


class RowsLayout(NamedTuple):
    """The layout of :class:`LogitRows`: the half of a plan's key that all families share."""

    logits: Like
    temperature: float
    row_temperature: Like | None
    mask: Like | None
    lengths: Like | None

    def meta(self) -> LogitRows:
        """Rows of that layout, without memory."""
        return LogitRows(*(x.meta() if isinstance(x, Like) else x for x in self))  # type: ignore[arg-type]

    def given(self) -> tuple[Tensor, float | Tensor, Tensor | None, Tensor | None]:
        """Logits, temperature, mask and lengths as a user gives them, without memory."""
        logits, temperature, row_temperature, mask, lengths = self.meta()
        return logits, temperature if row_temperature is None else row_temperature, mask, lengths


# The fields of LogitRows as the arguments of an operator of torch.library.
ROWS_SCHEMA = f"Tensor logits, {SCALE_SCHEMA}, Tensor? mask, Tensor? lengths"
ROWS_FIELDS = len(LogitRows._fields)


def named(dtypes: Iterable[torch.dtype], conjunction: str) -> str:
    """The names of several dtypes, for a message."""
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(names)} {conjunction} {last}"


def like(tensor: Tensor) -> Like:
    return _new(Like, (tensor.dtype, tensor.shape, tensor.stride()))


def like_given(tensor: Tensor | None) -> Like | None:
    return None if tensor is None else like(tensor)


def unflattened(arguments: Any) -> tuple[LogitRows, tuple[Any, ...]]:
    """The rows at the front of an operator's arguments, and the other arguments."""
    return LogitRows(*arguments[:ROWS_FIELDS]), tuple(arguments[ROWS_FIELDS:])


def unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """A mask as bool, one a token."""
    if mask.dtype == torch.bool:
        return mask
    bits = torch.arange(_WORD, dtype=torch.int32, device=mask.device)
    return ((mask.unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :vocab_size].bool()


def bits_at(words: Tensor, tokens: Tensor) -> Tensor:
    """bool: the bit of each token in a packed mask, given the word that has the bit."""
    return (words >> (tokens % _WORD).to(words.dtype) & 1).bool()


def some_rows(tensor: Tensor, trailing: int, rows: slice) -> Tensor:
    """A range of the rows of a tensor: a view if its strides allow, else a copy of the range.

    trailing: how many of the last dimensions belong to a row. All dimensions before them count the rows.
    """
    lead = tensor.shape[: tensor.dim() - trailing]
    try:
        return tensor.view(math.prod(lead), *tensor.shape[tensor.dim() - trailing :])[rows]
    except RuntimeError:
        return tensor[tuple(_places(lead, rows, tensor.device))]


def cut(tensors: Iterable[Tensor | None], rows: slice) -> list[Tensor | None]:
    """A range of the rows of several tensors, whose first dimension counts them."""
    return [None if x is None else x[rows] for x in tensors]


def _places(lead: Sequence[int], rows: slice, device: torch.device) -> list[Tensor]:
    """The places of a range of rows along each of the leading dimensions: a tensor (rows,) for each dimension."""
    numbers = torch.arange(rows.start, rows.stop, device=device)
    places = []
    for size in reversed(lead):
        places.append(numbers % size)
        numbers = numbers.div(size, rounding_mode="floor")
    return places[::-1]

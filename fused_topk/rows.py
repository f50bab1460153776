# SPDX-License-Identifier: Apache-2.0
"""What a call reads: rows of logits, how they are scaled, and which of them count. It is the same for every family.

One value, :class:`LogitRows`, travels from the check of the arguments to the kernels. The other half of a call, what is
wanted, is a small class a family (:mod:`fused_topk.problem`). A field that is added here has its check in
``check_rows()`` of row_arguments.py, its layout in :class:`RowsLayout`, its type in ``ROWS_SCHEMA``, and its place in ``flat()``, ``layout()``
and ``given()``. Rows that are made of others have all fields of those. So a field travels by itself outside of this file, but for what
takes rows apart (``topk_launch.py`` and ``cpu.py``), whatever the family does to its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # of logits
_WORD = 32  # tokens of a packed mask's word
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
    """Rows of logits, checked. The tensors besides the logits are broadcast to their leading dimensions, without a copy.

    All fields but the logits are given by name.
    """

    logits: Tensor  # (..., V), any strides, as all of these; hidden states (..., H) where an LM head makes the logits
    temperature: float = 1.0  # positive and finite (0 too for draws); ignored where row_temperature is given
    row_temperature: Tensor | None = None  # (...), float32, or float64 for float64 logits and for draws
    mask: Tensor | None = None  # bool (..., V), or int32 (..., ceil(V / 32))
    # (...), int32 or int64: tokens from a row's length on count as -inf and are not read. Those beyond 0 to V are clamped.
    lengths: Tensor | None = None

    @property
    def scale(self) -> float | Tensor:
        """What divides the logits, in a form that broadcasts along rows."""
        return self.temperature if self.row_temperature is None else self.row_temperature.unsqueeze(-1)

    def with_logits(self, logits: Tensor) -> LogitRows:
        """The same rows with other logits, or with what stands in their place."""
        # Not by _replace(), which torch.compile of torch 2.6 cannot trace.
        _, *others = self
        return LogitRows(logits, *others)  # type: ignore[arg-type]

    def unscaled(self) -> LogitRows:
        """The same rows at temperature 1."""
        return self._replace(temperature=1.0, row_temperature=None)

    def hidden(self, normalize: str = "allowed") -> Tensor | None:
        """bool (..., V): the tokens that count as -inf for m and d with that `normalize`. None: there are none. With "all" a mask
        hides tokens from the choice alone."""
        vocab_size, hidden = self.logits.shape[-1], None
        if self.lengths is not None:
            hidden = torch.arange(vocab_size, device=self.lengths.device) >= self.lengths.unsqueeze(-1)
        if self.mask is None or normalize == "all":
            return hidden
        by_mask = ~unpacked(self.mask, vocab_size)
        return by_mask if hidden is None else by_mask | hidden

    def counted(self, normalize: str = "allowed") -> Tensor:
        """The logits, -inf where a token does not count: for the choice, or for m and d with that `normalize`."""
        hidden = self.hidden(normalize)
        return self.logits if hidden is None else self.logits.masked_fill(hidden, -torch.inf)

    def counted_at(self, tokens: Tensor) -> Tensor | None:
        """bool (..., n): which of the tokens (..., n) count. None: all."""
        within = None if self.lengths is None else tokens < self.lengths.unsqueeze(-1)
        if self.mask is None:
            return within
        if self.mask.dtype == torch.bool:
            allowed = self.mask.gather(-1, tokens)
        else:
            allowed = bits_at(self.mask.gather(-1, tokens // _WORD), tokens)
        return allowed if within is None else allowed & within

    def tensors(self) -> list[Tensor]:
        """Those of the fields that are tensors, the logits first."""
        return [x for x in self if isinstance(x, Tensor)]

    @property
    def temperatures(self) -> tuple[float, Tensor | None]:
        """What a merge of these rows' states takes of them."""
        return self.temperature, self.row_temperature

    def at(self, given: LogitRows) -> LogitRows:
        """The tensors of `given` in the layout of these rows, which may be meta tensors: what was broadcast is so again."""
        return LogitRows(*map(_laid_out, self, given))

    def has_numbers(self) -> bool:
        """Whether the rows have numbers of their own, one a row."""
        return any(getattr(self, name) is not None for name in _NUMBERS)

    def with_numbers(self, change: Callable[[Tensor], Tensor]) -> LogitRows:
        """The same rows, with `change` of each tensor that has one number a row."""
        changed: Any = {name: change(x) for name in _NUMBERS if (x := getattr(self, name)) is not None}
        return self._replace(**changed)

    def with_adjacent_numbers(self) -> LogitRows:
        """The same rows, whose numbers lie without gaps."""
        return self.with_numbers(Tensor.contiguous)

    def flat(self) -> LogitRows:
        """The same rows in one dimension, whose numbers lie without gaps."""
        # Written out, which torch.compile of torch 2.6 can trace.
        logits, temperature, row_temperature, mask, lengths = self
        return LogitRows(
            logits.reshape(-1, logits.shape[-1]),
            temperature=temperature,
            row_temperature=None if row_temperature is None else row_temperature.reshape(-1).contiguous(),
            mask=None if mask is None else mask.reshape(-1, mask.shape[-1]),
            lengths=None if lengths is None else lengths.reshape(-1).contiguous(),
        )

    def contiguous(self) -> LogitRows:
        """The same rows without gaps between them."""
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
    """Some rows of all, one after the other, whose logits are made some tokens at a time. They have no lengths."""

    # The numbers are those of the part, the mask is that of all rows. The logits, or what stands in their place, are not looked at.
    rows: LogitRows
    part: slice  # which of all rows, without leading dimensions

    @staticmethod
    def of(rows: LogitRows, part: slice) -> RowsBlock:
        return RowsBlock(rows.with_numbers(lambda numbers: some_rows(numbers, 0, part).contiguous()), part)

    def of_tokens(self, logits: Tensor, start: int, end: int) -> LogitRows:
        """These rows of some of the tokens, given their logits (rows, tokens). `start` is a multiple of 32."""
        mask = self.rows.mask
        if mask is not None:
            tokens = slice(start, end) if mask.dtype == torch.bool else slice(start // _WORD, -(-end // _WORD))
            # Of rows that do not merge, a copy of all tokens may be too large.
            mask = some_rows(mask[..., tokens], 1, self.part)
        return self.rows._replace(logits=logits, mask=mask)

    def counted_at(self, tokens: Tensor) -> Tensor | None:
        """bool (rows, n): which of the tokens (rows, n) count. None: all."""
        mask = self.rows.mask
        if mask is None:
            return None
        places = [place.unsqueeze(-1) for place in _places(mask.shape[:-1], self.part, tokens.device)]
        if mask.dtype == torch.bool:
            return mask[(*places, tokens)]
        return bits_at(mask[(*places, tokens // _WORD)], tokens)


class RowsLayout(NamedTuple):
    """:class:`LogitRows` without their addresses: the half of a plan's key that is the same for every family."""

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


# How torch.library sees rows: the fields of LogitRows, flattened.
ROWS_SCHEMA = "Tensor logits, float temperature, Tensor? row_temperature, Tensor? mask, Tensor? lengths"
ROWS_FIELDS = len(LogitRows._fields)


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
    """The bits of tokens, given the word of each."""
    return (words >> (tokens % _WORD).to(words.dtype) & 1).bool()


def some_rows(tensor: Tensor, trailing: int, rows: slice) -> Tensor:
    """Rows of a tensor whose `trailing` last dimensions are no rows': a view where its strides allow, else a copy of those."""
    lead = tensor.shape[: tensor.dim() - trailing]
    try:
        return tensor.view(math.prod(lead), *tensor.shape[tensor.dim() - trailing :])[rows]
    except RuntimeError:
        return tensor[tuple(_places(lead, rows, tensor.device))]


def _places(lead: Sequence[int], rows: slice, device: torch.device) -> list[Tensor]:
    """Where rows stand in each of the leading dimensions: as many numbers as rows."""
    numbers = torch.arange(rows.start, rows.stop, device=device)
    places = []
    for size in reversed(lead):
        places.append(numbers % size)
        numbers = numbers.div(size, rounding_mode="floor")
    return places[::-1]


def _laid_out(like: Any, tensor: Any) -> Any:
    if not isinstance(like, Tensor) or tensor is None:
        return like
    is_alike = tensor.shape == like.shape and tensor.stride() == like.stride()
    return tensor if is_alike else tensor.as_strided(like.shape, like.stride())

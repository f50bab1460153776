# SPDX-License-Identifier: Apache-2.0
"""The buffer that each process sends: a header, then every row's m, every row's d, then every row's tokens, then their logits.

A caller may add bytes of its own at the end: the tail. Each piece is contiguous. So the kernels write a process's state directly into
its buffer, and read the states of the other processes where the collective leaves them.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import TopK, result_dtype
from ..rows import DTYPES
from ..tracing import is_traced

_WORD = 8  # bytes; no piece begins within one
_HEADER_WORDS = 2
_NORMALIZE = ("allowed", "all", "topk")
_OTHERS = 2**27  # kind has 31 bits


class Header(NamedTuple):
    """What a process says of its call. All but the length must be the same everywhere."""

    length: int  # columns of the process
    k: int
    rows: int
    kind: int  # dtype, normalize, and a number for what else must be the same

    @staticmethod
    def of(
        length: int, k: int, rows: int, dtype: torch.dtype, normalize: str, others: tuple[Any, ...] | None = None
    ) -> Header:
        """others: plain values that must be the same everywhere, too; None where there is no tail."""
        number = 0 if others is None else 1
        if others:
            number += zlib.crc32(repr(others).encode()) % _OTHERS
        kind = len(_NORMALIZE) * number + _NORMALIZE.index(normalize)
        return Header(length, k, rows, len(DTYPES) * kind + DTYPES.index(dtype))

    def __str__(self) -> str:
        kind, dtype = divmod(self.kind, len(DTYPES))
        number, normalize = divmod(kind, len(_NORMALIZE))
        more = f", targets or settings of draws number {number}" if number else ""
        return f"k={self.k}, {self.rows} rows of {DTYPES[dtype]} and normalize={_NORMALIZE[normalize]!r}{more}"


class Parts(NamedTuple):
    """Views of the states of all processes, as the operator merge_parts takes them."""

    logits: Tensor  # (processes, ..., k)
    indices: Tensor  # (processes, ..., k), int64 from each process's first column on
    m: Tensor  # (processes, ...)
    d: Tensor  # (processes, ...)
    lengths: Tensor  # (processes,) int32


class Packing(NamedTuple):
    """Where the pieces are, in words of 8 bytes."""

    leading: tuple[int, ...]  # of the rows
    k: int
    dtype: torch.dtype
    tail: int = 0  # bytes at the end that are the caller's

    @property
    def rows(self) -> int:
        return torch.Size(self.leading).numel()

    @property
    def words(self) -> int:
        """How many words a process's buffer has."""
        return self._ends()[-1]

    def _ends(self) -> tuple[int, int, int, int, int]:
        """Where the header, (m, d), the tokens, the logits and the tail end, in words."""
        entries = self.rows * self.k
        normalizer = _HEADER_WORDS + self.rows * 2 * result_dtype(self.dtype).itemsize // _WORD
        logits = normalizer + entries + -(-entries * self.dtype.itemsize // _WORD)
        return _HEADER_WORDS, normalizer, normalizer + entries, logits, logits + -(-self.tail // _WORD)

    def state(self, buffer: Tensor) -> TopK:
        """Views of a buffer (words,): the logits, the tokens and (m, d) of one process."""
        one = self._views(buffer.unsqueeze(0))
        return TopK(*(x.squeeze(0) for x in one))

    def parts(self, buffers: Tensor) -> Parts:
        """Views of all buffers (processes, words)."""
        logits, indices, normalizer = self._views(buffers)
        lengths = headers_of(buffers)[:, 0]
        return Parts(logits, indices, normalizer.select(1, 0), normalizer.select(1, 1), lengths)

    def tails(self, buffers: Tensor) -> Tensor:
        """The tails of all buffers, uint8 (processes, bytes)."""
        *_, logits, tail = self._ends()
        return buffers[:, logits:tail].view(torch.uint8)[:, : self.tail]

    def _views(self, buffers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        header, normalizer, indices, logits, _ = self._ends()
        entries, count = self.rows * self.k, buffers.shape[0]
        numbers = buffers[:, header:normalizer].view(result_dtype(self.dtype))
        elements = buffers[:, indices:logits].view(self.dtype)[:, :entries]
        return (
            elements.view(count, *self.leading, self.k),
            buffers[:, normalizer:indices].view(count, *self.leading, self.k),
            numbers.view(count, 2, *self.leading),
        )

    def packed(self, header: Header, state: TopK, tail: Tensor | None = None) -> Tensor:
        """A new buffer (words,) that holds a state: for traced code, which writes into no view."""
        logits, indices, normalizer = state
        pieces = [normalizer.flatten().view(torch.int64), indices.flatten(), _as_words(logits)]
        if tail is not None:
            pieces.append(_as_words(tail))
        return torch.cat((header_words(header, logits), *pieces))


def _as_words(tensor: Tensor) -> Tensor:
    padding = -tensor.nbytes % _WORD // tensor.itemsize
    return torch.nn.functional.pad(tensor.flatten(), (0, padding)).view(torch.int64)


def headers_of(buffers: Tensor) -> Tensor:
    """The headers (processes, 4) of all buffers."""
    return buffers[:, :_HEADER_WORDS].view(torch.int32)


def header_words(header: Header, beside: Tensor) -> Tensor:
    """The header as the first words of a buffer. beside: a tensor of the call, on the same device."""
    # A traced or fake tensor must not be kept for later calls.
    make = _kept_words if type(beside) is Tensor and not is_traced() else _words
    return make(header, beside.device)


def _words(header: Header, device: torch.device) -> Tensor:
    return torch.tensor(header, dtype=torch.int32, device=device).view(torch.int64)


@functools.lru_cache(maxsize=4096)
def _kept_words(header: Header, device: torch.device) -> Tensor:
    # Kept for later calls: a CUDA graph may capture them, and then nothing may be copied from the host.
    with torch.inference_mode(False):
        return _words(header, device)

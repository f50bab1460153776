# SPDX-License-Identifier: Apache-2.0
"""A catalogue of items on a device: which tokens may follow a text. Nothing here waits for the device, or knows transformers."""

from __future__ import annotations

import copy
import operator
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...arguments import check_int, check_tensor
from . import keys as sorted_keys
from .keys import SENTINEL, TOKEN_BITS, Keys

_TOKEN = (1 << TOKEN_BITS) - 1
_TOKENS = (torch.int64, torch.int32)
# For a node with more children than this a mask is made once. For any other node each step sets the bits one by one.
_NARROW = 256
# The most bytes of these masks. Where there are more nodes, the widest ones get masks.
_MASK_BYTES = 64 << 20


class TokenTrie:
    """Which tokens may come next, for texts that are to be items of a catalogue::

        trie = TokenTrie([[5, 9, 7], [5, 9], [8]], end_token_id=2)
        model.generate(**inputs, num_beams=4, logits_processor=[TrieLogitsProcessor(trie, begin_index=prompt_length)])

    A step of constrained beam search in any loop:

        mask = trie.allowed_mask(nodes, vocab_size)
        scores, indices, _ = fused_topk.beam_topk(logits, scores, beams, mask=mask, normalize="all")
        nodes = trie.step(nodes.gather(1, indices // vocab_size), indices % vocab_size)

    The tokens of a text lead from node to node; node 0 is the root, where all texts begin. A token may come next if it leads on to an
    item, and the end token where an item ends. After a text that has ended or left the catalogue only the end token may come.

    Args:
        sequences: the items: an integer tensor or array (items, tokens) on any device, lists of lists, or an iterable of items. In any
            order. Equal ones count once. Some may be the beginning of others.
        end_token_id: the token that ends a text, in no item.

    Raises:
        TypeError: items that are not of integers.
        ValueError: no items, an empty one, a token outside 0 ... 2^31 - 1, or `end_token_id` in an item.

    A trie does not change. Its memory is on one device, at first the CPU: 8 bytes for each different beginning of an item, and at most
    64 MB for masks of the widest nodes. 10 million items of 4 random tokens of 32000 take 307 MB, and 10 s of CPU time to build.
    """

    def __init__(self, sequences: Any, end_token_id: int) -> None:
        try:
            end_token_id = operator.index(end_token_id)
        except TypeError:
            got = type(end_token_id).__name__
            raise TypeError(f"`end_token_id` must be an integer, got {got}; pass one token id") from None
        if not 0 <= end_token_id <= _TOKEN:
            raise ValueError(f"`end_token_id` must be from 0 to 2^31 - 1, got {end_token_id}; pass a token id")
        self._take(sorted_keys.of(sequences, end_token_id), end_token_id)

    def _take(self, keys: Keys, end_token_id: int) -> None:
        self._end_token_id = end_token_id
        self._levels = keys.levels
        self._items = keys.items
        # The node of texts that no item begins with. It has no children.
        self._outside = len(keys.keys)
        self._keys = torch.from_numpy(keys.keys)
        self._most_token = max(end_token_id, int((keys.keys & _TOKEN).max()))
        nodes, counts, narrow = sorted_keys.wide_nodes(keys, _NARROW)
        words = self._most_token // 32 + 1
        most = _MASK_BYTES // (4 * words)
        by_width = counts.argsort(kind="stable")[::-1]
        if len(nodes) > most:
            narrow = int(counts[by_width[most]])
        wide = np.sort(nodes[by_width[:most]])
        # The last mask stands for all other nodes, and is empty.
        self._wide_nodes = torch.from_numpy(np.append(wide, SENTINEL))
        self._wide_masks = torch.from_numpy(_masks(keys.keys, wide, words))
        # Places for the children of the nodes without a mask; at least one place, for the end token.
        self._narrow = torch.arange(max(1, narrow), device="cpu")

    @property
    def depth(self) -> int:
        """The tokens of the longest item."""
        return len(self._levels) - 1

    @property
    def end_token_id(self) -> int:
        return self._end_token_id

    @property
    def device(self) -> torch.device:
        return self._keys.device

    @property
    def nbytes(self) -> int:
        """The bytes of its memory."""
        return sum(each.nbytes for each in self._tensors().values())

    def __len__(self) -> int:
        """The number of items that differ."""
        return self._items

    def __repr__(self) -> str:
        return (
            f"TokenTrie({len(self)} items of up to {self.depth} tokens, end_token_id={self.end_token_id}, "
            f"{self.nbytes} bytes on {self.device})"
        )

    def to(self, device: torch.device | str) -> TokenTrie:
        """The trie on a device; the same object if it is there already."""
        moved = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        if moved["_keys"] is self._keys:
            return self
        trie = copy.copy(self)
        vars(trie).update(moved)
        return trie

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the trie to a file of NumPy's format npz, under exactly this name."""
        with open(path, "wb") as file:
            np.savez(
                file,
                keys=self._keys.cpu().numpy(),
                levels=self._levels,
                items=self._items,
                end_token_id=self._end_token_id,
            )

    @classmethod
    def load(cls, path: str | PathLike[str]) -> TokenTrie:
        """The trie that :meth:`save` has written, on the CPU.

        Raises:
            ValueError: the file holds something else.
        """
        with open(path, "rb") as file:
            try:
                found = np.load(file)
                keys = Keys(found["keys"], found["levels"], int(found["items"])).checked()
                end_token_id = int(found["end_token_id"])
                if not 0 <= end_token_id <= _TOKEN:
                    raise ValueError("an end token out of range")
            # NumPy and zipfile raise errors of many kinds for a file that is damaged.
            except Exception as error:
                raise ValueError(
                    f"`path` must be a file that save() wrote, got {path} ({error}); save the trie"
                ) from error
        trie = cls.__new__(cls)
        trie._take(keys, end_token_id)
        return trie

    def step(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """The nodes that the tokens lead to.

        Args:
            nodes: int64 of any shape, on the trie's device: zeros, or what this method gave.
            tokens: int64 or int32 of the same shape, less than 2^31.

        Returns:
            int64 of that shape. A token that is no child, also a negative one, leads to a node without children.

        Raises:
            TypeError, ValueError: a tensor of another kind, dtype or device.
        """
        self._check("nodes", nodes, (torch.int64,))
        self._check("tokens", tokens, _TOKENS)
        wanted = ((nodes << TOKEN_BITS) | tokens).contiguous()
        places = torch.searchsorted(self._keys, wanted)
        return (places + 1).where(self._keys[places] == wanted, self._outside)

    def nodes(self, texts: Tensor) -> Tensor:
        """The nodes of whole texts: int64 (...) of int64 or int32 (..., length)."""
        self._check("texts", texts, _TOKENS)
        if texts.dim() == 0:
            raise ValueError(
                "`texts` must have the shape (..., length), got (); use .reshape(1) for a text of one token"
            )
        lead, length = texts.shape[:-1], texts.shape[-1]
        if length >= self.depth:
            # Such a text has left the catalogue, or is an item that no other item begins with.
            return torch.full(lead, self._outside, dtype=torch.int64, device=texts.device)
        nodes = torch.zeros(lead, dtype=torch.int64, device=texts.device)
        for tokens in texts.unbind(-1):
            nodes = self.step(nodes, tokens)
        return nodes

    def allowed_mask(self, nodes: Tensor, vocab_size: int) -> Tensor:
        """What may come next at each node, as a packed mask of :func:`fused_topk.beam_topk` and its kin.

        Args:
            nodes: int64 of any shape, on the trie's device, as :meth:`step` gives them.
            vocab_size: V, greater than each token of the trie.

        Returns:
            A mask of int32 words, shape (..., ceil(V / 32)), with bit j of word i set where token 32 i + j is allowed.

        Raises:
            TypeError, ValueError: nodes as for :meth:`step`, or a vocabulary without some of the tokens.
        """
        self._check("nodes", nodes, (torch.int64,))
        check_int("vocab_size", vocab_size)
        if vocab_size <= self._most_token:
            raise ValueError(
                f"`vocab_size` must be greater than the trie's tokens, got {vocab_size} and a token {self._most_token}; "
                "build the trie with the model's tokens"
            )
        of = nodes.reshape(-1)
        first, end = torch.searchsorted(self._keys, torch.stack([of, of + 1]) << TOKEN_BITS)
        slot = torch.searchsorted(self._wide_nodes, of)
        is_wide = self._wide_nodes[slot] == of
        slot = slot.where(is_wide, len(self._wide_nodes) - 1)
        words = -(-vocab_size // 32)
        masks = self._wide_masks.index_select(0, slot)
        masks = torch.nn.functional.pad(masks, (0, words - masks.shape[1]))

        # A place for each child of a node that is not wide, [R, n]. Where there is none, no bit is set.
        places = first.unsqueeze(1) + self._narrow
        is_child = (places < end.unsqueeze(1)) & ~is_wide.unsqueeze(1)
        tokens = self._keys[places.clamp_(max=len(self._keys) - 1)] & _TOKEN
        # Without children only the end token is left.
        is_leaf = first == end
        tokens[:, 0].masked_fill_(is_leaf, self._end_token_id)
        is_child[:, 0] |= is_leaf
        bits = torch.bitwise_left_shift(is_child.int(), (tokens & 31).int())
        # Children differ, so to add their bits is to set them.
        masks.scatter_add_(1, tokens >> 5, bits)
        return masks.view(*nodes.shape, words)

    def _check(self, name: str, tensor: Any, dtypes: tuple[torch.dtype, ...]) -> None:
        check_tensor(name, tensor)
        if tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"`{name}` must be {allowed}, got {tensor.dtype}; use .long()")
        if tensor.device != self.device:
            raise ValueError(
                f"`{name}` must be on {self.device}, where the trie is, got {tensor.device}; move the trie with "
                "`trie.to(device)`"
            )

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def _masks(keys: np.ndarray, nodes: np.ndarray, words: int) -> np.ndarray:
    """int32 [len(nodes) + 1, words]: masks of the children of each node, and an empty one."""
    masks = np.zeros((len(nodes) + 1, words), dtype=np.int32)
    bounds = np.searchsorted(keys, np.stack([nodes, nodes + 1]) << TOKEN_BITS)
    for mask, first, end in zip(masks, *bounds, strict=False):
        tokens = keys[first:end] & _TOKEN
        is_allowed = np.zeros(32 * words, dtype=bool)
        is_allowed[tokens] = True
        mask[:] = np.packbits(is_allowed, bitorder="little").view(np.dtype("<i4"))
    return masks

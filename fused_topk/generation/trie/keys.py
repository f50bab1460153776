# SPDX-License-Identifier: Apache-2.0
"""A catalogue's items as sorted keys: how a trie is built, with NumPy.

A trie's nodes are numbered level by level: 0 is the root, and the children of a node follow each other by ascending token. The key of a
node other than the root is `parent << 31 | token`. So keys ascend, key i is that of node i + 1, and a node's children are the keys
from `node << 31` up to `(node + 1) << 31`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from ...arguments import check_tensor

TOKEN_BITS = 31
# Behind the last key: its node does not exist, and its token is 0.
SENTINEL = (2**32 - 1) << TOKEN_BITS
# Two numbers are left for the node of the sentinel, and for the node of texts outside of the catalogue.
_MOST_NODES = 2**32 - 3


class Keys(NamedTuple):
    """The keys of a catalogue."""

    keys: np.ndarray  # int64 [n + 1], ascending, the last one SENTINEL
    levels: np.ndarray  # int64 [depth + 1]: where the keys of each level begin, and where the last one ends
    items: int  # the number of items that differ

    def checked(self) -> Keys:
        """These keys. Raises ValueError if they cannot be those of a catalogue."""
        keys, levels = self.keys, self.levels
        if keys.dtype != np.int64 or keys.ndim != 1 or levels.dtype != np.int64 or levels.ndim != 1:
            raise ValueError("arrays of another kind")
        if len(levels) < 2 or self.items < 1:
            raise ValueError("no items")
        are_levels = levels[0] == 0 and levels[-1] == len(keys) - 1 and (levels[1:] > levels[:-1]).all()
        if not are_levels or keys[0] < 0 or keys[-1] != SENTINEL or not (keys[1:] > keys[:-1]).all():
            raise ValueError("keys out of order")
        return self


def of(sequences: Any, end_token_id: int) -> Keys:
    """The keys of the items `sequences`. Where an item ends at a node with children, the end token is one more child. Errors: see
    :class:`TokenTrie`."""
    all_tokens, lengths = _catalogue(sequences)
    if not len(lengths):
        raise ValueError("`sequences` must hold at least one item, got none; decode without a trie")
    if not lengths.all():
        raise ValueError("`sequences` must hold items of at least one token, got an empty one; leave it out")
    # Each item may end at a node with children.
    keys = np.empty(len(all_tokens) + len(lengths) + 1, dtype=np.int64)
    # The node of each item that has further tokens.
    nodes = np.zeros(len(lengths), dtype=np.int64)
    levels, items = [0], 0
    for goes_on, tokens in _levels(all_tokens, lengths):
        _check(tokens, end_token_id)
        inner = np.empty(0, dtype=np.int64)
        if not goes_on.all():
            ended = np.unique(nodes[~goes_on])
            items += len(ended)
            nodes = nodes[goes_on]
            inner = ended[np.isin(ended, nodes)]
        start, ended_inside = levels[-1], len(inner)
        # The arrays are large: each is made in the place of another one, or dropped before the next one is made.
        nodes <<= TOKEN_BITS
        np.bitwise_or(nodes, tokens, out=nodes, dtype=np.int64, casting="unsafe")
        if ended_inside:
            nodes = np.concatenate([nodes, inner << TOKEN_BITS | end_token_id])
        order = nodes.argsort()
        nodes = nodes[order]
        is_first = np.empty(len(nodes), dtype=bool)
        is_first[0] = True
        np.not_equal(nodes[1:], nodes[:-1], out=is_first[1:])
        levels.append(start + int(np.count_nonzero(is_first)))
        if levels[-1] > _MOST_NODES:
            raise ValueError(f"`sequences` must have at most {_MOST_NODES} different beginnings, got more; split them")
        keys[start : levels[-1]] = nodes[is_first]
        np.cumsum(is_first, out=nodes)
        nodes += start
        places, nodes = nodes, np.empty_like(nodes)
        nodes[order] = places
        # Without the nodes of the end tokens, which nothing follows.
        nodes = nodes[: len(nodes) - ended_inside]
        del places, order
    # All other items end with the last level.
    items += levels[-1] - levels[-2] - ended_inside
    # In place: the rest of the array has never been written, and so takes no memory.
    keys.resize(levels[-1] + 1, refcheck=False)
    keys[-1] = SENTINEL
    return Keys(keys, np.array(levels), items)


def wide_nodes(keys: Keys, above: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Nodes with more children than `above`, ascending, their numbers of children, and the greatest number of the other nodes."""
    nodes, counts, others = [], [], 0
    for start, end in zip(keys.levels[:-1], keys.levels[1:], strict=True):
        parents = keys.keys[start:end] >> TOKEN_BITS
        # The children of a node follow each other.
        places = np.flatnonzero(np.diff(parents, prepend=-1))
        of_nodes = np.diff(places, append=len(parents))
        is_wide = of_nodes > above
        nodes.append(parents[places[is_wide]])
        counts.append(of_nodes[is_wide])
        others = max(others, int(of_nodes.max(initial=0, where=~is_wide)))
    return np.concatenate(nodes), np.concatenate(counts), others


def _levels(tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each level, which items of the level before have a further token, and these tokens."""
    ends = lengths.cumsum()
    places = ends - lengths
    while True:
        goes_on = places < ends
        places, ends = places[goes_on], ends[goes_on]
        if not len(places):
            return
        yield goes_on, tokens[places]
        places += 1


def _catalogue(sequences: Any) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all items, one item after the other, and how many each has."""
    if isinstance(sequences, torch.Tensor):
        check_tensor("sequences", sequences)
        if sequences.is_meta:
            raise ValueError("`sequences` must have values, got a meta tensor; make it on another device")
        sequences = sequences.detach().cpu().numpy()
    if isinstance(sequences, np.ndarray) and sequences.dtype != object:
        if sequences.ndim != 2 or sequences.dtype.kind not in "iu":
            raise TypeError(
                f"`sequences` as a tensor must be integers of shape (items, tokens), got {sequences.dtype} of shape "
                f"{sequences.shape}; pass a list of lists for items of unequal length"
            )
        return sequences.ravel(), np.full(len(sequences), sequences.shape[1])
    try:
        items: Sequence[Any] = sequences if isinstance(sequences, Sequence) else list(sequences)
        lengths = np.fromiter(map(len, items), dtype=np.int64, count=len(items))
        listed: Iterable[Any] = (item.tolist() if hasattr(item, "tolist") else item for item in items)
        tokens = map(operator.index, chain.from_iterable(listed))
        return np.fromiter(tokens, dtype=np.int64, count=int(lengths.sum())), lengths
    except TypeError as error:
        raise TypeError(
            f"`sequences` must be lists of integers, an integer tensor or an iterable of items ({error}); pass token ids"
        ) from error
    except OverflowError as error:
        raise _outside(str(error)) from error


def _check(tokens: np.ndarray, end_token_id: int) -> None:
    least, greatest = int(tokens.min()), int(tokens.max())
    if least < 0 or greatest >> TOKEN_BITS:
        raise _outside(f"{least if least < 0 else greatest}")
    if (tokens == end_token_id).any():
        raise ValueError(
            f"`end_token_id` must be in no item, got {end_token_id}, which is in one; leave out the end tokens of the items"
        )


def _outside(got: str) -> ValueError:
    return ValueError(
        f"`sequences` must hold tokens from 0 to 2^31 - 1, got {got}; pass items of other lengths as lists"
    )

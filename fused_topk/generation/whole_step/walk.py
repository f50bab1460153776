# SPDX-License-Identifier: Apache-2.0
"""Where the texts of a search are in a trie. Each token leads to a next node, and nodes follow the beams."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..trie.processor import TrieLogitsProcessor
from .texts import Texts


class Walk:
    """The nodes of a call's texts, one token after another. Args: constraint: the call's only processor."""

    def __init__(self, constraint: TrieLogitsProcessor, ids: Tensor, beams: int, vocab_size: int) -> None:
        self._trie = constraint.trie.to(ids.device)
        self._vocab_size = vocab_size
        nodes = self._trie.nodes(ids[:, constraint.begin_index :])
        # [batch, beams]; [batch] without beams
        self._nodes = nodes if beams == 1 else nodes.unsqueeze(1).repeat(1, beams)

    def mask_after(self, state: Any, token: int) -> Tensor:
        """The packed mask of what may come after a token of the state. Each call takes the token after that of the call before. After the
        end of a search there is none, and the mask is not used."""
        if isinstance(state, Texts):
            self._nodes = self._trie.step(self._nodes, state.tokens[:, token])
        else:
            tokens, parents = (each[:, :, token] for each in state.running[1:])
            self._nodes = self._trie.step(self._nodes.gather(1, parents.clamp(min=0)), tokens)
        return self._trie.allowed_mask(self._nodes, self._vocab_size)

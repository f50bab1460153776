# SPDX-License-Identifier: Apache-2.0
"""Texts that must be items of a catalogue, as a logits processor."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ...rows import unpacked
from .token_trie import TokenTrie


class TrieLogitsProcessor(LogitsProcessor):
    """Lets generate() write items of a catalogue and nothing else::

        trie = TokenTrie(items, end_token_id=model.config.eos_token_id).to(model.device)
        model.generate(**inputs, num_beams=4, logits_processor=[TrieLogitsProcessor(trie, begin_index=prompt_length)])

    The result is that of a `prefix_allowed_tokens_fn` that names the tokens :class:`TokenTrie` allows. Such a function runs on the host
    for each beam of each step. This processor waits for nothing.

    Args:
        trie: the items. If it is on another device than the scores, the first step copies it.
        begin_index: the number of tokens before the first generated one: the length of the prompts with their padding; of an
            encoder-decoder the length of its decoder's input, most often 1.

    Raises:
        TypeError, ValueError: arguments of another kind; in a step, logits without a place for each of the trie's tokens.

    Contract:
        Called with `input_ids` (R, length) and `scores` (R, V), it returns a new tensor: the scores of the tokens that may come
        next, -inf for all others.
        A row whose allowed tokens have got -inf from processors before has -inf everywhere. transformers from 5.20 on forces
        the tokens of `prefix_allowed_tokens_fn` where that is so of all beams of a prompt.
        Where a catalogue has fewer items than there are beams, the last results repeat items, with scores below -1e6, as in
        stock beam search, and in no particular order.
    """

    def __init__(self, trie: TokenTrie, begin_index: int) -> None:
        if not isinstance(trie, TokenTrie):
            raise TypeError(f"`trie` must be a TokenTrie, got {type(trie).__name__}; build one of the items")
        self.trie = trie
        try:
            self.begin_index = operator.index(begin_index)
        except TypeError:
            got = type(begin_index).__name__
            raise TypeError(f"`begin_index` must be an integer, got {got}; pass the length of the prompts") from None
        if self.begin_index < 0:
            raise ValueError(f"`begin_index` must not be negative, got {begin_index}; pass the length of the prompts")

    def allowed_mask(self, input_ids: Tensor, device: torch.device, vocab_size: int) -> Tensor:
        """int32 (R, ceil(V / 32)): the packed mask of what may follow the texts."""
        trie = self.trie = self.trie.to(device)
        return trie.allowed_mask(trie.nodes(input_ids[:, self.begin_index :].to(device)), vocab_size)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        vocab_size = scores.shape[-1]
        allowed = unpacked(self.allowed_mask(input_ids, scores.device, vocab_size), vocab_size)
        return scores.where(allowed, -torch.inf)

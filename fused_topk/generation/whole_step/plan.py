# SPDX-License-Identifier: Apache-2.0
"""The logits processors of a call: those that run as they are, and those that a choice in one read of the logits stands for.

In one read a choice can keep the tokens of a trie, and sample with temperature, top-k, top-p and min-p in this order. Everything else
is called with stock's arguments on all scores, before the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ... import functional
from ..processor import FusedTopKLogitsProcessor
from ..trie.processor import TrieLogitsProcessor
from .facts import is_as_published
from .texts import Texts

# Processors that keep nothing from step to step, and call no function of the user's. On a GPU they may see the tokens of steps that run
# after the end. Those that a version does not have are left out.
_STATELESS = frozenset(
    getattr(logits_process, name, None)
    for name in (
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
        "WhisperTimeStampLogitsProcessor",
    )
) | {FusedTopKLogitsProcessor, TrieLogitsProcessor}
# The parameters of fused_topk.sample(), by the warper that it stands for, in the order in which sample() applies them.
_PARAMETERS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    # Beyond these temperatures scores may overflow in float32, or have no digits left.
    logits_process.TemperatureLogitsWarper: ("temperature", lambda number: 1e-4 <= number <= 1e4),
    logits_process.TopKLogitsWarper: ("top_k", lambda number: isinstance(number, int) and number >= 1),
    logits_process.TopPLogitsWarper: ("top_p", lambda number: 0 < number <= 1),
    logits_process.MinPLogitsWarper: ("min_p", lambda number: 0 <= number <= 1),
}
_NO_EFFECT = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
_NAMES = [name for name, _ in _PARAMETERS.values()]
_ATTRIBUTES = {"filter_value", "min_tokens_to_keep", *_NAMES}


def reason_against(processors: Any) -> str | None:
    """Why a plan cannot stand for a loop's list of processors; None if it can."""
    if type(processors) is LogitsProcessorList and is_as_published(LogitsProcessorList):
        return None
    return f"logits processors in a {type(processors).__name__}"


class Plan:
    """How the processors of one call are carried out.

    processors: all of them.
    called: those that are called, in order, where the choice stands for the others.
    constraint: the processor whose mask the choice takes; None for none.
    asks_host: whether one of them may look at texts on the host, or must be called exactly once in a step. Then a step waits for the one
        before it.
    """

    def __init__(self, processors: Iterable[Any], is_drawn: bool) -> None:
        """Args: is_drawn: whether the call samples without beams."""
        self.processors = list(processors)
        self.called = list(self.processors)
        while is_drawn and self.called and _parameters(self.processors[len(self.called) - 1 :]) is not None:
            self.called.pop()
        self._warpers = self.processors[len(self.called) :]
        self.constraint: TrieLogitsProcessor | None = None
        if [*map(type, self.called)] == [TrieLogitsProcessor] and is_as_published(TrieLogitsProcessor):
            self.constraint = self.called.pop()
        self.asks_host = any(
            type(each) not in _STATELESS or not is_as_published(type(each)) for each in self.processors
        )

    @property
    def parameters(self) -> dict[str, Any] | None:
        """The parameters of sample() that stand for the warpers at the end, as they are now: a user's function may change them between
        two steps. None where nothing stands for them any more."""
        return _parameters(self._warpers)

    @property
    def rest(self) -> list[Any]:
        """The processors that the choice stands for."""
        return self.processors[len(self.called) :]


class QuickTopK:
    """A TopKLogitsWarper whose smallest score that is kept comes from our top-k: the same scores, in a tenth of the time."""

    def __init__(self, warper: Any) -> None:
        self._warper = warper

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        known = vars(self._warper)
        top_k, fill = known.get("top_k"), known.get("filter_value")
        is_known = type(top_k) is int and type(fill) is float and is_as_published(type(self._warper))
        if not is_known or top_k < 1 or scores.dtype is not torch.float32:
            found: Tensor = self._warper(input_ids, scores)
            return found
        least = functional.topk(scores, min(top_k, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill(scores < least, fill)


def called(processors: list[Any], input_ids: Tensor, scores: Tensor) -> Tensor:
    """The scores after these processors, which get stock's arguments."""
    as_called = [QuickTopK(each) if type(each) is logits_process.TopKLogitsWarper else each for each in processors]
    found: Tensor = LogitsProcessorList(as_called)(input_ids, scores)  # type: ignore[arg-type]
    return found


def _parameters(warpers: list[Any]) -> dict[str, Any] | None:
    """What sample() is asked for in the place of these warpers; None where it cannot stand for them."""
    found = [_parameters_of(each) for each in warpers]
    pairs = [pair for each in found for pair in (each or {}).items()]
    names = [name for name, _ in pairs]
    # Each once, in the order of sample().
    is_in_order = names == sorted(set(names), key=_NAMES.index)
    return dict(pairs) if is_in_order and None not in found else None


def _parameters_of(processor: Any) -> dict[str, Any] | None:
    kind = type(processor)
    if not is_as_published(kind):
        return None
    if kind is logits_process.LogitNormalization:
        # To renormalise a row does not change its distribution.
        return {}
    known, found = vars(processor), {}
    if kind is FusedTopKLogitsProcessor:
        found = {name: known.get(name) for name in _NAMES if known.get(name) != _NO_EFFECT.get(name)}
    elif kind in _PARAMETERS:
        name, _ = _PARAMETERS[kind]
        found = {name: known.get(name)}
    # sample() keeps one token at least.
    is_plain = known.get("filter_value", -float("inf")) == -float("inf") and known.get("min_tokens_to_keep", 1) == 1
    are_right = all(
        type(found[name]) in (int, float) and takes(found[name])
        for name, takes in _PARAMETERS.values()
        if name in found
    )
    return found if found and is_plain and are_right and known.keys() <= _ATTRIBUTES else None


class Walk:
    """The nodes of a call's texts in a trie, one token after another. `constraint` is the call's only processor."""

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

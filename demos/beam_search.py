# SPDX-License-Identifier: Apache-2.0
"""Beam search over a transformers causal LM, as plainly as it can be written, with the selection step passed in.

Each step chooses, for every prompt, the best `2 * beams` continuations among `beams * vocab_size` by accumulated
log-probability. `select_with_torch` and `select_fused` are the two ways to do it that this demo compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_topk

# (logits [batch, beams, V], beam_scores float32 [batch, beams], k) -> the best k of each prompt, best first:
# accumulated log-probabilities float32 [batch, k] and flat indices beam * V + token [batch, k].
Selection = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def select_with_torch(logits: Tensor, beam_scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The selection in torch operations, written as `transformers.generate` writes it (its float32 copy included)."""
    log_probs = F.log_softmax(logits.to(torch.float32, copy=True), dim=-1)
    accumulated = log_probs + beam_scores[:, :, None]
    best = torch.topk(accumulated.flatten(1), k)
    return best.values, best.indices


def select_fused(logits: Tensor, beam_scores: Tensor, k: int, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """The same selection in one read of the logits."""
    best = fused_topk.beam_topk(logits, beam_scores, k, backend=backend)
    return best.values, best.indices


class Beams(NamedTuple):
    """The best hypotheses of each prompt, best first.

    Attributes:
        tokens: int64 [batch, beams, new_tokens], filled up with the end token after a hypothesis has ended.
        scores: float32 [batch, beams], mean log-probability of the hypothesis' tokens; -inf where there is none.
        lengths: int64 [batch, beams], tokens up to and with the end token.
    """

    tokens: Tensor
    scores: Tensor
    lengths: Tensor


@torch.inference_mode()
def beam_search(
    model: torch.nn.Module,
    prompts: Tensor,
    attention_mask: Tensor,
    *,
    beams: int,
    new_tokens: int,
    end_token: int | None,
    select: Selection,
) -> Beams:
    """The best `beams` continuations of each prompt, of at most `new_tokens` tokens.

    Args:
        model: a transformers causal LM whose cache can be reordered.
        prompts: int64 [batch, length], padded on the left.
        attention_mask: int64 [batch, length], 0 where padded.
        beams: hypotheses kept per prompt.
        new_tokens: the most tokens to add; every hypothesis that has not ended by then counts as it stands.
        end_token: ends a hypothesis; None where nothing does.
        select: the selection step.
    """
    batch, device = len(prompts), prompts.device
    step_model = _Decoder(model, attention_mask)
    # The prompt is read once; only then is each one repeated for its beams.
    logits = step_model.read_prompts(prompts, beams)

    # All beams of a prompt start equal, so only the first may be chosen from, or every choice would come `beams` times.
    running_scores = torch.full((batch, beams), -torch.inf, device=device)
    running_scores[:, 0] = 0.0
    filler = 0 if end_token is None else end_token
    running = torch.full((batch, beams, new_tokens), filler, device=device)
    ended = Beams(
        running.clone(),
        torch.full((batch, beams), -torch.inf, device=device),
        torch.zeros((batch, beams), dtype=torch.int64, device=device),
    )

    for step in range(new_tokens):
        # Twice as many as are kept: even if each beam's best continuation ends it, enough remain to go on with.
        vocab_size = logits.shape[-1]
        values, indices = select(logits, running_scores, min(2 * beams, beams * vocab_size))
        parents, tokens = indices // vocab_size, indices % vocab_size
        candidates = _pick(running, parents)
        candidates[:, :, step] = tokens

        if end_token is not None:
            has_ended = tokens == end_token
            # One that ends counts only among the best `beams`: further down it would not have been kept either.
            counts = has_ended & (torch.arange(values.shape[1], device=device) < beams)
            ended = _best_of(ended, candidates, values.masked_fill(~counts, -torch.inf), step + 1)
            values = values.masked_fill(has_ended, -torch.inf)

        running_scores, kept = torch.topk(values, beams)
        running = _pick(candidates, kept)
        if step + 1 < new_tokens:
            logits = step_model.extend(_pick(tokens, kept), _pick(parents, kept))

    return _best_of(ended, running, running_scores, new_tokens)


def _best_of(ended: Beams, tokens: Tensor, log_probs: Tensor, length: int) -> Beams:
    """The best of the hypotheses that have ended and of new ones of one length, as many as there were."""
    scores, chosen = torch.topk(torch.cat([ended.scores, log_probs / length], 1), ended.scores.shape[1])
    lengths = torch.cat([ended.lengths, torch.full_like(log_probs, length, dtype=torch.int64)], 1)
    return Beams(_pick(torch.cat([ended.tokens, tokens], 1), chosen), scores, _pick(lengths, chosen))


def _pick(rows: Tensor, chosen: Tensor) -> Tensor:
    """`rows[b, chosen[b, i]]` at [b, i]."""
    return rows[torch.arange(len(rows), device=rows.device)[:, None], chosen]


class _Decoder:
    """The model with what it remembers of the text so far: the key-value cache, the positions and what is padding."""

    def __init__(self, model: torch.nn.Module, attention_mask: Tensor) -> None:
        self._model = model
        self._attention_mask = attention_mask
        self._arguments = inspect.signature(model.forward).parameters

    def read_prompts(self, prompts: Tensor, beams: int) -> Tensor:
        """Logits [batch, beams, V] after each prompt, the same for all its beams."""
        # A padded place comes before the text, where any position will do.
        positions = (self._attention_mask.cumsum(1) - 1).clamp_min(0)
        logits = self._forward(prompts, positions, cache=None)
        if not hasattr(self._cache, "reorder_cache"):
            raise ValueError(
                f"`--model` must have a cache that can be reordered, got {type(self._model).__name__} "
                f"with {type(self._cache).__name__}; choose a decoder with a key-value cache"
            )
        self._cache.batch_repeat_interleave(beams)
        self._attention_mask = self._attention_mask.repeat_interleave(beams, 0)
        self._next_position = positions[:, -1:].repeat_interleave(beams, 0) + 1
        return logits[:, None].expand(-1, beams, -1).contiguous()

    def extend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Logits [batch, beams, V] once beam i of prompt b is what `parents[b, i]` was, extended by `tokens[b, i]`."""
        batch, beams = tokens.shape
        rows = (torch.arange(batch, device=tokens.device)[:, None] * beams + parents).flatten()
        self._cache.reorder_cache(rows)
        # A beam's padding and position are its prompt's, so they need no reordering.
        self._attention_mask = F.pad(self._attention_mask, (0, 1), value=1)
        logits = self._forward(tokens.reshape(-1, 1), self._next_position, self._cache)
        self._next_position = self._next_position + 1
        return logits.view(batch, beams, -1)

    def _forward(self, tokens: Tensor, positions: Tensor, cache: object) -> Tensor:
        # Not every architecture has these: some have no positions, and older ones give logits for the whole prompt.
        optional = {"position_ids": positions, "logits_to_keep": 1}
        output = self._model(
            input_ids=tokens,
            attention_mask=self._attention_mask,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **{name: value for name, value in optional.items() if name in self._arguments},
        )
        self._cache = output.past_key_values
        return output.logits[:, -1]

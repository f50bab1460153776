# SPDX-License-Identifier: Apache-2.0
"""Processors of grammar libraries as edits: they say which tokens may come next, as a packed mask made on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..choice import masks
from .adapter import Adapter, Step
from .bans import Ban


class _Masked(LogitsProcessor):
    """The processor with the answer that it has given in this step: it takes each token once."""

    def __init__(self, allowed: Tensor) -> None:
        self._allowed = allowed

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.masked_fill(~self._allowed.to(scores.device), -torch.inf)


def _xgrammar(p: Any) -> Adapter | None:
    if "apply_token_bitmask_inplace" not in type(p).__call__.__code__.co_names:
        return None

    def adapter(step: Step) -> Ban:
        logits = step.rows.logits
        # Its own scores: what it hides of them, it hides of any.
        scores = torch.zeros(len(logits), step.rows.vocab_size, dtype=torch.float32, device="cpu")
        # It reads the last token of each row by itself. So a device is waited for once.
        allowed = p(step.input_ids.cpu(), scores) == 0
        step.on_call(p)
        step.answered[id(p)] = _Masked(allowed)
        return Ban(masks.of(allowed.numpy(), logits.device))

    return adapter


# By name, as :data:`adapter.Adapters` by class: a library is loaded only by those who use it.
ADAPTERS = {
    "xgrammar.contrib.hf.LogitsProcessor": (
        _xgrammar,
        frozenset({"matchers", "compiled_grammars", "full_vocab_size", "token_bitmask", "prefilled", "batch_size"}),
    )
}


def name_of(processor: Any) -> str:
    kind = type(processor)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_grammar(processor: Any) -> bool:
    """Whether the processor goes on by a token in each call, so that none may be called twice in a step, or for beams."""
    return name_of(processor) in ADAPTERS

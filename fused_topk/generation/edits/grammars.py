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
    """Stands for the processor in this step, with its answer: the processor must get each token only once."""

    def __init__(self, allowed: Tensor) -> None:
        self._allowed = allowed

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.masked_fill(~self._allowed.to(scores.device), -torch.inf)


def _xgrammar(p: Any) -> Adapter | None:
    if "apply_token_bitmask_inplace" not in type(p).__call__.__code__.co_names:
        return None

    def adapter(step: Step) -> Ban:
        logits = step.rows.logits
        # Any scores will do: the tokens that the processor hides do not depend on them.
        scores = torch.zeros(len(logits), step.rows.vocab_size, dtype=torch.float32, device="cpu")
        # The processor reads the last token of each row in turn. From a copy on the host that waits for the device only once.
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
    """Whether the processor advances by one token in each call. It must be called once in a step, and cannot follow beams."""
    return name_of(processor) in ADAPTERS

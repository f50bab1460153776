# SPDX-License-Identifier: Apache-2.0
"""The LM head of a step, where it is a product and nothing else: the choice is made from hidden states, and no logits exist.

:mod:`lm_head` knows whether it is. A second twin has a head that gives back what it gets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import backends, functional
from ...backends import cpu as native
from ...layout import linear_pieces
from ..lm_head import HeadInput, run_with_head
from .twin import twin_of


class Head(NamedTuple):
    """An LM head, of a model of which `headless` is the rest."""

    headless: Any
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]

    def serves(self, rows: int, k: int) -> bool:
        """Whether the CPU's kernel finds the k best of each row's logits without keeping them. Elsewhere logits are kept anyway."""
        weight = self.weight
        if weight.device.type != "cpu" or backends.pick(weight.device, weight.dtype, k, None) is not native:
            return False
        is_small = linear_pieces.is_for_the_native_kernel(rows, k)
        return is_small and native.multiplies(weight, weight, self.bias)

    def greatest(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """int64 [R]: the token of the greatest logit of each row.

        Args:
            hidden: [R, H].
            mask: int32 [R, W], which tokens it may be; None for any.
        """
        return functional.linear_topk(hidden, self.weight, 1, self.bias, mask=mask).indices.squeeze(1)

    def continuations(self, hidden: Tensor, beam_scores: Tensor, k: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The k best continuations of each sequence, ordered as :func:`fused_topk.beam_topk` does.

        Args:
            hidden: [batch * beams, H].
            beam_scores: float32 [batch, beams].
            mask: int32 [batch * beams, W], which tokens may come next; None for all.

        Returns:
            Accumulated log-probabilities float32 [batch, k], best first, and int64 [batch, k], beam * V + token.
        """
        batch, beams = beam_scores.shape
        vocab_size = len(self.weight)
        best = functional.linear_log_softmax_topk(
            hidden, self.weight, min(k, vocab_size), self.bias, mask=mask, normalize="all"
        )
        scores = (best.values.view(batch, beams, -1) + beam_scores.unsqueeze(-1)).flatten(1)
        beam = torch.arange(beams, device=hidden.device).unsqueeze(-1)
        indices = (best.indices.view(batch, beams, -1) + beam * vocab_size).flatten(1)
        # They lie in the order of beams, and within a beam of its logits: so of equal scores the smaller beam is first.
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return scores[:, :k], indices.gather(1, order[:, :k])


class _Through(nn.Module):
    """Stands in the place of a head, and gives what it gets."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def head_of(twin: Any, inputs: dict[str, Any]) -> Head | None:
    """The twin's LM head; None where it is more than a product.

    Args:
        inputs: some of the model's, to try it on.
    """
    found = run_with_head(twin, {**inputs, "use_cache": False})
    if not isinstance(found, HeadInput):
        return None
    head, headless = twin.get_output_embeddings(), twin_of(twin, None, vars)
    for path, module in twin.named_modules(remove_duplicate=False):
        if module is head:
            parent, _, name = path.rpartition(".")
            headless.get_submodule(parent)._modules[name] = _Through()
    # Where the model does not call the head as a module, it still has logits.
    is_without = torch.equal(headless(**inputs, use_cache=False).logits, found.hidden)
    return Head(headless, found.weight, found.bias) if is_without else None

# SPDX-License-Identifier: Apache-2.0
"""The LM head of a step, where logits are its product and nothing else. Tokens are chosen from hidden states, without logits.

:mod:`lm_head` finds out whether that is so. A second twin has a head that returns its input: the hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import backends, distributed, functional
from ...arguments import check_head
from ...backends import cpu as native
from ...layout import linear_pieces
from ...operators.dispatch import need_dispatcher
from ..lm_head import HeadInput, run_with_head
from ..tensor_parallel import Columns, GatheredLinear
from . import beams, texts
from .texts import Texts
from .twin import twin_of

# With this many multiplications or more the LM head's own kernel is quicker than a product and a choice. Measured for 1 to 32 rows of
# 128 to 2048 numbers and 1,000 to 128,256 tokens, float32, one thread of a shared EPYC (family 25, AVX-512), 2026-11-26: at
# 4 x 128 x 4,000 both take the same, at 4 x 128 x 32,000 it takes 0.6 times as long. With hidden states of 64 it takes up to 1.9 times as
# long: to add up the lanes of a sum takes as long as the sum.
_OPERATIONS = 1 << 22
_LEAST_HIDDEN_SIZE = 128


class Logits:
    """A choice from logits, with the methods of a :class:`Head`."""

    @staticmethod
    def greatest(logits: Tensor, mask: Tensor | None) -> Tensor:
        return functional.topk(logits, 1, mask=mask).indices.squeeze(1)

    @staticmethod
    def continuations(logits: Tensor, beam_scores: Tensor, k: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        of_beams = logits.view(*beam_scores.shape, -1)
        mask = None if mask is None else mask.view(*beam_scores.shape, -1)
        return functional.beam_topk(of_beams, beam_scores, k, mask=mask, normalize="all")[:2]


class Head:
    """A whole LM head on a CPU, whose kernels read the weight once for all rows, and keep logits where they are asked for. Other
    devices' kernels keep them, so nothing is gained there.

    Its weights are those that the module has now: else they would live on where a user replaces them. `headless` is the rest of its
    model.
    """

    def __init__(self, headless: Any, module: Any) -> None:
        self.headless = headless
        self.module = module

    @property
    def vocab_size(self) -> int:
        return len(self.module.weight)

    def serves(self, rows: int, k: int) -> bool:
        """Whether the head can find the k best tokens of so many rows."""
        weight = self.module.weight
        if weight.device.type != "cpu" or backends.pick(weight.device, weight.dtype, k, None) != "cpu":
            return False
        is_small = linear_pieces.is_for_the_native_kernel(rows, k)
        return is_small and native.multiplies(weight, weight, self.module.bias)

    def is_quicker(self, rows: int) -> bool:
        """Whether that is quicker than a choice from logits, where the steps are not kept."""
        weight: Tensor = self.module.weight
        return rows * weight.numel() >= _OPERATIONS and weight.shape[1] >= _LEAST_HIDDEN_SIZE

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V], for choices that need all of them."""
        weight, bias = self.module.weight, self.module.bias
        # What the user has put there since the call began.
        check_head(weight, bias, hidden)
        if need_dispatcher(hidden, weight, bias) or not native.multiplies(hidden, weight, bias):
            return nn.functional.linear(hidden, weight, bias)
        return native.linear(hidden, weight, bias)

    def greatest(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """int64 [R]: the token of the greatest logit of each row, of those that the mask int32 [R, W] allows."""
        return functional.linear_topk(hidden, self.module.weight, 1, self.module.bias, mask=mask).indices.squeeze(1)

    def continuations(self, hidden: Tensor, beam_scores: Tensor, k: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The k best continuations of each sequence, in the order of :func:`fused_topk.beam_topk`: their accumulated log-probabilities
        float32 [batch, k], and int64 [batch, k], beam * V + token. The mask is int32 [batch * beams, W]."""
        batch, beams = beam_scores.shape
        vocab_size = self.vocab_size
        best = functional.linear_log_softmax_topk(
            hidden, self.module.weight, min(k, vocab_size), self.module.bias, mask=mask, normalize="all"
        )
        scores = (best.values.view(batch, beams, -1) + beam_scores.unsqueeze(-1)).flatten(1)
        beam = torch.arange(beams, device=hidden.device).unsqueeze(-1)
        indices = (best.indices.view(batch, beams, -1) + beam * vocab_size).flatten(1)
        # The candidates lie in the order of beams, and those of a beam in the order of its logits. So of equal scores the smaller
        # beam is first.
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return scores[:, :k], indices.gather(1, order[:, :k])


class HeadOfColumns(Head):
    """This process's columns of an LM head. A choice is one all-gather of all candidates, and the same on all processes."""

    def __init__(self, headless: Any, module: Any, columns: Columns) -> None:
        super().__init__(headless, module)
        self.columns = columns

    @property
    def vocab_size(self) -> int:
        return self.columns.vocab_size

    def serves(self, rows: int, k: int) -> bool:
        # If a process has fewer than k columns, a choice waits for the device.
        columns = self.columns
        return k <= columns.vocab_size - columns.block * (columns.processes - 1)

    def is_quicker(self, rows: int) -> bool:
        return True

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module(hidden)
        return logits

    def greatest(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        found = distributed.topk(self._logits(hidden), 1, group=self.columns.group, mask=self._own(mask))
        return found.indices.squeeze(1)

    def continuations(self, hidden: Tensor, beam_scores: Tensor, k: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        own = self._own(mask)
        found = distributed.beam_topk(
            self._logits(hidden).view(*beam_scores.shape, -1),
            beam_scores,
            k,
            group=self.columns.group,
            mask=None if own is None else own.view(*beam_scores.shape, -1),
            normalize="all",
        )
        return found.values, found.indices

    def _logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.module.weight, self.module.bias)

    def _own(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else self.columns.of_mask(mask)


def choose(
    head: Head | None, state: Any, constants: Any, read: Tensor, mask: Tensor | None, step: Tensor, are_last: Tensor
) -> Any:
    """The state after the choice of one more token from hidden states [rows, H], without a head from logits [rows, V].

    Args:
        mask: int32 [batch, beams, W], or [batch, W] without beams: which tokens may come next; None for all.
        step, are_last: see :class:`choosing.Place`.
    """
    by = head or Logits
    if isinstance(state, Texts):
        return texts.choose_tokens(state, constants, by.greatest(read, mask), step, are_last)
    mask = None if mask is None else mask.flatten(0, 1)
    scores, indices = by.continuations(read, state.running.scores, len(constants.is_best), mask)
    vocab_size = read.shape[-1] if head is None else head.vocab_size
    return beams.choose(state, constants, scores, indices, vocab_size, step, are_last)


def head_of(twin: Any, inputs: dict[str, Any]) -> Head | None:
    """The twin's LM head, tried on these inputs; None where logits are more than its product."""
    head = twin.get_output_embeddings()
    inputs = {**inputs, "use_cache": False}
    if isinstance(head, GatheredLinear):
        headless = _without(head, twin)
        is_without = torch.equal(head(headless(**inputs).logits), twin(**inputs).logits)
        return HeadOfColumns(headless, head, head.part.columns) if is_without else None
    found = run_with_head(twin, inputs)
    if not isinstance(found, HeadInput):
        return None
    headless = _without(head, twin)
    # A model that does not call the head as a module gives logits here, too.
    is_without = torch.equal(headless(**inputs).logits, found.hidden)
    is_own = found.weight is head.weight and found.bias is head.bias
    return Head(headless, head) if is_without and is_own else None


def _without(head: nn.Module, twin: Any) -> Any:
    """The twin with a module in the place of its head that returns its input."""
    headless = twin_of(twin, None)
    for path, module in twin.named_modules(remove_duplicate=False):
        if module is head:
            parent, _, name = path.rpartition(".")
            headless.get_submodule(parent)._modules[name] = nn.Identity()
    return headless

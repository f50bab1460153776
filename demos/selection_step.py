# SPDX-License-Identifier: Apache-2.0
"""One step of transformers' decoding loops from the model's logits to the chosen tokens, without a model.

The operations are those of `GenerationMixin._beam_search` and `_sample`, in their order. Run on plain logits they are
the stock step; on logits and processors from a fused session, the fused one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from fused_topk.generation.interception.session import Session
from fused_topk.generation.request import Options


class BeamStep:
    """The beam step for `batch` texts with `beams` beams each, on random logits.

    Attributes:
        logits: [batch * beams, 1, V], as a model returns them.
        beam_scores: float32 [batch, beams].
        input_ids: int64 [batch * beams, 12], what the processors look at.
    """

    config: dict[str, Any]

    def __init__(
        self,
        batch: int,
        beams: int,
        vocab_size: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cuda",
        processors: Any = (),
    ) -> None:
        self.batch, self.beams, self.vocab_size = batch, beams, vocab_size
        generator = torch.Generator(device).manual_seed(0)
        made: dict[str, Any] = {"device": device, "generator": generator}
        self.logits = torch.randn((batch * beams, 1, vocab_size), dtype=dtype, **made).mul_(2)
        self.beam_scores = torch.rand((batch, beams), **made).neg_()
        self.input_ids = torch.randint(0, 100, (batch * beams, 12), **made)
        self._processors = LogitsProcessorList(processors)
        self.session = Session(torch.nn.Identity(), Options(sampling=True), loop=self._select.__code__)
        self._fused_processors = self.session.begin(self._config(), LogitsProcessorList(processors))

    @torch.no_grad()
    def stock(self) -> tuple[Tensor, Tensor]:
        """Accumulated log-probabilities and beam * V + token, [batch, 2 * beams], by torch operations."""
        return self._select(SimpleNamespace(logits=self.logits), self._processors)

    @torch.no_grad()
    def fused(self) -> tuple[Tensor, Tensor]:
        """The same by the fused path, its hooks around the model included."""
        return self._select(self.session.after_forward(SimpleNamespace(logits=self.logits)), self._fused_processors)

    def _config(self) -> GenerationConfig:
        return GenerationConfig(num_beams=self.beams)

    def _select(self, output: Any, processors: LogitsProcessorList) -> tuple[Tensor, Tensor]:
        logits = output.logits[:, -1, :].to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        log_probs = torch.nn.functional.log_softmax(logits, dim=-1)
        log_probs = processors(self.input_ids, log_probs)
        log_probs = torch.reshape(log_probs, (self.batch, self.beams, self.vocab_size))
        log_probs = log_probs + self.beam_scores[:, :, None]
        log_probs = torch.reshape(log_probs, (self.batch, -1))
        values, indices = torch.topk(log_probs, k=2 * self.beams)
        return values, indices


class GreedyStep(BeamStep):
    """The greedy step for `batch` texts."""

    def __init__(self, batch: int, vocab_size: int, **options: Any) -> None:
        super().__init__(batch, 1, vocab_size, **options)

    def _config(self) -> GenerationConfig:
        return GenerationConfig()

    def _select(self, output: Any, processors: LogitsProcessorList) -> tuple[Tensor, Tensor]:
        logits = output.logits[:, -1].to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = processors(self.input_ids, logits)
        return scores, torch.argmax(scores, dim=-1)


class SamplingStep(GreedyStep):
    """The sampling step for `batch` texts, with top-k and top-p behind other processors."""

    def __init__(
        self, batch: int, vocab_size: int, top_k: int, top_p: float, processors: Any = (), **options: Any
    ) -> None:
        chain = [*processors, TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
        super().__init__(batch, vocab_size, processors=chain, **options)

    def _config(self) -> GenerationConfig:
        return GenerationConfig(do_sample=True)

    def _select(self, output: Any, processors: LogitsProcessorList) -> tuple[Tensor, Tensor]:
        logits = output.logits[:, -1].to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        probs = torch.nn.functional.softmax(processors(self.input_ids, logits), dim=-1)
        return probs, torch.multinomial(probs, num_samples=1).squeeze(1)

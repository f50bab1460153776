# SPDX-License-Identifier: Apache-2.0
"""What the hooks of generation take from a model's output: outputs that cannot be assigned to are left as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import GenerationConfig, LogitsProcessorList

from fused_topk.generation import stats
from fused_topk.generation.interception.session import Session
from fused_topk.generation.request import Options


class _Named(NamedTuple):
    logits: Tensor


@dataclass(frozen=True)
class _Frozen:
    logits: Tensor


class _ReadOnly:
    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    @property
    def logits(self) -> Tensor:
        return self._logits


@pytest.mark.parametrize("kind", [_Named, _Frozen, _ReadOnly])
def test_outputs_that_cannot_be_assigned_to_stay_as_they_are(kind: Any) -> None:
    session = Session(nn.Linear(1, 1), Options())
    processors = session.begin(GenerationConfig(), LogitsProcessorList())
    logits = torch.randn(1, 3, 40)
    output = kind(logits)

    assert session.after_forward(output) is output
    assert output.logits is logits
    assert type(output.logits) is Tensor
    assert processors(torch.zeros(1, 3), output.logits[:, -1]) is not None
    assert any(kind.__name__ in reason for reason in stats().reasons)

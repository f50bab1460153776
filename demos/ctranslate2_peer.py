# SPDX-License-Identifier: Apache-2.0
"""CTranslate2 as a peer of the demo: the same model, converted, in float32 on the CPU.

Optional: `pip install ctranslate2`. Its beam search has other rules for ties and for when to stop, so only its time for texts of
a given length is comparable.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAME = "CTranslate2"


def way_of(folder: str, tokenizer: Any, inputs: dict[str, Tensor], beams: int) -> Callable[[int], Tensor]:
    """A function that generates that many tokens after each prompt.

    Args:
        folder: the model, as transformers saves it.
    """
    import ctranslate2

    # The generator holds the converted model in memory, and needs the folder no more.
    with tempfile.TemporaryDirectory(prefix="ctranslate2-") as converted:
        ctranslate2.converters.TransformersConverter(folder).convert(converted, force=True)
        generator = ctranslate2.Generator(
            converted, device="cpu", compute_type="float32", intra_threads=torch.get_num_threads(), inter_threads=1
        )
    is_text = inputs["attention_mask"].bool()
    prompts = [
        tokenizer.convert_ids_to_tokens(ids[kept].tolist())
        for ids, kept in zip(inputs["input_ids"], is_text, strict=True)
    ]

    def generate(new_tokens: int) -> Tensor:
        found = generator.generate_batch(
            prompts,
            beam_size=beams,
            max_length=new_tokens,
            min_length=new_tokens,
            include_prompt_in_result=False,
        )
        texts = torch.tensor([each.sequences_ids[0][:new_tokens] for each in found])
        return torch.cat([inputs["input_ids"], texts.to(inputs["input_ids"])], 1)

    return generate

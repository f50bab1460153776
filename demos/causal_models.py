# SPDX-License-Identifier: Apache-2.0
"""The models to decode with: the tiny one trained here, any that is on disk, or a true shape with random weights."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LlamaConfig,
    M2M100Config,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
)

from tiny_language_model import Recipe, folder_of_trained


class CausalModel(NamedTuple):
    """A model ready to decode with, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    vocab_size: int


class Shape(NamedTuple):
    """A call of generate() on a model with random weights: `beams` = 1 is greedy search, or sampling."""

    config: PretrainedConfig
    batch: int
    beams: int
    new_tokens: int = 48
    prompt: int = 32
    more: dict[str, Any] = {}  # noqa: RUF012 - options of generate(), which nobody changes

    @property
    def options(self) -> dict[str, Any]:
        return {"num_beams": self.beams, "do_sample": False, **self.more}


# As published. Position scaling is left out: it changes no shape.
_LLAMA = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768}
_SMALL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
LLAMA_1B = LlamaConfig(**_LLAMA, **_SMALL)
LLAMA_8B = LlamaConfig(**_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
QWEN_05B = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
NLLB_600M = M2M100Config(vocab_size=256206, d_model=1024, decoder_start_token_id=2)
T5_BASE = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32128, decoder_start_token_id=0)
TINY = LlamaConfig(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)

_SAMPLED = {"do_sample": True, "top_k": 50, "top_p": 0.95}
SHAPES = {
    "llama-1b-8-greedy-prompt-512": Shape(LLAMA_1B, 8, 1, 64, 512),
    "llama-1b-8-sampled-prompt-512": Shape(LLAMA_1B, 8, 1, 64, 512, _SAMPLED),
    "llama-1b-1-greedy-prompt-512": Shape(LLAMA_1B, 1, 1, 64, 512),
    "llama-1b-1-greedy-prompt-16384": Shape(LLAMA_1B, 1, 1, 64, 16384),
    "llama-1b-1x4-prompt-512": Shape(LLAMA_1B, 1, 4, 64, 512),
    "llama-1b-1x4-prompt-16384": Shape(LLAMA_1B, 1, 4, 64, 16384),
    "llama-1b-8x4-prompt-512": Shape(LLAMA_1B, 8, 4, 64, 512),
    "llama-1b-8x4-prompt-2048": Shape(LLAMA_1B, 8, 4, 128, 2048),
    "llama-1b-32x8": Shape(LLAMA_1B, 32, 8),
    "llama-8b-1-greedy-prompt-512": Shape(LLAMA_8B, 1, 1, 64, 512),
    "llama-8b-1-greedy-prompt-8192": Shape(LLAMA_8B, 1, 1, 64, 8192),
    "llama-8b-8-greedy-prompt-512": Shape(LLAMA_8B, 8, 1, 64, 512),
    "llama-8b-32-sampled-prompt-512": Shape(LLAMA_8B, 32, 1, 64, 512, _SAMPLED),
    "llama-8b-8x4-prompt-512": Shape(LLAMA_8B, 8, 4, 64, 512),
    "nllb-600m-16x5": Shape(NLLB_600M, 16, 5),
    "t5-base-8x4-source-512": Shape(T5_BASE, 8, 4, 64, 512),
    # All beams are returned, as for recommenders with semantic ids.
    "qwen-0.5b-1x512-prompt-1024": Shape(QWEN_05B, 1, 512, 4, 1024, {"num_return_sequences": 512}),
    "tiny-4x4": Shape(TINY, 4, 4),
}
"""By name: model, batch x beams, length of the prompt."""


def tiny(device: torch.device, dtype: torch.dtype, recipe: Recipe) -> CausalModel:
    """The model of Python code that the demo trains itself, or finds in its cache."""
    folder, is_new = folder_of_trained(recipe, device)
    print(f"{'Trained and kept' if is_new else 'Found'} the tiny model in {folder}", file=sys.stderr)
    return from_disk(str(folder), device, dtype)._replace(name="tiny Llama trained on the standard library")


def from_disk(name_or_path: str, device: torch.device, dtype: torch.dtype) -> CausalModel:
    """A causal LM that is on this machine: a folder, or a name in Hugging Face's local cache."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, local_files_only=True, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(name_or_path, local_files_only=True, dtype=dtype)
    # The loaders raise errors of many kinds, and all of them mean the same here.
    except Exception as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            "`--model` must be a causal LM on this disk (a folder with its config, weights and tokenizer, or a name in "
            f"Hugging Face's cache), got {name_or_path!r} ({cause}); give another path, or leave --model out"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return CausalModel(name_or_path, model.to(device).eval(), tokenizer, vocab_size)


def with_random_weights(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """A published architecture in its true shape: as slow as the real one, and no download."""
    torch.manual_seed(0)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device(device):
        return kind.from_config(config, dtype=dtype).eval()


def encode(model: CausalModel, texts: list[str], device: torch.device) -> dict[str, Tensor]:
    """Token ids and attention mask [batch, length] of the texts, padded on the left."""
    model.tokenizer.padding_side = "left"
    if not all(model.tokenizer(text)["input_ids"] for text in texts):
        raise ValueError("`--prompt` must have at least one token, got ''; give some text")
    encoded = model.tokenizer(texts, return_tensors="pt", padding=True)
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def random_prompts(vocab_size: int, batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """Random token ids and their attention mask, [batch, length]: as good as any text for random weights."""
    tokens = torch.randint(5, vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

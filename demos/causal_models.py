# SPDX-License-Identifier: Apache-2.0
"""The models to decode with: the tiny one trained here, any that is on disk, or a true shape with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from tiny_language_model import Recipe, folder_of_trained


class CausalModel(NamedTuple):
    """A model ready to decode with. `tokenizer` is None where weights are random and text would mean nothing."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    end_token: int | None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def longest_text(self) -> int | None:
        """The most tokens it can take, prompt and answer together; None where its config does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)


# The shapes as published (position scaling left out: it changes no shape). The vocabulary decides the selection's cost.
RANDOM_SHAPES: dict[str, PretrainedConfig] = {
    "llama-1b": LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "llama-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    ),
    "gpt2": GPT2Config(),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}


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
    return CausalModel(name_or_path, model.to(device).eval(), tokenizer, vocab_size, tokenizer.eos_token_id)


def with_random_weights(name: str, device: torch.device, dtype: torch.dtype) -> CausalModel:
    """A published architecture in its true shape with random weights: as slow as the real one, and no download."""
    if name not in RANDOM_SHAPES:
        raise ValueError(
            f"`--random-weights` must be one of {', '.join(RANDOM_SHAPES)}, got {name!r}; choose one of these"
        )
    config = RANDOM_SHAPES[name]
    # Counted on the meta device first: an 8B model is better refused than swapped.
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config, dtype=dtype).num_parameters()
    _check_memory(name, parameters * dtype.itemsize, device)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Random weights end a text at random: no end token, so that every run decodes the same number of steps.
    return CausalModel(f"{name} shape, random weights", model.eval(), None, config.vocab_size, None)


def _check_memory(name: str, needed: int, device: torch.device) -> None:
    free = _free_memory(device)
    size = f"{needed / 2**30:.1f} GiB of weights"
    if free is not None and needed > free:
        raise ValueError(
            f"`--random-weights` must fit into memory, got {name!r} with {size} where {free / 2**30:.1f} GiB are free "
            f"on {device}; choose a smaller shape or --dtype bfloat16"
        )
    if device.type == "cpu":
        print(f"Warning: {name} takes {size} in main memory, and each step on a CPU reads all of it.", file=sys.stderr)


def _free_memory(device: torch.device) -> int | None:
    """Free bytes on the device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def encode(model: CausalModel, texts: list[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [batch, length] of the texts, padded on the left."""
    if model.tokenizer is None:
        raise ValueError("random weights have no tokenizer; use random_prompts")
    model.tokenizer.padding_side = "left"
    if not all(model.tokenizer(text)["input_ids"] for text in texts):
        raise ValueError("`--prompt` must have at least one token, got ''; give some text")
    encoded = model.tokenizer(texts, return_tensors="pt", padding=True)
    return encoded["input_ids"].to(device), encoded["attention_mask"].to(device)


def random_prompts(model: CausalModel, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random token ids and their attention mask, [batch, length]: as good as any text for random weights."""
    tokens = torch.randint(model.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    return tokens.to(device), torch.ones_like(tokens).to(device)

# SPDX-License-Identifier: Apache-2.0
"""What generate() costs in whole steps and otherwise, all ways in turns, on true shapes with random weights.

For each shape and way: first call, first token, step, and memory beyond the weights.

    python demos/generation_cost.py --json out/generation_cost.json       # a GPU: every shape, about two minutes
    python demos/generation_cost.py --case small-beam --device cpu
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    M2M100Config,
    PretrainedConfig,
    T5Config,
)

import whole_calls
from benchmark.command_options import device_of
from benchmark.report import origin
from causal_models import RANDOM_SHAPES
from fused_topk.machine import describe
from whole_calls import COMPILED, STATIC, STOCK, WHOLE, Calls

NLLB_600M = M2M100Config(
    vocab_size=256206,
    d_model=1024,
    **{f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in (("layers", 12), ("attention_heads", 16))},
    encoder_ffn_dim=4096,
    decoder_ffn_dim=4096,
    decoder_start_token_id=2,
)
T5_BASE = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32128, decoder_start_token_id=0)
SMALL = LlamaConfig(
    vocab_size=32000,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=1024,
)


class Case(NamedTuple):
    """A shape to measure: `beams` = 1 is greedy search."""

    config: PretrainedConfig
    batch: int
    beams: int
    new_tokens: int = 48
    prompt: int = 32
    # Whether all beams are returned, as for recommender models with semantic ids.
    returns_all: bool = False


CASES = {
    "llama-1b-8x4": Case(RANDOM_SHAPES["llama-1b"], 8, 4),
    "llama-1b-32x8": Case(RANDOM_SHAPES["llama-1b"], 32, 8),
    "llama-1b-greedy": Case(RANDOM_SHAPES["llama-1b"], 1, 1, 16),
    "llama-1b-8x4-prompt-512": Case(RANDOM_SHAPES["llama-1b"], 8, 4, 64, 512),
    "llama-1b-8-greedy-prompt-512": Case(RANDOM_SHAPES["llama-1b"], 8, 1, 64, 512),
    "llama-1b-8x4-prompt-2048": Case(RANDOM_SHAPES["llama-1b"], 8, 4, 128, 2048),
    "llama-1b-1x4-prompt-512": Case(RANDOM_SHAPES["llama-1b"], 1, 4, 64, 512),
    "nllb-600m-16x5": Case(NLLB_600M, 16, 5),
    "t5-base-8x4-source-512": Case(T5_BASE, 8, 4, 64, 512),
    "qwen-0.5b-1x512-prompt-1024": Case(RANDOM_SHAPES["qwen2.5-0.5b"], 1, 512, 4, 1024, returns_all=True),
    "qwen-0.5b-1x128-prompt-1024": Case(RANDOM_SHAPES["qwen2.5-0.5b"], 1, 128, 4, 1024, returns_all=True),
    "qwen-0.5b-1x512": Case(RANDOM_SHAPES["qwen2.5-0.5b"], 1, 512, 16),
    "small-beam": Case(SMALL, 4, 4),
    "small-greedy": Case(SMALL, 4, 1, 16),
}


def measure(
    case: Case, dtype: torch.dtype, device: torch.device, rounds: int, is_compiled: bool
) -> tuple[dict[str, Calls], int]:
    """The calls of each way, and the number of the model's parameters."""
    torch.manual_seed(0)
    kind = AutoModelForSeq2SeqLM if case.config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device(device):
        model = kind.from_config(case.config, dtype=dtype).eval()
    # Random weights end a text at random: without an end token every run has the same number of steps.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts = torch.randint(
        5, case.config.vocab_size, (case.batch, case.prompt), generator=torch.Generator().manual_seed(0)
    )
    inputs = {"input_ids": prompts.to(device), "attention_mask": torch.ones_like(prompts).to(device)}
    options: dict[str, Any] = {"num_beams": case.beams, "do_sample": False}
    if case.returns_all:
        options["num_return_sequences"] = case.beams
    ways = [STOCK, WHOLE, *([COMPILED] if is_compiled else []), STATIC]
    runs = {way: whole_calls.way_of(model, inputs, options, way) for way in ways}
    return whole_calls.measure(runs, case.new_tokens, rounds, model), model.num_parameters()


def main(
    case: Annotated[list[str], typer.Option(metavar="|".join(CASES), help="Which shapes; by default all.")] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="By default a GPU where there is one.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each way, of which the median counts.")] = 5,
    json_path: Annotated[str, typer.Option("--json", metavar="PATH", help="Where to write every number.")] = "",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also compile whole steps: up to a minute each.")
    ] = False,
) -> None:
    unknown = [name for name in case if name not in CASES]
    if unknown:
        raise typer.BadParameter(f"`--case` must be of {', '.join(CASES)}, got {unknown[0]!r}")
    transformers.logging.set_verbosity_error()
    place = device_of(device)
    if place.type == "cuda":
        # Memory is counted of the current GPU.
        torch.cuda.set_device(place)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    results: dict[str, Any] = {**origin(describe()), "device": str(place), "dtype": str(dtype), "cases": {}}
    for name in case or CASES:
        started = time.perf_counter()
        try:
            calls, parameters = measure(CASES[name], dtype, place, rounds, compiled)
        except torch.OutOfMemoryError as error:
            print(f"{name}: out of memory ({error})", file=sys.stderr, flush=True)
            continue
        results["cases"][name] = {
            "parameters": parameters,
            "rounds": rounds,
            "whole_calls": {way: asdict(each) for way, each in calls.items()},
            "seconds": time.perf_counter() - started,
        }
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        for way, each in calls.items():
            print(_line(way, each), flush=True)
        # After each shape, so that an interrupted run has what it found.
        if json_path:
            Path(json_path).parent.mkdir(parents=True, exist_ok=True)
            Path(json_path).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        # Its model refers to itself, and would count as memory of the next shape.
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()


def _line(way: str, calls: Calls) -> str:
    peak = calls.peak_beyond_weights
    memory = "" if peak is None else f", {peak / 1e9:.2f} GB beyond the weights"
    otherwise = f", ran otherwise: {calls.not_as_asked}" if calls.not_as_asked else ""
    return (
        f"  {way}: first call {calls.first_call:.2f} s, first token {1e3 * calls.first_token:.1f} ms, step "
        f"{1e3 * calls.step:.2f} ms, same {calls.share_of_same:.0%}{memory}{otherwise}"
    )


if __name__ == "__main__":
    typer.run(main)

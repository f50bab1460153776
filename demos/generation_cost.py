# SPDX-License-Identifier: Apache-2.0
"""What fused generate() costs and saves: stock against fused, in one run, on true shapes with random weights.

Three measurements for each shape. The selection step by itself, from the model's logits to the chosen tokens: its time
on the GPU (replays of a CUDA graph), beside `beam_topk` or `topk` alone, its time on the host, and its scratch memory. A
whole generate(): wall time, stock and fused in turns. All kernels of a few steps of generate(), from torch's profiler. Then
whole calls in all ways, whole steps too: first call, first token, step, and memory beyond the weights.

    python demos/generation_cost.py --json out/generation_cost.json       # a GPU: every shape, about three minutes
    python demos/generation_cost.py --case small-beam --device cpu
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
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

import fused_topk
import whole_calls
from benchmark.command_options import device_of
from benchmark.report import origin
from causal_models import RANDOM_SHAPES
from fused_topk.cuda_runtime.capture import Graph
from fused_topk.generation import fused_decoding, stats
from fused_topk.machine import describe
from generate_comparison import peak_on_gpu
from selection_step import BeamStep, GreedyStep

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


@dataclass
class Cost:
    """The costs of one way, stock or fused. Times in µs of one step; None where a machine cannot tell."""

    selection_gpu: float | None = None
    selection_host: float | None = None
    selection_scratch_bytes: int | None = None
    generate_step: float | None = None
    generate_step_least: float | None = None
    generate_peak_bytes: int | None = None
    profiled_gpu: float | None = None


def measure_selection(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Cost], float]:
    """The costs of both ways, and the time of the package's function alone on the same logits."""
    vocab_size = case.config.vocab_size
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    if case.beams > 1:
        step = BeamStep(case.batch, case.beams, vocab_size, **options)
        logits = step.logits.view(case.batch, case.beams, vocab_size)

        def alone() -> Any:
            return fused_topk.beam_topk(logits, step.beam_scores, 2 * case.beams, normalize="all")
    else:
        step = GreedyStep(case.batch, vocab_size, **options)

        def alone() -> Any:
            return fused_topk.topk(step.logits[:, -1], 1)

    costs = {}
    with torch.no_grad():
        for name, run in (("stock", step.stock), ("fused", step.fused)):
            times = _gpu_time(run, device), _host_time(run, device)
            costs[name] = Cost(*times, peak_on_gpu(run) if device.type == "cuda" else None)
        return costs, _gpu_time(alone, device)


def _gpu_time(run: Callable[[], Any], device: torch.device, replays: int = 30) -> float:
    """Median µs of a replay of the captured step: the GPU's time alone. On a CPU the time of a call."""
    if device.type == "cpu":
        run()
        return statistics.median(_timed(run) for _ in range(10))
    graph = Graph(run, device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in pairwise(marks))


def _host_time(run: Callable[[], Any], device: torch.device, calls: int = 20) -> float | None:
    """Median µs that the host takes to launch the step, without waiting for the GPU."""
    if device.type == "cpu":
        return None
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        times.append(_timed(lambda: [run() for _ in range(calls)]) / calls)
    torch.cuda.synchronize()
    return statistics.median(times)


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - started)


def measure_generate(
    case: Case, dtype: torch.dtype, device: torch.device, seconds: float, costs: dict[str, Cost], is_compiled: bool
) -> dict[str, Any]:
    """Adds the costs of whole generate() calls, stock and fused in turns for about `seconds`; facts about the run."""
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

    def generate(new_tokens: int = case.new_tokens) -> torch.Tensor:
        found = model.generate(**inputs, max_new_tokens=new_tokens, num_beams=case.beams, do_sample=False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return found

    def run(name: str, new_tokens: int = case.new_tokens) -> torch.Tensor:
        if name == "stock":
            return generate(new_tokens)
        with fused_decoding(model, whole_step=False):
            return generate(new_tokens)

    found = {name: run(name) for name in costs}
    first = _timed(lambda: run("stock"))
    rounds = max(3, min(200, int(seconds * 1e6 / (2 * first))))
    times: dict[str, list[float]] = {name: [] for name in costs}
    stats(reset=True)
    for turn in range(rounds):
        # Which goes first alternates.
        for name in sorted(costs, reverse=bool(turn % 2)):
            times[name].append(_timed(lambda name=name: run(name)) / case.new_tokens)
    steps = stats(reset=True)
    options: dict[str, Any] = {"num_beams": case.beams, "do_sample": False}
    if case.returns_all:
        options["num_return_sequences"] = case.beams
    ways = [whole_calls.STOCK, whole_calls.FUSED, whole_calls.WHOLE, whole_calls.STATIC]
    # On a CPU whole steps are compiled in any case.
    ways[3:3] = [whole_calls.COMPILED] if is_compiled and device.type == "cuda" else []
    runs = {way: whole_calls.way_of(model, inputs, options, way) for way in ways}
    calls = whole_calls.measure(runs, case.new_tokens, max(3, min(rounds, 9)), model)
    for name, cost in costs.items():
        cost.generate_step, cost.generate_step_least = statistics.median(times[name]), min(times[name])
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            run(name)
            cost.generate_peak_bytes = torch.cuda.max_memory_allocated()
            cost.profiled_gpu = _profiled(lambda name=name: run(name, 8)) / 8
    same = (found["stock"] == found["fused"]).all(-1).float().mean().item()
    ratios = [fused / stock for stock, fused in zip(times["stock"], times["fused"], strict=True)]
    return {
        # Ratios of calls that follow each other: what else the machine does then slows both.
        "fused_to_stock": statistics.median(ratios),
        "fused_to_stock_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "parameters": model.num_parameters(),
        "rounds": rounds,
        "steps_fused": steps.fused,
        "steps_fallback": steps.reasons,
        # bfloat16 logits of random weights tie; torch.topk takes any of equals, the fused path the smaller index.
        "share_of_same_sequences": same,
        "whole_calls": {way: asdict(each) for way, each in calls.items()},
    }


def _profiled(run: Callable[[], Any]) -> float:
    """µs of all kernels on the GPU during the call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    return sum(each.self_device_time_total for each in profiled.key_averages())


def main(
    case: Annotated[list[str], typer.Option(metavar="|".join(CASES), help="Which shapes; by default all.")] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="By default a GPU where there is one.")] = "",
    seconds: Annotated[float, typer.Option(help="For the rounds of generate() of each shape.")] = 8.0,
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
        # What counts memory looks at the current GPU.
        torch.cuda.set_device(place)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    results: dict[str, Any] = {**origin(describe()), "device": str(place), "dtype": str(dtype), "cases": {}}
    print("times in µs of one step, stock / fused; alone: beam_topk or topk on the same logits")
    for name in case or CASES:
        started = time.perf_counter()
        try:
            costs, alone = measure_selection(CASES[name], dtype, place)
            facts = measure_generate(CASES[name], dtype, place, seconds, costs, compiled)
        except torch.OutOfMemoryError as error:
            print(f"{name}: out of memory ({error})", file=sys.stderr, flush=True)
            continue
        results["cases"][name] = {
            **facts,
            "function_alone_gpu": alone,
            **{way: asdict(cost) for way, cost in costs.items()},
            "seconds": time.perf_counter() - started,
        }
        print(_line(name, costs, alone, facts, time.perf_counter() - started), flush=True)
        for way, calls in facts["whole_calls"].items():
            print(_call_line(way, calls), flush=True)
        # After each shape, so that an interrupted run has what it found.
        if json_path:
            Path(json_path).parent.mkdir(parents=True, exist_ok=True)
            Path(json_path).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        # Its model refers to itself, and would count as memory of the next shape.
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()


def _line(name: str, costs: dict[str, Cost], alone: float, facts: dict[str, Any], seconds: float) -> str:
    stock, fused = costs["stock"], costs["fused"]

    def pair(field: str, scale: float = 1.0) -> str:
        values = [getattr(cost, field) for cost in (stock, fused)]
        return "-" if None in values else " / ".join(f"{value * scale:,.1f}" for value in values)

    low, high = facts["fused_to_stock_quartiles"]
    return (
        f"{name}: selection {pair('selection_gpu')} (alone {alone:,.1f}), host {pair('selection_host')}, "
        f"scratch MB {pair('selection_scratch_bytes', 1e-6)}; generate {pair('generate_step')} ("
        f"{facts['fused_to_stock'] - 1:+.1%}, middle half {low - 1:+.1%} to {high - 1:+.1%}, {facts['rounds']} rounds), "
        f"least {pair('generate_step_least')}, all kernels {pair('profiled_gpu')}, "
        f"peak MB {pair('generate_peak_bytes', 1e-6)}; same {facts['share_of_same_sequences']:.0%}, "
        f"fallbacks {facts['steps_fallback'] or 'none'}; {seconds:.0f} s"
    )


def _call_line(way: str, calls: dict[str, Any]) -> str:
    peak = calls["peak_beyond_weights"]
    memory = "" if peak is None else f", {peak / 1e9:.2f} GB beyond the weights"
    otherwise = f", ran otherwise: {calls['not_as_asked']}" if calls["not_as_asked"] else ""
    return (
        f"  {way}: first call {calls['first_call']:.2f} s, first token {1e3 * calls['first_token']:.1f} ms, step "
        f"{1e3 * calls['step']:.2f} ms, same {calls['share_of_same']:.0%}{memory}{otherwise}"
    )


if __name__ == "__main__":
    typer.run(main)

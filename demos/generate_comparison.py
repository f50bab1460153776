# SPDX-License-Identifier: Apache-2.0
"""Runs transformers' loops stock and fused in turns: times every step, and checks that they agree."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import StoppingCriteria, StoppingCriteriaList

from causal_models import CausalModel
from fused_topk.generation import fused_decoding, stats
from selection_step import BeamStep, GreedyStep, SamplingStep

WAYS = ("stock", "fused")
TOP_K, TOP_P = 50, 0.95
_DRAWS = 2000


@dataclass
class Way:
    """What one way of decoding took. Times in seconds, memory in bytes; None where a device does not tell."""

    steps: list[float] = field(default_factory=list)
    selection: float = 0.0
    selection_memory: int | None = None
    peak_memory: int | None = None


@dataclass
class Comparison:
    """Stock and fused generate() of one mode.

    Attributes:
        mode: "beam search", "greedy" or "sampling".
        check: what was found out about the results, in words.
        is_right: whether they are what they must be.
        fallbacks: steps of the fused way that ran stock operations, by reason.
    """

    mode: str
    ways: dict[str, Way]
    check: str
    is_right: bool
    fallbacks: dict[str, int]

    def step(self, way: str) -> float:
        """The median time of a step; the first, which reads the prompt, is not among them."""
        return statistics.median(self.ways[way].steps)


class _Clock(StoppingCriteria):
    """Notes the time at the end of every step. transformers' loops wait for the device there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class SmallerIndexFirst(TorchFunctionMode):
    """Within it torch.topk takes the smaller index among equals, where it promises none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk or type(args[0]) is not Tensor:
            return func(*args, **kwargs)
        k = kwargs["k"] if "k" in kwargs else args[1]
        values, indices = args[0].sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))


def options_of(mode: str, beams: int) -> dict[str, Any]:
    """The arguments of generate() for a mode."""
    if mode == "beam search":
        return {"num_beams": beams, "do_sample": False}
    if mode == "greedy":
        return {"num_beams": 1, "do_sample": False}
    return {"num_beams": 1, "do_sample": True, "top_k": TOP_K, "top_p": TOP_P}


def compare(
    chosen: CausalModel, inputs: dict[str, Tensor], mode: str, *, beams: int, new_tokens: int, rounds: int
) -> tuple[Comparison, Tensor]:
    """Decodes `rounds` times each way, in turns; what was measured, and the fused way's sequences."""
    model: Any = chosen.model
    options = {**options_of(mode, beams), "max_new_tokens": new_tokens}

    def generate(way: str, **more: Any) -> Tensor:
        with fused_decoding(model, sampling=True, whole_step=False) if way == "fused" else nullcontext():
            found: Tensor = model.generate(**inputs, **options, **more)
            return found

    for way in WAYS:
        generate(way)
    ways = {way: Way() for way in WAYS}
    stats(reset=True)
    for turn in range(rounds):
        # Which goes first alternates.
        for way in WAYS if turn % 2 else reversed(WAYS):
            clock = _Clock()
            generate(way, stopping_criteria=StoppingCriteriaList([clock]))
            ways[way].steps += [end - start for start, end in zip(clock.times, clock.times[1:], strict=False)]
    fallbacks = stats(reset=True).reasons

    _measure_selection(chosen, inputs, mode, beams, ways)
    if chosen.model.device.type == "cuda":
        for way in WAYS:
            torch.cuda.reset_peak_memory_stats()
            generate(way)
            ways[way].peak_memory = torch.cuda.max_memory_allocated()
    if mode == "sampling":
        check, is_right = _check_distribution(chosen, inputs)
    else:
        check, is_right = _check_sequences(generate)
    return Comparison(mode, ways, check, is_right and not fallbacks, fallbacks), generate("fused")


def _check_sequences(generate: Callable[[str], Tensor]) -> tuple[str, bool]:
    """Whether both ways give the same sequences, where stock operations too take the smaller index among equals."""
    with SmallerIndexFirst():
        stock, fused = generate("stock"), generate("fused")
    same = int((stock == fused).all(-1).sum()) if stock.shape == fused.shape else 0
    return f"{same} of {len(stock)} sequences are the same", same == len(stock)


@torch.no_grad()
def _check_distribution(chosen: CausalModel, inputs: dict[str, Tensor]) -> tuple[str, bool]:
    """Pearson's chi-square test of the first tokens that fused sampling draws against the stock probabilities."""
    model: Any = chosen.model
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    options = {**options_of("sampling", 1), "max_new_tokens": 1}
    stock = model.generate(**one, **options, return_dict_in_generate=True, output_scores=True)
    expected = stock.scores[0][0].softmax(-1).double().cpu() * _DRAWS
    many = {name: tensor.expand(_DRAWS // 10, -1) for name, tensor in one.items()}
    counts = torch.zeros_like(expected)
    with fused_decoding(model, sampling=True, whole_step=False):
        for _ in range(10):
            tokens = model.generate(**many, **options)[:, -1].cpu()
            counts += tokens.bincount(minlength=len(counts))
    outside = int(counts[expected == 0].sum())
    # Tokens with fewer than five draws expected count together.
    is_rare = expected < 5
    counts = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    chance = float(torch.special.gammaincc(torch.tensor(max(1, len(expected) - 1) / 2).double(), statistic / 2))
    return (
        f"{_DRAWS} fused draws of the first token against the stock probabilities: {outside} outside the kept set, "
        f"chi-square test p = {chance:.2f}",
        outside == 0 and chance > 1e-4,
    )


@torch.no_grad()
def _measure_selection(
    chosen: CausalModel, inputs: dict[str, Tensor], mode: str, beams: int, ways: dict[str, Way]
) -> None:
    """The step from the model's logits to the tokens, by itself, on logits of the model."""
    logits = chosen.model(**inputs).logits[:, -1:]
    batch, _, vocab_size = logits.shape
    options: dict[str, Any] = {"dtype": logits.dtype, "device": logits.device}
    if mode == "beam search":
        step = BeamStep(batch, beams, vocab_size, **options)
    elif mode == "greedy":
        step = GreedyStep(batch, vocab_size, **options)
    else:
        step = SamplingStep(batch, vocab_size, TOP_K, TOP_P, **options)
    step.logits.copy_(logits.repeat_interleave(len(step.logits) // batch, 0))
    runs = {"stock": step.stock, "fused": step.fused}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(22):
        for way in WAYS if turn % 2 else reversed(WAYS):
            seconds = _timed(runs[way], logits.device)
            # The first compile kernels.
            times[way] += [seconds] if turn > 1 else []
    for way in WAYS:
        ways[way].selection = statistics.median(times[way])
        ways[way].selection_memory = _memory(runs[way], logits.device)


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call. On a GPU between events in its stream, so that launches that it waits for count, too."""
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_on_gpu(run: Callable[[], Any]) -> int:
    """The most bytes that a call takes at a time on the current GPU, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _memory(run: Callable[[], Any], device: torch.device) -> int:
    """Bytes: on a GPU the most that a call takes at a time, on a CPU all that it allocates."""
    if device.type == "cuda":
        return peak_on_gpu(run)
    with (
        _without_lines_of_libraries(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        run()
    return sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())


@contextmanager
def _without_lines_of_libraries() -> Iterator[None]:
    """Within it the process writes nothing to its standard error, where torch's profiler tells of its starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)

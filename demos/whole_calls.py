# SPDX-License-Identifier: Apache-2.0
"""Whole generate() calls, several ways in turns: the first token, each further one, memory, and whether the texts agree.

The ways: stock; whole step, where beams share their prompt and nothing of the cache is copied (on a GPU one replay of a CUDA graph a
token); the same compiled; transformers' static cache, whose forward pass it compiles on a GPU; and CTranslate2, where it is asked for.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmark.results import Origin, Record
from fused_topk.generation import fused_decoding, stats

STOCK, WHOLE, COMPILED, STATIC = "stock", "whole step", "whole step, compiled", "static cache"
CTRANSLATE2 = "CTranslate2"
SUITE = "generate"


@dataclass
class Calls:
    """What the calls of one way took. Times in seconds, memory in bytes.

    Attributes:
        first_call: the first one, with all that is compiled or captured in it.
        first_token: the median of calls for one token.
        step: of each further token.
        peak_beyond_weights: None where a device does not tell.
        share_of_same: of the sequences those that are stock's.
        not_as_asked: for each reason, how many calls ran otherwise.
    """

    first_call: float
    first_token: float = 0.0
    step: float = 0.0
    peak_beyond_weights: int | None = None
    share_of_same: float = 0.0
    not_as_asked: dict[str, int] = field(default_factory=dict)


def way_of(model: Any, inputs: dict[str, Tensor], options: dict[str, Any], way: str) -> Callable[[int], Tensor]:
    """A function that generates that many tokens that way, of the same seed in each call."""
    more = {"cache_implementation": "static"} if way == STATIC else {}

    def generate(new_tokens: int) -> Tensor:
        is_ours = way in (WHOLE, COMPILED)
        torch.manual_seed(0)
        with fused_decoding(model, compile=way == COMPILED) if is_ours else nullcontext():
            lengths = {"max_new_tokens": new_tokens, "min_new_tokens": None}
            found: Tensor = model.generate(**inputs, **options, **lengths, **more)
            return found

    return generate


def with_ctranslate2(model: Any, tokenizer: Any, inputs: dict[str, Tensor], beams: int) -> Callable[[int], Tensor]:
    """The same model, converted, in float32 on the CPU (`pip install ctranslate2`). Its beam search has other rules for ties and for
    when to stop, so only its time for texts of a given length is comparable."""
    import ctranslate2

    # The generator holds the converted model in memory, and needs the folder no more.
    with tempfile.TemporaryDirectory(prefix="ctranslate2-") as converted:
        ctranslate2.converters.TransformersConverter(model.config._name_or_path).convert(converted, force=True)
        generator = ctranslate2.Generator(
            converted, device="cpu", compute_type="float32", intra_threads=torch.get_num_threads(), inter_threads=1
        )
    texts = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    prompts = [tokenizer.convert_ids_to_tokens(ids[kept].tolist()) for ids, kept in texts]

    def generate(new_tokens: int) -> Tensor:
        lengths = {"max_length": new_tokens, "min_length": new_tokens, "include_prompt_in_result": False}
        found = generator.generate_batch(prompts, beam_size=beams, **lengths)
        written = torch.tensor([each.sequences_ids[0][:new_tokens] for each in found])
        return torch.cat([inputs["input_ids"], written.to(inputs["input_ids"])], 1)

    return generate


def measure(
    ways: dict[str, Callable[[int], Tensor]], new_tokens: int, rounds: int, device: torch.device
) -> dict[str, Calls]:
    """The calls of each way, in turns, by a model on a device. A way that raises is left out, but for stock."""
    found: dict[str, Calls] = {}
    sequences: dict[str, Tensor] = {}
    on_gpu = device.type == "cuda"
    # The weights, and whatever else is there.
    held = torch.cuda.memory_allocated() if on_gpu else 0
    stats(reset=True)
    for way, generate in ways.items():
        try:
            seconds, sequences[way] = _timed(generate, new_tokens)
            _timed(generate, 1)
        # A way that this model, machine or version does not know.
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, ImportError) as error:
            # All others are compared with it.
            if way == STOCK:
                raise
            print(f"{way}: left out ({type(error).__name__}: {str(error).partition(chr(10))[0][:100]})", flush=True)
            continue
        found[way] = Calls(seconds)
        found[way].not_as_asked = stats(reset=True).reasons
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in found}
    for turn in range(rounds):
        # Which goes first alternates.
        for way in list(found)[:: 1 if turn % 2 else -1]:
            times[way].append((_timed(ways[way], 1)[0], _timed(ways[way], new_tokens)[0]))
    for way, calls in found.items():
        calls.first_token, whole = (statistics.median(each) for each in zip(*times[way], strict=True))
        calls.step = (whole - calls.first_token) / (new_tokens - 1)
        calls.share_of_same = share_of_same(sequences[way], sequences[STOCK])
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            ways[way](new_tokens)
            calls.peak_beyond_weights = torch.cuda.max_memory_allocated() - held
    return found


def records_of(case: str, calls: dict[str, Calls], origin: Origin, suite: str = SUITE) -> Iterator[Record]:
    """The calls of a case, as numbers of the benchmark's files."""
    for way, each in calls.items():
        yield Record(suite, case, "step", way, 1e3 * each.step, "ms", None, None, origin)
        yield Record(suite, case, "first token", way, 1e3 * each.first_token, "ms", None, None, origin)
        yield Record(suite, case, "first call", way, each.first_call, "s", None, None, origin)
        if each.peak_beyond_weights is not None:
            yield Record(suite, case, "memory", way, each.peak_beyond_weights / 1e9, "GB", None, None, origin)


def _timed(generate: Callable[[int], Tensor], new_tokens: int) -> tuple[float, Tensor]:
    started = time.perf_counter()
    found = generate(new_tokens)
    if found.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def share_of_same(found: Tensor, expected: Tensor) -> float:
    """How many of the texts are equal, from 0 to 1."""
    return 0.0 if found.shape != expected.shape else float((found == expected).all(-1).float().mean())


class SmallerIndexFirst(TorchFunctionMode):
    """Within it torch.topk takes the smaller index among equals, where it promises none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk or type(args[0]) is not Tensor:
            return func(*args, **kwargs)
        k = kwargs["k"] if "k" in kwargs else args[1]
        values, indices = args[0].sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))


def compared(model: Any, inputs: dict[str, Tensor], options: dict[str, Any], new_tokens: int) -> tuple[str, Tensor]:
    """What is wrong with the texts of whole steps, beside those of stock of the same seed (empty: nothing); and these texts."""
    with SmallerIndexFirst():
        stock = way_of(model, inputs, options, STOCK)(new_tokens)
    stats(reset=True)
    found = way_of(model, inputs, options, WHOLE)(new_tokens)
    reasons, same = stats(reset=True).reasons, share_of_same(found, stock)
    return (f"{same:.0%} of the texts are stock's; calls that ran otherwise: {reasons}" if same < 1 else ""), found

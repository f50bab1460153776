# SPDX-License-Identifier: Apache-2.0
"""Case by case: draw inputs, check the answer, and only then time it, the floor and the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fused_topk
from fused_topk.problem import RouterTopK, Sample, TopK

from .check import beam_topk_error, log_softmax_topk_error, router_error, sample_error, softmax_error
from .devices import reader
from .inputs import fits_in_cache, lengths_of, make_inputs, rotation_count, router_settings
from .peers import PEERS, beam_scores
from .suites import SAMPLING, Case
from .timing import FULL, QUICK, Effort, Function, Timing, time_eager, time_graph, time_host, time_interleaved

FUSED = "fused"


@dataclass(frozen=True)
class Settings:
    device: torch.device
    backend: str  # asked for by name, so that no fallback is timed in its place
    peers: Sequence[str] = ("torch",)
    quick: bool = False

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else FULL


@dataclass
class Result:
    """One case in one state of the cache: "cold", "hot", or "cpu" (interleaved rounds over one input)."""

    suite: str
    case: Case
    cache: str
    rotation: int
    times: dict[str, Timing] = field(default_factory=dict)
    target_us: float | None = None
    failure: str | None = None  # of ours: a wrong answer or an error
    notes: dict[str, str] = field(default_factory=dict)  # peer -> why it has no time

    @property
    def fused(self) -> Timing | None:
        return self.times.get(FUSED)

    @property
    def gigabytes_per_second(self) -> float | None:
        return self.case.bytes_moved / self.fused.median / 1000 if self.fused else None

    @property
    def meets_target(self) -> bool | None:
        return self.fused.median <= self.target_us if self.fused and self.target_us is not None else None

    def ratio(self, to: str) -> float | None:
        """Our time over that of `to`."""
        return self.fused.median / self.times[to].median if self.fused and to in self.times else None


def run(
    cases: Iterable[tuple[str, Case]], settings: Settings, on_start: Callable[[Case], None] = lambda case: None
) -> Iterator[list[Result]]:
    """The results of each case as it is done, one per state of the cache. Calls `on_start` before each case."""
    earlier: dict[tuple[Any, ...], float] = {}
    for suite, case in cases:
        on_start(case)
        results = _run_case(suite, case, settings)
        for result in results:
            untargeted = case._replace(target=None, hot=None)
            if result.fused:
                earlier[(*untargeted, result.cache)] = result.fused.median
            target = case.target_for(result.cache)
            if target:
                measured = {name: timing.median for name, timing in result.times.items()}
                normal = untargeted._replace(distribution="normal")
                aligned = untargeted._replace(vocab=case.aligned_vocab)
                for name, other in (("normal", normal), ("aligned", aligned)):
                    if (*other, result.cache) in earlier:
                        measured[name] = earlier[(*other, result.cache)]
                result.target_us = target.limit(measured)
        yield results


def empty_kernel_time(settings: Settings) -> Timing:
    """What the smallest launch costs in the same replays: the read kernel on 16 bytes."""
    return time_graph(reader(settings.device), [torch.zeros((1, 4), device=settings.device)], settings.effort)


def host_times(settings: Settings) -> dict[str, Timing]:
    """Host µs per eager call on an input so small that the device keeps up."""
    case = Case(1, 1024, 8, "fp32")
    (logits,) = make_inputs(case, settings.device, 1)
    peers, _ = _peers(case, replace(settings, peers=("torch",)))
    functions = _bound({FUSED: fused_function(case, settings), **peers}, logits)
    synchronize = torch.cuda.synchronize if settings.device.type == "cuda" else _no_wait
    return {name: time_host(function, synchronize, settings.effort) for name, function in functions.items()}


def inputs_from_memory(case: Case, device: torch.device) -> list[Tensor]:
    """As many inputs as it takes that each, in its turn, comes from the GPU's memory."""
    torch.cuda.empty_cache()  # The last case's inputs and its graphs' memory.
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    rotation = rotation_count(case.input_bytes, cache_bytes, torch.cuda.mem_get_info(device)[0])
    return make_inputs(case, device, rotation)


def answer_error(case: Case, fused: Function, inputs: Sequence[Tensor], device: torch.device) -> str | None:
    """What is wrong with our answers on the first and the last input, or None."""
    for logits in {id(x): x for x in (inputs[0], inputs[-1])}.values():
        error = _error_of(case, logits, fused(logits), device)
        if error:
            return f"wrong answer: {error}"
    return None


def _error_of(case: Case, logits: Tensor, got: object, device: torch.device) -> str | None:
    if case.k == 0 and isinstance(got, Tensor):
        return softmax_error(logits, got)
    if case.sampling and isinstance(got, Sample):
        expected = _sample_function(case, "reference")(logits)
        assert isinstance(expected, Sample)
        return sample_error(logits, got, expected)
    if case.router and isinstance(got, RouterTopK):
        routed = _router_function(case, device, "reference")(logits)
        assert isinstance(routed, RouterTopK)
        return router_error(got, routed)
    if not isinstance(got, TopK):
        return f"a {type(got).__name__}, which is no TopK"
    if case.beams:
        return beam_topk_error(logits, beam_scores(case, device), case.k, got)
    return log_softmax_topk_error(logits, case.k, got)


def floor(case: Case, device: torch.device) -> dict[str, Function]:
    """The least that is possible: a function that only reads the same bytes, and for full rows writes them again."""
    if case.k == 0:
        return {"copy": Tensor.clone}
    read = reader(device)
    if not case.is_ragged:
        return {"read": read}
    # As many bytes as lie within the lengths, one after the other.
    count = int(lengths_of(case, device).sum())
    return {"read": lambda logits: read(logits.flatten()[:count].unsqueeze(0))}


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(": ")


def _run_case(suite: str, case: Case, settings: Settings) -> list[Result]:
    try:
        if settings.device.type == "cuda":
            return _run_on_gpu(suite, case, settings)
        return [_run_on_cpu(suite, case, settings)]
    except Exception as error:
        return [Result(suite, case, "-", 1, failure=first_line(error))]


def _run_on_gpu(suite: str, case: Case, settings: Settings) -> list[Result]:
    device, effort = settings.device, settings.effort
    inputs = inputs_from_memory(case, device)
    rotation = len(inputs)
    fused = fused_function(case, settings)
    failure = answer_error(case, fused, inputs, device)
    if failure:
        return [Result(suite, case, "-", rotation, failure=failure)]

    results = [Result(suite, case, "cold", rotation)]
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    if fits_in_cache(case.input_bytes, cache_bytes) and not settings.quick:
        results.append(Result(suite, case, "hot", 1))
    ours = {**floor(case, device), FUSED: fused, **_rows_function(case, settings)}
    peers, unavailable = _peers(case, settings)
    for result in results:
        result.notes.update(unavailable)
        rotated = inputs[: result.rotation]
        result.times.update({name: time_graph(function, rotated, effort) for name, function in ours.items()})
        for name, function in peers.items():
            timer = time_graph if PEERS[name].capturable else time_eager
            try:
                result.times[name] = timer(function, rotated, effort)
            except Exception as error:
                result.notes[name] = first_line(error)
    return results


def _run_on_cpu(suite: str, case: Case, settings: Settings) -> Result:
    device = settings.device
    inputs = make_inputs(case, device, 1)
    fused = fused_function(case, settings)
    result = Result(suite, case, "cpu", 1, failure=answer_error(case, fused, inputs, device))
    if result.failure:
        return result
    peers, result.notes = _peers(case, settings)
    functions = {**floor(case, device), FUSED: fused, **_rows_function(case, settings), **peers}
    result.times = time_interleaved(_bound(functions, inputs[0]), settings.effort)
    return result


def fused_function(case: Case, settings: Settings) -> Function:
    k, backend = case.k, settings.backend
    if case.sampling:
        return _sample_function(case, backend)
    if case.router:
        return _router_function(case, settings.device, backend)
    if k == 0:
        return lambda logits: fused_topk.softmax(logits, backend=backend)
    if not case.beams:
        lengths = lengths_of(case, settings.device) if case.is_ragged else None
        return lambda logits: fused_topk.log_softmax_topk(logits, k, lengths=lengths, backend=backend)
    scores = beam_scores(case, settings.device)
    return lambda logits: fused_topk.beam_topk(logits, scores, k, backend=backend)


def _sample_function(case: Case, backend: str) -> Function:
    parameters: dict[str, Any] = SAMPLING[case.sampling]
    return lambda logits: fused_topk.sample(logits, seed=0, backend=backend, **parameters)


def _router_function(case: Case, device: torch.device, backend: str) -> Function:
    settings = router_settings(case, device)
    return lambda logits: fused_topk.router_topk(logits, case.k, backend=backend, **settings)


def _rows_function(case: Case, settings: Settings) -> dict[str, Function]:
    """For beams, log_softmax_topk of the same rows without beams; for draws, the top-k of the same rows."""
    if case.sampling:
        return {"rows": fused_function(case._replace(sampling=""), settings)}
    if not case.beams:
        return {}
    rows = fused_function(case._replace(rows=case.num_rows, beams=0), settings)
    return {"rows": lambda logits: rows(logits.flatten(0, 1))}


def _peers(case: Case, settings: Settings) -> tuple[dict[str, Function], dict[str, str]]:
    functions, notes = {}, {}
    for name in settings.peers:
        cause = PEERS[name].unavailable(settings.device)
        function = None if cause else PEERS[name].make(case, settings.device)
        if function:
            functions[name] = function
        else:
            notes[name] = cause or "not for this case"
    return functions, notes


def _bound(functions: Mapping[str, Function], logits: Tensor) -> dict[str, Callable[[], object]]:
    def bind(function: Function) -> Callable[[], object]:
        return lambda: function(logits)

    return {name: bind(function) for name, function in functions.items()}


def _no_wait() -> None:
    """The CPU has done its work when the call returns."""

# SPDX-License-Identifier: Apache-2.0
"""Case by case: draw inputs, check the answer, and only then time it, the floor and the rivals, all in turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from . import rivals
from .cases import Case
from .devices import reader
from .inputs import inputs_from_memory
from .results import OURS, PREDICTED, Origin, Record
from .suites import Suite
from .timing import FULL, QUICK, Effort, Function, Timing, in_turns, sampler

# A kernel that reads as much has no beginning and no end to speak of.
_BYTES_OF_BANDWIDTH = {"cuda": 1 << 30, "cpu": 1 << 28}


@dataclass(frozen=True)
class Settings:
    """How to run: where, with what bandwidth (bytes a µs), and beside which rivals (None: each that is installed, but for
    torch.compile, which takes its time)."""

    device: torch.device
    origin: Origin
    bandwidth: float
    rivals: Sequence[str] | None = None
    quick: bool = False

    @property
    def effort(self) -> Effort:
        return QUICK if self.quick else FULL


@dataclass
class Found:
    """What came of one case: numbers, or why there are none; and why rivals have none."""

    suite: str
    case: Case
    records: list[Record] = field(default_factory=list)
    failure: str | None = None
    notes: dict[str, str] = field(default_factory=dict)


def run(cases: Iterable[tuple[str, Suite, Case]], settings: Settings) -> Iterator[Found]:
    """Each case as it is done."""
    for name, suite, case in cases:
        found = Found(name, case)
        try:
            _measure(found, suite, settings)
        except Exception as error:
            found.failure = first_line(error)
        yield found


def bandwidth_of(device: torch.device) -> float:
    """Bytes a µs of the plain read of a large tensor."""
    tensor = torch.zeros((16, _BYTES_OF_BANDWIDTH[device.type] // 64), device=device)
    function = reader(device)
    (time,) = in_turns({"read": sampler(function, [tensor], QUICK.sample_us)}, QUICK.samples).values()
    return tensor.nbytes / time.median


def _measure(found: Found, suite: Suite, settings: Settings) -> None:
    case, device = found.case, settings.device
    inputs = inputs_from_memory(case, device)
    ours = suite.ours(case, device)
    found.failure = answer_error(suite, case, ours, inputs)
    if found.failure:
        return
    ways = {OURS: ours}
    others = dict(suite.others)
    if "torch" in others:
        others["compiled"] = rivals.compiled(others["torch"])
    for name, maker in others.items():
        if name in rivals.FLOORS or (name != "compiled" if settings.rivals is None else name in settings.rivals):
            cause = rivals.unavailable(name, device)
            function = None if cause else maker(case, device)
            if function:
                ways[name] = function
            elif cause:
                found.notes[name] = cause
    is_rotated = device.type == "cuda" and not case.depth and not dist.is_initialized()
    states = {"cold" if is_rotated else "time": inputs}
    # An input read over and over stays in the cache, with room for the results.
    room = 0.7 * torch.cuda.get_device_properties(device).L2_cache_size if is_rotated else 0
    if case.logit_bytes <= room and not settings.quick:
        states["hot"] = inputs[:1]
    of_data = "" if case.data == "normal" else f", {case.data}"

    def record(measure: str, way: str, unit: str, value: float, *spread: float) -> None:
        p10, p90 = spread or (None, None)
        found.records.append(Record(found.suite, case.label, measure, way, value, unit, p10, p90, settings.origin))

    for state, rotated in states.items():
        times = time_ways(ways, rotated, settings.effort, found.notes, suite.is_captured)
        for way, time in times.items():
            record(state + of_data, way, "µs", *time)
    record(next(iter(states)) + of_data, PREDICTED, "µs", suite.bytes(case) / settings.bandwidth)
    if device.type == "cuda" and case.depth:
        for way in times:
            record("memory", way, "GB", scratch_bytes(ways[way], inputs[0]) / 1e9)


def time_ways(
    ways: dict[str, Function], inputs: Sequence[Tensor], effort: Effort, notes: dict[str, str], is_captured: bool = True
) -> dict[str, Timing]:
    """The time of each way. A rival that raises gets a note instead."""
    samplers = {}
    for name, function in ways.items():
        try:
            samplers[name] = sampler(function, inputs, effort.sample_us, is_captured)
        except Exception as error:
            if name == OURS:
                raise
            notes[name] = first_line(error)
    return in_turns(samplers, effort.samples)


def answer_error(suite: Suite, case: Case, function: Function, inputs: Sequence[Tensor]) -> str | None:
    """What is wrong with our answers on the first and the last input, or None."""
    for given in {id(x): x for x in (inputs[0], inputs[-1])}.values():
        if error := suite.error(case, given, function(given)):
            return f"wrong answer: {error}"
    return None


def scratch_bytes(function: Function, given: Tensor) -> int:
    """The most bytes that a call holds beyond its result, after a first one has made the library's workspace."""
    function(given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function(given)
    torch.cuda.synchronize()
    tensors = result if isinstance(result, tuple) else (result,)
    held = sum(int(x.nbytes) for x in tensors if isinstance(x, Tensor))
    return torch.cuda.max_memory_allocated() - before - held


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(": ")

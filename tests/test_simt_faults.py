# SPDX-License-Identifier: Apache-2.0
"""Faults planted in copies of the kernels: the emulated machine must report each of them, whatever the schedule."""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch

from simt.cases import Case, Laid, check
from simt.emulate import replacing, replacing_each
from test_simt import check_bits_of_short_rows
from test_simt_layouts import check_tokens_of_many_beams
from test_simt_sampling import check_broad, check_case

pytestmark = pytest.mark.exhaustive  # each fault is a build of its own

ONE_WARP = Case(257, 5, rows="2")
# Its loads go to registers; those of longer rows may go to shared memory in the background.
ONE_TILE = Case(256, 5, rows="2", padding=16)
ONE_BLOCK = Case(3001, 40, rows="2", owner="some")
TWO_BLOCKS = Case(3001, 40, rows="2", splits=2)
# Three tiles that a warp keeps in place, one after the other.
IN_PLACE = Case(2500, 5, rows="2", owner="many", padding=28)
# Two windows of a warp's tiles, copied in the background, and loaded to registers.
COPIED_WINDOWS = Case(70_000, 20, "bf16", rows="2", owner="some", padding=16)
LOADED_WINDOWS = Case(70_000, 8, "bf16", rows="2", splits=1, padding=16)
# Each beats all before it.
WINNING_TILES = Case(20_001, 8, rows="ascending_by_tiles", owner="some")
# Three steps of parts.
LONG_ROW = Case(270_001, 5, "bf16", rows="2", splits=2, padding=15)
# Blocks that hand over, and sort, by buckets.
LARGE_K = Case(4097, 400, rows="1", splits=2)
# Candidates on both sides of zero, more than a block sorts at a time: they crowd the buckets, and are merged.
CROWDED = Case(3500, 2048, rows="1", splits=1)
# More candidates than there is room for, told apart by their indices alone.
EQUAL_ROW = Case(20_001, 1024, rows="all_equal", splits=1)


class Fault(NamedTuple):
    """A fault, and what tells of it."""

    old: str  # a regular expression: what to replace in csrc/, wherever it is
    new: str
    case: Case
    kinds: set[str]  # one of these is reported
    text: str = ""  # and this regular expression matches one of the reports


FAULTS = {
    "missing __syncthreads": Fault(r"__syncthreads\(\);", ";", ONE_BLOCK, {"race", "uninitialised"}),
    "missing __syncwarp": Fault(r"__syncwarp\(\);", ";", ONE_WARP, {"race", "uninitialised"}),
    "barrier that a warp does not reach": Fault(r"__syncthreads\(\);", "if (threadIdx.x / 32 != 3) __syncthreads();",
        ONE_BLOCK, {"deadlock", "divergence"}, "__syncthreads"),
    "shuffle that a lane does not reach": Fault(r"return __shfl_xor_sync\(|value \+= __shfl_xor_sync\(",
        r"if (lane_id() != 7) \g<0>", ONE_WARP, {"deadlock", "divergence"}, "of lanes ffffffff"),
    "two collectives at a time": Fault(r"__reduce_max_sync\(kAllLanes, value\)",
        "(lane_id() == 7 ? __reduce_add_sync(kAllLanes, value) : __reduce_max_sync(kAllLanes, value))", ONE_WARP,
        {"deadlock"}, "wait at __reduce_add_sync"),
    "mask without the caller": Fault(r"__reduce_max_sync\(kAllLanes, value\)", "__reduce_max_sync(0x7FFFFFFF, value)",
        ONE_WARP, {"divergence"}),
    "two threads at one word": Fault(r"add_to_shared\(&shared_\.count, (\w+)\)", r"(shared_.count += \1) - \1",
        ONE_BLOCK, {"race"}, "all_shared"),
    "read outside of an array": Fault(r"(__ldg\(static_cast<const uint4\*>\(address\))\)", r"\1 + 4096)", ONE_TILE,
        {"out of bounds"}),
    "read between the rows": Fault(r"(__ldg\(static_cast<const uint4\*>\(address\))\)", r"\1 + 1)", ONE_TILE,
        {"out of bounds"}, "in a gap between its rows|past its end"),
    "write outside of an array": Fault(r"problem\.logsumexp\[row\] =", "problem.logsumexp[row + 1] =", ONE_WARP,
        {"out of bounds"}, "past its end"),
    "write outside of shared memory": Fault(r"shared_\.count = 0;", "(&shared_.count)[1 << 14] = 0;", ONE_BLOCK,
        {"out of bounds"}, "writes 4 bytes"),
    "write to an input": Fault(r"problem\.logsumexp\[row\] =", "((float*)problem.logits)[row] =", ONE_WARP,
        {"write to an input"}),
    "result left out": Fault(r"problem\.logsumexp\[row\] =", "if (row) problem.logsumexp[row] =", ONE_WARP,
        {"not written"}, "logsumexp"),
    "uninitialised shared memory": Fault(r"shared_\.count = 0;", ";", ONE_BLOCK, {"uninitialised"}, "all_shared"),
    "misaligned vector": Fault(r"static_cast<const uint4\*>\(address\)", "(const uint4*)((const char*)address + 4)",
        ONE_TILE, {"misaligned"}),
    "no fence before the ticket": Fault(r"atom\.acq_rel\.gpu\.global\.inc", "atom.acquire.gpu.global.inc", TWO_BLOCKS,
        {"race"}, "empty"),
    "no fence behind the ticket": Fault(r"atom\.acq_rel\.gpu\.global\.inc", "atom.release.gpu.global.inc", TWO_BLOCKS,
        {"race"}, "empty"),
    "no barrier before the ticket": Fault(r"GROUP::sync\(\);(\s*candidates\.restart\(k\);\s*return arrives_last)",
        r"\1", TWO_BLOCKS, {"race"}),
    "no barrier between samples and buckets": Fault(r"(publish_samples\(own\);\s*)GROUP::sync\(\);", r"\1", LARGE_K,
        {"race", "uninitialised"}, "all_shared"),
    "no barrier between counts and sums of buckets": Fault(r"GROUP::sync\(\);(\s*is_crowded_ =)", r"\1", LARGE_K,
        {"race"}, "all_shared"),
    "no barrier between runs that are sorted and merged": Fault(r"(sort_run\(slots[^;]*;\s*)GROUP::sync\(\);", r"\1",
        CROWDED, {"race"}, "all_shared"),
    "merged candidates stored before all are read": Fault(r"GROUP::sync\(\);(\s*store\(slots \+ place, own\);)", r"\1",
        CROWDED, {"race"}, "all_shared"),
    "window whose sums are added up too soon": Fault(
        r"(rank = lane_id\(\) % Shared::kLanesOfTile;\s*(?://.*\s*)*)__syncwarp\(\);",
        r"\1",
        COPIED_WINDOWS,
        {"race", "uninitialised"},
        "dynamic|tile_slots",
    ),
    "window read into before its sums are added up": Fault(r"(u32 t = 0;\s*(?://.*\s*)*)__syncwarp\(\);", r"\1",
        LOADED_WINDOWS, {"race"}),
    "steps merged before they are made": Fault(r"(shared\.steps\[i\] = [^}]*\};\s*\}\s*)GROUP::sync\(\);", r"\1",
        LONG_ROW, {"race", "uninitialised"}, "all_shared"),
    "list handed over without its end": Fault(r"list\[i\] = kNoCandidate;", ";", LARGE_K, {"uninitialised"}, "empty"),
    "ticket not reset": Fault(r'"r"\(count - 1\)', '"r"(count)', TWO_BLOCKS, {"not reset"}, "tickets"),
    "part read through a cache that is not kept coherent": Fault(r"return __ldcg\(address\);", "return __ldg(address);",
        TWO_BLOCKS, {"stale cache"}),
    "copy that is not waited for": Fault(r"cp\.async\.wait_group %0", "cp.async.wait_group 7", ONE_BLOCK,
        {"uninitialised"}, "tile_slots|dynamic"),
    "copy in place that is not waited for": Fault(r"is_last \|\| kAhead == 1", "is_last", IN_PLACE, {"uninitialised"},
        "dynamic"),
    "copy over a tile that is still needed": Fault(r"if \(!scan\.selector\.offer\(",
        r"request(order.after(turn)); \g<0>", IN_PLACE, {"uninitialised"}, "dynamic"),
    "threshold told without an atomic": Fault(r"others = raise_in_shared\(&shared_\.threshold, threshold_\);",
        "others = shared_.threshold, shared_.threshold = max(others, threshold_);", WINNING_TILES, {"race"},
        "all_shared"),
    "threshold of the row before": Fault(r"shared_\.threshold = kNoCandidate;", ";", WINNING_TILES, {"uninitialised"},
        "all_shared"),
    "words used again too soon": Fault(r"GROUP::sync\(\);(\s*return greatest;)", r"\1", EQUAL_ROW, {"race"},
        "all_shared"),
    "copy from outside of an array": Fault(r"(cp\.async\.cg\.shared\.global\S*) \[%0\], \[%1\]",
        r"\1 [%0], [%1 + 65536]", ONE_BLOCK, {"out of bounds"}),
    "shift by the width of a type": Fault(r"u64\(key\) << 32", "u64(key << (32 + 0 * index))", ONE_WARP,
        {"undefined behaviour"}, "shifts"),
    "no end": Fault(r"shared\.row = RowResult\(",
        "while (*(volatile float*)problem.values == 0.0f) {} shared.row = RowResult(",
        Case(300, 5, rows="1", entry="topk"), {"no end", "uninitialised"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_fault_is_reported(fault):
    for schedule in ("forward", "reverse", "random", "starve", "rush"):
        laid = Laid(fault.case, edit=replacing_each(fault.old, fault.new), schedule=schedule, max_steps=3_000_000)
        logits, settings, _ = fault.case.arguments("cpu")
        with pytest.raises(AssertionError):
            laid(fault.case.entry, logits, fault.case.k, **settings)
        found = laid.outcomes[-1].faults
        assert fault.kinds & {report.kind for report in found}, (schedule, found)
        assert any(re.search(fault.text, report.text) for report in found), (schedule, found)


@pytest.mark.parametrize("case", dict.fromkeys(fault.case for fault in FAULTS.values()), ids=str)
def test_without_a_fault_nothing_is_reported(case):
    check(case)


# Nothing but the comparison with the reference can tell: an edit, and what compares.
WRONG_RESULTS: dict[str, tuple[Callable[[str], str], Callable[..., object]]] = {
    "logsumexp": (
        replacing("kThreads - 1) problem.logsumexp[row] =", "kThreads - 1) problem.logsumexp[row] = 1.0001f *"),
        partial(check, ONE_BLOCK),
    ),
    "bound that left 64 bits": (replacing("widths > high_ >> shift_", "(widths << shift_) >= high_"),
        partial(check, Case(50_257, 600, rows="infinities_of_both_signs"))),
    "half of the sorted candidates left out": (replacing("if (count > kHalf) merge(slots, kHalf);", ""),
        partial(check, CROWDED)),
    "top-p keeps the token at its border": (replacing("sums - mine < aim", "sums - mine <= aim"),
        partial(check_case, "top_p_of_half", torch.float32, 777, None)),
    "what is above the border's bucket is forgotten": (replacing("above = shared.above;", ""),
        partial(check_case, "top_p_of_half", torch.float32, 777, 5)),
    "a search goes on in the wrong half": (replacing("if (is_upper)", "if (!is_upper)"),
        partial(check_broad, "many", torch.float32, 9001)),
    "chosen added in another order": (replacing("(d[0] + d[2]) + (d[1] + d[3])", "(d[0] + d[1]) + (d[2] + d[3])"),
        partial(check_bits_of_short_rows, "fp32", 32)),
    "token of a beam in 32 bits": (replacing("i64(beam.rank) * problem.V", "beam.rank * problem.V"),
        check_tokens_of_many_beams),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_wrong_results_are_reported(name):
    edit, compare = WRONG_RESULTS[name]
    compare()
    with pytest.raises(AssertionError):
        compare(edit=edit)


def test_report_names_the_seed_and_the_place():
    fault = FAULTS["two threads at one word"]
    with pytest.raises(AssertionError) as raised:
        check(fault.case, edit=replacing_each(fault.old, fault.new), schedule="random", seed=17)
    report = str(raised.value)
    assert "schedule=random, seed=17" in report
    assert re.search(r"block \d+(,\d+)* thread \d+ \(warp \d+, lane \d+\) .*candidates\.cuh:\d+", report), report

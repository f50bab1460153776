# SPDX-License-Identifier: Apache-2.0
"""The kernels of csrc/ themselves, on the emulated machine (tests/simt/README.md) and, where there is one, on a GPU."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

import kernel_names
import ladder_rungs
from benchmark.devices import read_rows
from choices import of_topk as alternatives
from fused_topk import operators
from fused_topk.backends import cuda as kernels
from fused_topk.cuda_runtime import driver
from fused_topk.cuda_runtime.kernel_source import source_folder
from fused_topk.layout.topk_choice import KernelChoice, choose
from fused_topk.problem import TopkProblem
from fused_topk.rows import LogitRows
from oracle import DTYPES, assert_same, assert_topk, expected
from rows import INF, adversarial_rows, also, random_logits
from simt import sanitized
from simt.cases import Case, Laid, check, kernel_of
from simt.emulate import emulated
from simt.launch import SCHEDULES, Array
from simt.row_topk import empty_result, row_topk
from test_beam import check_beams, infinite_beams, unequal_beams

# (V, k, whose rows, blocks a row), on both sides of every number at which the kernels, or their choice, change course:
# a vector, a lane, what 8 lanes hold, 8, 16 and 32 lanes, a tile, two of them, a part for each warp, three steps of parts; the k
# that 8 lanes, a warp, 8 warps and 16 warps take; more blocks.
SIZES = {
    "8 lanes, 8 logits in each": [
        (1, 1, "few", 0), (2, 2, "few", 0), (8, 8, "many", 0), (9, 5, "few", 0), (31, 5, "many", 0), (64, 8, "few", 0),
    ],
    "8 lanes, 16 in each": [(65, 8, "many", 0), (72, 1, "few", 0), (100, 7, "many", 0), (128, 8, "few", 0)],
    "8 lanes, 32 in each": [
        (129, 8, "few", 0), (160, 6, "many", 0), (200, 2, "few", 0), (255, 8, "many", 0), (256, 8, "few", 0),
    ],
    "lanes of a warp": [
        (9, 9, "many", 0), (33, 32, "few", 0), (64, 12, "few", 0), (65, 17, "many", 0), (128, 16, "few", 0),
        (129, 9, "few", 0), (256, 32, "few", 0),
    ],
    "warp": [
        (257, 9, "few", 0), (300, 33, "many", 0), (1023, 32, "few", 0), (1024, 1, "many", 0), (1025, 31, "many", 0),
        (2047, 8, "many", 0), (2049, 3, "many", 0), (4097, 32, "many", 0),
    ],
    "8 warps": [
        (33, 33, "some", 0), (257, 64, "some", 0), (2049, 5, "few", 0), (8193, 33, "some", 0), (4097, 40, "some", 0),
        (25003, 50, "some", 0),
    ],
    "16 warps": [
        (33, 33, "few", 0), (4097, 40, "few", 3), (8193, 8, "few", 0), (17001, 256, "few", 1), (33001, 200, "few", 2),
        (20003, 16, "few", 1), (9001, 50, "few", 6), (270001, 5, "few", 2),
    ],
    "8 warps, three tiles each": [(17000, 20, "some", 0), (50001, 33, "some", 0), (140001, 60, "some", 0)],
    "16 warps, three tiles each": [
        (33001, 8, "few", 1), (70000, 3, "few", 1), (50001, 33, "few", 1), (150001, 16, "few", 2),
    ],
    "16 warps for a large k": [
        (1025, 65, "many", 0), (3001, 192, "few", 0), (9001, 128, "few", 2), (193, 193, "few", 0), (300, 256, "few", 0),
        (1000, 257, "many", 0), (2049, 300, "few", 2), (4097, 2048, "few", 0), (9001, 600, "few", 3),
        (36001, 300, "few", 1),
    ],
}  # fmt: skip
ENTRIES = ("log_softmax_topk", "softmax_topk", "topk")


def cases() -> list[Case]:
    """Every kernel; every size with each dtype and alignment, a third of them with each use of a mask."""
    turns = itertools.count()
    found = []
    for dtype, is_aligned, mask_use in itertools.product(DTYPES, (True, False), ("none", "allowed", "all")):
        for sizes in SIZES.values():
            chosen = sizes if mask_use == "none" else sizes[next(turns) % 3 :: 3]
            for vocab_size, k, owner, splits in chosen:
                turn = next(turns)
                # topk() takes neither a temperature nor what to normalize by.
                entry = ENTRIES[turn % 3] if mask_use != "all" else ENTRIES[turn % 2]
                found.append(
                    Case(
                        vocab_size,
                        k,
                        dtype,
                        # Each of the rows comes with many a size.
                        rows=f"{turn % 4}/4" if vocab_size < 1500 else f"{turn % 16}/16",
                        entry=entry,
                        owner=owner,
                        splits=splits,
                        mask="none" if mask_use == "none" else ("bool", "packed")[turn % 2],
                        normalize="all"
                        if mask_use == "all"
                        else ("allowed", "topk")[turn % 4 == 1 and entry != "topk"],
                        temperature="none" if entry == "topk" else ("none", "0.7", "rows")[turn // 3 % 3],
                        start=0 if is_aligned else turn % 7 + 1,
                        padding=16 + -vocab_size % 16 if is_aligned else 1 + turn % 5,
                    )
                )
    return found


CASES: dict[str, list[Case]] = {}
for _case in cases():
    CASES.setdefault(kernel_of(_case), []).append(_case)


def short(kernel: str) -> str:
    return kernel.replace("fused_topk::", "").replace(" ", "")


def half_of_twins() -> list[str]:
    """Of each two kernels that differ in nothing but bfloat16 for float16 one, by turns; and all that have no twin."""
    twins: dict[str, list[str]] = {}
    for kernel in CASES:
        twins.setdefault(kernel.replace("BFloat16", "Float16"), []).append(kernel)
    return [found[turn % len(found)] for turn, found in enumerate(twins.values())]


@pytest.mark.parametrize("kernel", half_of_twins(), ids=short)
def test_kernel_once(kernel):
    """In the case with the shortest rows. test_kernel runs every kernel."""
    check(min(CASES[kernel], key=lambda case: case.vocab_size), schedule="random")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", CASES, ids=short)
def test_kernel(kernel):
    for turn, case in enumerate(CASES[kernel]):
        schedule = SCHEDULES[turn % len(SCHEDULES)]
        try:
            check(case, schedule=schedule, seed=turn)
        except AssertionError as error:
            command = f"python -m tests.simt {case} --schedule {schedule} --seed {turn}"
            raise AssertionError(f"{command}\n{error}") from error


@pytest.mark.parametrize("kernel", CASES, ids=short)
def test_kernel_on_a_gpu(cuda, kernel):
    """The same cases there, hence the same indices."""
    for case in CASES[kernel]:
        check(case, cuda.device)


def test_every_kernel_is_tested():
    """Here, and by files of their own, test_simt_*.py and test_ladder.py."""
    # test_simt_lengths.py takes the same cases for the kernels of rows with lengths.
    of_lengths = {kernel.removesuffix(", 0>") + ", 3>" for kernel in CASES if kernel.endswith(", 0>")}
    tested = {*CASES, *of_lengths, kernel_names.READ_ROWS}
    assert tested == {kernel_names.READ_ROWS, *kernel_names.of_topk()}
    elsewhere = [
        *kernel_names.of_full_rows(),
        *kernel_names.of_routers(),
        *kernel_names.small(),
        *kernel_names.of_attention(),
        *ladder_rungs.kernel_names(),
    ]
    named = {re.split("<", name)[0] for name in (*tested, *elsewhere)}
    sources = (path.read_text() for path in source_folder().rglob("*.cu"))
    defined = [name for source in sources for name in re.findall(r"__global__[^{;]*?(\w+)\(const", source)]
    assert defined and sorted(name.split("::")[-1] for name in named) == sorted(defined)


def test_prepared_call_without_rows_launches_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(kernels, "topk_choice", kernels.topk_choice.__wrapped__)
    monkeypatch.setattr(driver, "call", None)
    logits = torch.empty(0, 300)
    problem = TopkProblem(LogitRows(logits), 5, "logits", "allowed")
    operators.row_topk.prepare_cuda(problem, torch.device("cuda", 0))(problem.rows, empty_result(problem))


# As rows of more than 2^20 elements are cut, with the parts' ends on both sides of a tile's and of the row's.
LONG_PARTS = [
    Case(8192, 8, owner="many", tiles_per_part=2),
    Case(8193, 8, "bf16", rows="0/4", owner="many", tiles_per_part=4, mask="packed", start=1, padding=3),
    Case(25003, 16, "fp16", rows="1/4", splits=1, tiles_per_part=2, normalize="topk"),
    Case(8191, 40, rows="2/4", owner="some", tiles_per_part=2, entry="softmax_topk", start=3),
    Case(12289, 33, "bf16", rows="3/4", splits=2, tiles_per_part=4, mask="bool", normalize="all", padding=7),
    Case(9001, 300, "fp16", rows="0/4", splits=3, tiles_per_part=2, entry="topk", start=5),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", LONG_PARTS, ids=str)
def test_several_tiles_a_part(case):
    for seed, schedule in enumerate(SCHEDULES):
        check(case._replace(rows="1") if seed else case, schedule=schedule, seed=seed)


@pytest.mark.parametrize("case", LONG_PARTS, ids=str)
def test_several_tiles_a_part_on_a_gpu(cuda, case):
    check(case, cuda.device)


# Whole tiles pass the bound, and must be cut to their own best: proven by the lanes' maxima, or, for a greater k, by bisection.
TILES_THAT_WIN = [
    Case(30001, k, dtype, rows="ascending_by_tiles", owner=owner, splits=splits)
    for k, owner, splits in ((2, "few", 1), (3, "some", 1), (20, "few", 2))
    for dtype in DTYPES
]


# Of a warp, of 8, and of 16; in their last round, not each warp has a tile, or its tile not many logits.
TILES_IN_ORDER = [
    Case(20_001, 8, "bf16", owner="many"), Case(20_001, 50, owner="many"), Case(40_964, 8, owner="some"),
    Case(40_961, 50, owner="some"), Case(60_000, 8, splits=1), Case(70_001, 600, "fp16", splits=2),
    Case(20_001, 1024, splits=1),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", TILES_THAT_WIN, ids=str)
def test_every_tile_beats_all_before_it(case):
    check(case, schedule="random", seed=7)


# Of a warp, of 8, and of 16, tile by tile and in windows.
CROWDED = [
    Case(20_001, 8, owner="many"), Case(40_961, 50, owner="some"), Case(40_000, 8, owner="some"),
    Case(16_384, 8, "fp16", splits=1), Case(60_000, 50, splits=1), Case(80_000, 8, "bf16", splits=1),
    Case(40_000, 3, "bf16", owner="some"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CROWDED, ids=str)
def test_tile_that_finds_no_room_is_offered_again_but_counted_once(case):
    """Ties in too few lanes of each tile for a warp to look for the tile's own best, but in all tiles together more of them than
    there is room for."""
    lane = torch.arange(case.vocab_size) // (16 // DTYPES[case.dtype].itemsize) % 32
    logits = (lane < 20).to(DTYPES[case.dtype]).expand(1, -1).contiguous()
    got = Laid(case)("log_softmax_topk", logits, case.k)
    assert_topk(got, expected("log_softmax_topk", logits, case.k), logits, "log_softmax_topk")


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", ["ascending", "descending", "all_equal", "many_ties_across_k", "nans", "all_nan"])
@pytest.mark.parametrize("case", TILES_IN_ORDER, ids=str)
def test_last_tiles_come_first(case, rows):
    for seed, schedule in enumerate(("forward", "random")):
        check(case._replace(rows=rows), schedule=schedule, seed=seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in TILES_IN_ORDER if case.k <= 8], ids=str)
def test_few_tiles_have_hits_where_logits_ascend(case, monkeypatch):
    """For each, its warp asks for room in shared memory, and tells the others what it has proven."""
    (outcome,) = check(case._replace(rows="ascending"))
    monkeypatch.setattr(KernelChoice, "lead", 0)
    (without,) = check(case._replace(rows="ascending"))
    assert 3 * outcome.counts["atomics"] < without.counts["atomics"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_of_an_older_gpu(dtype):
    """Compute capability 7.5 has neither the warp's reductions nor maxima of pairs, nor copies in the background."""
    for vocab_size, k, owner, offset in [
        (100, 8, "few", 1),
        (256, 5, "few", 1),
        (100, 9, "few", 1),
        (257, 9, "few", 1),
        (1025, 65, "few", 1),
        (17000, 20, "some", 0),
        (33001, 8, "few", 0),
    ]:
        padding = 0 if offset else -vocab_size % 16
        case = Case(vocab_size, k, dtype, rows="0/2", owner=owner, start=offset, padding=padding, splits=1 - offset)
        check(case, schedule="random", architecture=75)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [8, 9, 24, 32])
def test_short_rows_have_the_bits_of_longer_ones(dtype, most):
    """A row's sums are added in one order, whichever kernel k and beams choose."""
    check_bits_of_short_rows(dtype, most)


def check_bits_of_short_rows(dtype: str, most: int, **how) -> None:
    """Of k up to `most`. how: as of row_topk()."""
    for vocab_size in (1, 8, 33, 64, 65, 100, 128, 129, 200, 256):
        k = min(vocab_size, most)
        logits = torch.stack(list(adversarial_rows(vocab_size, k, DTYPES[dtype]).values())[::3])
        problem = TopkProblem(LogitRows(logits, temperature=0.7), k, "softmax", "topk")
        short, tiles = (
            choose(1, vocab_size, k, logits.element_size(), 132, has_beams=has_beams) for has_beams in (False, True)
        )
        assert short.lanes and not tiles.lanes
        assert_same(row_topk(problem, short, **how)[0], row_topk(problem, tiles)[0])
        # So far from 0 that the sums are formed another way.
        far = torch.arange(vocab_size).remainder(97).mul(0.25).add(3e6).expand(2, -1).contiguous().to(DTYPES[dtype])
        far[1] = random_logits(vocab_size).mul(0.5).add(3e6).to(DTYPES[dtype])
        if far.isfinite().all():
            problem = TopkProblem(LogitRows(far, temperature=0.7), k, "softmax", "allowed")
            assert_same(row_topk(problem, short, **how)[0], row_topk(problem, tiles)[0])


@pytest.mark.parametrize(
    "case", [Case(40, 5), Case(40, 9), Case(300, 9), Case(3001, 40, splits=1), Case(3001, 300, splits=2)], ids=str
)
def test_subnormal_temperatures(case):
    """Their inverse overflows, but 0 / T is 0: the best token has everything."""
    logits = (-torch.arange(case.vocab_size) / 2).expand(2, -1).contiguous()
    for entry in ("softmax_topk", "log_softmax_topk"):
        for temperature in (torch.tensor([1e-40, 1e-45]), 2e-39):
            got = Laid(case)(entry, logits, case.k, temperature=temperature)
            assert (got.indices == torch.arange(case.k)).all() and (got.logsumexp == 0).all()
            assert (got.values[:, 0] == (entry == "softmax_topk")).all()
            assert (got.values[:, 1:] <= (0 if entry == "softmax_topk" else -1e35)).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("k", [1, 5, 8, 20])
@pytest.mark.parametrize("vocab_size", [60, 64, 128, 200, 256])
def test_short_rows_tell_all_float32_logits_apart(vocab_size, k, is_apart):
    """Two neighbours, the lesser one first, on both sides of every rank up to the k-th. They differ in the last bit, in all eight
    that a word leaves out, or in what it keeps. is_apart: all of the best in vectors of their own. One row at a time: those of a
    warp share its second look at them."""
    random = torch.Generator().manual_seed(vocab_size + k)
    for rank, last_byte in itertools.product(range(k + 1), (0x00, 0x7F, 0xFF)):
        order = torch.randperm(vocab_size, generator=random)
        if is_apart:
            order = torch.randperm(vocab_size // 4, generator=random)[:, None] * 4 + torch.arange(4)
            order = order.t().flatten()
        elif vocab_size == 256:
            # All bits of their indices differ too.
            order[order == 255 - order[rank]] = order[rank + 1].item()
            order[rank + 1] = 255 - order[rank]
        logits = torch.empty(1, vocab_size)
        logits[0, order] = 20 - torch.arange(vocab_size) / 2
        first, second = order[rank : rank + 2].sort().values
        logits[0, first] = 20 - rank / 2
        logits.view(torch.int32)[0, first] |= last_byte
        logits[0, second] = logits[0, first].nextafter(torch.tensor(INF))
        problem = TopkProblem(LogitRows(logits), k, "softmax", "topk")
        for choice in alternatives(1, vocab_size, k, 4, 132):
            if choice.lanes:
                got = row_topk(problem, choice)[0]
                assert_topk(got, expected("softmax_topk", logits, k, normalize="topk"), logits, "softmax_topk")


ARRIVALS = {
    "blocks": Case(9001, 40, rows="1", splits=9, entry="softmax_topk"),
    "ties between blocks": Case(6001, 5, "bf16", rows="few_levels", splits=6),
    "beams": Case(300, 8, "fp16", beams=5, start=1),
    "beams of blocks": Case(3001, 4, beams=3, splits=3, mask="packed", normalize="all"),
    "more than one row has": Case(33, 60, beams=3),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", [8, 16, 20, 50, 64, 200, 256])
def test_bound_of_warps_that_is_the_kth_best(k):
    cases = [Case(tiles * 1024, k, rows="1", splits=1) for tiles in (8, 16)]
    case = next(case for case in cases if case.choice().warps == case.choice().parts)
    check_that_no_more_prove_a_bound(case, case.choice().k_of_warp(k))


@pytest.mark.exhaustive
@pytest.mark.parametrize("splits", [2, 4, 5, 8, 16, 17])
@pytest.mark.parametrize("k", [5, 13, 50])
def test_bound_of_blocks_that_is_the_kth_best(k, splits):
    case = Case(splits * 1024, k, rows="1", splits=splits)
    check_that_no_more_prove_a_bound(case, case.choice().k_of_split(k))


def check_that_no_more_prove_a_bound(case, of_each):
    """As many tiles as prove it have their share of the k best, `of_each`, and no more, each worse than the one before. A warp,
    or a block, has one tile."""
    tiles, k = case.choice().parts, case.k
    needed = -(-k // of_each)
    logits = random_logits(1, case.vocab_size)
    for i, j in itertools.product(range(needed), range(of_each)):
        # Of different lanes, and different.
        logits[0, (3 * i % tiles) * 1024 + 4 * (j + i)] = 100 - i - j / 32
    got = Laid(case)("log_softmax_topk", logits, k)
    assert_topk(got, expected("log_softmax_topk", logits, k), logits, "log_softmax_topk")
    assert got.values.min() >= got.values.max() - needed


@pytest.mark.parametrize("beams", [2, *also(5, 8), 9])
@pytest.mark.parametrize(("vocab_size", "share", "splits"), [(13, 0.8, 0), (1501, 0.02, 2)])
def test_unequal_beams(beams, vocab_size, share, splits):
    """What proves a bound of a sequence: one beam's list alone, or two, or all."""
    logits, scores, k = unequal_beams(beams, vocab_size, share, "cpu")
    for schedule in ("forward", "random"):
        laid = Laid(Case(vocab_size, k, beams=beams, splits=splits), schedule=schedule)
        check_beams(laid, logits, scores, k)


def test_beams_of_infinite_score():
    logits, scores = infinite_beams("cpu")
    for schedule in SCHEDULES:
        got = Laid(Case(3, 6, beams=2), schedule=schedule)("beam_topk", logits, scores, 6)
        assert got.indices.tolist() == [[1, 2, 4, 5, 0, 3]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ARRIVALS.values(), ids=list(ARRIVALS))
def test_blocks_arrive_in_any_order(case):
    """Bit for bit the same, whoever comes last."""
    logits, settings, _ = case.arguments("cpu")
    entry, scores = case.entry, []
    if case.beams:
        entry, scores = "beam_topk", [random_logits(2, case.beams, seed=1)]
    want = None
    for schedule in SCHEDULES:
        for seed in range(1 if schedule in ("forward", "reverse") else 5):
            got = Laid(case, schedule=schedule, seed=seed)(entry, logits, *scores, case.k, **settings)
            assert_same(got, want or got)
            want = got
    check(case)


@pytest.mark.exhaustive
def test_more_blocks_than_a_warp_has_lanes():
    """Then a lane holds the bounds of several, and k may be smaller than that."""
    for k in (5, 33):
        check(Case(35_000, k, "bf16", rows="few_levels", splits=34), schedule="random")


def test_blocks_take_turns():
    """The seed decides who runs when, and nothing else does."""
    case = Case(3001, 40, rows="2", splits=3)
    switches = [
        check(case, schedule=schedule, seed=seed)[0].counts["switches"]
        for schedule in ("random", "starve", "rush")
        for seed in (1, 2, 1)
    ]
    for first, second, again in zip(switches[::3], switches[1::3], switches[2::3]):
        assert first == again != second


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 8, 8 * 256 * 8 - 1, 40_000])
def test_read_rows(dtype, count):
    """Also where the last vector is not whole, and where there is none."""
    logits = torch.zeros(count, dtype=DTYPES[dtype])
    with emulated([Array("logits", logits, "input")], schedule="random") as outcomes:
        read_rows(logits)
    outcomes[0].check()


SHARDS = 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", range(SHARDS))
def test_under_address_sanitizer(shard):
    """Kernels for both formats of 16 bits between them, each in one of its cases."""
    cases_of_each = [CASES[kernel] for kernel in half_of_twins()]
    chosen = [(cases_of[turn % len(cases_of)],) for turn, cases_of in enumerate(cases_of_each)]
    done = sanitized.call("test_simt", "check_sanitized", chosen[shard::SHARDS])
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]


@pytest.mark.exhaustive
def test_address_sanitizer_sees_local_variables():
    """Which the harness's own checks leave to it."""
    calls = [(Case(300, 5, rows="1"), "__frcp_rn(t);", "(&t)[1 + (t < 0.0f)];")]
    done = sanitized.call("test_simt", "check_sanitized", calls)
    assert done.returncode != 0, done.stdout
    assert re.search("insufficient space|stack-buffer-overflow", done.stderr), done.stderr[-3000:]


def check_sanitized(case: Case, old: str = "\0", new: str = "") -> None:
    """check() under AddressSanitizer, with `old` in csrc/ replaced by `new`."""
    check(case, address_sanitizer=True, schedule="random", edit=lambda source: source.replace(old, new))

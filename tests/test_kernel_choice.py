# SPDX-License-Identifier: Apache-2.0
"""How rows are laid over a GPU: the pure function that decides it, tested without one."""

import itertools
import re

import pytest

import kernel_names
from fused_topk.cuda_runtime.kernel_source import source_folder
from fused_topk.layout.topk_choice import MAX_K, KernelChoice, Method, choose, list_length
from fused_topk.layout.topk_launch import kernel_name
from test_cuda_compile import most_static_bytes

ROWS = (1, 2, 3, 8, 37, 64, 132, 500, 1000, 2112, 4096, 100_000, 2**31 - 1)
VOCABS = (
    1, 2, 31, 32, 33, 64, 65, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023,
    1024, 1025, 2048, 4097, 32000, 50257, 128256, 151936,
)  # fmt: skip
LONG_VOCABS = (2**20 - 1, 2**20, 2**20 + 1, 2**21 + 7, 2**25 + 3, 2**31 - 1)
KS = (1, 2, 8, 9, 32, 33, 63, 64, 65, 128, 255, 256, 257, 1000, 1024, MAX_K)
MULTIPROCESSORS = (1, 20, 132, 160)
LANES, VECTOR_BYTES = 32, 16


def problems():
    for rows, vocab_size, k, itemsize, multiprocessors in itertools.product(
        ROWS, VOCABS + LONG_VOCABS, KS, (2, 4), MULTIPROCESSORS
    ):
        if k <= vocab_size:
            yield rows, vocab_size, k, itemsize, multiprocessors


@pytest.mark.parametrize(
    ("rows", "vocab_size", "k", "itemsize", "regime"),
    [
        (4096, 128, 8, 4, "router rows"), (1, 200, 5, 2, "router rows"), (37, 256, 9, 2, "short rows"),
        (37, 256, 32, 4, "short rows"), (37, 256, 33, 4, "block per row"), (37, 257, 32, 4, "warp per row"),
        (37, 1024, 32, 2, "warp per row"), (37, 1024, 64, 2, "block per row"), (4000, 4000, 5, 4, "warp per row"),
        (4000, 24576, 5, 4, "warp per row"), (4000, 24580, 8, 4, "block per row"),
        (4000, 24581, 8, 4, "warp per row"), (4000, 61440, 9, 4, "warp per row"),
        (4000, 61441, 9, 4, "block per row"), (4000, 61440, 64, 2, "warp per row"),
        (4000, 128256, 8, 2, "block per row"), (264, 2000, 8, 4, "warp per row"), (263, 2000, 8, 4, "block per row"),
        (264, 2000, 32, 4, "block per row"), (528, 25000, 8, 4, "block per row"), (1584, 32000, 8, 2, "warp per row"),
        (1583, 32000, 8, 2, "block per row"), (1188, 8000, 50, 4, "warp per row"),
        (1187, 8000, 50, 4, "block per row"), (4000, 100, 100, 4, "block per row"),
        (4000, 25000, 300, 4, "block per row"), (1, 128256, 8, 2, "split row"), (64, 128256, 8, 2, "split row"),
        (8, 128256, 1000, 4, "split row"),
    ],
)  # fmt: skip
def test_choose_regime(rows, vocab_size, k, itemsize, regime):
    """On an H200 (132 multiprocessors)."""
    assert choose(rows, vocab_size, k, itemsize, 132).regime == regime


@pytest.mark.parametrize(
    ("rows", "vocab_size", "k", "warps", "splits"),
    [
        (1, 128256, 8, 16, 8), (8, 50257, 50, 16, 4), (16, 151936, 20, 16, 8), (96, 50257, 20, 16, 1),
        (132, 32768, 64, 16, 1), (132, 262144, 64, 16, 1), (133, 262144, 64, 8, 1), (133, 262144, 65, 16, 1),
        (66, 262144, 8, 16, 2), (67, 262144, 8, 16, 1), (64, 128256, 1024, 16, 2), (1, 32768, 8, 16, 1),
        (1, 32769, 8, 16, 3), (1, 8192, 32, 8, 1), (1, 8193, 32, 16, 1), (1, 8192, 33, 16, 1), (4000, 4000, 5, 1, 1),
    ],
)  # fmt: skip
def test_choose_warps_and_splits(rows, vocab_size, k, warps, splits):
    """Warps of a block, and blocks of a row, on an H200, of either size of a logit."""
    for itemsize in (2, 4):
        choice = choose(rows, vocab_size, k, itemsize, 132)
        assert (choice.warps, choice.splits) == (warps, splits)


@pytest.mark.parametrize(
    ("rows", "vocab_size", "k", "lead"),
    [
        (4000, 256, 8, 0), (4000, 1024, 8, 0), (4000, 2048, 8, 2), (4000, 25000, 64, 2), (256, 128256, 8, 5),
        (1, 8192, 8, 0), (1, 16384, 8, 0), (1, 32000, 8, 9), (1, 128256, 8, 0), (64, 128256, 1024, 9),
        (128, 2**20, 5, 9), (128, 2**20 + 1, 5, 0),
    ],
)  # fmt: skip
def test_last_tiles_come_first_where_a_warp_reads_several(rows, vocab_size, k, lead):
    assert choose(rows, vocab_size, k, 2, 132).lead == lead


def test_no_more_tiles_come_first_than_there_are():
    for problem in problems():
        choice = choose(*problem)
        assert choice.lead <= choice.parts // choice.splits


def test_fewer_warps_than_read_prove_a_bound():
    """Each knows as many of its bests as it publishes, and together they have k (csrc/topk/bound.cuh)."""
    for problem in problems():
        choice, k = choose(*problem), problem[2]
        if choice.lanes:
            continue
        of_warp = choice.k_of_warp(k)
        warps = -(-k // of_warp)
        readers = min(choice.warps, choice.parts // choice.splits)
        assert warps <= readers and of_warp < 2**16, (problem, choice)
        # A quarter of them may have read next to nothing, unless k is large.
        most = readers - readers // 4
        assert warps <= most or k > 16 * most, (problem, choice)
        # Then an eighth of them.
        assert k > 256 or warps <= readers - readers // 8, (problem, choice)


def test_fewer_blocks_than_share_a_row_prove_a_bound():
    """A quarter of them may have next to nothing, unless they are very few or very many."""
    for k, splits in itertools.product((1, 2, 7, 64, 100, MAX_K), (1, 2, 3, 4, 5, 8, 10, 16, 17, 64, 1024)):
        of_block = KernelChoice(16, 4, splits, 1024, 1).k_of_split(k)
        blocks = -(-k // of_block)
        assert blocks <= (splits - splits // 4 if 4 < splits <= 16 else splits) and of_block < 2**16, (k, splits)


def test_a_large_k_has_kernels_of_its_own():
    """From 17 of a warp on; the warps that read nothing do not help."""
    whole, short = choose(64, 128256, 1000, 4, 132), choose(1, 3001, 192, 4, 132)
    assert (whole.warps, short.warps, short.parts) == (16, 16, 3)
    few, many = Method.TILE_BY_TILE, Method.FOR_MANY
    assert [whole.method(k, 4, True) for k in (1, 256, 257, 2048)] == [few, few, many, many]
    assert [short.method(k, 4, True) for k in (48, 49)] == [few, many]
    # Fewer warps have one kernel for what k they take.
    assert choose(4000, 4000, 64, 4, 132).method(64, 4, True) == few


def test_three_tiles_of_a_warp_are_read_in_windows():
    """Of 16-bit logits, in rows without a mask."""
    by_tile, in_windows = Method.TILE_BY_TILE, Method.IN_WINDOWS
    for warps, splits in ((8, 1), (16, 1), (16, 3)):
        for parts, want in ((2 * warps * splits, by_tile), (2 * warps * splits + 1, in_windows)):
            choice = KernelChoice(warps, 4, splits, parts, 1)
            assert choice.method(8, 2, True) == want
            assert choice.method(8, 2, False) == choice.method(8, 4, True) == by_tile
            assert choice._replace(tiles_per_part=2).method(8, 2, True) == by_tile
            assert choice.method(32 * warps, 2, True) != in_windows
    assert choose(256, 128256, 8, 2, 132).method(8, 2, True) == in_windows
    assert choose(4000, 25000, 8, 2, 132).method(8, 2, True) == by_tile


def test_choose_covers_the_row():
    """The parts hold every token, and none of them is empty."""
    for problem in problems():
        _, vocab_size, _, itemsize, _ = problem
        choice = choose(*problem)
        tile = choice.vectors * (choice.lanes or LANES) * VECTOR_BYTES // itemsize
        part = tile * choice.tiles_per_part
        assert part * choice.parts >= vocab_size, (problem, choice)
        assert part * (choice.parts - 1) < vocab_size, (problem, choice)


def test_choose_fits_the_machine():
    """Dynamic and static shared memory within the 99 KiB that a block gets on any hardware since compute capability 8.0:
    tiles, windows of them, and the states of at most 1024 parts. The tiles of 16 warps are there only where a block gets 227."""
    for problem in problems():
        choice = choose(*problem)
        states = 8 * 1024 if choice.splits == 1 or choice.warps == 1 else 0
        for is_aligned, is_unmasked in itertools.product((True, False), repeat=2):
            method = choice.method(problem[2], problem[3], is_unmasked)
            by_tile = method == Method.TILE_BY_TILE
            has_room = (
                choice.warps > 8 and is_unmasked and (by_tile or (method == Method.IN_WINDOWS and not is_aligned))
            )
            straddles = 0 if is_aligned else 32 * 128
            shared_bytes = choice.shared_bytes(method, is_aligned, is_unmasked)
            assert shared_bytes <= (128 if has_room else 64) * 1024 + straddles + states, (problem, choice)
            most = 227 if has_room else 99
            assert shared_bytes + most_static_bytes(choice.warps, method) <= most << 10, (problem, choice)
        assert choice.threads <= 1024 and choice.threads % LANES == 0
        assert 1 <= choice.splits <= choice.parts, (problem, choice)
        across, along = choice.grid(problem[0])
        # The first and the second dimension of a grid. Several blocks share a row only where rows are few.
        assert 1 <= across <= 2**31 - 1 and 1 <= along <= 65535, (problem, choice)


def test_32_warps_with_a_row_each_fit_on_a_multiprocessor():
    """Of 228 KiB, 1 of each block for the system: aligned rows, no mask."""
    for problem in problems():
        choice = choose(*problem)
        if choice.warps == 1 and not choice.lanes:
            block = choice.shared_bytes(Method.TILE_BY_TILE, True, True) + most_static_bytes(1, Method.TILE_BY_TILE)
            assert 32 * 32 // choice.threads * (block + 1024) <= 228 << 10, (problem, choice)


def test_steps_of_every_row_fit():
    """csrc/topk/softmax_topk.cu has room for the steps in which the parts of a row are merged."""
    declared = re.search(r"kMaxParts = (\d+);", (source_folder() / "topk/softmax_topk.cu").read_text())
    assert declared and max(choose(*problem).parts for problem in problems()) <= int(declared[1])


def test_choose_gives_every_block_a_share():
    """About one part, or more, for each warp of each block of a split row."""
    for problem in problems():
        choice = choose(*problem)
        assert choice.splits == 1 or choice.parts // choice.splits * 2 > choice.warps, (problem, choice)


def test_only_16_warps_share_a_row_with_other_blocks():
    """Group::kSharesRow of csrc/topk/group.cuh: smaller blocks would all read the whole row."""
    for problem in problems():
        choice = choose(*problem)
        assert choice.warps == 16 or choice.splits == 1, problem


def test_list_length_leaves_room_for_candidates():
    """What a block hands over holds k, and a list of them fits where the row's last block gathers it."""
    for k, splits in itertools.product(range(1, MAX_K + 1), (2, 3, 8, 16, 64)):
        assert k <= list_length(k, splits) <= 4096, (k, splits)


def test_choose_cuts_a_row_by_its_length_alone():
    """So that the sum of a row is added in the same order in any batch, for any k and on any GPU."""
    for vocab_size, itemsize in itertools.product(VOCABS + LONG_VOCABS, (2, 4)):
        cuts = set()
        for rows, k, multiprocessors in itertools.product(ROWS, KS, MULTIPROCESSORS):
            if k <= vocab_size:
                choice = choose(rows, vocab_size, k, itemsize, multiprocessors)
                cuts.add((choice.parts, choice.tiles_per_part))
        assert len(cuts) == 1, (vocab_size, itemsize, cuts)


def test_every_compiled_kernel_is_asked_for_and_no_other():
    """test_cuda_compile.py compiles the list of names: a choice outside it would be untested."""
    assert asked_kernels() == set(kernel_names.of_topk())


def asked_kernels():
    elements = {2: ("Float16", "BFloat16"), 4: ("Float32",)}
    # One of each variant.
    variants = {}
    for problem in problems():
        choice = choose(*problem)
        for is_unmasked in (True, False):
            method = choice.method(problem[2], problem[3], is_unmasked)
            variants[problem[3], choice.warps, method, choice.vectors, choice.kernel, is_unmasked] = choice
    return {
        kernel_name(element, choice, method, aligned, mask)
        for (itemsize, _, method, _, _, is_unmasked), choice in variants.items()
        for element in elements[itemsize]
        for aligned, mask in itertools.product((True, False), (0, 1, 2, 3))
        if (mask in (0, 3)) == is_unmasked
    }


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("k", [1, 9])
def test_choose_gives_short_rows_all_the_lanes_and_vectors_that_they_need(k, itemsize):
    for vocab_size in range(k, 257):
        choice = choose(100, vocab_size, k, itemsize, 132)
        per_lane = choice.vectors * VECTOR_BYTES // itemsize
        if k <= 8:
            assert choice.lanes == 8 and per_lane in (8, 16, 32)
        else:
            assert choice.lanes in (8, 16, 32) and per_lane == 8
        # Half of it would not do.
        held = choice.lanes * per_lane
        assert held >= vocab_size and (held == 64 or held < 2 * vocab_size)
        assert choice.rows_per_block * choice.lanes == choice.threads == 128
        # Rows of a sequence merge elsewhere.
        assert choose(100, vocab_size, k, itemsize, 132, has_beams=True).lanes == 0

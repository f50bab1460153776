# SPDX-License-Identifier: Apache-2.0
"""Rows that leave the candidates' buffer, bounds and buckets nothing to spare, on the emulated machine."""

import itertools

import pytest
import torch
from torch import Tensor

from oracle import DTYPES, check
from rows import NAN, random_logits
from simt.cases import Case, Laid
from simt.launch import Outcome
from test_beam import check_beams

CAPACITY = {1: 128, 8: 512, 16: 4096}  # by warps: Candidates::kCapacity of csrc/topk/candidates.cuh
TILE = 1024

# A tile for each warp, from where it was copied to or from registers, offered in both ways; then in windows.
CASES = [
    Case(TILE, 16, owner="many"),
    Case(TILE, 40, "bf16", owner="many"),
    Case(TILE, 16, "fp16", owner="many", mask="bool"),
    Case(8 * TILE, 48, owner="some"),
    Case(16 * TILE, 180, "bf16", splits=1),
    Case(16 * TILE, 180, splits=1, start=1),
    Case(16 * TILE, 1200, splits=1),
    Case(24 * TILE, 48, "bf16", owner="some"),
    Case(48 * TILE, 180, "fp16", splits=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_many_candidates_as_there_is_room_for(case):
    room = CAPACITY[case.choice().warps]
    if case.k > 1000:
        # What is left for the sort decides how it sorts, so the switches below say nothing. Only one too many needs the cut.
        for extra in (-1, 0, 1):
            check_row(case, filling_row(case, room + extra))
        check_row(case, filling_row(case, room), edit=without_cuts)
        with pytest.raises(AssertionError):
            check_row(case, filling_row(case, room + 1), edit=without_cuts)
        return
    switches = []
    for extra in (-1, 0, 1):
        outcome = check_row(case, filling_row(case, room + extra))
        switches.append(outcome.counts["switches"])
    # Threads wait for each other more often in a cut: there is one for one too many, and none before.
    with_one_to_spare, full, with_one_too_many = switches
    assert full < with_one_to_spare + 100 < with_one_too_many


@pytest.mark.parametrize(
    ("case", "last"),
    [
        (Case(70, 32, owner="many", beams=4), 3),
        (Case(70, 43, owner="many", beams=3), 2),
        (Case(300, 64, owner="some", beams=8), 6),
        (Case(300, 57, owner="some", beams=9), 7),
        (Case(300, 256, beams=16), 14),
        (Case(300, 241, beams=17), 15),
    ],
    ids=str,
)
def test_lists_of_beams_that_fill_the_buffer(case, last):
    """No list says anything of the others: the tokens of the best beam, of which the buffer gets one last, are all NaN."""
    assert case.beams * case.k - CAPACITY[case.choice().warps] in (0, 1)
    logits, scores = random_logits(1, case.beams, case.vocab_size), random_logits(1, case.beams)
    scores[0, last] = NAN
    got = check_beams(Laid(case), logits, scores, case.k)
    assert (got.indices // case.vocab_size == last).all()


@pytest.mark.parametrize(
    "case",
    [
        Case(2 * TILE, 33, owner="many"),
        Case(3 * TILE, 50, "bf16", owner="many"),
        Case(8 * TILE, 64, "fp16", owner="some"),
        Case(16 * TILE, 64, splits=1),
        Case(24 * TILE, 50, "bf16", owner="some"),
    ],
    ids=str,
)
def test_tile_with_a_peak_in_each_lane(case):
    """32 lanes' bests prove no bound of more."""
    dtype = DTYPES[case.dtype]
    of_vector = 16 // dtype.itemsize
    logits = low_logits(case)
    order = torch.randperm(TILE, generator=torch.Generator().manual_seed(0))
    peaks = torch.arange(32) * of_vector + torch.arange(32) % of_vector
    logits[-1, torch.cat([order[~torch.isin(order, peaks)], peaks])] = above_one(TILE, dtype)
    check_row(case, logits)


@pytest.mark.parametrize("rows", ["even", "samples_above", "samples_apart"])
def test_bound_that_a_block_reads_off_its_buckets(rows):
    """Of two blocks with the same share of the best k: in some bucket; in the last, below all samples; in the first below the
    second best sample."""
    case = Case(32 * TILE, 512, splits=2)
    of_tile = hits_of_tile(case, 34)
    logits = low_logits(case)
    logits[:, 0] = 1
    # Of each block, in the order in which they are stored: of a warp's tile the 1, then the others.
    hits = torch.arange(32)[:, None] * TILE + torch.cat([torch.zeros(1, dtype=torch.long), of_tile])
    hits = hits.view(2, -1)
    slot = torch.arange(hits.shape[1])
    # The last of their thread's, in the first and the last lane of a warp.
    is_sample = (slot % 32 % 31 == 0) & (slot + 512 >= len(slot))
    spread = torch.randperm(hits.numel(), generator=torch.Generator().manual_seed(0)).view(hits.shape) / hits.numel()
    if rows == "even":
        values = 2 + spread
    elif rows == "samples_above":
        values = torch.where(is_sample, 100, 2) + spread
    else:
        values = torch.where(is_sample, 2, 99.8) + spread / 10
        values[:, is_sample.nonzero().flatten()[:2]] = 100 + torch.tensor([[0.0, 0.01], [0.02, 0.03]])
    is_one = hits % TILE == 0
    logits.view(-1)[hits[~is_one]] = values[~is_one]
    check_row(case, logits)


@pytest.mark.parametrize("case", [Case(9001, 600, splits=3), Case(9001, 1024, splits=1)], ids=str)
def test_neighbours_of_a_large_k(case):
    """They differ in the last bits of their keys, and in no order."""
    steps = torch.randperm(case.vocab_size, generator=torch.Generator().manual_seed(case.k)).int()
    check_row(case, (torch.ones(()).view(torch.int32) + steps).view(torch.float32))


@pytest.mark.parametrize("count", [257, 2048, 2049, 3000, 4096])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_candidates_that_crowd_the_buckets(dtype, count):
    """All of a row, on both sides of zero, where keys of equal distance hold very different numbers of logits; with ties."""
    case = Case(count, min(count, 2048), dtype, splits=1)
    logits = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(DTYPES[dtype])
    logits[::7] = logits[0]
    check_row(case, logits)


def without_cuts(source: str) -> str:
    """An edit of emulated(): what finds the candidates full while a share is read is lost."""
    cut = "candidates.cut(candidates.enough());\n  }\n}"
    assert cut in source
    return source.replace(cut, "break;\n  }\n}")


def check_row(case: Case, tiles: Tensor, **how) -> Outcome:
    """Runs a row that is given by its tiles and compares the result with the reference's."""
    logits = case._placed(tiles.view(1, -1))
    mask = {"mask": torch.ones_like(logits, dtype=torch.bool)} if case.mask == "bool" else {}
    laid = Laid(case, **how)
    check(laid, "log_softmax_topk", logits, case.k, **mask)
    return laid.outcomes[0]


def filling_row(case: Case, count: int) -> Tensor:
    """Tiles of a row of which `count` logits pass the bound. Those that a warp stores last are among the best, but not of their lanes."""
    choice, dtype = case.choice(), DTYPES[case.dtype]
    distinct = count - choice.warps
    logits = low_logits(case)
    logits[: choice.warps, 0] = 1
    begins = [tile * distinct // choice.parts for tile in range(choice.parts + 1)]
    shares = [end - begin for begin, end in itertools.pairwise(begins)]
    hits = [tile * TILE + hits_of_tile(case, share) for tile, share in enumerate(shares)]
    best = torch.cat([of_tile[[-1, -2]] for of_tile in hits[-choice.warps :]])
    rest = torch.cat(hits)
    rest = rest[~torch.isin(rest, best)]
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(count))]
    logits.view(-1)[torch.cat([rest, best])] = above_one(distinct, dtype)
    return logits


def hits_of_tile(case: Case, count: int) -> Tensor:
    """So many tokens of a tile, in the order in which a warp stores them, that with the first they prove no better bound than it.

    They are in one lane less than the bound needs, or of a large k in one set of a lane's elements less, and are 7 of every 8
    elements there, as far as they go.
    """
    of_vector = 16 // DTYPES[case.dtype].itemsize
    token = torch.arange(TILE)
    lane = token // of_vector % 32
    bit = token // (32 * of_vector) * of_vector + token % of_vector
    of_warp = case.choice().k_of_warp(case.k)
    if of_warp <= 16:  # else KthBound::needs_many() of csrc/topk/bound.cuh
        place, rank = lane, bit
    elif of_vector == 4:
        place, rank = lane * 8 + bit // 4, bit % 4
    else:
        place, rank = lane * 8 + bit // 8 * 2 + bit % 2, bit % 8 // 2
    usable = token[(place > 0) & (place < of_warp) & (bit % 8 != 7)]
    hits = usable[(rank * TILE + place)[usable].argsort()][:count]
    assert len(hits) == count
    return hits[(lane * 32 + bit)[hits].argsort()]


def low_logits(case: Case) -> Tensor:
    """Tiles of logits that no bound lets pass."""
    return (random_logits(case.choice().parts, TILE).clamp(-10, 10) - 100).to(DTYPES[case.dtype])


def above_one(count: int, dtype: torch.dtype) -> Tensor:
    """So many numbers, each greater than the one before."""
    steps = torch.arange(1, count + 1)
    if dtype.itemsize == 4:
        return 1 + steps / 1024
    return (torch.ones((), dtype=dtype).view(torch.int16) + steps).to(torch.int16).view(dtype)

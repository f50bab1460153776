# SPDX-License-Identifier: Apache-2.0
"""A search for rows of extreme values that a kernel answers wrongly, on the emulated machine: some ten seconds for each family
of kernels. The numbers of a search are its seeds."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from exact_draws import SETTINGS, check_draws, kept_weights, uniforms
from fused_topk.problem import MergeProblem
from fused_topk.scale import Scale
from oracle import DTYPES, assert_topk, check, expected
from rows import extreme_row, packed, random_mask
from simt.cases import Case, Laid
from test_beam import check_beams
from test_merge import D_TOLERANCE, assert_same_state
from test_simt_full_rows import SHAPES, laid_over, results, small_choice
from test_simt_merge import parts_of
from test_simt_merge import run as merged
from test_simt_pieces import accumulated, wanted
from test_simt_sampling import draw
from test_softmax import check as check_full_rows

pytestmark = pytest.mark.exhaustive

ROWS = 4


def extreme_rows(vocab_size: int, k: int, parts: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values around k of them, around half of k, and around each part's share of k."""
    counts = [min(count, vocab_size) for count in (k, k // 2, -(-k // parts))]
    return torch.stack([extreme_row(vocab_size, counts, dtype, seed * ROWS + row) for row in range(ROWS)])


def masks(logits: Tensor, k: int, seed: int) -> dict[str, Tensor]:
    """By turns none; one that leaves most; one that leaves fewer than k, the greatest among them."""
    rows, vocab_size = logits.shape
    if seed % 3 == 0:
        return {}
    allowed = random_mask(rows, vocab_size, share=0.7 if seed % 3 == 1 else k / 4 / vocab_size, seed=seed)
    if seed % 3 == 2:
        allowed.scatter_(1, logits.float().topk(-(-k // 4)).indices, True)
    return {"mask": packed(allowed) if seed % 2 else allowed}


class Layout(NamedTuple):
    """How a family's rows are laid over the machine."""

    sizes: list[int]
    least: int  # k
    most: int
    owner: str
    times: int
    splits: tuple[int, ...] = (0,)


TOPK = {
    "splits": Layout([4097, 9001, 20_003], 5, 2048, "few", 40, (2, 3, 5)),
    "one row on many multiprocessors": Layout([50_257, 128_256], 300, 2048, "few", 9),
    "16 warps": Layout([1025, 4097, 17_001], 5, 1024, "few", 66, (1,)),
    "8 warps": Layout([300, 4097, 25_003], 33, 64, "some", 66),
    "a warp": Layout([257, 1025, 4097], 2, 32, "many", 200),
    "lanes of a warp": Layout([33, 64, 100, 256], 9, 32, "few", 330),
    "8 lanes": Layout([9, 64, 100, 256], 1, 8, "few", 330),
}


def search_topk(family: str, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    layout = TOPK[family]
    places = list(itertools.product(layout.splits, DTYPES))
    splits, dtype = places[seed % len(places)]
    sizes = layout.sizes
    vocab_size = sizes[int(torch.randint(len(sizes), (), generator=random))]
    most = min(layout.most, vocab_size // max(splits, 1))
    # As many small k as great ones.
    k = round(layout.least * (most / layout.least) ** torch.rand((), generator=random).item())
    case = Case(vocab_size, k, dtype, owner=layout.owner, splits=splits, start=seed % 2)
    logits = case._placed(extreme_rows(vocab_size, k, case.choice().splits, DTYPES[dtype], seed))
    check(Laid(case), ("log_softmax_topk", "topk")[seed % 2], logits, k, **masks(logits, k, seed))


def search_beams(seed: int) -> None:
    """Each beam's list may hold what the others' lack."""
    vocab_size, k, splits = [(40, 12, 0), (300, 33, 0), (3001, 40, 2), (9001, 600, 2)][seed % 4]
    dtype = list(DTYPES)[seed % 3]
    logits = extreme_rows(vocab_size, k, ROWS, DTYPES[dtype], seed)[None]
    scores = extreme_row(ROWS, [1], torch.float32, seed)[None]
    check_beams(Laid(Case(vocab_size, k, dtype, beams=ROWS, splits=splits)), logits, scores, k)


def search_full_rows(seed: int) -> None:
    kernel, blocks, vocab_size = SHAPES[seed % len(SHAPES)]
    dtype = list(DTYPES.values())[seed % 3]
    vocab_size *= 4 // dtype.itemsize
    logits = extreme_rows(vocab_size, 40, blocks, dtype, seed)
    values, out_dtype = results(dtype)[seed // 3 % 3]
    choice = small_choice(kernel, vocab_size, dtype.itemsize, blocks)
    check_full_rows(laid_over(choice, schedule="random", seed=seed), values, logits, dtype=out_dtype)


def search_merges(seed: int) -> None:
    vocab_size, k, cuts = [(300, 6, [7, 8, 150, 250]), (300, 65, [150]), (90, 40, [30, 60]), (500, 300, [4, 100])][
        seed % 4
    ]
    logits = extreme_rows(vocab_size, k, len(cuts) + 1, list(DTYPES.values())[seed % 3], seed)
    problem = MergeProblem(*parts_of(logits, cuts, k), k, Scale(), "log_softmax", "allowed")
    assert_topk(merged(problem), expected("log_softmax_topk", logits, k), logits, "log_softmax_topk")


def search_draws(seed: int) -> None:
    """Rows without a distribution give their first token."""
    settings = list(SETTINGS.values())[seed % len(SETTINGS)]
    logits = extreme_rows(777, 50, 3, list(DTYPES.values())[seed % 3], seed)
    names = torch.arange(ROWS) + ROWS * seed
    longest, blocks = [(None, 1), (5, 1), (5, 3), (50, 2)][seed // 3 % 4]
    got = draw(logits, settings, name_of=names, longest=longest, blocks=blocks)
    greatest = logits.float().amax(1)
    is_drawn = greatest.isfinite()
    first = expected("topk", logits, 1).indices
    assert torch.equal(got.tokens[~is_drawn], first.expand_as(got.tokens)[~is_drawn])
    assert torch.equal(got.logprobs.isnan(), ~is_drawn.unsqueeze(1).expand_as(got.logprobs))
    if is_drawn.any():
        weights = kept_weights(logits[is_drawn], settings)
        check_draws(got.tokens[is_drawn], uniforms(names, 2)[is_drawn], weights)
        # Elsewhere a token may lie at the border.
        assert "top_p" in settings or bool((weights.gather(1, got.tokens[is_drawn]) > 0).all())


def search_pieces(seed: int) -> None:
    k = [1, 5, 17, 32][seed % 4]
    cuts = [[1024], [3, 4, 1100, 2300], [40, 2048]][seed // 4 % 3]
    logits = extreme_rows(3001, k, len(cuts) + 1, list(DTYPES.values())[seed % 3], seed)
    assert_same_state(accumulated(logits, k, cuts), wanted(logits, k), D_TOLERANCE)


# How often each searches in ten seconds or so: in each layout, with each format and mask.
SEARCHES: dict[str, tuple[Callable[[int], None], int]] = {
    **{family: (functools.partial(search_topk, family), layout.times) for family, layout in TOPK.items()},
    "beams": (search_beams, 48),
    "whole rows": (search_full_rows, 66),
    "merges": (search_merges, 330),
    "draws": (search_draws, 216),
    "pieces": (search_pieces, 200),
}


@pytest.mark.parametrize("family", SEARCHES)
def test_rows_of_extreme_values(family):
    search, times = SEARCHES[family]
    for seed in range(times):
        try:
            search(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error

# SPDX-License-Identifier: Apache-2.0
"""Rows, masks, temperatures and scores of beams that lie far apart, on the emulated machine: it reports accesses between them."""

import pytest
import torch
from torch import Tensor

from fused_topk import TopK
from oracle import DTYPES, assert_same, check, expected, problem_of
from rows import NAN, packed, random_logits, random_mask, shifted
from simt.cases import Case, Laid
from simt.row_topk import row_topk
from test_beam import check_beams
from test_simt_full_rows import laid_over, small_choice
from test_softmax import check as check_full_rows

# Up to four dimensions are walked; more are copied.
SIZES = [torch.Size(sizes) for sizes in ((3, 2), (2, 3, 2), (2, 3, 2, 2), (2, 2, 2, 2, 2))]


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        *((Case(33, 5, mask="bool"), sizes) for sizes in SIZES),
        (Case(33, 9, "fp16", mask="packed"), SIZES[1]),
        (Case(300, 8, "bf16", mask="bool"), SIZES[1]),
        (Case(257, 40, owner="some", mask="packed"), SIZES[1]),
        (Case(2049, 40, splits=2, mask="bool"), SIZES[0]),
    ],
    ids=str,
)
def test_leading_dimensions(case, sizes):
    """No stride describes any two of them, and each tensor has its own."""
    logits = turned(random_logits(*sizes, case.vocab_size, dtype=DTYPES[case.dtype]))
    mask = random_mask(*sizes, case.vocab_size, share=0.7)
    mask = laid_out(packed(mask) if case.mask == "packed" else mask, step=2)
    temperature = torch.linspace(0.3, 3.0, sizes[1:].numel()).view(sizes[1:]).expand(sizes)
    check(Laid(case, schedule="random"), case.entry, logits, case.k, mask=mask, temperature=temperature)


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_leading_dimensions_of_full_rows(sizes):
    """Two are walked; more are copied."""
    logits = turned(random_logits(*sizes, 300))
    temperature = turned(torch.linspace(0.3, 3.0, sizes.numel()).view(*sizes, 1))[..., 0]
    check_full_rows(laid_over(small_choice("block", 300, 4)), "log_softmax", logits, temperature=temperature)


@pytest.mark.parametrize("case", [Case(300, 8, beams=3), Case(2049, 4, beams=3, splits=2)], ids=str)
def test_beams(case):
    logits = turned(random_logits(2, 3, case.vocab_size))
    mask = laid_out(random_mask(2, 3, case.vocab_size), step=2)
    temperature = torch.tensor([0.5, 2.0]).view(2, 1).expand(2, 3)
    scores = random_logits(2, 3, seed=1)
    for view in (turned(scores.unsqueeze(-1))[..., 0], laid_out(scores, step=2), scores[:1].expand(2, 3)):
        check_beams(Laid(case), logits, view, case.k, mask=mask, temperature=temperature)


# Rows that end at, before and behind a vector's end and a tile's; of a warp each, and for each number of warps tile by tile, in
# windows and for a large k.
ADDRESSES = [
    *(Case(size, 9, "bf16", owner="many") for size in (257, 1023, 1024, 1025)),
    *(Case(size, 9, "fp32", owner="many") for size in (257, 1023, 1024, 1025, 1027)),
    Case(2049, 9, "fp16", owner="many", mask="bool"),
]
MORE_ADDRESSES = [
    *(Case(size, 9, "bf16", owner="many") for size in (*range(1018, 1023), *range(1026, 1034), 2047, 2048, 2049)),
    *(Case(size, 9, "fp32", owner="many") for size in (1021, 1022, 1026, 1028, 2047, 2048, 2049)),
    *(Case(4097, 40, dtype, owner="some", mask=mask) for dtype in DTYPES for mask in ("none", "packed")),
    *(Case(8193, 40, dtype, splits=splits) for dtype in DTYPES for splits in (1, 2)),
    *(Case(size, 20, "bf16", owner="some") for size in (17000, 17001)),
    Case(17001, 20, "fp16", owner="some"),
    *(Case(33001, 8, dtype, splits=1) for dtype in ("bf16", "fp16")),
    *(Case(1025, 100, dtype, owner="many") for dtype in DTYPES),
]


@pytest.mark.parametrize(
    "case", [*ADDRESSES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE_ADDRESSES)], ids=str
)
def test_row_has_the_same_bits_at_any_address(case):
    """One row at each distance from a multiple of 16 bytes, in one launch, and at none."""
    dtype = DTYPES[case.dtype]
    distances = 16 // dtype.itemsize
    row = random_logits(case.vocab_size, dtype=dtype)
    mask = {} if case.mask == "none" else {"mask": random_mask(1, case.vocab_size, share=0.7).expand(distances, -1)}
    if case.mask == "packed":
        mask = {"mask": packed(mask["mask"])}

    def at_distance(stride: int) -> TopK:
        logits = shifted(row.new_full((distances, stride), NAN), 0)[:, : case.vocab_size]
        logits.copy_(row)
        assert len({x.data_ptr() % 16 for x in logits}) == (distances if stride % 2 else 1)
        return check(Laid(case, schedule="random"), case.entry, logits, case.k, **mask)

    aligned = at_distance(-(-case.vocab_size // 16) * 16)
    unaligned = at_distance(case.vocab_size | 1)
    for got in (aligned, unaligned):
        assert_same(got, TopK(*(x[:1].expand_as(x) for x in aligned)))


def test_tokens_of_beams_beyond_32_bits():
    check_tokens_of_many_beams()


def check_tokens_of_many_beams(**how) -> None:
    """Of long rows the launch reads the first tile alone. how: as of row_topk()."""
    tile, vocab_size, beams, k = 1024, 2**26, 65, 5
    row = torch.empty(vocab_size, dtype=torch.bfloat16)
    row[:tile] = random_logits(tile)
    logits = row.expand(1, beams, vocab_size)
    scores = torch.linspace(-200, 0, beams)[None]
    choice = Case(vocab_size, k, "bf16", beams=beams).choice()._replace(splits=1, parts=1, tiles_per_part=1)
    got, outcome = row_topk(problem_of("log_softmax_topk", logits, k), choice, beam_scores=scores, **how)
    outcome.check()
    want = expected("log_softmax_topk", row[:tile], k).indices + (beams - 1) * vocab_size
    assert int(want.min()) >= 2**32
    assert torch.equal(got.indices, want[None])


def laid_out(tensor: Tensor, step: int = 1) -> Tensor:
    """An equal one whose elements are `step` apart, and its rows so far that no stride describes two dimensions."""
    *leading, last = tensor.shape
    room = tensor.new_zeros(*(size + 1 for size in leading), last * step + 3)
    view = room[(*(slice(size) for size in leading), slice(0, last * step, step))]
    return view.copy_(tensor)


def turned(tensor: Tensor) -> Tensor:
    """The same, but of all dimensions before the last the first is the innermost."""
    order = [*reversed(range(tensor.dim() - 1)), tensor.dim() - 1]
    return laid_out(tensor.permute(order)).permute(order)

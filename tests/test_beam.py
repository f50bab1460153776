# SPDX-License-Identifier: Apache-2.0
"""beam_topk: the merge of the beams' own top-k lists.

Accumulated log-probabilities of different beams may round to equal or swapped values, so the order is exact with
respect to the log-probabilities that the same backend computes, and these are checked elsewhere against float64.
"""

import pytest
import torch
from torch import Tensor

from fused_topk import TopK
from oracle import DTYPES, bits
from rows import INF, NAN, adversarial_rows, random_logits, random_mask

SHAPES = [
    (1, 1, 1, 1), (2, 3, 7, 5), (3, 4, 33, 8), (1, 5, 1000, 10), (2, 4, 5003, 65), (37, 4, 1000, 8), (2, 16, 32000, 32),
    (1, 3, 50257, 6),
]  # fmt: skip


def merged(backend, logits: Tensor, scores: Tensor, k: int, **settings) -> TopK:
    """The contract: each beam's log_softmax_topk, its score added in float32, and a stable merge."""
    batch, beams, vocab_size = logits.shape
    rows = backend("log_softmax_topk", logits, min(k, vocab_size), **settings)
    values = rows.values + scores.float().unsqueeze(-1)
    flat = rows.indices + torch.arange(beams, device=logits.device).view(-1, 1) * vocab_size
    values, flat = values.flatten(1), flat.flatten(1)
    # On the CPU, where a sort puts every NaN first, whatever its bits.
    order = values.cpu().sort(dim=-1, descending=True, stable=True).indices[:, :k].to(logits.device)
    return TopK(values.gather(1, order), flat.gather(1, order), rows.logsumexp)


def check_beams(backend, logits: Tensor, scores: Tensor, k: int, **settings) -> TopK:
    got = backend("beam_topk", logits, scores, k, **settings)
    want = merged(backend, logits, scores, k, **settings)
    assert got.values.dtype == torch.float32 and got.indices.dtype == torch.int64
    assert got.logsumexp.dtype == torch.float32
    assert torch.equal(got.indices, want.indices)
    assert torch.equal(got.values.isnan(), want.values.isnan())
    assert torch.equal(got.values.nan_to_num(nan=1.0), want.values.nan_to_num(nan=1.0))
    assert torch.equal(bits(got.logsumexp.nan_to_num(nan=1.0)), bits(want.logsumexp.nan_to_num(nan=1.0)))
    return got


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "batch{}-beams{}-V{}-k{}".format(*s))
def test_beam_topk_merges_rows(backend, dtype, shape):
    batch, beams, vocab_size, k = shape
    logits = random_logits(batch, beams, vocab_size, dtype=DTYPES[dtype], device=backend.device)
    scores = random_logits(batch, beams, device=backend.device, seed=1) - 20
    got = check_beams(backend, logits, scores, k)
    literal = torch.topk((logits.double().log_softmax(-1) + scores.double().unsqueeze(-1)).flatten(1), k)
    torch.testing.assert_close(got.values.double(), literal.values, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [3, 40, 600])
def test_beam_topk_k_of_all_tokens(backend, vocab_size):
    """k up to beams * V: more than one row has."""
    logits = random_logits(2, 3, vocab_size, device=backend.device)
    scores = random_logits(2, 3, device=backend.device)
    for k in {vocab_size, vocab_size + 1, 3 * vocab_size}:
        got = check_beams(backend, logits, scores, k)
        assert all(row.unique().numel() == k for row in got.indices)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab_size", "k"), [(5, 12), (16, 1), (33, 8), (63, 6), (200, 5), (256, 8), (256, 9), (257, 8), (64, 32)]
)
def test_beam_topk_of_short_rows(backend, dtype, vocab_size, k):
    """Without beams such rows have kernels of their own. Many rows, because the last bits of a few may agree by chance."""
    hostile = torch.stack(list(adversarial_rows(vocab_size, min(k, vocab_size), DTYPES[dtype]).values()))
    rows = torch.cat([hostile[: len(hostile) // 3 * 3], random_logits(300, vocab_size, dtype=DTYPES[dtype])])
    logits = rows.unflatten(0, (-1, 3)).to(backend.device)
    scores = random_logits(*logits.shape[:2], device=backend.device, seed=1)
    temperature = torch.rand(logits.shape[:2], generator=torch.Generator().manual_seed(2)).to(backend.device) + 0.5
    mask = random_mask(*logits.shape, device=backend.device)
    for settings in ({}, {"mask": mask}, {"mask": mask, "normalize": "all"}, {"temperature": temperature}):
        check_beams(backend, logits, scores, k, **settings)


@pytest.mark.parametrize("beams", [2, 3, 5, 8, 9])
@pytest.mark.parametrize(("vocab_size", "share"), [(13, 0.8), (3001, 0.01)])
def test_beam_topk_unequal_beams(backend, beams, vocab_size, share):
    """However many of a sequence's best k come from one beam, or from two, or from each."""
    logits, scores, k = unequal_beams(beams, vocab_size, share, backend.device)
    got = check_beams(backend, logits, scores, k)
    of_beam = (got.indices // vocab_size).cpu()
    assert (of_beam[0] == beams - 1).all() or k > vocab_size
    assert (of_beam[1] == 0).any() and (of_beam[1] == 1).any()
    assert all(len(of_beam[2 + i].unique()) == beams for i in range(2))


def unequal_beams(beams: int, vocab_size: int, share: float, device) -> tuple[Tensor, Tensor, int]:
    """(logits, scores, k): one beam is far ahead, then two are, then all are equal or nearly so."""
    logits = random_logits(4, beams, vocab_size, device=device)
    scores = torch.zeros(4, beams, device=device)
    scores[0, -1] = 50
    scores[1, :2] = 50
    scores[2] = torch.linspace(0, 0.1, beams)
    return logits, scores, int(share * beams * vocab_size)


def test_beam_topk_ties_between_beams(backend):
    """Equal values: the smaller beam first, then the smaller index in it."""
    logits = torch.zeros(2, 4, 50, device=backend.device)
    got = check_beams(backend, logits, torch.zeros(2, 4, device=backend.device), 120)
    assert got.indices.tolist() == [list(range(120))] * 2
    logits[:, 2, 30] = 1.0
    logits[:, 1, 20] = 1.0
    got = check_beams(backend, logits, torch.zeros(2, 4, device=backend.device), 6)
    assert got.indices[:, :2].tolist() == [[50 + 20, 100 + 30]] * 2


def test_beam_topk_keeps_the_order_of_a_row_where_values_round_together(backend):
    """A large score swallows the differences in a row, yet its better logits come first."""
    logits = random_logits(3, 1, 300, device=backend.device)
    scores = torch.full((3, 1), -1e8, device=backend.device)
    got = check_beams(backend, logits, scores, 40)
    assert torch.equal(got.indices, backend("topk", logits[:, 0], 40).indices)


@pytest.mark.parametrize("vocab_size", [6, 700, 5000])
def test_beam_topk_special_values(backend, vocab_size):
    """Beams of score -inf (the first step of a beam search), and rows with -inf, +inf or NaN."""
    logits = random_logits(6, 4, vocab_size, device=backend.device)
    scores = random_logits(6, 4, device=backend.device)
    scores[0, 1:] = -INF
    scores[1] = -INF
    scores[2, 1] = NAN
    logits[3, 2] = -INF
    logits[4, 0, 5] = NAN
    logits[5, 3, 1] = INF
    for k in (1, 5, vocab_size + 2):
        got = check_beams(backend, logits, scores, k)
        assert ((got.indices >= 0) & (got.indices < 4 * vocab_size)).all()
        assert (got.values[1] == -INF).all()
        for row, beam in ((2, 1), (3, 2), (4, 0), (5, 3)):
            assert got.values[row, 0].isnan() and got.indices[row, 0] // vocab_size == beam
    first_step = backend("beam_topk", logits[:1], scores[:1], 5)
    assert (first_step.indices < vocab_size).all() and first_step.values.isfinite().all()


def infinite_beams(device):
    """Beams of score +inf and tokens of logit -inf: inf + -inf is NaN, which ranks first though its logit ranks last."""
    logits = torch.full((1, 2, 3), -INF, device=device)
    logits[..., 0] = 0
    return logits, torch.full((1, 2), INF, device=device)


def test_beam_topk_infinite_scores(backend):
    got = backend("beam_topk", *infinite_beams(backend.device), 6)
    assert got.values.isnan().tolist() == [[True] * 4 + [False] * 2] and (got.values[:, 4:] == INF).all()
    assert got.indices.tolist() == [[1, 2, 4, 5, 0, 3]]

# SPDX-License-Identifier: Apache-2.0
"""The kernel of csrc/linear/accumulate_piece.cu on the emulated machine: every read and write checked, under several schedules."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fused_topk import TopK, TopKState, operators
from fused_topk.backends import cuda, cuda_pieces, reference
from fused_topk.layout import launch
from fused_topk.layout import linear_pieces as layout
from fused_topk.operators import linear_pieces
from fused_topk.rows import LogitRows
from linear_heads import ENTRIES, exact_head, exact_logits, without_the_native_kernel
from oracle import DTYPES, assert_topk, expected, problem_of, start
from rows import adversarial_rows, random_logits, random_mask
from simt.emulate import emulated
from simt.launch import SCHEDULES, Array
from test_merge import D_TOLERANCE, assert_same_state

# V and where the tokens are cut: in tiles and beside them, pieces of one token, and less than k of them at first.
CUTS = {
    "one piece": (3001, []),
    "whole tiles": (4096, [1024, 3072]),
    "ragged": (4011, [3, 4, 1100, 2300]),
    "ends in a vector": (2055, [1024, 2048]),
}


def accumulated(
    logits: Tensor,
    k: int,
    cuts: list[int],
    temperature: float | Tensor = 1.0,
    targets: tuple[Tensor, Tensor, Tensor | None] | None = None,
    **how,
) -> TopKState:
    """What the kernel makes of the pieces of CPU tensors, with all that the machine checks."""
    rows = len(logits)
    # NaN, so that a state that is read before it is written is seen.
    state = TopK(
        torch.full((rows, k), torch.nan, dtype=logits.dtype), torch.full((rows, k), 7), torch.full((2, rows), torch.nan)
    )
    of_rows = temperature if isinstance(temperature, Tensor) else None
    number = 0.0 if isinstance(temperature, Tensor) else temperature
    borders = [0, *cuts, logits.shape[-1]]
    for first, end in pairwise(borders):
        # Rows begin at multiples of 16 bytes; what is behind their ends is not to be read.
        wide = torch.full((rows, -(-(end - first) // 8) * 8 + 8), torch.inf, dtype=logits.dtype)
        piece = wide[:, : end - first].copy_(logits[:, first:end])
        arrays = [Array("logits", piece, "input")]
        arrays += [Array(name, x, "inout" if first else "output") for name, x in state._asdict().items()]
        arrays += [] if of_rows is None else [Array("row_temperature", of_rows, "input")]
        arrays += of_target_arrays(targets)
        with emulated(arrays, **how) as outcomes:
            cuda_pieces.accumulate_piece(
                LogitRows(piece, temperature=number, row_temperature=of_rows), first, state, targets
            )
        outcomes[0].check()
    return TopKState(state.values, state.indices, *state.logsumexp)


def accumulated_on_a_gpu(logits: Tensor, k: int, cuts: list[int]) -> TopKState:
    """The same launches there, and no others but torch's copies."""
    rows = len(logits)
    state = TopK(
        torch.empty(rows, k, dtype=logits.dtype, device="cuda"),
        torch.empty(rows, k, dtype=torch.int64, device="cuda"),
        torch.empty(2, rows, device="cuda"),
    )
    for first, end in pairwise([0, *cuts, logits.shape[-1]]):
        tokens, stride = end - first, -(-(end - first) // 8) * 8
        # The last row ends with its memory.
        memory = torch.empty((rows - 1) * stride + tokens, dtype=logits.dtype, device="cuda")
        piece = memory.as_strided((rows, tokens), (stride, 1))
        cuda_pieces.accumulate_piece(LogitRows(piece.copy_(logits[:, first:end])), first, state)
    torch.cuda.synchronize()
    return TopKState(state.values.cpu(), state.indices.cpu(), *state.logsumexp.cpu())


def of_target_arrays(targets: tuple[Tensor, Tensor, Tensor | None] | None) -> list[Array]:
    tokens, *found = targets or (None,)
    named = zip(("target_logits", "target_ranks"), found, strict=False)
    return [
        *([] if tokens is None else [Array("targets", tokens, "input")]),
        *(Array(name, x, "inout") for name, x in named if x is not None),
    ]


def wanted(logits: Tensor, k: int, temperature: float | Tensor = 1.0) -> TopKState:
    problem = problem_of("log_softmax_topk", logits, k, temperature=temperature)._replace(values="state")
    rows = len(logits)
    state = TopK(
        torch.empty(rows, k, dtype=logits.dtype), torch.empty(rows, k, dtype=torch.int64), torch.empty(2, rows)
    )
    start(reference, problem, state)
    return TopKState(state.values, state.indices, *state.logsumexp)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 8, 32])
def test_pieces_are_the_whole(cut, dtype, k):
    """Of all adversarial rows: NaN and infinities, ties across pieces, zeros of both signs, sorted rows."""
    vocab_size, cuts = CUTS[cut]
    rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
    names = list(rows)[k % 3 :: 3] if cut != "ragged" else list(rows)
    logits = torch.stack([rows[name] for name in names])
    assert_same_state(accumulated(logits, k, cuts), wanted(logits, k), D_TOLERANCE)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", CUTS)
def test_pieces_on_a_gpu(cuda, cut, dtype):
    """Without a matrix product, whose library's kernels a sanitizer may not follow. A block lacks rows."""
    vocab_size, cuts = CUTS[cut]
    logits = random_logits(6, vocab_size, dtype=DTYPES[dtype])
    got = accumulated_on_a_gpu(logits, 8, cuts)
    assert_same_state(got, wanted(logits, 8), D_TOLERANCE)


@pytest.mark.parametrize("temperature", [0.7, "rows"])
def test_temperatures(temperature):
    logits = random_logits(5, 2500)
    if temperature == "rows":
        temperature = torch.tensor([0.3, 0.7, 1.0, 1.9, 40.0])
    assert_same_state(accumulated(logits, 5, [1300], temperature), wanted(logits, 5, temperature), D_TOLERANCE)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_and_ranks_of_targets(cut, dtype):
    """Ties with the target in its tile, and in the tiles and pieces before and behind; infinities, and a NaN, which is no greater."""
    vocab_size, cuts = CUTS[cut]
    rows = adversarial_rows(vocab_size, 8, DTYPES[dtype])
    logits = torch.stack([rows[name] for name in list(rows)[::2]])
    places = torch.tensor([0, 3, 1023, 1024, 1500, 1999, vocab_size - 1])
    tokens = places[torch.arange(len(logits)) % len(places)].unsqueeze(1)
    found = logits.gather(1, tokens)
    # Known ahead, perhaps but for its last place.
    noted, ranks = found.clone(), torch.ones_like(tokens)
    accumulated(logits, 8, cuts, targets=(tokens, noted, ranks))
    torch.testing.assert_close(noted, found, rtol=0, atol=0, equal_nan=True)
    is_before = (logits > found) | ((logits == found) & (torch.arange(vocab_size) < tokens))
    assert torch.equal(ranks, 1 + is_before.sum(1, keepdim=True))
    several = torch.randint(vocab_size, (len(logits), 70), generator=torch.Generator().manual_seed(1))
    noted = torch.full(several.shape, 7, dtype=logits.dtype)
    accumulated(logits, 8, cuts, targets=(several, noted, None))
    torch.testing.assert_close(noted, logits.gather(1, several), rtol=0, atol=0, equal_nan=True)


def test_targets_whose_logits_are_known_ahead():
    """Pieces before a target's own compare with the logit that is known; then its own takes the place of that."""
    logits = (random_logits(6, 4011) * 2).round() / 2
    tokens = torch.tensor([[0], [1100], [2000], [40], [3], [2000]])
    found, ranks = logits.gather(1, tokens), torch.ones_like(tokens)
    noted = found.clone()
    noted[2] = logits[2].max() + 1
    accumulated(logits, 9, [3, 600], targets=(tokens, noted, ranks))
    assert torch.equal(noted, found)
    is_before = (logits > found) | ((logits == found) & (torch.arange(4011) < tokens))
    is_before[2, :600] = False
    assert torch.equal(ranks, 1 + is_before.sum(1, keepdim=True))


def test_tiles_in_flight():
    """A short piece before a long one, of two bytes a logit, and on a GPU without copies in the background."""
    short, few = random_logits(2, 3500, dtype=torch.bfloat16), random_logits(2, 1030)
    assert_same_state(accumulated(short, 9, [3]), wanted(short, 9), D_TOLERANCE)
    assert_same_state(accumulated(few, 8, [5], architecture=75), wanted(few, 8), D_TOLERANCE)


def test_fewer_tokens_than_k_leave_entries_empty():
    logits = random_logits(3, 5)
    got = accumulated(logits, 9, [2])
    best = wanted(logits, 5)
    assert torch.equal(got.indices, torch.nn.functional.pad(best.indices, (0, 4), value=-1))
    assert torch.equal(got.logits, torch.nn.functional.pad(best.logits, (0, 4), value=-torch.inf))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule):
    logits = random_logits(6, 3001, dtype=torch.bfloat16)
    got = accumulated(logits, 8, [1100, 2900], schedule=schedule)
    assert_same_state(got, wanted(logits, 8), D_TOLERANCE)


@pytest.mark.parametrize("architecture", [75, 80, 120])
@pytest.mark.parametrize("dtype", DTYPES)
def test_architectures(architecture, dtype):
    """Without copies in the background, and with other numbers of tiles in flight."""
    rows = adversarial_rows(4011, 8, DTYPES[dtype])
    logits = torch.stack(list(rows.values())[::4])
    got = accumulated(logits, 8, [1100, 2300], architecture=architecture)
    assert_same_state(got, wanted(logits, 8), D_TOLERANCE)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", ["nothing", "targets", "mask"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads(monkeypatch, entry, dtype, more, has_bias):
    """An LM head takes its pieces into one state: two blocks of rows, and a last piece that is not full. The kernel knows no
    mask: with one the pieces' states are merged."""
    hidden, weight, bias = exact_head(7, 16, 3001, DTYPES[dtype])
    bias = bias if has_bias else None
    has_targets, has_mask = more == "targets" and entry != "linear_topk", more == "mask"
    targets = (torch.arange(7) * 500).unsqueeze(-1) if has_targets else None
    # test_simt_tokens.py has the kernel of sums.
    monkeypatch.setitem(operators.token_spread.ON, "cuda", operators.token_spread.reference)
    without_the_native_kernel(monkeypatch)
    monkeypatch.setattr(layout, "forward_pieces", lambda *sizes: layout.Pieces(3, 1024, 2))
    monkeypatch.setattr(layout, "accumulated_pieces", lambda *sizes: layout.Pieces(4, 1024, 0))
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 1)
    # The rest runs on the CPU.
    monkeypatch.setattr(linear_pieces, "backends", SimpleNamespace(pick=lambda *request: "cuda"))
    launched = []

    def accumulate(of_piece, first_token, state, of_targets):
        arrays = [Array("logits", of_piece.logits, "input")]
        arrays += [Array(name, x, "inout" if first_token else "output") for name, x in state._asdict().items()]
        arrays += of_target_arrays(of_targets)
        with emulated(arrays) as outcomes:
            accumulate_piece(of_piece, first_token, state, of_targets)
        outcomes[0].check()
        launched.append(of_piece.logits.shape)

    accumulate_piece = cuda_pieces.accumulate_piece
    monkeypatch.setattr(cuda_pieces, "accumulate_piece", accumulate)
    settings = {} if entry == "linear_topk" else {"temperature": 0.7}
    settings |= {"mask": random_mask(7, 3001, share=0.7)} if has_mask else {}
    head = linear_pieces.LinearProblem(LogitRows(hidden, **settings), weight, bias, targets, "allowed")
    values = {"softmax_topk": "softmax", "log_softmax_topk": "log_softmax", "topk": "logits"}[ENTRIES[entry]]
    found = linear_pieces.forward(head, linear_pieces.Wanted(9, values, "cpu", "index" if has_targets else None, True))
    assert launched == [(4, 1024), (4, 1024), (4, 953), (3, 1024), (3, 1024), (3, 953)] * (not has_mask)
    logits = exact_logits(hidden, weight, bias)
    got = TopK(*found[:3])
    want = expected(ENTRIES[entry], logits, 9, **settings)
    assert_topk(got, want, logits, ENTRIES[entry], temperature=settings.get("temperature"))
    if has_targets:
        logp = (logits.double() / 0.7).log_softmax(-1).gather(-1, targets)
        torch.testing.assert_close(found.target_logprobs.double(), logp, rtol=0, atol=4e-6)
        ranks = (logits > logits.gather(-1, targets)).sum(-1, keepdim=True)
        ties = (logits == logits.gather(-1, targets)) & (torch.arange(3001) < targets)
        assert torch.equal(found.target_ranks, ranks + ties.sum(-1, keepdim=True) + 1)


def test_launches_have_the_shape_that_the_kernel_expects():
    assert [launch.piece_blocks(rows) for rows in (1, 4, 5, 2048)] == [1, 1, 2, 512]
    # Two tiles of 2 kB a warp of four.
    assert launch.piece_shared_bytes(torch.bfloat16) == 16384

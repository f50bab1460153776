# SPDX-License-Identifier: Apache-2.0
"""The kernel of csrc/linear/logit_gradient.cu, and the backward pass around it, on the emulated machine, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fused_topk.backends import cuda_pieces
from fused_topk.layout import linear_pieces as layout
from fused_topk.operators import linear_backward, linear_pieces
from fused_topk.problem import LinearProblem, LogitGradientProblem
from fused_topk.rows import LogitRows, RowsBlock, unpacked
from fused_topk.token_sums import without
from linear_heads import exact_head
from oracle import DTYPES
from rows import INF, NAN, adversarial_rows, packed, random_logits, random_mask
from simt import build
from simt.emulate import emulated
from simt.launch import SCHEDULES, Array

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

SPAN = {"fp32": 4096, "fp16": 8192, "bf16": 8192}
U = 2.0**-24


class Case(NamedTuple):
    problem: LogitGradientProblem
    temperature: float
    row_temperature: Tensor | None
    mask: Tensor | None  # (rows, V or words)

    def rows_of(self, logits: Tensor, first: int) -> LogitRows:
        rows = LogitRows(logits, temperature=self.temperature, row_temperature=self.row_temperature, mask=self.mask)
        return RowsBlock.of(rows, slice(0, len(logits))).of_tokens(logits, first, first + logits.shape[1])


def run(case: Case, logits: Tensor, first: int = 0, device: str = "emulated", **how) -> Tensor:
    """What the kernel makes of a copy of the logits that lies as they do, with all that the machine checks; or on a GPU."""
    problem, rows = case.problem, case.rows_of(logits, first)
    memory = logits.as_strided((logits.untyped_storage().size() // logits.element_size(),), (1,), 0).clone()
    if device != "emulated":
        there = memory.to(device)
        tensors = {name: x.to(device) for name, x in problem._asdict().items() if isinstance(x, Tensor)}
        view = there.as_strided(logits.shape, logits.stride(), logits.storage_offset())
        of_rows = LogitRows(*(x.to(device) if isinstance(x, Tensor) else x for x in rows))._replace(logits=view)
        cuda_pieces.logit_gradients(problem._replace(**tensors), of_rows, first)
        return there.cpu().as_strided(logits.shape, logits.stride(), logits.storage_offset())
    copy = memory.as_strided(logits.shape, logits.stride(), logits.storage_offset())
    inputs = {name: x for name, x in problem._asdict().items() if isinstance(x, Tensor)}
    inputs |= {name: x for name, x in rows._asdict().items() if name != "logits" and isinstance(x, Tensor)}
    arrays = [Array("logits", copy, "inout"), *(Array(name, x, "input") for name, x in inputs.items())]
    with emulated(arrays, **how) as outcomes:
        cuda_pieces.logit_gradients(problem, rows._replace(logits=copy), first)
    outcomes[0].check()
    return copy


def check(case: Case, added: list[tuple[Tensor, Tensor]], logits: Tensor, first: int = 0, **how) -> None:
    """Within a rounding of its format of the float64 gradient, and what float32 loses before that."""
    got, problem = run(case, logits, first, **how), case.problem
    rows, tokens = logits.shape
    t = case.row_temperature if case.row_temperature is not None else torch.full((rows,), case.temperature)
    t = t.double().where(t > 0, torch.nan).unsqueeze(-1)
    m = problem.m.double().where(problem.m != -INF, 0.0).unsqueeze(-1)
    z = (logits.double() - m) / t
    c = problem.coefficient.double().unsqueeze(-1)
    if problem.slope is not None:
        b = problem.slope.double().unsqueeze(-1) * z.clamp(min=-1e6)
        c, size_of_c = c + b, c.abs() + b.abs()
    else:
        size_of_c = c.abs()
    a, size = torch.zeros(2, rows, tokens + 1, dtype=torch.float64)
    for listed, amounts in added:
        place = (listed - first).where((listed >= first) & (listed < first + tokens), tokens)
        a.scatter_add_(-1, place, amounts.double())
        size.scatter_add_(-1, place, amounts.double().abs())
    a, size = a[:, :-1], size[:, :-1]
    allowed = None
    if case.mask is not None:
        allowed = case.mask if case.mask.dtype == torch.bool else unpacked(case.mask, first + tokens)
        allowed = allowed[:, first : first + tokens]
    rest_z, rest = torch.zeros_like(z), torch.zeros_like(z)
    if problem.rest is not None:
        rest_m = problem.rest_m.double().where(problem.rest_m != -INF, 0.0).unsqueeze(-1)
        rest_z = (left_of(logits.double(), allowed, added, first) - rest_m) / t
        rest = problem.rest.double().unsqueeze(-1) * rest_z.exp()
    exact = (c * z.exp() + rest + a) / t
    # The argument of 2^x is of x - m, 1 / T and log2(e), each rounded, and two products; 2^x itself is off by 4 u. Below 2^-126
    # it is 0. The sum of a token's n amounts rounds n times.
    lost = (size_of_c * z.exp()) * (6 * z.abs().nan_to_num(0.0) + 8) * U + (size + size_of_c * z.exp()) * 20 * U
    lost += rest.abs() * (6 * rest_z.where(rest != 0, 0.0).abs().nan_to_num(0.0) + 28) * U + 2.0**-126
    bound = (lost + size_of_c * 2.0**-126) / t
    if allowed is not None:
        exact, bound = exact.masked_fill(~allowed, 0.0), bound.masked_fill(~allowed, 0.0)
    info = torch.finfo(logits.dtype)
    # Half a step of the format; below its normal numbers steps are equal.
    step = (
        (exact.abs() + bound).clamp(min=info.smallest_normal) * info.eps / 2 if logits.dtype != torch.float32 else 0.0
    )
    is_same = (got.isnan() & exact.isnan()) | (got == exact.to(logits.dtype))
    is_near = (got.double() - exact).abs() <= bound + step + 2.0**-149
    assert (is_same | is_near).all(), (is_same | is_near).logical_not().nonzero()[:5].tolist()


def left_of(x: Tensor, allowed: Tensor | None, added: list[tuple[Tensor, Tensor]], first: int) -> Tensor:
    """The logits of the tail's tokens: those that are allowed, and not among the given ones, which are the second ones listed."""
    x = x if allowed is None else x.masked_fill(~allowed, -INF)
    given = added[1][0] if len(added) > 1 else torch.zeros((len(x), 0), dtype=torch.int64)
    return without(x, given - first)


def lying(logits: Tensor, offset: int, gap: int) -> Tensor:
    """The same logits `offset` elements behind a multiple of 16 bytes, with a gap behind each row."""
    rows, tokens = logits.shape
    memory = torch.full((rows * (tokens + gap) + offset,), NAN, dtype=logits.dtype)
    view = memory.as_strided((rows, tokens), (tokens + gap, 1), offset)
    view.copy_(logits)
    return view


def added_at(rows: int, places: list[int], count: int, most: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Two lists of tokens: given ones and random ones up to `most`, every third one twice, and some that are none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, most, (rows, count), generator=generator)
    tokens[:, 1::3] = tokens[:, ::3][:, : tokens[:, 1::3].shape[1]]
    tokens[:, ::7] = -100
    tokens[:, ::11] = 2**32 + 1
    given = torch.tensor(places, dtype=torch.int64).expand(rows, -1)
    return [(x, torch.randn(x.shape, generator=generator)) for x in (given, tokens)]


def case_of(
    logits: Tensor, added: list[tuple[Tensor, Tensor]], first: int, temperature: float | Tensor = 1.0, mask=None
) -> Case:
    """As the backward pass makes it for rows that end with these logits."""
    rows, vocab_size = logits.shape[0], first + logits.shape[1]
    shown = logits.float()
    if mask is not None:
        shown = shown.masked_fill(~unpacked(mask, vocab_size)[:, first:], -INF)
    m = shown.amax(-1)
    coefficient = torch.linspace(-2.0, 3.0, rows) / (shown - m.where(m != -INF, 0.0).unsqueeze(-1)).exp().sum(-1)
    row_temperature = temperature if isinstance(temperature, Tensor) else None
    number = 1.0 if row_temperature is not None else temperature
    # With an entropy in the loss, and without one; with a tail, and without one.
    slope = coefficient.flip(0) / 3 if first % 64 == 0 else None
    rest_m = rest = None
    if first % 96 == 0:
        allowed = None if mask is None else unpacked(mask, vocab_size)[:, first:]
        left = left_of(logits.float(), allowed, added, first)
        rest_m = left.amax(-1)
        rest = torch.linspace(4.0, -1.0, rows) / (left - rest_m.where(rest_m != -INF, 0.0).unsqueeze(-1)).exp().sum(-1)
        # Where nothing is left there is no gradient.
        rest = rest.where(rest_m != -INF, 0.0)
    problem = LogitGradientProblem(m, coefficient, slope, rest_m, rest, linear_backward._listed(added))
    return Case(problem, number, row_temperature, mask)


# Tokens, where they begin in the vocabulary, how far they lie from a multiple of 16 bytes, and the gap behind a row.
PIECES = {
    "aligned": (9000, 0, 0, 0),
    "one span": (8192, 64, 0, 0),
    "one token more": (8193, 32, 0, 7),
    "unaligned": (5003, 96, 3, 2),
    "rows of any alignment": (4099, 0, 1, 0),
    "few": (5, 1024, 0, 0),
    "one": (1, 32, 1, 0),
}


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_kind", ["none", "bool", "packed"])
@pytest.mark.parametrize("count", [0, 9, 700])
def test_gradient(piece, dtype, mask_kind, count):
    check_piece(piece, dtype, mask_kind, "rows", count)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_one_temperature(piece, dtype):
    """A number takes the place of the row's, whatever else there is."""
    check_piece(piece, dtype, "packed", "number", 9)


@pytest.mark.sanitize
@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_kind", ["none", "bool", "packed"])
@pytest.mark.parametrize("count", [0, 9, 700])
def test_gradient_on_a_gpu(cuda, piece, dtype, mask_kind, count):
    check_piece(piece, dtype, mask_kind, "rows", count, device=cuda.device)


def check_piece(piece: str, dtype: str, mask_kind: str, temperature: str, count: int, **how) -> None:
    """Tokens at both borders of the piece and of its spans, and beyond them."""
    tokens, first, offset, gap = PIECES[piece]
    rows, span = 3, SPAN[dtype]
    logits = lying(random_logits(rows, tokens, dtype=DTYPES[dtype]), offset, gap)
    places = [first - 1, first, first + tokens - 1, first + tokens, first + span - 1, first + span, -1]
    places = [place for place in places if place < first + tokens or place == first + tokens]
    added = added_at(rows, places, count, first + tokens)
    mask = None
    if mask_kind != "none":
        mask = random_mask(rows, first + tokens, share=0.7)
        mask = packed(mask) if mask_kind == "packed" else mask
    t = torch.tensor([0.7, 1.0, 2.5]) if temperature == "rows" else 0.8
    check(case_of(logits, added, first, t, mask), added, logits, first, **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [300, 4097])
def test_gradient_of_adversarial_rows(dtype, tokens):
    check_adversarial_rows(dtype, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [300, 4097])
def test_gradient_of_adversarial_rows_on_a_gpu(cuda, dtype, tokens):
    check_adversarial_rows(dtype, tokens, device=cuda.device)


def check_adversarial_rows(dtype: str, tokens: int, **how) -> None:
    """NaN and infinities, offsets of 1e4, nothing but -inf."""
    logits = torch.stack(list(adversarial_rows(tokens, 5, DTYPES[dtype]).values())).to(DTYPES[dtype])
    added = [(logits.float().nan_to_num(-INF).topk(3).indices, torch.full((len(logits), 3), -0.75))]
    check(case_of(logits, added, 0), added, logits, **how)


def test_gradient_of_temperatures_that_are_not_positive():
    logits = random_logits(4, 100)
    added = added_at(4, [3], 0, 100)
    got = run(case_of(logits, added, 0, torch.tensor([1.0, 0.0, -1.0, NAN])), logits)
    assert got.isnan().all(-1).tolist() == [False, True, True, True] and not got[0].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_near_one(dtype):
    """p - 1 where p is nearly 1 has the digits of float32, whatever the format."""
    logits = torch.zeros(2, 64, dtype=DTYPES[dtype])
    logits[:, 5] = 20.0
    tokens = torch.tensor([[5, 9], [9, 5]])
    added = [(tokens, torch.tensor([[-1.0, 0.0], [0.0, -1.0]]))]
    case = case_of(logits, added, 0)
    coefficient = torch.full((2,), 0.999)
    case = case._replace(problem=case.problem._replace(coefficient=coefficient, rest_m=None, rest=None))
    check(case, added, logits)
    torch.testing.assert_close(run(case, logits)[:, 5].float(), torch.full((2,), -0.001), rtol=4e-3, atol=0)


def test_gradient_of_rows_with_nothing_left():
    """A row of -inf alone, and a tail without the greatest logit, or without any."""
    logits = torch.stack([random_logits(500), torch.full((500,), -INF)])
    best = logits.topk(3).indices
    added = [(tokens, torch.randn(2, 3)) for tokens in (best, best[:, :1] + torch.arange(3))]
    case = case_of(logits, added, 0)
    coefficient = torch.tensor([0.5, 2.0])
    for changes in ({"slope": None}, {"rest_m": None, "rest": None}):
        problem = case.problem._replace(coefficient=coefficient, **changes)
        check(case._replace(problem=problem), added, logits)


@pytest.mark.parametrize("masked", [False, True])
def test_gradient_of_a_token_listed_often(masked):
    """Longer than a block has threads: the first entry of the token adds up all."""
    logits = random_logits(2, 500, dtype=torch.bfloat16)
    tokens = torch.full((2, 900), 77)
    tokens[:, 600:] = torch.arange(100, 400)
    added = [(tokens, torch.linspace(-1.0, 1.0, 1800).view(2, 900))]
    mask = random_mask(2, 500) if masked else None
    check(case_of(logits, added, 0, mask=mask), added, logits)


def test_gradient_of_a_mask_with_strides():
    """A mask that is the same for all rows, and one whose tokens are apart."""
    logits = random_logits(3, 100)
    added = added_at(3, [0, 99], 9, 100)
    one = random_mask(1, 100).expand(3, 100)
    apart = random_mask(100, 3).t()
    for mask in (one, apart):
        check(case_of(logits, added, 0, mask=mask), added, logits)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("architecture", [75, 90])
def test_gradient_schedules(schedule, architecture):
    """What is listed replaces what another thread has written."""
    logits = random_logits(2, 9000, dtype=torch.bfloat16)
    added = added_at(2, [0, 8191, 8192, 8999], 300, 9000)
    case = case_of(logits, added, 0)
    for seed in range(3):
        check(case, added, logits, schedule=schedule, seed=seed, architecture=architecture)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_kind", ["none", "bool", "packed"])
@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("pieces", [(3, 1024), (7, 2500)], ids=str)
@pytest.mark.parametrize("leading", [(7,), (2, 4)], ids=str)
def test_backward_pass(monkeypatch, dtype, mask_kind, normalize, pieces, leading):
    """As operations of torch have it in float64, which test_linear_spread.py checks; targets are among the chosen, and several are
    equal."""
    vocab_size = 2500
    hidden, weight, bias = exact_head(leading, 8, vocab_size, DTYPES[dtype])
    if len(leading) == 2:
        # Rows that do not merge.
        hidden = hidden[:, :3]
    lead = hidden.shape[:-1]
    mask = given = None
    if mask_kind != "none":
        mask = random_mask(*lead, vocab_size, share=0.7)
        given = packed(mask) if mask_kind == "packed" else mask
    t = torch.linspace(0.5, 2.0, lead.numel()).view(lead)
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, vocab_size, (*lead, 6), generator=generator)
    targets[..., 1] = targets[..., 0]
    targets[..., 2] = -100
    head = LinearProblem(LogitRows(hidden, row_temperature=t, mask=given), weight, bias, targets, normalize)
    wanted = linear_pieces.Wanted(5, "log_softmax", None, None, True, True, tail=True)
    targets[..., 3] = linear_pieces.forward(head, wanted).indices[..., 0]
    grads = [torch.randn(shape, generator=generator) for shape in ((*lead, 5), (*lead, 6), lead, lead, lead)]

    def gradients(head: LinearProblem) -> list[Tensor]:
        incoming = linear_backward.Incoming(found.indices, found.state, *grads)
        return linear_backward.backward(head, incoming, None, (True, True, True))

    wide = [x.double() for x in (hidden, weight, bias)]
    rows = head.rows._replace(logits=wide[0], row_temperature=t.double())
    exact = LinearProblem(rows, *wide[1:], targets, normalize)
    found = linear_pieces.forward(exact, wanted)
    want = gradients(exact)
    found = linear_pieces.forward(head, wanted)
    monkeypatch.setattr(layout, "in_place_pieces", lambda *sizes: layout.Pieces(*pieces, 1, blocks=2))
    monkeypatch.setattr(linear_backward.cuda, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(linear_backward, "backends", SimpleNamespace(pick=lambda *request: "cuda"))
    tensors = {
        **head._asdict(),
        **head.rows._asdict(),
        "indices": found.indices,
        "state": found.state,
        "chosen": grads[0],
    }
    arrays = [Array(name, x, "input") for name, x in tensors.items() if isinstance(x, torch.Tensor)]
    with emulated(arrays) as outcomes:
        got = gradients(head)
    for outcome in outcomes:
        outcome.check()
    blocks, parts = -(-lead.numel() // pieces[0]), -(-vocab_size // pieces[1])
    assert len(outcomes) == blocks * parts
    # Rounded as an element, as the product of each piece or block, and as the sum.
    unit = max(torch.finfo(DTYPES[dtype]).eps / 2, 2.0**-20)
    for mine, of_want in zip(got, want, strict=True):
        assert mine.dtype == DTYPES[dtype] and mine.shape == of_want.shape
        assert (mine.double() - of_want).abs().amax() <= 4 * unit * of_want.abs().amax()

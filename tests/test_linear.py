# SPDX-License-Identifier: Apache-2.0
"""LM heads: the k best of logits that are computed on the way, against float64, in one piece and in many."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fused_topk
from contract_results import flat
from fused_topk import TokenLogprobs, TopK, TopKLogits, arguments
from fused_topk.backends import cpu as native_cpu
from fused_topk.backends import cuda, cuda_pieces
from fused_topk.functional import linear as functional
from fused_topk.layout import linear_pieces as layout
from fused_topk.operators import linear_backward, linear_pieces
from fused_topk.problem import LinearProblem
from fused_topk.rows import LogitRows
from linear_heads import ALL_DTYPES, ENTRIES, exact_head, exact_logits, merged_in_pieces
from live_bytes import live_bytes
from oracle import DTYPES, assert_same, assert_topk, expected
from rows import packed, random_logits, random_mask
from test_tokens import assert_right

pytestmark = pytest.mark.usefixtures("exact_library_products")

INSTRUCTION_SETS = native_cpu.native.instruction_sets() if native_cpu.unavailable() is None else ["baseline"]
# Rows, the size of a hidden state, vocabulary and k. The native kernel takes the first ones: tiles of each height, depths
# that fill no vector, or several stretches, and blocks of the vocabulary that are not full.
SHAPES = [
    (1, 1, 1, 1),
    (1, 64, 2000, 8),
    (2, 33, 7, 3),
    (5, 130, 3001, 40),
    (7, 3, 1025, 5),
    (13, 600, 2050, 5),
    (32, 16, 4097, 100),
    (33, 20, 5000, 8),
    (3, 40, 3000, 3000),
]


def check(call, entry: str, hidden: Tensor, weight: Tensor, k: int, bias: Tensor | None = None, **settings) -> TopK:
    """Compares with the oracle of the exact logits."""
    logits = exact_logits(hidden, weight, bias)
    got = call(entry, hidden, weight, k, bias, **settings)
    want = expected(ENTRIES[entry], logits, k, **settings)
    assert type(got) is (TopKLogits if entry == "linear_topk" else TopK)
    assert_topk(got, want, logits, ENTRIES[entry], temperature=settings.get("temperature"))
    return got


def check_tokens(
    call, hidden: Tensor, weight: Tensor, tokens: Tensor, bias: Tensor | None = None, **settings
) -> TokenLogprobs:
    """token_logprobs() of the exact logits, with ranks of both kinds, and the k best beside them."""
    logits = exact_logits(hidden, weight, bias)
    best = expected("log_softmax_topk", logits, 3, **settings)
    for ties in ("index", "last"):
        got = call("linear_token_logprobs", hidden, weight, tokens, bias, k=3, ranks=True, ties=ties, **settings)
        assert_topk(got.topk, best, logits, "log_softmax_topk", temperature=settings.get("temperature"))
        assert_right(got, logits, tokens, ties=ties, **settings)
    return got


@pytest.fixture
def call():
    """A public function by its name."""
    return lambda entry, *args, **settings: getattr(fused_topk, entry)(*args, **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "vocab_size", "k"), SHAPES)
def test_linear_against_float64(backend, dtype, rows, depth, vocab_size, k):
    hidden, weight, bias = exact_head(rows, depth, vocab_size, DTYPES[dtype], backend.device)
    for entry in ENTRIES:
        check(backend, entry, hidden, weight, k)
        check(backend, entry, hidden, weight, k, bias)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("normalize", ["allowed", "all", "topk"])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "packed"])
@pytest.mark.parametrize("tokens", [1024, 10**6])
def test_linear_in_pieces(monkeypatch, call, dtype, normalize, mask_kind, tokens):
    """Masks are cut at the borders of pieces; k exceeds the last piece, and the first where tokens are few."""
    hidden, weight, bias = exact_head((2, 5), 24, 4133, ALL_DTYPES[dtype])
    merged_in_pieces(monkeypatch, 3, tokens, 2)
    mask = None if mask_kind == "none" else random_mask(2, 5, 4133, share=0.3)
    temperature = torch.linspace(0.5, 3.0, 10, dtype=torch.float64).view(2, 5).to(hidden.dtype)
    for k in (1, 7, 1030):
        settings = {"normalize": normalize, "mask": mask, "temperature": temperature.to(torch.float32)}
        plain = check(call, "linear_log_softmax_topk", hidden, weight, k, bias, **settings)
        check(call, "linear_softmax_topk", hidden, weight, k, bias, **settings)
        if mask_kind == "packed":
            settings["mask"] = packed(mask)
            words = fused_topk.linear_log_softmax_topk(hidden, weight, k, bias, **settings)
            assert_same(words, plain)
        if normalize == "allowed":
            check(call, "linear_topk", hidden, weight, k, bias, mask=mask)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("normalize", ["allowed", "all"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("of_piece", [1024, 10**6])
def test_linear_tokens_in_pieces(monkeypatch, call, dtype, normalize, masked, of_piece):
    """One token a row and several, of every piece."""
    hidden, weight, bias = exact_head((2, 5), 24, 4133, ALL_DTYPES[dtype])
    merged_in_pieces(monkeypatch, 3, of_piece, 2)
    temperature = torch.linspace(0.5, 3.0, 10, dtype=torch.float64).view(2, 5).to(hidden.dtype).float()
    settings = {"normalize": normalize, "temperature": temperature}
    if masked:
        settings["mask"] = random_mask(2, 5, 4133, share=0.3)
    generator = torch.Generator().manual_seed(3)
    for shape in ((2, 5), (2, 5, 6)):
        tokens = torch.randint(0, 4133, shape, generator=generator)
        tokens[1, 2] = -100
        for with_bias in (bias, None):
            check_tokens(call, hidden, weight, tokens, with_bias, **settings)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.7, "rows"])
def test_linear_takes_pieces_into_one_state(monkeypatch, cuda, dtype, temperature):
    """test_simt_pieces.py has the same on the emulated GPU. k = 33 is merged from the pieces' states."""
    hidden, weight, bias = exact_head(10, 24, 4133, DTYPES[dtype], "cuda")
    merged_in_pieces(monkeypatch, 3, 1024, 2)
    monkeypatch.setattr(
        layout, "accumulated_pieces", lambda rows, vocab_size, k, *sizes: layout.Pieces(4, 1024, 0) if k <= 32 else None
    )
    if temperature == "rows":
        temperature = torch.linspace(0.5, 3.0, 10, device="cuda")
    tokens = torch.arange(10, device="cuda") * 400
    for k in (1, 8, 32, 33):
        check(cuda, "linear_log_softmax_topk", hidden, weight, k, bias, temperature=temperature)
        check(cuda, "linear_softmax_topk", hidden, weight, k, temperature=temperature, normalize="topk")
        check(cuda, "linear_topk", hidden, weight, k, bias)
    check_tokens(cuda, hidden, weight, tokens, bias)


def test_linear_of_many_rows_on_a_gpu(cuda):
    """As it comes: several blocks of rows, several pieces, and in 64 MB of memory."""
    hidden, weight, _ = exact_head(4500, 64, 50257, torch.bfloat16, "cuda")
    tokens = torch.arange(4500, device="cuda") * 11
    # One with its rank, and several.
    for of_rows, ranks in ((tokens, True), (tokens.unsqueeze(1) + torch.arange(200, device="cuda"), False)):
        fused_topk.linear_token_logprobs(hidden, weight, of_rows, k=8, ranks=ranks)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = fused_topk.linear_token_logprobs(hidden, weight, of_rows, k=8, ranks=ranks)
        of_result = sum(x.nbytes for x in flat(got))
        assert torch.cuda.max_memory_allocated() - before - of_result <= 64 << 20
    for part in (slice(0, 300), slice(2200, 2300), slice(-100, None)):
        logits = exact_logits(hidden[part], weight)
        want = expected("log_softmax_topk", logits, 8)
        assert_topk(TopK(*(x[part] for x in got.topk)), want, logits, "log_softmax_topk")


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_linear_native_kernel(cpu, instruction_set, dtype):
    for rows, depth, vocab_size, k in SHAPES:
        if rows > 32 or k > 128:
            continue
        hidden, weight, bias = exact_head(rows, depth, vocab_size, DTYPES[dtype])
        mask = random_mask(rows, vocab_size)
        mask[:, 0] = True
        temperature = torch.linspace(0.5, 3.0, rows)
        logits = exact_logits(hidden, weight, bias)
        assert torch.equal(native_cpu.linear(hidden, weight, bias).double(), logits.double())
        for normalize, allowed in (("allowed", None), ("all", mask), ("topk", packed(mask)), ("allowed", packed(mask))):
            head = LinearProblem(
                LogitRows(hidden, row_temperature=temperature, mask=allowed), weight, bias, None, normalize
            )
            out = linear_pieces.empty_result(head, linear_pieces.Wanted(k, "log_softmax", keeps_state=True))
            best = TopK(*out[:3])
            native_cpu.linear_topk(head, k, "log_softmax", best, out.state, instruction_set)
            settings = {"normalize": normalize, "mask": allowed, "temperature": temperature}
            assert_topk(best, expected("log_softmax_topk", logits, k, **settings), logits, "log_softmax_topk",
                        temperature=temperature)  # fmt: skip
            counted = logits if normalize == "all" or allowed is None else logits.masked_fill(~mask, -torch.inf)
            assert torch.equal(out.state[:, 0], counted.amax(-1).float())
            exact = (
                ((counted.double() - counted.double().amax(-1, keepdim=True)) / temperature.double()[:, None])
                .exp()
                .sum(-1)
            )
            torch.testing.assert_close(out.state[:, 1].double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("depth", [1, 5, 100, 512, 2048, 3000])
def test_linear_native_sums_are_within_their_bound(cpu, instruction_set, dtype, depth):
    """The bound that linear_kernels.cpp derives, of every logit, before it is rounded to the dtype."""
    generator = torch.Generator().manual_seed(depth)
    hidden, weight = torch.randn(3, depth, generator=generator), torch.randn(70, depth, generator=generator)
    bias = torch.randn(70, generator=generator)
    hidden, weight, bias = (x.to(DTYPES[dtype]) for x in (hidden, weight, bias))
    head = LinearProblem(LogitRows(hidden), weight, bias, None, "allowed")
    out = linear_pieces.empty_result(head, linear_pieces.Wanted(70, "logits"))
    native_cpu.linear_topk(head, 70, "logits", TopK(*out[:3]), None, instruction_set)
    got = torch.empty(3, 70, dtype=torch.float64).scatter_(-1, out.indices, out.values.double())
    lanes = {"avx512": 16, "avx2": 8, "baseline": 4}[instruction_set]
    n = min(depth, 512) / lanes + math.log2(lanes) + math.ceil(depth / 512) + 2
    terms = hidden.double().abs() @ weight.double().abs().T + bias.double().abs()
    exact = hidden.double() @ weight.double().T + bias.double()
    bound = n * 2**-24 * terms
    if dtype == "bf16":
        # To the nearest of 8 bits.
        bound += 2**-8 * (exact.abs() + bound)
    assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_linear_native_rows_do_not_depend_on_the_batch(cpu, threads, dtype):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(32, 700, generator=generator).to(DTYPES[dtype])
    weight = torch.randn(9000, 700, generator=generator).to(DTYPES[dtype])
    threads(1)
    alone = [cpu("linear_softmax_topk", hidden[i : i + 1], weight, 9) for i in range(32)]
    for count in (2, 4):
        threads(count)
        for rows in (1, 2, 3, 5, 6, 7, 12, 13, 31, 32):
            together = cpu("linear_softmax_topk", hidden[:rows], weight, 9)
            for got, one in zip(together, zip(*alone[:rows])):
                assert torch.equal(got, torch.cat(one))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_linear_weight_at_an_odd_address(cpu, dtype):
    """The native kernel reads whole elements, so the library multiplies."""
    hidden, weight, _ = exact_head(3, 16, 50, DTYPES[dtype])
    memory = bytearray(weight.nbytes + 1)
    odd = torch.frombuffer(memory, dtype=weight.dtype, offset=1, count=weight.numel()).view(weight.shape)
    odd.copy_(weight)
    assert odd.data_ptr() % weight.element_size()
    assert not native_cpu.multiplies(hidden, odd, None)
    check(cpu, "linear_topk", hidden, odd, 5)


def test_linear_in_pieces_of_rows_that_do_not_merge(monkeypatch, call):
    merged_in_pieces(monkeypatch, 7, 1024, 3)
    hidden, weight, bias = exact_head((3, 9, 4), 24, 2100, torch.float32)
    mask = random_mask(3, 9, 4, 2100)
    tokens = torch.randint(0, 2100, (3, 9, 4), generator=torch.Generator().manual_seed(3))
    for dims in (slice(None), slice(0, -1)):
        check_tokens(call, hidden[:, dims], weight, tokens[:, dims], bias, mask=mask[:, dims])
    check_tokens(call, hidden, weight, tokens, bias, mask=mask[:, :1])


@pytest.mark.parametrize("tokens", [1024, 10**6])
@pytest.mark.parametrize("is_native", [False, True])
def test_linear_special_values(monkeypatch, call, tokens, is_native):
    hidden, weight, _ = exact_head(6, 8, 2500, torch.float32)
    if not is_native:
        merged_in_pieces(monkeypatch, 4, tokens, 2)
    bias = torch.zeros(2500)
    bias[[5, 2000]] = -torch.inf
    mask = torch.ones(6, 2500, dtype=torch.bool)
    mask[3] = False
    mask[4, 1:2000] = False
    hidden[1] = torch.nan
    hidden[2] = 0.0
    check(call, "linear_softmax_topk", hidden, weight, 700, bias, mask=mask)
    bias[2100] = torch.inf
    check(call, "linear_log_softmax_topk", hidden, weight, 700, bias, mask=mask)
    bias[7] = torch.nan
    check(call, "linear_topk", hidden, weight, 700, bias)


def test_linear_without_rows(backend):
    hidden, weight, bias = exact_head((2, 0), 8, 20, torch.float32, backend.device)
    tokens = torch.empty(2, 0, dtype=torch.int64, device=backend.device)
    of_tokens = backend("linear_token_logprobs", hidden, weight, tokens, bias, ranks=True)
    assert of_tokens.logprobs.shape == of_tokens.ranks.shape == (2, 0)
    found = backend("linear_softmax_topk", hidden.requires_grad_(), weight.requires_grad_(), 3, bias)
    assert found.values.shape == (2, 0, 3) and found.logsumexp.shape == (2, 0)
    found.values.sum().backward()
    assert hidden.grad.shape == hidden.shape and not weight.grad.any()


# ---- Memory ----


def result_bytes(result) -> int:
    return sum(x.nbytes for x in result if x is not None)


@pytest.mark.parametrize(
    ("rows", "vocab_size", "k", "dtype", "has_targets"),
    [
        (140, 128256, 8, "fp32", False),
        (200, 128256, 8, "fp32", True),
        pytest.param(700, 60000, 64, "bf16", True, marks=pytest.mark.exhaustive),
        (40, 300000, 2000, "fp32", False),
        pytest.param(3000, 20000, 1, "fp32", False, marks=pytest.mark.exhaustive),
        (40, 20000, 20000, "bf16", False),
        pytest.param(50, 30000, 4, "fp64", False, marks=pytest.mark.exhaustive),
    ],
)
def test_linear_scratch_memory(rows, vocab_size, k, dtype, has_targets):
    hidden, weight, _ = exact_head((2, rows), 2, vocab_size, ALL_DTYPES[dtype])
    # Rows that do not merge may be copied, but not all at once.
    hidden = hidden[:, : rows // 2]
    targets = torch.zeros(*hidden.shape[:-1], 1, dtype=torch.int64) if has_targets else None
    head = LinearProblem(LogitRows(hidden), weight, None, targets, "allowed")
    with live_bytes() as live:
        result = linear_pieces.forward(
            head,
            linear_pieces.Wanted(
                k, "softmax", None, "index" if has_targets else None, has_targets, has_targets, has_targets
            ),
        )
    assert live.most - result_bytes(result) <= 64 << 20
    # The counting sees the pieces.
    assert live.most - result_bytes(result) > 2**20


@pytest.mark.parametrize(
    ("rows", "depth", "vocab_size", "listed", "dtype"),
    [
        (600, 64, 32000, 0, "fp32"),
        (2816, 8, 20000, 720, "fp32"),
        pytest.param(300, 128, 50000, 0, "fp32", marks=pytest.mark.exhaustive),
        pytest.param(3000, 1500, 4000, 9, "bf16", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("has_kernel", [False, True])
def test_linear_backward_scratch_memory(monkeypatch, rows, depth, vocab_size, listed, dtype, has_kernel):
    """has_kernel: with a GPU's pieces and lists, on the CPU, where nothing computes their gradient."""
    hidden, weight, bias = exact_head((2, rows), depth, vocab_size, DTYPES[dtype])
    # Rows that do not merge are copied.
    half = slice(rows // 2)
    hidden = hidden[:, half]
    lead = hidden.shape[:-1]
    targets = torch.zeros((2, rows, listed), dtype=torch.int64)[:, half] if listed else None
    head = LinearProblem(LogitRows(hidden), weight, bias, targets, "allowed")
    indices, state = torch.zeros((*lead, 4), dtype=torch.int64), torch.ones((*lead, 5))
    spread = (torch.ones(lead), torch.ones(lead)) if listed else (None, None)
    grads = torch.ones(*lead, 4), torch.ones(2, rows, listed)[:, half] if listed else None, torch.ones(lead)
    if has_kernel:
        monkeypatch.setattr(linear_backward, "backends", SimpleNamespace(pick=lambda *request: "cuda"))
        monkeypatch.setattr(cuda, "multiprocessors", lambda index: 132)
        monkeypatch.setattr(cuda_pieces, "logit_gradients", lambda problem, rows, start, sums_all: None)
    with live_bytes() as live:
        incoming = linear_backward.Incoming(indices, state, *grads, *spread)
        result = linear_backward.backward(head, incoming, None, (True, True, True))
    assert 2**19 < live.most - result_bytes(result) <= 64 << 20


def test_linear_memory_of_a_step_of_training():
    """With entropy: a hundredth of what the same takes with whole logits, which are there twice at the least."""
    rows, depth, vocab_size = 512, 256, 32000
    hidden, weight, _ = exact_head(rows, depth, vocab_size, torch.float32)
    tokens = torch.arange(rows)
    head = LinearProblem(LogitRows(hidden), weight, None, tokens.unsqueeze(-1), "allowed")
    with live_bytes() as of_forward:
        found = linear_pieces.forward(head, linear_pieces.Wanted(0, "log_softmax", keeps_state=True, entropy=True))
    ones = torch.ones(rows)
    incoming = linear_backward.Incoming(
        found.indices, found.state, ones.new_empty(rows, 0), ones[:, None], ones, ones, None
    )
    with live_bytes() as of_backward:
        grads = linear_backward.backward(head, incoming, None, (True, True, False))
    learned = [x.clone().requires_grad_() for x in (hidden, weight)]
    with live_bytes() as of_torch:
        logp = (learned[0] @ learned[1].T).log_softmax(-1)
        loss = logp.gather(-1, tokens[:, None]).sum() - (logp.exp() * logp).sum()
        loss.backward()
    ours = max(of_forward.most - result_bytes(found), of_backward.most - result_bytes(grads))
    assert 2**19 < ours < (of_torch.most - result_bytes([x.grad for x in learned])) / 100


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_packed", [False, True])
def test_linear_scratch_memory_of_a_mask_that_rows_share(is_packed):
    """Such rows do not merge into one dimension. So the mask is copied, but no more of it than of the logits."""
    hidden, weight, _ = exact_head((2, 140), 2, 300000, torch.float32)
    mask = random_mask(2, 1, 300000, share=0.7)
    given = (packed(mask) if is_packed else mask).expand(2, 140, -1)
    targets = torch.arange(280).view(2, 140, 1) * 1000
    head = LinearProblem(LogitRows(hidden, mask=given), weight, None, targets, "allowed")
    with live_bytes() as live:
        result = linear_pieces.forward(head, linear_pieces.Wanted(4, "softmax", None, "index", True))
        grads = torch.ones(2, 140, 4), torch.ones(2, 140, 1), torch.ones(2, 140)
        found = linear_backward.backward(
            head,
            linear_backward.Incoming(result.indices, result.state, *grads, None, None),
            None,
            (True, True, True),
        )
    assert 2**20 < live.most - result_bytes(result) - result_bytes(found) <= 64 << 20
    logits = exact_logits(hidden, weight).masked_fill(~mask, -torch.inf)
    assert torch.equal(logits.gather(-1, result.indices), logits.topk(4).values)
    logp = logits.double().log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(result.target_logprobs.double(), logp, rtol=0, atol=1e-5)


def test_linear_choice_of_the_native_kernel(monkeypatch, cpu):
    """Which calls it takes, by what is asked of it."""
    taken = []
    native = native_cpu.prepare_linear_topk
    monkeypatch.setattr(
        native_cpu, "prepare_linear_topk", lambda head, *rest: taken.append(head.row_count) or native(head, *rest)
    )
    functional._plan.cache_clear()
    for rows, depth, k, dtype in (
        (32, 256, 8, "fp32"),
        (33, 256, 8, "fp32"),
        (24, 128, 8, "fp32"),
        (31, 128, 8, "bf16"),
        (4, 300, 1025, "fp32"),
        (2, 300, 8, "fp16"),
        (3, 300, 8, "fp64"),
    ):
        hidden, weight, _ = exact_head(rows, depth, 1500, ALL_DTYPES[dtype])
        fused_topk.linear_topk(hidden, weight, k)
    fused_topk.linear_token_logprobs(hidden.float(), weight.float(), torch.zeros(3, dtype=torch.int64))
    fused_topk.linear_topk(hidden.float(), weight.float().T.contiguous().T, 8)
    assert taken == [32, 24, 31]


def test_linear_pieces_that_are_taken_into_one_state():
    def pieces(rows, k, row_bytes=0, other_bytes=0):
        return layout.accumulated_pieces(rows, 128256, k, 2, row_bytes, other_bytes, 132)

    # 16 x 57 tiles of 128 x 256 logits: seven for nearly each of 132 multiprocessors.
    assert pieces(2048, 8) == pieces(8192, 32) == layout.Pieces(2048, 57 * 256, 0)
    assert pieces(3000, 8) == layout.Pieces(1500, 77 * 256, 0)
    assert pieces(923, 8) is None and pieces(2048, 33) is None
    # With targets: 16 x 33 tiles, four for each, and too little room.
    assert pieces(2048, 1, 257 * 48) == layout.Pieces(2048, 33 * 256, 0)
    assert pieces(2048, 1, 48, 8 << 20) == layout.Pieces(2048, 49 * 256, 0)
    assert pieces(2048, 1, 450 * 48) is None


def test_linear_pieces_that_become_their_gradient():
    def pieces(rows, has_mask=False):
        return layout.in_place_pieces(rows, 128256, 2048, 2, 2, False, has_mask, False, True, 132)

    # Rows in tiles of the product's 128, in equal shares.
    # 16 x 41 tiles of 128 x 256 logits: five for nearly each of 132 multiprocessors.
    assert pieces(8192) == layout.Pieces(2048, 41 * 256, 1, 7)
    assert pieces(3000) == layout.Pieces(1536, 66 * 256, 1, 9)
    assert pieces(8192, has_mask=True) == layout.Pieces(2048, 24 * 256, 1, 7)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_linear_pieces_fit(is_cpu):
    for rows in (1, 33, 256, 257, 8192, 10**6):
        for vocab_size in (1, 1000, 32000, 128256, 4_000_000):
            for k in {1, min(8, vocab_size), min(2048, vocab_size), vocab_size}:
                for itemsize, logit_bytes in ((2, 2), (4, 8), (8, 72)):
                    pieces = layout.forward_pieces(rows, vocab_size, k, itemsize, logit_bytes, 48, is_cpu)
                    assert 1 <= pieces.rows <= rows and pieces.states >= 1
                    assert pieces.tokens == vocab_size or pieces.tokens % 1024 == 0
                    is_whole = pieces.tokens >= vocab_size
                    logits = pieces.rows * pieces.tokens * logit_bytes
                    held = 0 if is_whole else (2 * pieces.states + 1) * pieces.rows * k * (itemsize + 8)
                    # A single row of more than 64 MB is a piece of its own.
                    assert logits + held <= 64 << 20 or pieces.rows == 1
                    pieces = layout.accumulated_pieces(rows, vocab_size, k, itemsize, 48, 1 << 20, 132)
                    if pieces is not None:
                        assert k <= 32 and 7 * 132 <= pieces.rows <= 2048 and pieces.states == 0
                        assert pieces.tokens < vocab_size and pieces.tokens % 256 == 0
                        held = pieces.rows * (3 * k * (itemsize + 8) + 48) + (1 << 20)
                        assert pieces.rows * pieces.tokens * itemsize + held <= 64 << 20
        for depth in (1, 2048, 16384):
            for vocab_size in (10, 128256, 4_000_000):
                pieces = layout.backward_pieces(rows, vocab_size, depth, 2, is_cpu)
                assert 1 <= pieces.rows <= rows
                assert pieces.rows * (pieces.tokens * 7 + depth * 8) <= 64 << 20
                for listed, itemsize, has_bias in ((1, 2, False), (265, 4, True), (5000, 2, True)):
                    has_mask = listed > 1
                    sizes = (rows, vocab_size, depth, itemsize, listed, has_bias, has_mask, True, False, 132)
                    pieces = layout.in_place_pieces(*sizes)
                    assert 1 <= pieces.rows <= rows
                    assert pieces.tokens == vocab_size or pieces.tokens % 256 == 0
                    # The states, their gradient and a product, or the list while it is sorted; and of tokens the bias and a sum.
                    of_row = depth * itemsize + max(depth * (itemsize + 4) + listed * 8, listed * 36)
                    of_tokens = has_bias * (vocab_size + pieces.tokens) * 4
                    assert pieces.rows * (pieces.tokens * (itemsize + has_mask) + of_row) + of_tokens <= 64 << 20


# ---- What torch does with them ----


def test_linear_has_no_second_gradient():
    hidden, weight, _ = exact_head(3, 8, 30, torch.float32)
    hidden.requires_grad_()
    found = fused_topk.linear_softmax_topk(hidden, weight, 4)
    (grad,) = torch.autograd.grad(found.logsumexp.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        grad.sum().backward()

    def loss(hidden):
        return fused_topk.linear_softmax_topk(hidden, weight, 4).logsumexp.sum()

    with pytest.raises(RuntimeError, match="got forward mode"):
        torch.func.hessian(loss)(hidden)
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.func.jacrev(torch.func.jacrev(loss))(hidden)


def test_linear_compile_does_not_look_for_dtensors(monkeypatch):
    """torch.compile would copy the list of modules, and fails if another thread imports one meanwhile."""
    monkeypatch.setattr(arguments, "sys", None)
    hidden, weight, _ = exact_head(2, 8, 50, torch.float32)
    compiled = torch.compile(fused_topk.linear_topk, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(hidden, torch.nn.Parameter(weight), 4)
    assert torch.equal(found.indices, (hidden @ weight.T).topk(4).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_memory_that_holds_nan(backend, dtype, monkeypatch):
    """What a process gets for its logits may hold anything. A product of bfloat16 on CPUs with AMX reads beyond the ends of rows."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(torch.nan))
    leaves = [
        random_logits(*shape, device=backend.device, seed=seed).to(dtype).requires_grad_()
        for seed, shape in enumerate([(40, 24), (700, 24)])
    ]
    backend("linear_log_softmax_topk", *leaves, 5).values.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)

# SPDX-License-Identifier: Apache-2.0
"""The kernel of csrc/tokens/token_sums.cu on the emulated machine: every read and write checked, under several schedules."""

import pytest
import torch
from torch import Tensor

from fused_topk import operators
from fused_topk.layout import launch
from fused_topk.problem import TokenSumsProblem
from fused_topk.rows import LogitRows
from fused_topk.token_sums import empty_sums
from oracle import DTYPES
from rows import NAN, adversarial_rows, packed, random_logits, random_mask, shifted
from simt.emulate import emulated, replacing
from simt.launch import SCHEDULES, Array

KERNELS = [pytest.param(dtype, marks=() if dtype == "bf16" else pytest.mark.exhaustive) for dtype in ("fp32", "bf16", "fp16")]  # fmt: skip


def begun(problem: TokenSumsProblem) -> tuple[Tensor, Tensor]:
    """What a piece before may have left."""
    lead, count = problem.tokens.shape[:-1], problem.tokens[..., 0].numel()
    sums = empty_sums(lead, torch.float32, torch.device("cpu")).view(count, 5)
    sums[::2] = torch.tensor([1.0, 3.0, -0.5, 0.5, 2.0])
    return sums.view(*lead, 5), torch.full(problem.tokens.shape, 7.0, dtype=problem.rows.logits.dtype)


def check(problem: TokenSumsProblem, **how) -> None:
    want, want_logits = begun(problem)
    operators.token_spread.reference(problem, want, want_logits)
    sums, logits = begun(problem)
    inputs = {**problem.rows._asdict(), "tokens": problem.tokens}
    arrays = [Array(name, tensor, "input") for name, tensor in inputs.items() if isinstance(tensor, Tensor)]
    # The sums are read and written.
    with emulated([*arrays, Array("sums", sums, "inout"), Array("logits", logits, "inout")], **how) as outcomes:
        operators.token_spread.on_cuda(problem, sums, logits)
    outcomes[0].check()
    assert torch.equal(logits.nan_to_num(9.0), want_logits.nan_to_num(9.0))
    # Where d is NaN, so is all that is made of it.
    is_sum = ~want[..., 1].isnan()
    width = 5 if problem.tail else 3
    torch.testing.assert_close(sums[is_sum][..., :width], want[is_sum][..., :width], rtol=3e-6, atol=3e-6)
    assert torch.equal(sums[..., 1].isnan(), want[..., 1].isnan())


def random_tokens(rows: int, vocab_size: int, number: int) -> Tensor:
    """Some of them none, some beyond the row, some equal."""
    tokens = torch.randint(-1, vocab_size + 1, (rows, number), generator=torch.Generator().manual_seed(vocab_size))
    tokens[0], tokens[-1] = torch.arange(number) - 2, vocab_size - 1 + torch.arange(number)
    tokens[:, -1] = tokens[:, 0]
    return tokens


def hidden_in_all_ways(logits: Tensor) -> list[LogitRows]:
    count, vocab_size = logits.shape
    mask = random_mask(count, vocab_size, share=0.7)
    lengths = (torch.arange(count) * (vocab_size // 3 + 1)).remainder(vocab_size + 1)
    temperature = torch.linspace(0.5, 2.0, count)
    return [
        LogitRows(logits),
        LogitRows(logits, temperature=0.7, mask=mask),
        LogitRows(logits, row_temperature=temperature, mask=packed(mask), lengths=lengths.int()),
        LogitRows(logits, lengths=lengths),
    ]


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 1024, 9001])
def test_adversarial_rows(dtype, vocab_size):
    rows = torch.stack(list(adversarial_rows(vocab_size, 1, DTYPES[dtype]).values())[:: 1 if vocab_size < 9000 else 4])
    # What overflows in float32, or is lost in it, is compared elsewhere.
    rows = rows[(rows.float().abs() < 1e4).logical_or(~rows.isfinite()).all(-1)]
    tokens = random_tokens(len(rows), vocab_size, 3)
    for i, given in enumerate(hidden_in_all_ways(rows)):
        for normalize in ("allowed", "all"):
            problem = TokenSumsProblem(given, tokens, normalize, i != 3 or normalize == "all")
            check(problem, schedule=SCHEDULES[i % len(SCHEDULES)], seed=i)


@pytest.mark.parametrize("threads", [32, 128])
def test_a_piece_by_fewer_threads(monkeypatch, threads):
    """Its tokens begin at 5000."""
    monkeypatch.setattr(launch, "sum_threads", lambda rows: threads)
    tokens = random_tokens(3, 9001, 40) + 5000
    for given in hidden_in_all_ways(random_logits(3, 9001, dtype=torch.bfloat16)):
        check(TokenSumsProblem(given, tokens, "allowed", True, 5000))


def test_layouts():
    """Rows at any address and with any strides, and masks with strides of their own."""
    x = random_logits(2, 3, 70, dtype=torch.bfloat16)
    mask = random_mask(3, 70, share=0.7).expand(2, 3, 70)
    tokens = random_tokens(6, 70, 2).view(2, 3, 2)
    wide, apart = torch.cat([x, x], -1), torch.stack([x, x], -1)[..., 0]
    for logits in (x, shifted(x, 1), wide[..., 1:71], x.transpose(0, 1).contiguous().transpose(0, 1), apart, x[:1].expand(2, 3, 70)):  # fmt: skip
        for given in (LogitRows(logits), LogitRows(logits, mask=mask), LogitRows(logits, mask=packed(mask))):
            check(TokenSumsProblem(given, tokens, "allowed", True))


# What is replaced in csrc/tokens/token_sums.cu.
FAULTS = {
    "0 log 0": ("weight == 0.0f ? 0.0f : y * weight", "y * weight"),
    "a token that is not left out": ("omitted != 0 || is_masked_later", "is_masked_later"),
    "a token of another warp": ("given + warp * kWarpSize", "given"),
    "no mask of the rest": ("if (is_masked_later) {", "if (false) {"),
    "a mask of all sums": ("wanted.sums_all ? none : mask", "mask"),
    "another row": ("i64(row) * wanted.num_tokens;\n\n", "0;\n\n"),
    "a hidden token": ("is_hidden ?", "false ?"),
    "a token beyond the row": ("token >= problem.V) continue", "false) continue"),
    "no barrier": ("  __syncthreads();\n", ""),
    "a warp left out": ("i < num_warps; ++i", "i + 1 < num_warps; ++i"),
    "what the pieces before have left": ("all = {sums[0], sums[1], sums[2] * kLog2E}", "all = {}"),
    "a token of another piece": ("wanted.first_token + first, bits", "first, bits"),
    "its logit": ("i) - wanted.first_token", "i)"),
    "what the block's other warps read": ("num_warps * Reader", "kMostWarps * Reader"),
    "units of s": ("sums[2] = all.s * kLn2", "sums[2] = all.s"),
}  # fmt: skip


@pytest.mark.exhaustive  # each fault is a build of its own
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_line_is_seen(monkeypatch, fault):
    logits = random_logits(3, 12001, dtype=torch.bfloat16)
    logits[1, 5000], logits[0, 17] = NAN, -torch.inf
    tokens = random_tokens(3, 12001, 3)
    # One that is a good part of the sum.
    tokens[0, 1] = logits[0].argmax()
    problems = [
        TokenSumsProblem(given, tokens + 300 * i, normalize, True, 300 * i)
        for i, given in enumerate(hidden_in_all_ways(logits))
        for normalize in ("allowed", "all")
    ]
    monkeypatch.setattr(launch, "sum_threads", lambda rows: 96)
    with pytest.raises(AssertionError):
        for i, problem in enumerate(problems):
            check(problem, edit=replacing(*FAULTS[fault]), schedule=SCHEDULES[i % len(SCHEDULES)], seed=i)

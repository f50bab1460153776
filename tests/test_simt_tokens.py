# SPDX-License-Identifier: Apache-2.0
"""The kernels of csrc/tokens/token_sums.cu and csrc/ranks/target_ranks.cu on the emulated machine: every read and write checked,
under several schedules."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from fused_topk import operators
from fused_topk.backends import cuda
from fused_topk.layout import launch
from fused_topk.problem import RankProblem, TokenSumsProblem
from fused_topk.rows import LogitRows
from fused_topk.token_sums import empty_sums
from oracle import DTYPES
from rows import adversarial_rows, packed, random_logits, random_mask, shifted
from simt.emulate import emulated
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


def rows_in_all_layouts() -> list[LogitRows]:
    """Rows [2, 3, 70] at any address and with any strides, and masks with strides of their own."""
    x = random_logits(2, 3, 70, dtype=torch.bfloat16)
    wide, apart = torch.cat([x, x], -1), torch.stack([x, x], -1)[..., 0]
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    mask = random_mask(3, 70, share=0.7).expand(2, 3, 70)
    ways = (x, shifted(x, 1), wide[..., :70], wide[..., 1:71], turned, apart, x[:1].expand(2, 3, 70))
    return [LogitRows(logits, mask=given) for logits in ways for given in (None, mask, packed(mask))]


def test_layouts():
    tokens = random_tokens(6, 70, 2).view(2, 3, 2)
    for given in rows_in_all_layouts():
        check(TokenSumsProblem(given, tokens, "allowed", True))


# csrc/ranks/target_ranks.cu.


def ranks_of(problem: RankProblem, blocks: int = 0, **how) -> Tensor:
    """What the kernel makes of CPU tensors. blocks: that share a target; 0: as many as the layout says."""
    out = torch.empty_like(problem.targets)
    inputs = {**problem.rows._asdict(), "targets": problem.targets}
    arrays = [Array(name, tensor, "input") for name, tensor in inputs.items() if isinstance(tensor, Tensor)]
    with (
        emulated([*arrays, Array("ranks", out, "output")], **how) as outcomes,
        mock.patch.object(cuda, "multiprocessors", lambda device: 132),
        mock.patch.object(launch, "ranking_blocks", lambda *_: blocks) if blocks else mock.MagicMock(),
    ):
        operators.ranks.on_cuda(problem, out)
    outcomes[0].check()
    return out


def check_ranks(problem: RankProblem, blocks: int = 0, **how) -> None:
    want = torch.empty_like(problem.targets)
    operators.ranks.reference(problem, want)
    torch.testing.assert_close(ranks_of(problem, blocks, **how), want, rtol=0, atol=0)


def random_targets(rows: int, vocab_size: int, number: int) -> Tensor:
    """Some of them none, and some of them beyond the row, which may not be read."""
    targets = torch.randint(-1, vocab_size + 1, (rows, number), generator=torch.Generator().manual_seed(vocab_size))
    targets[0] = torch.arange(number) - 2
    targets[-1] = vocab_size - 1 + torch.arange(number)
    return targets


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 1024, 3001])
def test_adversarial_rows_of_ranks(dtype, vocab_size):
    rows = torch.stack(list(adversarial_rows(vocab_size, 1, DTYPES[dtype]).values())[:: 1 if vocab_size < 3000 else 4])
    targets = random_targets(len(rows), vocab_size, 2)
    for i, given in enumerate(hidden_in_all_ways(rows)):
        check_ranks(RankProblem(given, targets, i % 2 == 0))
        check_ranks(RankProblem(given, targets, i % 2 == 1), schedule=SCHEDULES[i % len(SCHEDULES)], seed=i)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("architecture", [75, pytest.param(90, marks=pytest.mark.exhaustive)])
def test_blocks_that_share_a_target(schedule, architecture):
    logits = (random_logits(3, 20_001, dtype=torch.bfloat16) * 2).round()
    targets = random_targets(3, 20_001, 2)
    for i, given in enumerate(hidden_in_all_ways(logits)):
        blocks = (0, 2, 3, 40)[i]
        check_ranks(
            RankProblem(given, targets, i % 2 == 1), blocks, schedule=schedule, seed=i, architecture=architecture
        )


def test_layouts_of_ranks():
    targets = random_targets(6, 70, 1).view(2, 3, 1)
    for given in rows_in_all_layouts():
        check_ranks(RankProblem(given, targets, True))
    check_ranks(RankProblem(LogitRows(random_logits(70, dtype=torch.bfloat16)), targets[0, 0], False))

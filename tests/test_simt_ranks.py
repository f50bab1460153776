# SPDX-License-Identifier: Apache-2.0
"""The kernel of csrc/ranks/target_ranks.cu on the emulated machine: every read and write checked, under several schedules."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from fused_topk import operators
from fused_topk.backends import cuda
from fused_topk.layout import launch
from fused_topk.problem import RankProblem
from fused_topk.rows import LogitRows
from oracle import DTYPES
from rows import NAN, adversarial_rows, packed, random_logits, random_mask, shifted
from simt.emulate import emulated, replacing
from simt.launch import SCHEDULES, Array
from test_simt_token_sums import hidden_in_all_ways

KERNELS = [pytest.param(dtype, marks=() if dtype == "bf16" else pytest.mark.exhaustive) for dtype in ("fp32", "bf16", "fp16")]  # fmt: skip


def run(problem: RankProblem, blocks: int = 0, **how) -> Tensor:
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


def check(problem: RankProblem, blocks: int = 0, **how) -> None:
    want = torch.empty_like(problem.targets)
    operators.ranks.reference(problem, want)
    torch.testing.assert_close(run(problem, blocks, **how), want, rtol=0, atol=0)


def random_targets(rows: int, vocab_size: int, number: int) -> Tensor:
    """Some of them none, and some of them beyond the row, which may not be read."""
    targets = torch.randint(-1, vocab_size + 1, (rows, number), generator=torch.Generator().manual_seed(vocab_size))
    targets[0] = torch.arange(number) - 2
    targets[-1] = vocab_size - 1 + torch.arange(number)
    return targets


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 1024, 3001])
def test_adversarial_rows(dtype, vocab_size):
    rows = torch.stack(list(adversarial_rows(vocab_size, 1, DTYPES[dtype]).values())[:: 1 if vocab_size < 3000 else 4])
    targets = random_targets(len(rows), vocab_size, 2)
    for i, given in enumerate(hidden_in_all_ways(rows)):
        check(RankProblem(given, targets, i % 2 == 0))
        check(RankProblem(given, targets, i % 2 == 1), schedule=SCHEDULES[i % len(SCHEDULES)], seed=i)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("architecture", [75, pytest.param(90, marks=pytest.mark.exhaustive)])
def test_blocks_that_share_a_target(schedule, architecture):
    logits = (random_logits(3, 20_001, dtype=torch.bfloat16) * 2).round()
    targets = random_targets(3, 20_001, 2)
    for i, given in enumerate(hidden_in_all_ways(logits)):
        blocks = (0, 2, 3, 40)[i]
        check(RankProblem(given, targets, i % 2 == 1), blocks, schedule=schedule, seed=i, architecture=architecture)


def test_layouts():
    """Rows at any address and with any strides, and masks with strides of their own."""
    x = random_logits(2, 3, 70, dtype=torch.bfloat16)
    mask = random_mask(3, 70, share=0.7).expand(2, 3, 70)
    targets = random_targets(6, 70, 1).view(2, 3, 1)
    wide = torch.cat([x, x], -1)
    apart = torch.stack([x, x], -1)[..., 0]
    for logits in (x, shifted(x, 1), wide[..., :70], wide[..., 1:71], x.transpose(0, 1).contiguous().transpose(0, 1), apart, x[:1].expand(2, 3, 70)):  # fmt: skip
        for given in (LogitRows(logits), LogitRows(logits, mask=mask), LogitRows(logits, mask=packed(mask))):
            check(RankProblem(given, targets, True))
    check(RankProblem(LogitRows(x[0, 0]), targets[0, 0], False))


# What is replaced in csrc/ranks/target_ranks.cu.
FAULTS = {
    "a target that its ties do not count": ("(token < end)", "(token + 1 < end)"),
    "ties behind the target": (": token + 1, blocks", ": token + 2, blocks"),
    "another row": ("place / wanted.num_targets)", "place)"),
    "a target beyond the row": ("target < problem.V ? target : problem.V - 1", "target"),
    "a hidden target": ("token < logits.V ? order_key(logits(token))", "true ? order_key(logits(token))"),
    "tokens behind the length": ("key == kNegativeInfinityKey &&", "false &&"),
    "counted by all threads": ("&& blockIdx.y == 0 && threadIdx.x == 0", "&& blockIdx.y == 0 && threadIdx.x < 32"),
    "counted by all blocks": ("&& blockIdx.y == 0 && threadIdx.x == 0", "&& threadIdx.x == 0"),
    "a warp left out": ("lane_id() < kWarps ?", "lane_id() + 1 < kWarps ?"),
    "no barrier": ("  __syncthreads();\n", ""),
    "a block left out": ("block < blocks; block += kWarpSize", "block + 1 < blocks; block += kWarpSize"),
    "not the last block": ("!= blocks - 1) return;", "!= 0) return;"),
    "a rank without a target": ("target < 0 ? 0 : rank", "rank"),
}  # fmt: skip


@pytest.mark.exhaustive  # each fault is a build of its own
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_line_is_seen(fault):
    logits = (random_logits(3, 9001, dtype=torch.bfloat16) * 2).round()
    logits[1, 5000] = NAN
    problems = [
        RankProblem(given, random_targets(3, 9001, 2), ties) for given in hidden_in_all_ways(logits) for ties in (False, True)
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        for i, problem in enumerate(problems):
            for blocks in (1, 2):
                check(problem, blocks, edit=replacing(*FAULTS[fault]), schedule=SCHEDULES[i % len(SCHEDULES)], seed=i)

# SPDX-License-Identifier: Apache-2.0
"""What the CPU's kernels round to 16 bits: bit for bit what torch does, with every instruction set of this machine."""

import pytest
import torch

from fused_topk.backends import cpu as native_cpu
from fused_topk.problem import FullRowProblem
from fused_topk.rows import LogitRows
from oracle import bits, start_full_rows
from rows import INF, NAN

INSTRUCTION_SETS = [] if native_cpu.unavailable() else native_cpu.native.instruction_sets()
DTYPES = [torch.float16, torch.bfloat16]


def full_rows(values: str, logits: torch.Tensor, dtype: torch.dtype, instruction_set: str) -> torch.Tensor:
    out = torch.empty(logits.shape, dtype=dtype)
    start_full_rows(native_cpu, FullRowProblem(LogitRows(logits), values), out, instruction_set=instruction_set)
    return out


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_and_their_neighbours(cpu, dtype, instruction_set):
    """Next to a 0, logits so low that they add nothing to the sum are their own log-probabilities."""
    first = torch.tensor(88.0, dtype=dtype).view(torch.int16)
    kept = torch.arange(first.item(), torch.tensor(INF, dtype=dtype).view(torch.int16).item(), dtype=torch.int16)
    kept = kept.view(dtype).float()
    # Halfway to the next; beyond the greatest, too.
    ties = kept + torch.cat([kept.diff(), kept[-1:] - kept[-2:-1]]) / 2
    beyond = torch.tensor([65536.0, 1e5, 3e38, INF])
    row = torch.cat([kept, ties, ties.nextafter(torch.tensor(INF)), ties.nextafter(torch.tensor(0.0)), beyond])
    for length in (len(row), 1003, 45, 7):
        logits = -torch.cat([torch.zeros(1), row[-length:]]).unsqueeze(0)
        got = full_rows("log_softmax", logits, dtype, instruction_set)
        assert torch.equal(bits(got[0, 1:]), bits(logits[0, 1:].to(dtype)))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_numbers_and_none(cpu, dtype, instruction_set):
    """Down to the last that is not 0, and to 0; and a row of NaN."""
    rows = torch.rand(5, 20_001, generator=torch.Generator().manual_seed(0)) * (18 if dtype == torch.float16 else 90)
    rows[:, 0] = 20
    rows[1, 1] = NAN
    for length in (20_001, 1003, 45, 7):
        logits = rows[:, :length].contiguous()
        wide = full_rows("softmax", logits, torch.float32, instruction_set)
        narrow = full_rows("softmax", logits, dtype, instruction_set)
        torch.testing.assert_close(narrow, wide.to(dtype), rtol=0, atol=0, equal_nan=True)

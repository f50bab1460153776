# SPDX-License-Identifier: Apache-2.0
"""A vocabulary over 1 to 4 processes on this machine. distributed_*checks.py have what each process checks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distributed_checks
import distributed_contract_checks
import distributed_linear_checks
import distributed_sampling_checks
import fused_topk.distributed
import processes
from benchmark import results

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")

CHECKS = {
    module: processes.checks_of(module, "a_process_dies")
    for module in (
        distributed_checks,
        distributed_linear_checks,
        distributed_sampling_checks,
        distributed_contract_checks,
    )
}
# Those of contract.py are of two groups of two.
OF_FOUR = [(distributed_contract_checks, check) for check in CHECKS[distributed_contract_checks]]
OF_ANY = [(module, check) for module in list(CHECKS)[:-1] for check in CHECKS[module]]
EACH_OF_FOUR, EACH = (
    pytest.mark.parametrize(("module", "check"), checks, ids=lambda x: x if isinstance(x, str) else x.__name__)
    for checks in (OF_FOUR, OF_ANY)
)


@EACH
def test_two_processes(module, check):
    processes.assert_passes(module.__name__, check, 2, CHECKS[module])


@EACH_OF_FOUR
def test_four_processes(module, check):
    processes.assert_passes(module.__name__, check, 4, CHECKS[module])


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 3, 4])
@EACH
def test_other_numbers_of_processes(module, check, size):
    processes.assert_passes(module.__name__, check, size, CHECKS[module])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_process_that_dies(size):
    processes.assert_survivors("distributed_checks", size)


def test_without_a_group():
    with pytest.raises(RuntimeError, match=r"torch\.distributed must be initialised"):
        fused_topk.distributed.topk(torch.zeros(2, 5), 2)


def bench(launcher: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    options = ["--suite", "distributed", "--device", "cpu", "--quick", "--only", "1 x 128256", *map(str, arguments)]
    command = [sys.executable, *launcher, Path(__file__).parents[1] / "demos/benchmark", "bench", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.exhaustive
def test_bench(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = bench(launcher, "--csv", tmp_path / "run.csv")
    assert done.returncode == 0, done.stderr
    records = results.read(tmp_path / "run.csv")
    assert {record.case for record in records} == {"1 x 128256 bf16 k=8", "1 x 128256 bf16 k=50"}
    assert {record.way for record in records} == {"fused_topk", "local", "empty", "gathered", "predicted"}

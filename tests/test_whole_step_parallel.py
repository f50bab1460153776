# SPDX-License-Identifier: Apache-2.0
"""generate() of tensor-parallel models over 2 and 4 processes. whole_parallel_checks.py has what each process checks."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import processes
from fused_topk.generation.whole_step import trial

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
pytest.importorskip("accelerate", reason="transformers loads tensor-parallel models with accelerate")

import whole_parallel_checks

# Of earlier versions alone.
OF_WHOLE_HEADS = "heads_that_are_whole"
CHECKS = processes.checks_of(whole_parallel_checks, OF_WHOLE_HEADS, "a_process_dies")
# The processes of the plain tier run these alone.
QUICK = ["sampling", "what_is_exchanged", "a_process_that_differs"]
# What may depend on how many processes there are.
OF_FOUR = [*QUICK, "texts_and_scores", "processors", "captured_steps"]
if not whole_parallel_checks.IS_SERVED:
    CHECKS = QUICK = OF_FOUR = [OF_WHOLE_HEADS]
are_served = pytest.mark.skipif(QUICK == CHECKS, reason="this version of transformers does not spread LM heads")

passes = functools.partial(processes.assert_passes, "whole_parallel_checks")


def test_two_processes():
    for check in QUICK:
        passes(check, 2, QUICK)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", CHECKS)
def test_every_check(check):
    passes(check, 2, CHECKS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", OF_FOUR)
def test_four_processes(check):
    passes(check, 4, OF_FOUR)


def test_all_processes_try_a_capture_again_or_none(monkeypatch):
    """Here both tries succeed. The first has failed on another process."""
    tries = []
    monkeypatch.setattr(trial, "_tried", lambda capture: tries.append(capture))
    answers = iter(["failed", None])
    assert trial.reason_against_capture(None, lambda reason: next(answers)) is None
    assert len(tries) == 2


@are_served
@pytest.mark.exhaustive
def test_a_process_that_dies():
    processes.assert_survivors("whole_parallel_checks", 2)


@are_served
@pytest.mark.exhaustive
def test_the_demo(tmp_path):
    demo = Path(__file__).parents[1] / "demos" / "tensor_parallel.py"
    if not demo.exists():
        pytest.skip("the demos are only in a checkout")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ["--tiny", "--layers", "1", "--prompt", "8", "--new-tokens", "4", "--turns", "1", "--csv"]
    command = [sys.executable, *launcher, demo, *options, tmp_path / "run.csv"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("same 100%") == result.stdout.count("as asked") == 4
    assert (tmp_path / "run.csv").read_text().count("tensor parallel,") == 12

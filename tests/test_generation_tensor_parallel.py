# SPDX-License-Identifier: Apache-2.0
"""generate() of tensor-parallel models over 2 and 4 processes. tensor_parallel_checks.py has what each process checks."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

import processes

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
pytest.importorskip("accelerate", reason="transformers loads tensor-parallel models with accelerate")

import tensor_parallel_checks

CHECKS = [
    name
    for name, check in vars(tensor_parallel_checks).items()
    if inspect.isfunction(check) and list(inspect.signature(check).parameters) == ["rank", "size"]
]
if not tensor_parallel_checks.IS_SERVED:
    CHECKS = ["whole_heads"]
# The processes of the plain tier, which take seconds to import transformers, run these alone.
QUICK = ["greedy_and_beams", "few_bytes_a_step"] if tensor_parallel_checks.IS_SERVED else CHECKS

# Those that may differ with the number of processes.
OF_MORE = [
    check
    for check in CHECKS
    if check in (*QUICK, "whole_heads", "the_choice_of_columns", "other_heads", "processors", "sampling")
]


passes = functools.partial(processes.assert_passes, "tensor_parallel_checks")


def test_two_processes():
    for check in QUICK:
        passes(check, 2, QUICK)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", CHECKS)
def test_every_check(check):
    passes(check, 2, CHECKS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", OF_MORE)
def test_four_processes(check):
    passes(check, 4, OF_MORE)

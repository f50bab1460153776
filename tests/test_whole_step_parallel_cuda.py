# SPDX-License-Identifier: Apache-2.0
"""Captured steps of tensor-parallel models, by NCCL. whole_parallel_cuda_checks.py has what each process checks."""

import pytest
import torch

import processes

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("accelerate", reason="transformers loads tensor-parallel models with accelerate")

import whole_parallel_checks
import whole_parallel_cuda_checks

if not whole_parallel_checks.IS_SERVED:
    pytest.skip("this version of transformers does not spread LM heads", allow_module_level=True)

SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]
CHECKS = processes.checks_of(whole_parallel_cuda_checks, "a_group_is_destroyed", "a_process_dies")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", SIZES)
def test_gpus(size, check):
    processes.assert_passes("whole_parallel_cuda_checks", check, size, CHECKS, "nccl")


@pytest.mark.parametrize("size", SIZES)
def test_a_group_is_destroyed(size):
    found = processes.run("whole_parallel_cuda_checks", ["a_group_is_destroyed"], size, seconds=100, backend="nccl")
    assert found == [{"a_group_is_destroyed": None}] * size, found


@pytest.mark.parametrize("size", SIZES)
def test_a_process_that_dies(size):
    processes.assert_survivors("whole_parallel_cuda_checks", size, seconds=100, backend="nccl")

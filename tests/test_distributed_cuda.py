# SPDX-License-Identifier: Apache-2.0
"""A vocabulary over several GPUs of this machine, by NCCL. distributed_cuda_checks.py has what each process checks."""

import pytest
import torch

import distributed_cuda_checks
import processes

GPUS = torch.cuda.device_count()
SIZES = [size for size in (2, 4, 8) if size <= GPUS]
CHECKS = processes.checks_of(distributed_cuda_checks, "a_process_dies")


@pytest.mark.skipif(not SIZES, reason="needs two GPUs")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", SIZES or [2])
def test_gpus(size, check):
    processes.assert_passes("distributed_cuda_checks", check, size, CHECKS, "nccl")


@pytest.mark.skipif(not SIZES, reason="needs two GPUs")
@pytest.mark.parametrize("size", SIZES or [2])
def test_a_process_that_dies(size):
    processes.assert_survivors("distributed_cuda_checks", size, backend="nccl")

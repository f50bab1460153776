# SPDX-License-Identifier: Apache-2.0
"""A vocabulary over several GPUs of this machine, by NCCL. distributed_cuda_checks.py has what each process checks."""

import functools
import inspect

import pytest
import torch

import distributed_cuda_checks
import processes

GPUS = torch.cuda.device_count()
SIZES = [size for size in (2, 4, 8) if size <= GPUS]
CHECKS = [
    name
    for name, check in vars(distributed_cuda_checks).items()
    if inspect.isfunction(check)
    and name != "a_process_dies"
    and list(inspect.signature(check).parameters) == ["rank", "size"]
]


@functools.cache
def results(size: int) -> list[dict[str, str | None]]:
    """Of all checks. The processes start once."""
    return processes.run("distributed_cuda_checks", CHECKS, size, backend="nccl")


@pytest.mark.skipif(not SIZES, reason="needs two GPUs")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", SIZES or [2])
def test_gpus(size, check):
    for rank, of_rank in enumerate(results(size)):
        assert check in of_rank, f"rank {rank} of {size} has no result; it died or did not end"
        assert of_rank[check] is None, of_rank[check]


@pytest.mark.skipif(not SIZES, reason="needs two GPUs")
@pytest.mark.parametrize("size", SIZES or [2])
def test_a_process_that_dies(size):
    *survivors, dead = processes.run("distributed_cuda_checks", ["a_process_dies"], size, backend="nccl")
    assert dead == {}
    assert survivors == [{"a_process_dies": None}] * (size - 1), survivors

# SPDX-License-Identifier: Apache-2.0
"""Captured steps of tensor-parallel models, by NCCL. whole_parallel_cuda_checks.py has what each process checks."""

import functools
import inspect

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
# In processes of their own.
LAST = ("a_group_is_destroyed", "a_process_dies")
CHECKS = [
    name
    for name, check in vars(whole_parallel_cuda_checks).items()
    if inspect.isfunction(check)
    and check.__module__ == whole_parallel_cuda_checks.__name__
    and name not in LAST
    and list(inspect.signature(check).parameters) == ["rank", "size"]
]


@functools.cache
def results(size: int) -> list[dict[str, str | None]]:
    """Of all checks. The processes start once."""
    return processes.run("whole_parallel_cuda_checks", CHECKS, size, backend="nccl")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", SIZES)
def test_gpus(size, check):
    for rank, of_rank in enumerate(results(size)):
        assert check in of_rank, f"rank {rank} of {size} has no result; it died or did not end"
        assert of_rank[check] is None, of_rank[check]


@pytest.mark.parametrize("size", SIZES)
def test_a_group_is_destroyed(size):
    found = processes.run("whole_parallel_cuda_checks", [LAST[0]], size, seconds=100, backend="nccl")
    assert found == [{LAST[0]: None}] * size, found


@pytest.mark.parametrize("size", SIZES)
def test_a_process_that_dies(size):
    *survivors, dead = processes.run("whole_parallel_cuda_checks", [LAST[1]], size, seconds=100, backend="nccl")
    assert dead == {}
    assert survivors == [{LAST[1]: None}] * (size - 1), survivors

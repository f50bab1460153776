# SPDX-License-Identifier: Apache-2.0
"""LM heads over 1 to 4 processes. distributed_linear_checks.py has what each process checks."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

import distributed_linear_checks
import processes

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")

CHECKS = [
    name
    for name, check in vars(distributed_linear_checks).items()
    if inspect.isfunction(check) and list(inspect.signature(check).parameters) == ["rank", "size"]
]


@functools.cache
def results(size: int) -> list[dict[str, str | None]]:
    return processes.run_once("distributed_linear_checks", CHECKS, size)


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check):
    passes(check, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_other_numbers_of_processes(check, size):
    passes(check, size)


def passes(check: str, size: int) -> None:
    for rank, of_rank in enumerate(results(size)):
        assert check in of_rank, f"rank {rank} of {size} has no result; it died or did not end"
        assert of_rank[check] is None, of_rank[check]

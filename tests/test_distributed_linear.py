# SPDX-License-Identifier: Apache-2.0
"""LM heads over 1 to 4 processes. distributed_linear_checks.py has what each process checks."""

from __future__ import annotations

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


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(check):
    processes.assert_passes("distributed_linear_checks", check, 2, CHECKS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("check", CHECKS)
def test_other_numbers_of_processes(check, size):
    processes.assert_passes("distributed_linear_checks", check, size, CHECKS)

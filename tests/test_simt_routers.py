# SPDX-License-Identifier: Apache-2.0
"""The kernels of csrc/routers/route_experts.cu on the emulated machine: every read and write checked, under several schedules,
and the result the reference's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fused_topk.backends import cuda, reference
from fused_topk.layout import router_launch
from fused_topk.problem import RouterProblem, RouterTopK
from fused_topk.rows import LogitRows
from oracle import DTYPES
from routing import assert_same, empty_result, random_problem, route
from rows import packed, random_logits, random_mask, shifted
from simt import build
from simt.emulate import emulated, replacing
from simt.launch import SCHEDULES, Array

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


def run(p: RouterProblem, index_dtype: torch.dtype = torch.int64, **how) -> RouterTopK:
    """What the kernel makes of CPU tensors, with all that the machine checks."""
    out = empty_result(p, index_dtype)
    inputs = {name: x for name, x in (*p.rows._asdict().items(), ("bias", p.bias)) if isinstance(x, torch.Tensor)}
    arrays = [*(Array(name, x, "input") for name, x in inputs.items())]
    arrays += [Array(name, x, "output") for name, x in out._asdict().items()]
    with emulated(arrays, **how) as outcomes:
        cuda.prepare_router(p, torch.device("cpu"))(p.rows, p.bias, out)
    outcomes[-1].check()
    return out


def check(p: RouterProblem, **how) -> None:
    assert_same(run(p, **how), route(reference, p), p)

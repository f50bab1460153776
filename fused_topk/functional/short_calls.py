# SPDX-License-Identifier: Apache-2.0
"""The short way of a call on CPU tensors: from the arguments to the result in one call of the native code.

For a short row, looking at the arguments in Python takes longer than the row. A public function asks `topk()` or
`full_rows()` first. They return None unless a call with the same layout and the same options has passed all checks before
and `keep_topk()` or `keep_full_rows()` has kept its plan. csrc/cpu/short_calls.cpp says what they look at. Not for calls
that torch.compile traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends import cpu
from ..operators.dispatch import keys_at_run_time
from ..plans import FullRowPlan, TopkPlan


def _serves_no_call(*arguments: Any) -> None:
    return None


_calls = cpu.short_calls(keys_at_run_time())
# (values, logits, k, dim, temperature, mask, normalize, backend, out), as the user gave them.
topk: Callable[..., Any] = _serves_no_call if _calls is None else _calls.topk
# (values, logits, dim, temperature, dtype, backend)
full_rows: Callable[..., Any] = _serves_no_call if _calls is None else _calls.full_rows


# A result of at most this many elements is made like a tensor, which takes a third less time than by its size and dtype.
_MOST_ELEMENTS = 1024


# By dtype: what all such tensors are views of, so that they need no memory of their own.
_memory: dict[torch.dtype, Tensor] = {}


def _result(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    elements = math.prod(shape)
    if elements > _MOST_ELEMENTS:
        return shape, dtype
    memory = _memory.get(dtype)
    if memory is None:
        memory = torch.empty(_MOST_ELEMENTS, dtype=dtype, device="cpu")
    view = memory[:elements].view(shape)
    # A mode may make something else of tensors.
    if type(view) is not Tensor or not view.is_cpu:
        return shape, dtype
    _memory[dtype] = memory
    return view


def keep_topk(plan: TopkPlan, *arguments: Any) -> None:
    """Lets topk() serve calls with such arguments, those of topk() without `out`, by the plan, if it is a native one."""
    if _calls is not None and isinstance(plan.start, cpu.PreparedTopk):
        _calls.keep_topk(*arguments, plan.start.native, [_result(*field) for field in plan.result])


def keep_full_rows(plan: FullRowPlan, *arguments: Any) -> None:
    """Lets full_rows() serve calls with such arguments."""
    if _calls is not None and isinstance(plan.start, cpu.PreparedFullRows):
        results = [] if plan.is_alike else [_result(plan.shape, plan.dtype)]
        _calls.keep_full_rows(*arguments, plan.start.native, results)

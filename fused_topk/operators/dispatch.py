# SPDX-License-Identifier: Apache-2.0
"""The library that the operators are in, and which calls torch's dispatcher must see."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..tracing import is_traced, is_traced_by_dynamo

library = torch.library.Library("fused_topk", "DEF")


def register(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any] = lambda *arguments: None,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Implements a defined operator: how it is computed, what it returns for fake tensors, and its gradient."""
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fused_topk::{name}", fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(f"fused_topk::{name}", backward, setup_context=setup_context, lib=library)


# A private function of torch. Without it the Functions of transforms.py take every call except those that torch.compile traces.
# They are right for every call, only slower.
_are_transforms_active: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: not is_traced()
)


def transform_is_active() -> bool:
    """Whether a transform of torch.func is under way, or may be."""
    return _are_transforms_active()


def _keys(*names: str) -> int:
    sets = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr() for name in names)
    return functools.reduce(operator.or_, sets)


try:
    # All of the dispatcher's keys but those that every dense CPU or CUDA tensor, or every thread, has. Each of them stands for
    # something that must see the call: a transform, a mode, a tracer, a subclass, a pending negation.
    _OTHER_TENSOR_KEYS = ~_keys(
        "CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA", "ADInplaceOrView"
    )
    _OTHER_THREAD_KEYS = ~_keys("BackendSelect", "ADInplaceOrView")
    _keys_of_tensor = torch._C._dispatch_keys
    _keys_of_thread = torch._C._dispatch_tls_local_include_set
    _keys_of_tensor(torch.empty(0, device="cpu")).raw_repr(), _keys_of_thread().raw_repr(), forward_ad._current_level
    _sees_keys = True
except (AttributeError, TypeError):
    # This version of torch has other private names. Every call then goes through the dispatcher.
    _sees_keys = False


def need_dispatcher(logits: Tensor, *others: Tensor | None) -> bool:
    """Whether a call with these tensors must go through torch: for gradients, torch.compile, vmap, a mode and the like.

    If not, the operator's implementation may be called directly: the dispatcher costs more than a short row.
    """
    if (
        not _sees_keys
        or is_traced_by_dynamo()
        or forward_ad._current_level >= 0
        or _keys_of_thread().raw_repr() & _OTHER_THREAD_KEYS
        # Written out for the one tensor that every call has, because a call of a short row takes 5 µs.
        or (logits.requires_grad and torch.is_grad_enabled())
        or _keys_of_tensor(logits).raw_repr() & _OTHER_TENSOR_KEYS
    ):
        return True
    for tensor in others:
        if tensor is not None and (
            (tensor.requires_grad and torch.is_grad_enabled())
            or _keys_of_tensor(tensor).raw_repr() & _OTHER_TENSOR_KEYS
        ):
            return True
    return False


def way_of_call(
    direct: Callable[..., Any], operator: Callable[..., Any], transform: Callable[..., Any], *tensors: Tensor | None
) -> Callable[..., Any]:
    """The shortest way of a call with these tensors, the logits first: the implementation itself, the operator, or the Function
    that transforms of torch.func see."""
    if transform_is_active():
        return transform
    return operator if need_dispatcher(*tensors) else direct  # type: ignore[arg-type]

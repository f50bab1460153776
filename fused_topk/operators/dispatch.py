# SPDX-License-Identifier: Apache-2.0
"""Which calls torch's dispatcher must see."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..tracing import is_traced, is_traced_by_dynamo

# A private function of torch. Without it operators take every call except those that torch.compile traces as one
# under a transform. That is right for every call, only slower.
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


def is_seen_by_torch(*tensors: Tensor) -> bool:
    """Whether something of torch but autograd must see a call with these tensors: a tracer, a mode, a subclass and the like."""
    return (
        not _sees_keys
        or is_traced_by_dynamo()
        or forward_ad._current_level >= 0
        or bool(_keys_of_thread().raw_repr() & _OTHER_THREAD_KEYS)
        or any(_keys_of_tensor(tensor).raw_repr() & _OTHER_TENSOR_KEYS for tensor in tensors)
    )


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd must see the call."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

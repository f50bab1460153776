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

# Whether a transform of torch.func is under way, or may be. A private function of torch: without it operators take every call except
# those that torch.compile traces as one under a transform. That is right for every call, only slower.
transform_is_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: not is_traced())


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


def is_seen_by_torch(*tensors: Tensor | None) -> bool:
    """Whether something of torch but autograd must see a call with these tensors: a tracer, a mode, a subclass and the like."""
    if not _sees_keys or is_traced_by_dynamo() or forward_ad._current_level >= 0:
        return True
    # A loop, because any() of a generator would show in a call of a short row, which takes 5 µs.
    keys = _keys_of_thread().raw_repr() & _OTHER_THREAD_KEYS
    for tensor in tensors:
        if tensor is not None:
            keys |= _keys_of_tensor(tensor).raw_repr() & _OTHER_TENSOR_KEYS
    return bool(keys)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd must see the call."""
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return torch.is_grad_enabled()
    return False


def need_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors must go through torch: for gradients, torch.compile, vmap, a mode and the like. If not, the
    operator's implementation may be called directly: the dispatcher costs more than a short row."""
    return is_seen_by_torch(*tensors) or wants_gradient(*tensors)

# SPDX-License-Identifier: Apache-2.0
"""Which code runs a request: the CUDA kernels, the native CPU kernel, or the reference in torch operations."""

from __future__ import annotations

from types import ModuleType

import torch

from ..layout.router_launch import MOST_CHOSEN, MOST_EXPERTS
from ..layout.topk_choice import MAX_K
from ..rows import DTYPES, named
from . import cpu, cuda, reference

_BACKENDS: dict[str, ModuleType] = {"cuda": cuda, "cpu": cpu, "reference": reference}
NAMES = tuple(_BACKENDS)
REQUESTS = (None, *NAMES)  # what `backend` may be


def available(device: torch.device | None = None) -> dict[str, str | None]:
    """For each backend None if it works here, else the cause and the remedy in one sentence. GPUs differ: with `device` the
    answer is about that one, without it about the one that fits best."""
    return {name: backend.unavailable(device) for name, backend in _BACKENDS.items()}


def pick(device: torch.device, dtype: torch.dtype, k: int, requested: str | None) -> str:
    """The name of the backend that serves logits of that dtype on that device, and that `k`. An error where the requested one does
    not."""
    if requested is None:
        backend = _BACKENDS.get(device.type)
        works = backend is not None and backend.supports(dtype, k) and backend.unavailable(device) is None
        return device.type if works else "reference"
    if requested == "reference":
        return requested
    backend = _BACKENDS[requested]
    if device.type != requested:
        raise ValueError(
            f"`backend` must fit the device of `logits`, got backend={requested!r} with logits on {device}; "
            "move the logits or leave backend=None"
        )
    cause = backend.unavailable(device)
    if cause is not None:
        raise RuntimeError(f"`backend`={requested!r} does not work here: {cause}")
    if not backend.supports(dtype, k):
        limit, given = (f" and k <= {MAX_K}", f" and k={k}") if requested == "cuda" and k > MAX_K else ("", "")
        dtypes = [x for x in DTYPES if backend.supports(x, 1)]
        raise ValueError(
            f"`backend`={requested!r} takes {named(dtypes, 'and')} logits{limit}, got {dtype}{given}; "
            "leave backend=None to fall back to torch operations"
        )
    return requested


def pick_router(device: torch.device, dtype: torch.dtype, experts: int, k: int, requested: str | None) -> str:
    """The backend that routes rows of so many experts to k of them. Errors as those of pick()."""
    backend = pick(device, dtype, 1, requested)
    if backend == "reference" or (experts <= MOST_EXPERTS and k <= MOST_CHOSEN):
        return backend
    if requested is None:
        return "reference"
    raise ValueError(
        f"`backend`={requested!r} takes at most {MOST_EXPERTS} experts and k <= {MOST_CHOSEN}, got {experts} and k={k}; "
        "leave backend=None to fall back to torch operations"
    )

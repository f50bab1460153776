# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the package. No other module reads them."""

from __future__ import annotations

import os
from pathlib import Path


def kernel_cache_dir() -> Path | None:
    """The folder of compiled CUDA kernels: `FUSED_TOPK_CACHE_DIR`, or `fused_topk/kernels` in the user's cache folder.

    The folder may not exist and may not be writable: the caller creates it and handles a failure. None if the user has
    no home folder. A shared folder such as /tmp is no substitute: another user could create the cache there first.
    """
    chosen = os.environ.get("FUSED_TOPK_CACHE_DIR")
    try:
        if chosen:
            return Path(chosen).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG specification says to ignore a relative path: it would mean another folder in each working directory.
        return (base if base.is_absolute() else Path.home() / ".cache") / "fused_topk" / "kernels"
    except RuntimeError:
        # There is no home folder. A container's user id without a passwd entry has none.
        return None


def print_choice() -> bool:
    """Whether each new choice of kernel is printed once: `FUSED_TOPK_PRINT_CHOICE` is neither unset, empty nor 0."""
    return os.environ.get("FUSED_TOPK_PRINT_CHOICE", "") not in ("", "0")


def check_distributed() -> bool:
    """Whether every call of fused_topk.distributed on GPUs first compares the calls of all processes, by a second collective:
    `FUSED_TOPK_CHECK_DISTRIBUTED` is neither unset, empty nor 0."""
    return os.environ.get("FUSED_TOPK_CHECK_DISTRIBUTED", "") not in ("", "0")


_VLLM = "FUSED_TOPK_VLLM"


def choose_in_vllm() -> bool:
    """Whether vLLM's plugin is to do anything: `FUSED_TOPK_VLLM` is neither unset, empty nor 0."""
    return os.environ.get(_VLLM, "") not in ("", "0")


def set_choose_in_vllm(is_on: bool) -> None:
    """Sets or removes `FUSED_TOPK_VLLM`, for the processes that this one starts."""
    if is_on:
        os.environ[_VLLM] = "1"
    else:
        os.environ.pop(_VLLM, None)

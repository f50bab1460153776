# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the package. No other module reads them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def kernel_cache_dir() -> Path:
    """Folder of the compiled CUDA kernels: `FUSED_TOPK_CACHE_DIR`, or `fused_topk/kernels` in the user's cache folder.

    The folder need not exist, nor be writable: the caller makes it and copes where it cannot.
    """
    chosen = os.environ.get("FUSED_TOPK_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return _user_cache_dir() / "fused_topk" / "kernels"


def print_choice() -> bool:
    """Whether to print each new choice of kernel once: `FUSED_TOPK_PRINT_CHOICE` is set, and neither empty nor 0."""
    return os.environ.get("FUSED_TOPK_PRINT_CHOICE", "") not in ("", "0")


def _user_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        # A container's bare user id has no home. Its own folder, so that users of one machine do not collide.
        return Path(tempfile.gettempdir()) / f"cache-{os.getuid() if hasattr(os, 'getuid') else 'user'}"

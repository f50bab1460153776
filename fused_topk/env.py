# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the package. No other module reads them."""

from __future__ import annotations

import os
from pathlib import Path


def kernel_cache_dir() -> Path | None:
    """Folder of the compiled CUDA kernels: `FUSED_TOPK_CACHE_DIR`, or `fused_topk/kernels` in the user's cache folder.

    The folder need not exist, nor be writable: the caller makes it and copes where it cannot. None where there is no home:
    a name that others can guess, in a folder that all share, is theirs to take first.
    """
    chosen = os.environ.get("FUSED_TOPK_CACHE_DIR")
    try:
        if chosen:
            return Path(chosen).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # A relative one is to be ignored, says the XDG specification: it would be another one in each working folder.
        return (base if base.is_absolute() else Path.home() / ".cache") / "fused_topk" / "kernels"
    except RuntimeError:
        # No home, as for a container's bare user id.
        return None


def print_choice() -> bool:
    """Whether to print each new choice of kernel once: `FUSED_TOPK_PRINT_CHOICE` is set, and neither empty nor 0."""
    return os.environ.get("FUSED_TOPK_PRINT_CHOICE", "") not in ("", "0")

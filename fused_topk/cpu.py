# SPDX-License-Identifier: Apache-2.0
"""placeholder until the native kernel lands (to be overwritten by the owner of this file; needs `supports(dtype, k)`)"""
from __future__ import annotations
import torch
def unavailable() -> str | None:
    return "the native extension is not built"
def supports(dtype: torch.dtype, k: int) -> bool:
    return False

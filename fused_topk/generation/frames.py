# SPDX-License-Identifier: Apache-2.0
"""Who has called a function of this package. transformers' loops are recognised by their frames."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from torch import nn

# The code objects of the functions that is_of_a_loop() has found, by id: to compare two of them takes long. An object is kept
# here, so that no other one gets its id.
_codes: dict[int, CodeType] = {}


def is_of_a_loop(frame: FrameType) -> bool:
    """Whether the frame is a function of transformers that runs a decoding loop or a part of one.

    Such a function has a parameter `generation_config`. Functions of users do not count, nor do the processors and criteria that
    a loop calls.
    """
    code = frame.f_code
    if id(code) in _codes:
        return True
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    is_own = str(frame.f_globals.get("__name__")).startswith("transformers.") and "generation_config" in parameters
    if is_own:
        _codes[id(code)] = code
    return is_own


def variables(frame: FrameType) -> dict[str, Any]:
    """The local variables of the function in the frame."""
    found = frame.f_locals
    copied = dict(found)
    # Before Python 3.13, f_locals is a dict that the frame keeps. It would keep tensors alive that the function drops.
    if type(found) is dict:
        found.clear()
    return copied


def caller_of_module() -> Any:
    """The frame that has called a module. For a hook of the module, or a method of ours in the place of the module's own."""
    frame: Any = sys._getframe(1)
    while frame.f_globals is nn.modules.module.__dict__ or frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
    return frame

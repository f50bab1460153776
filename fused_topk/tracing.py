# SPDX-License-Identifier: Apache-2.0
"""Whether torch traces the code that asks. The package asks nothing else: see :func:`is_traced`."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Of torch.compile alone, for short calls. What else traces shows in its tensors and in the thread's keys.
is_traced_by_dynamo: Callable[[], bool] = torch.compiler.is_dynamo_compiling

# A private name of torch: how many modes of this thread see each operation.
_number_of_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the code that asks.

    torch.compiler.is_compiling() is true in all threads while one of them compiles. What traces without dynamo has a mode in its
    own thread.
    """
    return is_traced_by_dynamo() or (torch.compiler.is_compiling() and _number_of_modes() > 0)

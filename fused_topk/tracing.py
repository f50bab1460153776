# SPDX-License-Identifier: Apache-2.0
"""Whether torch.compile or torch.export traces the running code."""

from __future__ import annotations

from collections.abc import Callable

import torch

# True while torch.compile traces. It is quicker than is_traced(), but does not see other tracers.
is_traced_by_dynamo: Callable[[], bool] = torch.compiler.is_dynamo_compiling

# A private function of torch: the number of dispatch modes that are active in this thread.
_number_of_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the running code.

    torch.compiler.is_compiling() is true in every thread while one thread compiles. So a second sign is needed: a tracer other
    than dynamo has a dispatch mode in its own thread.
    """
    return is_traced_by_dynamo() or (torch.compiler.is_compiling() and _number_of_modes() > 0)

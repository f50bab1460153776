# SPDX-License-Identifier: Apache-2.0
"""How a logits processor of transformers becomes an edit of each step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..choice.edit import Edit, NotSparse
from ..choice.rows import Rows


class Step(NamedTuple):
    """What an adapter may look at."""

    input_ids: Tensor  # int64 [R, length]
    rows: Rows  # the model's logits
    edits: Sequence[Edit]  # of the processors before
    are_log_probs: bool
    # By the id() of a processor, what the stock operations of this step run in its place. For processors that call a user's
    # function, which must be called only once in a step.
    answered: dict[int, Any]
    # An adapter that has called a processor passes it to this function: the processor may have changed its attributes.
    on_call: Callable[[Any], None]


# Returns a processor's edit in a step; None if it changes nothing.
Adapter = Callable[[Step], "Edit | None"]
# For each class of processor a function that makes its adapter, or None for a processor that cannot be expressed as edits; and
# the attributes that the class has in any version. A processor with any other attribute is unknown.
Adapters = dict[type, tuple[Callable[[Any], "Adapter | None"], frozenset[str]]]


def is_as_published(kind: type) -> bool:
    """Whether the class runs the code of the module that defines it, and nobody has patched its __call__."""
    code = getattr(kind.__call__, "__code__", None)
    return code is not None and code.co_filename == getattr(sys.modules.get(kind.__module__), "__file__", None)


@functools.cache
def _leaves_out_foreign(kind: Any, argument: Any) -> bool:
    """Whether a processor leaves out tokens of the text that the logits have no place for, as later versions do."""
    try:
        # On a CPU, whatever the user's default device: after a read out of bounds a process cannot use its GPU any more.
        with torch.device("cpu"):
            kind(argument)(torch.tensor([[2]]), torch.zeros(1, 1))
    except (IndexError, RuntimeError):
        return False
    return True


def text_check(kind: type, argument: Any) -> Callable[[Step], None]:
    """A check of each step. It raises NotSparse where a text has tokens for which the processor may raise."""
    is_lenient = _leaves_out_foreign(kind, argument)
    is_first = True

    def check(step: Step) -> None:
        nonlocal is_first
        ids = step.input_ids
        # Chosen tokens are in the vocabulary. So on a GPU only the first step of a call looks, which waits for the device.
        if is_first or not ids.is_cuda:
            is_first = False
            is_foreign = ids < 0 if is_lenient else (ids < 0) | (ids >= step.rows.vocab_size)
            if bool(is_foreign.any()):
                raise NotSparse("a text with tokens outside the vocabulary")

    return check

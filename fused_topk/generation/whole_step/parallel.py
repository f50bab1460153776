# SPDX-License-Identifier: Apache-2.0
"""Calls of tensor-parallel models: every process must run them in whole steps, or none.

Each process decides from its own options, memory and clock how a call runs. If they decided differently, some would wait for
collectives that others never call. So a process that could serve a call asks the others first, with a text of all that its
collectives depend on (:meth:`search.Search.told`). A process that does not serve the call, for whatever reason, answers that it
refuses. Then all processes learn that, and run stock's generate().

After that nothing is decided from what may differ. Tokens are chosen by collectives, whose results are the same bit for bit on all
processes, or by the first process. The number of steps, the room and the end of texts follow from tokens, and from options that the
processes have compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.collective import all_gather
from .. import tensor_parallel
from ..lm_head import sharded_head_of
from .criteria import Criteria
from .given_cache import cache_of, is_used
from .plan import Plan
from .reasons import Declined, unknown_inputs

# What a process says that does not serve a call.
_REFUSED = 0


class Together:
    """The processes of a tensor-parallel model, in one call. `forget` drops what is kept of the model."""

    def __init__(self, group: Any, device: torch.device, forget: Callable[[], None]) -> None:
        self.group, self._device, self._forget = group, device, forget
        # Whether all processes know that the call is not served, or is.
        self.is_over = False

    @staticmethod
    def of(model: Any, forget: Callable[[], None]) -> Together | None:
        """None for a model that is not tensor-parallel, or whose processes cannot ask each other."""
        head: Any = sharded_head_of(model)
        part = None if head is None else tensor_parallel.part_of(head)
        return None if part is None else Together(part.group, head.weight.device, forget)

    def ask(self, what: str) -> None:
        """Asks the other processes whether they go on in the same way. A collective, after which all raise Declined if one does not.

        Args:
            what: a text of all that the collectives to come depend on.
        """
        everyone = self._told(int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "little") + 1)
        if len(everyone) > 1:
            self.is_over = True
            if _REFUSED not in everyone:
                # The steps that they keep may differ. So all drop them.
                self._forget()
            raise Declined("a call that is not the same on all processes")

    def refuse(self) -> None:
        """Tells the other processes that this one does not serve the call. A collective, which they call to ask."""
        if not self.is_over:
            self.is_over = True
            self._told(_REFUSED)

    def _told(self, said: int) -> set[int]:
        everyone: list[list[int]] = all_gather(torch.tensor([[said]], device=self._device), self.group).tolist()
        return {number for each in everyone for number in each}


def refuse(model: Any) -> None:
    """Tells the other processes of a tensor-parallel model that this one serves a call by stock's generate()."""
    together = Together.of(model, lambda: None)
    if together is not None:
        together.refuse()


def agreed(reason: str | None, twin: Any) -> str | None:
    """Why the trial of a tensor-parallel model has failed, here or on another process; None if it has not. A collective."""
    part = twin.get_output_embeddings().part
    if all_say(reason is None, next(twin.parameters()).device, part.group):
        return None
    return reason or "a trial that has failed on another process"


def reason_against(plan: Plan, criteria: Criteria, inputs: Mapping[str, Any]) -> str | None:
    """Why a tensor-parallel model's call is not served; None if it is. Processes may have different reasons."""
    if plan.asks_host:
        # It could raise in one process.
        return "a function of the user's, or a grammar, in a tensor-parallel model"
    if criteria.have_clocks or criteria.read_text:
        # Each process would decide by itself when texts end.
        return "max_time or stop_strings in a tensor-parallel model"
    unknown = unknown_inputs(inputs, False)
    if unknown:
        return f"model input {unknown[0]} of a tensor-parallel model"
    return "a cache that has been used, of a tensor-parallel model" if is_used(cache_of(inputs)) else None


def all_say(is_so: bool, device: torch.device, group: Any) -> bool:
    """Whether `is_so` is true on all processes. A collective, which waits for the device."""
    return bool(all_gather(torch.tensor([[int(is_so)]], device=device), group).all())


def of_first(tensor: Tensor, group: Any) -> Tensor:
    """The first process's tensor, whose shape is the same on all processes; without a group the tensor itself. A collective."""
    if group is None:
        return tensor
    tensor = tensor.contiguous()
    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    return tensor

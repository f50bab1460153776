# SPDX-License-Identifier: Apache-2.0
"""Calls of tensor-parallel models: every process must run them in whole steps, or none.

Each process decides from its own options, memory and clock how a call runs. If they decided differently, some would wait for
collectives that others never call. So a process that could serve a call asks the others first, with a text of all that its
collectives depend on (:meth:`search.Search.told`). A process that does not serve the call, for whatever reason, asks the question of
transformers' loop instead. Then all processes learn that, and run transformers' loop (:class:`ShardedHead`).

After that nothing is decided from what may differ. Tokens are chosen by collectives, whose results are the same bit for bit on all
processes, or by the first process. The number of steps, the room and the end of texts follow from tokens, and from options that the
processes have compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..edits.plan import Plan
from ..lm_head import sharded_head_of
from ..tensor_parallel.group import all_say
from ..tensor_parallel.sharded_head import ShardedHead
from .criteria import Criteria
from .given_cache import cache_of, is_used
from .reasons import Declined, unknown_inputs


class Together:
    """The processes of a tensor-parallel model, in one call.

    Args:
        head: its LM head.
        forget: drops what is kept of the model.
    """

    def __init__(self, head: ShardedHead, forget: Callable[[], None]) -> None:
        self._head = head
        self._forget = forget

    @staticmethod
    def of(model: Any, forget: Callable[[], None]) -> Together | None:
        """None for a model that is not tensor-parallel."""
        head = sharded_head_of(model)
        return None if head is None else Together(ShardedHead(model, head), forget)

    @property
    def group(self) -> Any:
        return self._head.group

    def ask(self, what: str) -> None:
        """Asks the other processes whether they go on in the same way. A collective.

        Args:
            what: a text of all that the collectives to come depend on.

        Raises:
            Declined: on all processes, if one does not.
        """
        all_ask, are_alike = self._head.propose(what)
        if all_ask and not are_alike:
            # The steps that they keep may differ. So all drop them.
            self._forget()
        if not all_ask or not are_alike:
            raise Declined("a call that is not the same on all processes")


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

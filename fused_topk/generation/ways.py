# SPDX-License-Identifier: Apache-2.0
"""Which way a generate() call runs: in whole steps, or in transformers' own loop with each choice of tokens fused that can be.

A call that is not to be fused runs as stock, and does not come here (:mod:`hooks`). A step of transformers' loop that cannot
be fused runs stock operations on the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..problem import TopK
from .calls import Call, running, running_call
from .interception.session import Session
from .request import Options
from .statistics import count_not_whole
from .whole_step import OF_FEW_LOGITS, Asked, Checked, Declined, Loop, Once, TopKRecord, reads_few_logits

# Runs generate(), given the call, the loop to run (None for that of transformers) and the streamer (None for none).
Run = Callable[[Call, "Loop | None", Any], Any]


def run_call(
    model: nn.Module,
    options: Options,
    run: Run,
    streamer: Any,
    asked: Asked,
    is_cache_given: bool,
    reason: str | None = None,
) -> tuple[Any, list[TopK]]:
    """Runs a generate() call. Returns its result and the record of its steps.

    Args:
        run: see above. With a loop it may raise Declined. Then it runs again, without a loop.
        streamer: the user's; None for none.
        asked: what the call asks for, as far as is known before generate() prepares it.
        is_cache_given: whether the user has a cache that is to hold what the call reads.
        reason: why no step of transformers' loop can be fused; None as far as is known.
    """
    outer = running_call()
    if outer is not None and outer.model is not model and any(each is model for each in outer.model.modules()):
        outer.has_parts = True
    # By default the choice from few logits is left to stock operations, which are as quick.
    is_left = options.whole_step is None and not options.topk_per_step and reads_few_logits(model, asked)
    not_whole = None
    if is_left and asked.num_beams == 1:
        not_whole = OF_FEW_LOGITS
    elif options.whole_step is not False:
        once = None if streamer is None else Once(streamer)
        try:
            return _in_whole_steps(model, options, run, once, is_cache_given)
        except Declined as declined:
            not_whole = str(declined)
        if once is not None:
            once.restart()
            streamer = once
    session = Session(model, options, reason or (OF_FEW_LOGITS if is_left else None))
    try:
        with running(session):
            return run(session, None, streamer), session.topk
    finally:
        # A model whose generate() calls the generate() of a part writes no text by itself: the part's calls are counted.
        if not_whole is not None and not session.has_parts:
            count_not_whole(not_whole, options.whole_step)


def _in_whole_steps(
    model: nn.Module, options: Options, run: Run, streamer: Once | None, is_cache_given: bool
) -> tuple[Any, list[TopK]]:
    checked = Checked.of(model, options.whole_step is None)
    call = Call(model)
    with running(call):
        topk = TopKRecord(options.topk_per_step, []) if options.topk_per_step else None
        result = run(call, Loop(checked, options.whole_step, streamer, is_cache_given, topk), streamer)
        return result, [] if topk is None else topk.steps

# SPDX-License-Identifier: Apache-2.0
"""How much memory of torch's allocator a call holds."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from torch.profiler import ProfilerActivity, profile


@contextmanager
def live_bytes() -> Iterator[SimpleNamespace]:
    """After the block `most` is the most that is held at a time of what the block allocates."""
    live = SimpleNamespace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield live
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live.most = max(itertools.accumulate(event.nbytes() for event in events))

# SPDX-License-Identifier: Apache-2.0
"""The steps that are kept of a model, one for each shape."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .compiled import Codes
from .head import Head
from .kept import KeptStep, NotKept
from .shape import Shape

# Limits for one model. Guesses: a service has few shapes, and the cache of one shape may be as large as the model.
MAX_SHAPES = 8
MAX_BYTES = 1 << 32
# The stores of tensor-parallel models.
_with_collectives: weakref.WeakSet[Store] = weakref.WeakSet()


class Store:
    """The steps that are kept of one model."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Shape, KeptStep] = OrderedDict()
        self._codes = Codes()
        self._used: set[Shape] = set()
        # How often the step of a shape could not be made, and why.
        self._failed: dict[Shape, tuple[int, str]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def step(self, twin: Any, head: Head | None, shape: Shape, group: Any = None) -> Iterator[KeptStep]:
        """Lends one call the step of a shape. Raises NotKept where another call uses it, or earlier calls could not make it."""
        with self._lock:
            failures, reason = self._failed.get(shape, (0, ""))
            # Another thread may have broken a capture. To compile takes too long to try it again.
            if failures >= (1 if shape.way.is_compiled else 2):
                raise NotKept(reason)
            if shape in self._used:
                raise NotKept("another call of the same shape runs")
            self._used.add(shape)
            if group is not None:
                _with_collectives.add(self)
            step = self._kept.pop(shape, None)
        try:
            step = KeptStep(twin, head, shape, self._codes, group) if step is None else step
            try:
                yield step
            except NotKept as error:
                self.note(shape, str(error))
                raise
            # An error of this call, its processors or its streamer. The step can be kept: the next call writes all its tensors anew.
            except BaseException:
                self._keep(shape, step)
                raise
            self._keep(shape, step)
        finally:
            self._used.discard(shape)

    def note(self, shape: Shape, reason: str) -> None:
        """Notes that the step of a shape could not be made."""
        with self._lock:
            self._failed[shape] = self._failed.get(shape, (0, ""))[0] + 1, reason

    def release(self) -> None:
        """Drops steps that hold collectives: NCCL destroys no communicator before the graphs that use it are gone."""
        with self._lock:
            if self in _with_collectives:
                self._kept.clear()

    def made(self, shape: Shape) -> tuple[Any, ...]:
        with self._lock:
            step = self._kept.get(shape)
            return self._failed.get(shape, (0,))[0], shape in self._used, None if step is None else step.made

    def _keep(self, shape: Shape, step: KeptStep) -> None:
        step.rest()
        with self._lock:
            self._kept[shape] = step
            while len(self._kept) > MAX_SHAPES or (
                len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > MAX_BYTES
            ):
                self._kept.popitem(last=False)


@atexit.register
def _release_all() -> None:
    for store in list(_with_collectives):
        store.release()

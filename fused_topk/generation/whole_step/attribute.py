# SPDX-License-Identifier: Apache-2.0
"""What is kept for a model, as an attribute of the model.

What is kept refers to all that the model refers to. That may be the model itself: users keep methods of a model as its attributes. A
table with weak keys would hold such a model for ever. An attribute makes a cycle, which Python collects.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

# The name of the attribute.
KEPT = "_fused_topk_whole_step"


class OfModels:
    """A mapping from models to what is kept for each."""

    def get(self, model: Any) -> Any:
        attribute = vars(model).get(KEPT)
        # A shallow copy of the model has the attribute of the model itself. Any other copy has None.
        return attribute.kept if isinstance(attribute, _Attribute) and attribute.model() is model else None

    def __setitem__(self, model: Any, kept: Any) -> None:
        # setattr() of a module registers some values as parts of the model.
        vars(model)[KEPT] = _Attribute(model, kept)

    def pop(self, model: Any) -> None:
        vars(model).pop(KEPT, None)

    def forgetting(self, model: Any) -> Callable[[], None]:
        """A function that forgets what is kept for the model, and may be called at any time: it does not change the model's attributes."""
        ref = weakref.ref(model)

        # With all names as arguments: at the end of the process the module may have none any more.
        def forget(name: str = KEPT, kind: Any = _Attribute, attributes_of: Any = vars) -> None:
            model = ref()
            attribute = None if model is None else attributes_of(model).get(name)
            if isinstance(attribute, kind):
                attribute.kept = None

        return forget


class _Attribute:
    def __init__(self, model: Any, kept: Any) -> None:
        self.model = weakref.ref(model)
        self.kept = kept

    def __reduce__(self) -> Any:
        """A copy is None. So a pickled model can be read where this package is not installed."""
        return type(None), ()

# SPDX-License-Identifier: Apache-2.0
"""Softmax + top-k that reads the logits once, on CUDA and CPU tensors."""

from . import functional
from .functional import *  # noqa: F403 - the public functions, which functional/__init__.py lists
from .problem import Kept, RouterTopK, Sample, TargetTopK, TopK, TopKLogits, TopKState

__version__ = "0.1.0"

__all__ = ["Kept", "RouterTopK", "Sample", "TargetTopK", "TopK", "TopKLogits", "TopKState", "__version__"]
__all__ += functional.__all__

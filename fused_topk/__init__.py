# SPDX-License-Identifier: Apache-2.0
"""Softmax + top-k that reads the logits once, on CUDA and CPU tensors."""

from . import functional, gone
from .functional import *  # noqa: F403 - the public functions, which functional/__init__.py lists
from .problem import Kept, RouterTopK, Sample, TokenLogprobs, TopK, TopKLogits, TopKState

__version__ = "0.2.0"

__all__ = ["Kept", "RouterTopK", "Sample", "TokenLogprobs", "TopK", "TopKLogits", "TopKState", "__version__"]
__all__ += functional.__all__

__getattr__ = gone.attributes_of(__name__)

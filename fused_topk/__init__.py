# SPDX-License-Identifier: Apache-2.0
"""Softmax + top-k that reads the logits once, on CUDA and CPU tensors."""

from importlib.metadata import PackageNotFoundError, version

from .functional import beam_topk, log_softmax_topk, softmax_topk, topk
from .problem import TopK

try:
    __version__ = version("fused_topk")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+unknown"

__all__ = ["TopK", "__version__", "beam_topk", "log_softmax_topk", "softmax_topk", "topk"]

# SPDX-License-Identifier: Apache-2.0
"""transformers' own decoding loops with a fused choice of tokens: the way of calls that whole steps do not serve.

The docstring of `fused_topk.generation` has the idea. Nothing is added to this package: new features go to :mod:`whole_step`.
"""

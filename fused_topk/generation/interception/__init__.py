# SPDX-License-Identifier: Apache-2.0
"""transformers' own decoding loops, whose choice of tokens is fused: the way of calls that whole steps do not serve.

The docstring of `fused_topk.generation` has the idea. It is kept as it is: what is new goes to :mod:`whole_step`.
"""

# SPDX-License-Identifier: Apache-2.0
"""Decides whether a call of generate() can run in whole steps, and holds its loops.

Whole steps: a generate() call in which the beams of a sequence share their prompt, and nothing of the cache is copied.

transformers' loops compute and keep the prompt once for each beam, and copy the whole cache at every step, in the order of
the beams that go on. Here a call runs on one row a sequence for the prompt, and on a cache whose entries stay where they
were written; a table of ancestors tells which of them are a beam's past. What is asked of transformers is public, but for
two names that `generation/__init__.py` lists: a Cache with layers of its own (:mod:`cache`), a function of
AttentionInterface and of AttentionMaskInterface (:mod:`attention`), and custom_generate (:mod:`entry`), through which
generate() prepares the call as always.

    reasons, criteria    what is served: everything else runs on the fused path, and stats() counts why
    trial                whether a model is: it is tried on a few tokens, once
    twin                 a copy of the model's modules, of the same weights, so that the model itself is not touched
    attribute    what is kept of a model, which goes with the model
    cache, ancestry, attention, decoder    the forward pass, of encoder-decoders on what their encoder has read once
    head     the choice from hidden states, on the CPU, so that logits never exist
    scan     the choice from logits to which the call's processors are applied
    kept, compiled, graphs    steps that are compiled, captured as CUDA graphs, or both, kept for later calls of the same shape
    beams, texts, search, results    what a search holds, the loops, what is returned
    streaming    a streamer of a call that may run twice

Sequences are those of transformers, with ties to the smaller index. The `past_key_values` of a result, in later
versions its `cache`, is None: the cache is not one that a model can go on with.
"""

from .entry import Loop, drop
from .reasons import Declined, decline_for, of_arguments
from .streaming import Once

__all__ = ["Declined", "Loop", "Once", "decline_for", "drop", "of_arguments"]

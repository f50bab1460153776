# SPDX-License-Identifier: Apache-2.0
"""generate() calls in whole steps: the beams of a sequence share their prompt, and nothing of the cache is copied.

transformers' loops compute and keep the prompt once for each beam, and copy the whole cache at every step, in the order of
the beams that go on. Here a call runs on one row a sequence for the prompt, and on a cache whose entries stay where they
were written. A table of ancestors tells which of them are a beam's past.

The public API of transformers serves for that: a Cache with layers of its own (:mod:`cache`), a function of
AttentionInterface and of AttentionMaskInterface (:mod:`attention`), and custom_generate (:mod:`entry`), with which
generate() prepares a call as ever. `generation/__init__.py` lists the private names.

    entry                decides whether a call is served, and holds the loop
    parallel             tensor-parallel models: all processes run a call in whole steps, or none
    reasons, criteria    which calls are served: all others run stock's generate(), and stats() counts why
    trial                whether a model is served: it is tried once, on a few tokens
    traces               whether a forward pass leaves a trace; a trial leaves none
    twin                 a copy of the model's modules with the same weights, so that the model itself is not touched
    attribute            what is kept for a model, as an attribute of the model
    prompts              what a call reads, from what generate() hands to a loop, or what a model's own methods prepare
    cache, ancestry, attention, decoder    the forward pass of a decoder; the encoder of an encoder-decoder has run before
    row_form             the second form of the forward pass, with a row for each beam
    facts                what can be read from a model and its configuration
    norms                a twin's RMS norms, each as one operation
    layers               a twin's layers as compiled code, for steps on a GPU
    head                 the choice from hidden states on a CPU, for which no logits are computed
    plan, choosing       the call's processors, and the choice from logits
    given_cache          a cache of transformers that a call goes on with, or leaves for the next call
    room                 for how many new tokens there is room, which grows
    shape, kept, store, compiled, graphs    steps for later calls of the same shape: captured as CUDA graphs, or compiled
    beams, texts, search, results    the state of a search, the loops, and what is returned
    draws                what stock generate() would draw, from the user's generator

Sequences are those of transformers, with ties to the smaller index. The cache that a call returns or adds to is that of
transformers, too.
"""

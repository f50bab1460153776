# SPDX-License-Identifier: Apache-2.0
"""Hugging Face decoding that reads the vocabulary once. The only part of the package that knows transformers::

    with fused_decoding(model):                       # or enable(model) ... disable(model)
        model.generate(...)                           # unchanged: greedy, sampling, beams
    with fused_decoding(model, compile=True):         # quicker steps, for seconds in a shape's first call
    FusedTopKLogitsProcessor(top_k, ...)              # an ordinary LogitsProcessor
    TrieLogitsProcessor(TokenTrie(items, end), ...)   # another: texts must be items of a catalogue
    stats()                                           # what was served, what was not, and why
    next_token_topk, text_token_logprobs              # compact results without generate()
    with fuse_routers(model):                         # experts of a mixture are chosen by one launch, everywhere

A call goes down through these, and none of them calls one above it:

    entrance            how a user asks for whole steps, and what stands for generate() of an enabled model
    whole_step/         loops of our own: beams share their prompt, and a step can be compiled and captured
    tensor_parallel     models that are spread over processes
    processor, trie/    logits processors: four warpers in one, and a catalogue of items with the tokens that may follow a text

A call is served in whole steps, or runs stock's generate() untouched. generate() itself prepares every call, and hands it to a loop of
ours by its argument custom_generate. Where the loop finds something that it does not serve, it runs the loop that generate() would
have run, with what generate() has prepared.

Beside public API (generate, custom_generate, Cache, AttentionInterface) these private names are used:

`_sample`, `_beam_search`
    the loops that generate() would have run
`config._attn_implementation`
    to know which attention a whole step stands for
methods of a model that stock's loops call (`whole_step/reasons.py` lists them)
    to notice a model that overrides one of them
`_supports_default_dynamic_cache` of a model, before transformers has caches with states
    to notice a model whose result has a cache of a type of its own
`tp_forward` of a tensor-parallel model's modules, and `_local_tensor` of DTensor
    the closure of `tp_forward` says which part of a module a process has; a model without it, or with another closure, has no
    whole steps
"""

from .. import gone
from .entrance import FusedDecoding, disable, enable, fused_decoding
from .logprobs import next_token_topk, text_token_logprobs
from .processor import FusedTopKLogitsProcessor
from .routers import FusedRouters, fuse_routers
from .statistics import Stats, stats
from .trie.processor import TrieLogitsProcessor
from .trie.token_trie import TokenTrie

__all__ = [
    "FusedDecoding",
    "FusedRouters",
    "FusedTopKLogitsProcessor",
    "Stats",
    "TokenTrie",
    "TrieLogitsProcessor",
    "disable",
    "enable",
    "fuse_routers",
    "fused_decoding",
    "next_token_topk",
    "stats",
    "text_token_logprobs",
]

__getattr__ = gone.attributes_of(__name__)

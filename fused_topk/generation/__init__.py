# SPDX-License-Identifier: Apache-2.0
"""Hugging Face decoding that reads the vocabulary once. The only part of the package that knows transformers::

    with fused_decoding(model):                       # or enable(model) ... disable(model)
        model.generate(...)                           # unchanged: greedy, sampling, beams
    model.generate(..., custom_generate=generate)     # the same for one call
    with fused_decoding(model, whole_step=True):      # beams share their prompt, and the cache is never copied
    FusedTopKLogitsProcessor(top_k, ...)              # an ordinary LogitsProcessor
    TrieLogitsProcessor(TokenTrie(items, end), ...)   # another: texts must be items of a catalogue
    stats()                                           # what was fused, what was not, and why
    next_token_topk, topk_logprobs                    # compact results without generate()
    with fuse_routers(model):                         # experts of a mixture are chosen by one launch, everywhere

A call goes down through these, and none of them calls one above it:

    entrance, hooks     how a user asks for fused calls, and the methods of a model that notice its calls
    ways                which way a call runs: in whole steps, or in transformers' loop
    whole_step/         loops of our own: beams share their prompt, and a step can be compiled and captured
    interception/       transformers' own loop, with a fused choice of tokens wherever that is possible
    tensor_parallel/    models that are spread over processes: their logits, and their modules
    edits/              what the processors of a call do, as edits of few tokens
    trie/               a catalogue of items, and which tokens may follow a text
    choice/             how tokens are chosen from logits, with edits and warpers

How transformers' loops are served without a copy of any:

1. Outside generate() nothing changes. Inside, a forward hook marks the logits that the model returns to the loop
   (`model_logits.ModelLogits`: real logits, usable for everything). Where the loop takes the last ones in float32, it
   gets `lazy_scores.LazyScores`: a value that has not been computed. Only transformers' own loop gets lazy values.
   Processors, criteria, streamers and hooks may ask the model, too. They get plain tensors.
2. A lazy value recognises what the loops do with it: log_softmax, the processors, adding the beams' scores, reshaping,
   and last topk, argmax or softmax + multinomial. Until then nothing is computed; the last one runs `beam_topk` or
   `topk` on the model's own logits (`choice.selection`).
3. Any other operation, known or not, gets the values that the stock operations compute, and the step goes on with
   stock operations. So a change in transformers can cost speed, never a result.
4. Processors that touch few tokens become edits: those tokens are left out of the one scan by a mask, a bit for a token,
   and merged in with their new values. Only a processor of a known class with exactly the known attributes becomes an
   edit. Any other processor makes the step run the stock processors.

Beside public API (forward hooks, generate, get_compiled_call) these private names are used:

`_get_logits_processor`
    to learn the processors and the configuration of a call; without it generate() stays stock, with one warning
`_compiled_call_impl` of torch
    without it the steps of a model after model.compile() are stock, and counted
`config._attn_implementation`
    to know which attention a whole step stands for
`_update_model_kwargs_for_generation`, `_unflatten_beam_dim`, `_get_top_k_continuations`
    methods that get the logits, the scores or the cache: to notice a model that overrides one of them
`_supports_default_dynamic_cache` of a model, before transformers has caches with states
    to notice a model whose result has a cache of a type of its own
`tp_forward` of a tensor-parallel model's modules, and `_local_tensor` of DTensor
    the closure of `tp_forward` says which part of a module a process has; a model without it, or with another closure, has no
    whole steps

The loop of a tensor-parallel model gets the columns of its own process: the LM head's forward() gives them in place of
gathered logits, in an object that stands for the whole (`sharded_logits`). Lazy values choose from them by small collectives
(`sharded_rows`). Everyone else gets the whole logits, gathered on demand.

A model carries hooks while it is enabled, while a block is open, and during a call. The hooks hold no state of a call. The
options of a block are kept in a context variable, and the state of a call in its `calls.Call`.
"""

from .edits.tries import TrieLogitsProcessor
from .edits.warpers import FusedTopKLogitsProcessor
from .entrance import disable, enable, fused_decoding, generate
from .logprobs import TokenLogprobs, next_token_topk, text_topk_logprobs, topk_logprobs
from .request import FusedDecoding
from .routers import FusedRouters, fuse_routers
from .statistics import Stats, stats
from .trie.token_trie import TokenTrie

__all__ = [
    "FusedDecoding",
    "FusedRouters",
    "FusedTopKLogitsProcessor",
    "Stats",
    "TokenLogprobs",
    "TokenTrie",
    "TrieLogitsProcessor",
    "disable",
    "enable",
    "fuse_routers",
    "fused_decoding",
    "generate",
    "next_token_topk",
    "stats",
    "text_topk_logprobs",
    "topk_logprobs",
]

# SPDX-License-Identifier: Apache-2.0
"""Makes a model's generate() calls take the fused path: until disabled, or in a with block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationMixin

from .hooks import LOOKUP, FusedDecoding, Request, entered, set_enabled
from .interception.session import Options
from .statistics import tell_once
from .whole_step import drop


def _generators(model: Any) -> list[Any]:
    """The model and the parts of it that can generate by themselves."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a transformers model, got {type(model).__name__}; pass the model itself")
    found = [module for module in model.modules() if isinstance(module, GenerationMixin)]
    if not found:
        raise TypeError(
            f"`model` must have a generate() of transformers, in itself or in a part, got {type(model).__name__}; "
            "load it with a class for generation, such as AutoModelForCausalLM"
        )
    return found


def _fusible(model: Any) -> list[Any]:
    found = [module for module in _generators(model) if hasattr(module, LOOKUP)]
    if not found:
        tell_once(f"generate() stays stock: this version of transformers has no {LOOKUP}")
    return found


def enable(model: nn.Module, *, sampling: bool = False, whole_step: bool | str = False) -> None:
    """Makes the model's generate() calls take the fused path, until :func:`disable`.

    Beam search and greedy decoding give the sequences of the stock path; where logits tie, the smaller index. Calls of
    the model outside generate() and other models are not touched. Can be called again to change the option. What is copied
    or saved of the model, with copy, pickle or torch.save, is not enabled.

    Of a tensor-parallel model every process must enable it, and make the same calls. Its LM head then gathers no logits where
    the call can be served: each process chooses from its own columns, and one small collective merges the candidates.
    :func:`stats` counts such steps in `sharded`, and says in `gathered` why others are not.

    Args:
        model: a transformers model, or one with such models as parts: each part that can generate is enabled.
        sampling: also fuse do_sample=True with top-k, top-p or min-p, and beam sampling. The distribution is that of
            the stock path; the random numbers are used otherwise, so that a seed gives other draws.
        whole_step: read the prompt once for all beams of a sequence, and never copy the cache (:mod:`whole_step`). For greedy
            decoding and beam search, also of encoder-decoders, and with sampling=True for sampling; other calls take the
            fused path, and :func:`stats` says why in `not_whole`. The first call of a model tries it on a few tokens.
            Results have no cache: past_key_values, in transformers 5.24 cache, is None. On a GPU each token is one replay of a
            CUDA graph, captured in the first call of a shape (batch, beams, lengths rounded up). On a CPU it is one call of
            code that torch.compile makes in that call, which takes seconds to tens of seconds and needs a C++ compiler. The
            time is logged. "compiled" has torch.compile make what is captured on a GPU, too. "eager" runs one operation after
            another, with nothing to make and to keep. Where processors, sampling or scores that are returned take a choice of
            their own, it is the forward pass that is compiled and captured.

    Raises:
        TypeError: an argument of the wrong kind.

    Example:
        >>> enable(model)  # doctest: +SKIP
        >>> model.generate(**inputs, num_beams=4)  # doctest: +SKIP
    """
    set_enabled(_fusible(model), Request(Options.checked(sampling, 0, whole_step)))


def disable(model: nn.Module) -> None:
    """Undoes :func:`enable`, also within a block, which goes on. Does nothing to a model that is not enabled.

    Forgets, too, what `whole_step` has kept for later calls of the model.

    Raises:
        TypeError: not a model that can generate.
    """
    found = _generators(model)
    set_enabled(found, None)
    for module in found:
        drop(module)


@contextmanager
def fused_decoding(
    model: nn.Module, *, sampling: bool = False, topk_per_step: int = 0, whole_step: bool | str = False
) -> Iterator[FusedDecoding]:
    """Makes the model's generate() calls in a with block take the fused path.

    Blocks of several threads or tasks may overlap: a call takes the options of the innermost block that its own thread or
    task is in. Where that is in none, it takes those of :func:`enable`, and where there are none either, those of the
    block that another thread has entered last, such as that which started it; then the call is not recorded.

    Args:
        model: see :func:`enable`.
        sampling: also fuse sampling: the same distribution, other draws for a seed.
        topk_per_step: record for each step the k most probable tokens; 0 for no record.
        whole_step: see :func:`enable`.

    Yields:
        FusedDecoding, whose `topk` has the record of the last call, also after the block.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or a negative topk_per_step.

    Example:
        >>> with fused_decoding(model):  # doctest: +SKIP
        ...     model.generate(**inputs, num_beams=4)
    """
    block = Request(Options.checked(sampling, topk_per_step, whole_step))
    with entered(_fusible(model), block):
        yield block.given

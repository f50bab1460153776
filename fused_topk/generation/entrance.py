# SPDX-License-Identifier: Apache-2.0
"""How a user asks for fused decoding: of a model until it is disabled, in a with block, or for one call.

Methods that a model carries notice its calls (:mod:`hooks`). A call that is to be fused runs in one of two ways (:mod:`ways`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

from .calls import LOOKUP, Call
from .frames import variables
from .hooks import entered, held, set_enabled
from .request import BEAMS, SAMPLING, SEARCH, FusedDecoding, Options, Request, mode_of
from .statistics import tell_once
from .ways import run_call
from .whole_step import Asked, Declined, Loop, cache_of, drop


def _generators(model: Any) -> list[Any]:
    """The model and its parts, as far as they can generate by themselves."""
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


def enable(model: nn.Module, *, sampling: bool = False, whole_step: bool | str | None = None) -> None:
    """Makes the model's generate() calls take the fused path, until :func:`disable`.

    >>> enable(model)  # doctest: +SKIP
    >>> model.generate(**inputs, num_beams=4)  # doctest: +SKIP

    Beam search and greedy decoding give the sequences of the stock path; where logits tie, the smaller index. Calls of
    the model outside generate() and other models are not touched. Call it again to change an option. A copy of the model, made
    with copy, pickle or torch.save, is not enabled.

    Every process of a tensor-parallel model must enable it, and make the same calls. Where a call can be served, no logits are
    gathered: each process chooses from its own columns, and one small collective merges the candidates.
    :func:`stats` counts such steps of transformers' loop in `sharded`, and says in `gathered` why others gather. Leave the block, or
    disable the model, before the process group is destroyed: NCCL waits for captured steps.

    Args:
        model: a transformers model, or one with such models as parts: each part that can generate is enabled.
        sampling: also fuse do_sample=True in transformers' loop, with top-k, top-p or min-p, and beam sampling. The distribution is that
            of the stock path, but a seed gives other draws. Whole steps need no option: a seed gives the texts of the stock path.
        whole_step: how to run the calls that whole steps serve. A whole step reads the prompt once for all beams of a sequence, and
            never copies the cache (:mod:`whole_step`). It serves greedy decoding, sampling, beam search and beam sampling, also of
            encoder-decoders, with any processor and criterion. Other calls run in transformers' loop with a fused choice of each token, and
            :func:`stats` says why in `not_whole`. The first call of a model tries it on a few tokens.

            =========== =================================================================================================
            None        Whole steps where they are quicker from the first call on. On a GPU each token is one replay of a CUDA
                        graph, captured in the first call of a shape (batch, beams, lengths rounded up). On a CPU they run one
                        operation after another, and greedy search of fewer than 60,000 logits runs as stock generate() does.
            True        On a CPU a token is one call of code that torch.compile makes in the first call of a shape. That takes
                        seconds to tens of seconds, which are logged, and needs a C++ compiler. On a GPU as None.
            "compiled"  As True, and torch.compile makes what is captured on a GPU.
            "eager"     One operation after another, with nothing to make and to keep.
            False       Never. The choice of each token is fused.
            =========== =================================================================================================

            Sequences in float32 are those of the stock path. In 16 bits a whole step's forward pass rounds otherwise, as with
            another batch size or another implementation of attention, so that some texts differ. With sampling, returned scores,
            stop strings, or processors other than one :class:`TrieLogitsProcessor`, the forward pass alone is compiled and
            captured. A call that is given a cache goes on from it. What it leaves there, or in its result, is what stock leaves.

    Raises:
        TypeError: an argument of the wrong kind.
    """
    set_enabled(_fusible(model), Request(Options.checked(sampling, 0, whole_step)))


def disable(model: nn.Module) -> None:
    """Undoes :func:`enable`, also within a block, which goes on, and forgets the whole steps that are kept for later calls.

    Does nothing to a model that is not enabled.

    Raises:
        TypeError: not a model that can generate.
    """
    found = _generators(model)
    set_enabled(found, None)
    for module in found:
        drop(module)


@contextmanager
def fused_decoding(
    model: nn.Module, *, sampling: bool = False, topk_per_step: int = 0, whole_step: bool | str | None = None
) -> Iterator[FusedDecoding]:
    """Makes the model's generate() calls in a with block take the fused path.

    >>> with fused_decoding(model):  # doctest: +SKIP
    ...     model.generate(**inputs, num_beams=4)

    Blocks of several threads or tasks may overlap. A call takes the options of the innermost block that its own thread or
    task is in, else those of :func:`enable`. Without either it takes those of the block that another thread has entered last,
    and is not recorded.

    Args:
        model: see :func:`enable`.
        sampling: see :func:`enable`.
        topk_per_step: record for each step the k most probable tokens; 0 for no record.
        whole_step: see :func:`enable`.

    Yields:
        FusedDecoding, whose `topk` has the record of the last call, also after the block.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or a negative topk_per_step.
    """
    block = Request(Options.checked(sampling, topk_per_step, whole_step))
    with entered(_fusible(model), block):
        yield block.given


def generate(
    model: nn.Module,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    sampling: bool = False,
    topk_per_step: int = 0,
    whole_step: bool | str | None = None,
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(..., custom_generate=fused_topk.generation.generate)`: this one call takes the fused path.

    Not to be called directly. Own arguments of generate(): `sampling`, `topk_per_step` and `whole_step`, as in
    :func:`fused_decoding`. With topk_per_step and return_dict_in_generate=True the result has `topk`, the list that
    :class:`FusedDecoding` has.

    `streamer` and `synced_gpus` are honoured, though transformers does not hand them to custom_generate. It refuses
    `stop_strings` with custom_generate, which :func:`fused_decoding` serves, and ignores custom_generate with
    cache_implementation="paged".

    Raises:
        ValueError: a mode that is not served: assisted, contrastive, constrained, group beams; do_sample without
            sampling=True; a streamer with beams.
        RuntimeError: this version of transformers has no loop of the known name.
    """
    given = _arguments_of_caller()
    mode = mode_of(generation_config)
    if given.get("assistant_model") is not None:
        mode = GenerationMode.ASSISTED_GENERATION
    if mode not in SEARCH + SAMPLING:
        raise ValueError(
            f"`custom_generate` of fused_topk serves greedy search, beam search, sampling and beam sampling, got "
            f"{mode.value}; leave custom_generate out, or use fused_decoding(model), which leaves that mode as it is"
        )
    if mode in SAMPLING and not sampling:
        raise ValueError(
            "`do_sample` must be False unless sampling=True is given, got do_sample=True; fused sampling has the same "
            "distribution but draws other tokens for a seed: pass sampling=True to generate() to accept that"
        )
    options = Options.checked(sampling, topk_per_step, whole_step)
    is_synced = _is_synced(model, given.get("synced_gpus"))

    def run(call: Call, loop: Loop | None, streamer: Any) -> Any:
        processors = call.begin(generation_config, logits_processor)
        if loop is not None:
            if is_synced or given.get("synced_gpus") is not None:
                raise Declined("synced_gpus")
            return loop(model, input_ids, processors, stopping_criteria, generation_config, **model_kwargs)
        if mode not in BEAMS:
            model_kwargs["streamer"] = streamer
        elif streamer is not None:
            raise ValueError("`streamer` must be None with beams, got one; set num_beams=1 to stream")
        return _stock_loop(model, mode)(
            model,
            input_ids,
            logits_processor=processors,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=is_synced,
            **model_kwargs,
        )

    with held(model):
        has_cache = cache_of(given.get("kwargs") or {}) is not None
        result, topk = run_call(
            model, options, run, given.get("streamer"), Asked.by(generation_config, len(input_ids)), has_cache
        )
    if topk_per_step and generation_config.return_dict_in_generate:
        result["topk"] = topk
    return result


def _stock_loop(model: nn.Module, mode: GenerationMode) -> Any:
    name = "_beam_search" if mode in BEAMS else "_sample"
    loop = getattr(type(model), name, None)
    if loop is None:
        raise RuntimeError(
            f"this version of transformers has no {name}; use fused_decoding(model), which does not need it"
        )
    return loop


def _arguments_of_caller() -> dict[str, Any]:
    """Arguments of generate() that it does not hand to custom_generate. Without this they would be lost silently."""
    caller = sys._getframe(2)
    if caller.f_code.co_name != "generate":
        return {}
    given = variables(caller)
    return {name: given.get(name) for name in ("streamer", "synced_gpus", "assistant_model", "kwargs")}


def _is_synced(model: nn.Module, given: bool | None) -> bool:
    """Whether all processes must go on until the last has finished, as generate() decides it."""
    if given is not None:
        return given
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)  # type: ignore[no-untyped-call]
    return bool(is_sharded) and torch.distributed.get_world_size() > 1

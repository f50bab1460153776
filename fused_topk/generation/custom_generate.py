# SPDX-License-Identifier: Apache-2.0
"""The fused path for one generate() call, through transformers' own hook `custom_generate=`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

from .hooks import held, whole_loop
from .interception.model_logits import variables
from .interception.session import SAMPLING, SEARCH, Options, Session, running
from .statistics import count_not_whole
from .whole_step import Declined, Once


def generate(
    model: nn.Module,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    sampling: bool = False,
    topk_per_step: int = 0,
    whole_step: bool | str = False,
    **model_kwargs: Any,
) -> Any:
    """For `model.generate(..., custom_generate=fused_topk.generation.generate)`: this one call takes the fused path.

    Not to be called directly. Own arguments of generate(): `sampling`, `topk_per_step` and `whole_step`, as in
    :func:`fused_decoding`. With topk_per_step and return_dict_in_generate=True the result has `topk`, the list that
    :class:`FusedDecoding` has.

    transformers does not hand `streamer` and `synced_gpus` to custom_generate; they are taken from the call all the
    same. It refuses `stop_strings` before it gets here, and ignores custom_generate with cache_implementation="paged":
    :func:`fused_decoding` serves the former.

    Raises:
        ValueError: a mode that is not served: assisted, contrastive, constrained, group beams; do_sample without
            sampling=True; a streamer with beams.
        RuntimeError: this version of transformers has no loop under the name that it states.
    """
    mode = generation_config.get_generation_mode()
    given = _arguments_of_caller()
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
    streamer = given.get("streamer")
    if whole_step:
        reason = "topk_per_step" if topk_per_step else None
        if is_synced or given.get("synced_gpus") is not None:
            reason = "synced_gpus"
        streamer = once = None if streamer is None else Once(streamer)
        try:
            if reason is not None:
                raise Declined(reason)
            with held(model):
                return whole_loop(options, once)(
                    model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
                )
        except Declined as declined:
            count_not_whole(str(declined))
        if once is not None:
            once.restart()

    is_beam = mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
    loop = getattr(type(model), _loop_name(mode, is_beam), None)
    if loop is None:
        raise RuntimeError(
            f"this version of transformers has no {_loop_name(mode, is_beam)}; "
            "use fused_decoding(model), which does not need it"
        )
    if not is_beam:
        model_kwargs["streamer"] = streamer
    elif streamer is not None:
        raise ValueError("`streamer` must be None with beams, got one; set num_beams=1 to stream")
    model_kwargs["synced_gpus"] = is_synced

    session = Session(model, options)
    with held(model), running(session):
        result = loop(
            model,
            input_ids,
            logits_processor=session.begin(generation_config, logits_processor),
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **model_kwargs,
        )
    if topk_per_step and generation_config.return_dict_in_generate:
        result["topk"] = session.topk
    return result


def _loop_name(mode: GenerationMode, is_beam: bool) -> str:
    from transformers.generation import utils

    names: dict[GenerationMode, str] = getattr(utils, "GENERATION_MODES_MAPPING", {})
    return names.get(mode, "_beam_search" if is_beam else "_sample")


def _arguments_of_caller() -> dict[str, Any]:
    """What generate() was called with but does not pass on: without a look they would be lost silently."""
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    if caller is None or caller.f_code.co_name != "generate":
        return {}
    given = variables(caller)
    return {name: given.get(name) for name in ("streamer", "synced_gpus", "assistant_model")}


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

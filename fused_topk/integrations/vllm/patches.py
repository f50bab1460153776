# SPDX-License-Identifier: Apache-2.0
"""The functions of vLLM that are replaced, and by what.

`Sampler.__init__` is replaced first. A process that makes a sampler has a model runner: the rest is checked and replaced when the
first sampler is made. So a front end, which has no runner, need not import one.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ... import __version__
from . import compatibility, statistics
from .choice import LOGPROBS_MODES, Vllm, choose, is_only_argmax, why_stock
from .compatibility import BATCH, FILTERING, PROCESSORS, RUNNER, SAMPLER, WORKER
from .prompts import PromptScorer, RunnerView
from .requests import OUTPUTS, KnownProcessors
from .statistics import logger

# (owner, name) of all that has been replaced, with what stood there before; None where nothing stood there.
_replaced: dict[tuple[Any, str], Any] = {}
_lock = threading.RLock()


def install() -> bool:
    """Replaces the samplers that vLLM will make in this process. False, with one warning, if its version is not known."""
    vllm = importlib.import_module("vllm")
    wrong = compatibility.unknown_version(vllm.__version__)
    sampler = None if wrong else compatibility.found_at(f"{SAMPLER}:Sampler")
    if sampler is None:
        # One warning only: the process that starts vLLM's further processes has given it.
        if multiprocessing.parent_process() is None:
            _warn(vllm.__version__, wrong or f"{SAMPLER}:Sampler is missing")
        return False
    with _lock:
        if (sampler, "__init__") not in _replaced:
            _replace(sampler, "__init__", _init)
        if RUNNER in sys.modules:
            return _install_rest()
    return True


def uninstall() -> None:
    """Puts back whatever was replaced."""
    with _lock:
        for (owner, name), stock in _replaced.items():
            if stock is None:
                delattr(owner, name)
            else:
                setattr(owner, name, stock)
        _replaced.clear()


def _install_rest() -> bool:
    """Replaces the rest, in a process with a model runner. If vLLM is not as tested: False, with one warning, and vLLM as it was."""
    with _lock:
        sampler = compatibility.found_at(f"{SAMPLER}:Sampler")
        if (sampler, "forward") in _replaced:
            return True
        version = importlib.import_module("vllm").__version__
        wrong = compatibility.difference()
        if wrong is not None:
            uninstall()
            _warn(version, wrong)
            return False
        _replace(sampler, "forward", _forward)
        _replace(compatibility.found_at(f"{BATCH}:InputBatch"), "_make_sampling_metadata", _make_sampling_metadata)
        _replace(
            compatibility.found_at(f"{RUNNER}:GPUModelRunner"), "_get_prompt_logprobs_dict", _get_prompt_logprobs_dict
        )
        _replace(compatibility.found_at(f"{WORKER}:WorkerBase"), "fused_topk_stats", _worker_stats)
    logger.info("fused_topk %s chooses the tokens of vLLM %s", __version__, version)
    return True


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Args: make: makes the replacement, given what stands there; None if nothing does."""
    stock = vars(owner).get(name)
    _replaced[owner, name] = stock
    made = make(stock)
    setattr(owner, name, made if stock is None else functools.wraps(stock)(made))


def _warn(version: str, wrong: str) -> None:
    logger.warning("fused_topk %s leaves vLLM %s as it is: %s", __version__, version, wrong)


def _init(stock: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _install_rest()
        stock(self, *args, **kwargs)

    return __init__


def _forward(stock: Any) -> Any:
    vllm = Vllm(
        compatibility.found_at(f"{SAMPLER}:Sampler"),
        compatibility.found_at(f"{FILTERING}:TopKTopPSampler"),
        KnownProcessors(
            compatibility.found_at(f"{PROCESSORS}:MinPLogitsProcessor"),
            compatibility.found_at(f"{PROCESSORS}:LogitBiasLogitsProcessor"),
            compatibility.found_at(f"{PROCESSORS}:MinTokensLogitsProcessor"),
        ),
        compatibility.found_at(f"{FILTERING}:apply_top_k_top_p"),
    )
    to_output = compatibility.found_at(f"{SAMPLER}:SamplerOutput")
    to_tensors = compatibility.found_at(f"{SAMPLER}:LogprobsTensors")

    def forward(
        self: Any,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> Any:
        is_plain = not predict_bonus_token and logprobs_mode_override is None
        reason = why_stock(self, logits, sampling_metadata, is_plain, vllm)
        if reason is not None:
            statistics.count_stock(reason)
        elif is_only_argmax(sampling_metadata):
            statistics.count("argmax")
        else:
            tokens, report = choose(self, logits, sampling_metadata, vllm)
            statistics.count("fused")
            return to_output(tokens.int()[:, None], None if report is None else to_tensors(*report))
        return stock(self, logits, sampling_metadata, predict_bonus_token, logprobs_mode_override)

    return forward


def _make_sampling_metadata(stock: Any) -> Any:
    def _make_sampling_metadata(self: Any) -> Any:
        metadata = stock(self)
        # The list of the batch itself: vLLM keeps it up to date.
        setattr(metadata, OUTPUTS, self.req_output_token_ids)
        return metadata

    return _make_sampling_metadata


def _get_prompt_logprobs_dict(stock: Any) -> Any:
    sampler = compatibility.found_at(f"{SAMPLER}:Sampler")
    scorer = PromptScorer(compatibility.found_at(f"{SAMPLER}:LogprobsTensors"))

    def _get_prompt_logprobs_dict(self: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
        runner = self
        if self.num_prompt_logprobs:
            mode = self.model_config.logprobs_mode
            if type(self.sampler) is sampler and mode in LOGPROBS_MODES:
                statistics.count("prompts")
                runner = RunnerView(self, scorer)
            else:
                statistics.count_stock(f"prompts with logprobs_mode={mode!r}")
        return stock(runner, hidden_states, num_scheduled_tokens)

    return _get_prompt_logprobs_dict


def _worker_stats(stock: Any) -> Any:
    def fused_topk_stats(self: Any) -> dict[str, Any]:
        return statistics.stats()._asdict()

    return fused_topk_stats

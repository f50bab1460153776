# SPDX-License-Identifier: Apache-2.0
"""The names that went in 0.2, and what to write instead. This file goes in 0.3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

# Arguments of functions. The function is named where another one has an argument of this name.
_ARGUMENTS = {
    "targets": "use token_logprobs(logits, tokens), or linear_token_logprobs(hidden, weight, tokens)",
    "target_ties": "use token_logprobs(logits, tokens, ranks=True, ties=)",
    "start": "use linear_token_logprobs(), which alone needs it",
    "truncated_log_probs": 'write logprobs="kept"',
    "merge_topk.values": "write kind=",
    "router_topk.normalize": "write renormalize=",
    "warm_up.masked": "write mask=True",
    "warm_up.ragged": "write lengths=True",
    "warm_up.targets": 'write functions="token_logprobs", ranks=True',
    "sampling": "leave it out: do_sample=True is served, with the texts that stock generate() gives for a seed",
    "whole_step": "leave it out, or write compile=True for compiled steps",
}
_NAMES = {
    "Sample.log_probs": "write .logprobs",
    "TopKLogits.logsumexp": "call logsumexp(logits), or log_softmax_topk(), whose result has it",
    "fused_topk.TargetTopK": "use TokenLogprobs, which token_logprobs() returns",
    "fused_topk.generation.TokenLogprobs": "use fused_topk.TokenLogprobs",
    "fused_topk.generation.generate": "write `with fused_decoding(model):` around the call of model.generate()",
    "fused_topk.generation.text_topk_logprobs": "use text_token_logprobs(model, inputs, tokens, k=)",
    "fused_topk.generation.topk_logprobs": "use fused_topk.token_logprobs(logits, tokens, k=)",
}


def refuse(function: str, arguments: Mapping[str, Any]) -> NoReturn:
    """Raises the error of arguments that the function does not have."""
    name = next(iter(arguments))
    remedy = _ARGUMENTS.get(f"{function}.{name}") or _ARGUMENTS.get(name) or "check the spelling"
    raise TypeError(f"`{name}` is no argument of {function}(); {remedy}")


def refuse_field(path: str) -> NoReturn:
    """Raises the error of a field that a result does not have."""
    raise AttributeError(f"{path} is gone; {_NAMES[path]}")


def attributes_of(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module."""

    def __getattr__(name: str) -> NoReturn:
        path = f"{module}.{name}"
        if path in _NAMES:
            refuse_field(path)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__

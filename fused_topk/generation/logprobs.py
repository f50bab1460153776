# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in compact form: of the best next tokens, and of whole sequences, for scoring and distillation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..problem import TargetTopK, TopK
from .lm_head import HeadInput, run_with_head


class TokenLogprobs(NamedTuple):
    """The result of :func:`topk_logprobs`.

    Attributes:
        values: float32 [..., k], log-probabilities, greatest first.
        indices: int64 [..., k], their tokens.
        logsumexp: float32 [...], of the logits: log-probability = logit - logsumexp.
        target_logprobs: float32 of the targets' shape; None without targets.
        target_ranks: int64 [...], 1 for the most probable token; of equal ones the smaller index first. None without targets, or
            where a position has several.
    """

    values: Tensor
    indices: Tensor
    logsumexp: Tensor
    target_logprobs: Tensor | None
    target_ranks: Tensor | None


def topk_logprobs(logits: Tensor, k: int, targets: Tensor | None = None) -> TokenLogprobs:
    """The k most probable tokens at every position with their log-probabilities, and how the targets fare.

    >>> import torch
    >>> found = topk_logprobs(torch.tensor([[0.0, 3.0, 1.0]]), 1, targets=torch.tensor([2]))
    >>> found.indices, found.target_ranks
    (tensor([[1]]), tensor([2]))

    For scoring given texts, and to store a teacher's distribution for distillation: k numbers a position instead of the
    vocabulary. Scratch memory is constant, however many positions there are.

    Args:
        logits: floating point [..., V], of any device.
        k: 1 <= k <= V.
        targets: int64 [...], a token for each position; negative ones (such as -100) mark positions without target,
            which get log-probability NaN and rank 0. None for no targets.

    Returns:
        TokenLogprobs. Log-probabilities are differentiable with respect to the logits.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Contract:
        Order, ties and special rows as in :func:`fused_topk.log_softmax_topk`; in a row with NaN ranks mean nothing.
        Does not wait for the device. Targets of V or more are not looked for on CUDA tensors and must not occur.
    """
    return _token_logprobs(functional.log_softmax_topk(logits, k, targets=targets))


def _token_logprobs(found: TopK | TargetTopK) -> TokenLogprobs:
    return TokenLogprobs(*found) if isinstance(found, TargetTopK) else TokenLogprobs(*found, None, None)


def text_topk_logprobs(
    model: nn.Module, inputs: Tensor | Mapping[str, Any], k: int, targets: Tensor | None = None
) -> TokenLogprobs:
    """The k most probable tokens at every position of given texts, and how the targets fare: :func:`topk_logprobs` of a model.

    >>> text_topk_logprobs(model, tokenizer(["The sky is"], return_tensors="pt"), k=3)  # doctest: +SKIP

    One forward pass. Where the model's head is a plain linear layer, its logits are never all in memory, not even in the
    backward pass. Other models compute them all.

    Args:
        model: see :func:`next_token_topk`.
        inputs: see :func:`next_token_topk`. All of a mapping goes to the model, so it must have no `labels`.
        k: 1 <= k <= V.
        targets: int64 [batch, length], a token for each position, or [batch, length, n], n tokens for each, as a teacher's
            best ones; negative ones (such as -100) stand for no target. None for no targets.

    Returns:
        TokenLogprobs: values and indices [batch, length, k], logsumexp [batch, length], and with targets their
        log-probabilities, and with one target a position its rank. Differentiable with respect to the model's parameters.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Contract:
        That of :func:`fused_topk.linear_log_softmax_topk`. Logits of 16 bits are not widened first.
    """
    arguments, _ = _model_arguments(model, inputs)
    found = run_with_head(model, arguments)
    if not isinstance(found, HeadInput):
        return topk_logprobs(found, k, targets)
    return _token_logprobs(found.log_softmax_topk(k, targets))


@torch.no_grad()
def next_token_topk(model: nn.Module, inputs: Tensor | Mapping[str, Any], k: int) -> TopK:
    """The k most likely next tokens of each text, with their log-probabilities.

    >>> next_token_topk(model, tokenizer(["The sky is"], return_tensors="pt"), k=3)  # doctest: +SKIP

    One forward pass. Where the model can (`logits_to_keep`), it computes the last logits alone. Where its head is a plain linear
    layer, not even these are all in memory.

    Args:
        model: a transformers model with a language modelling head, in the mode (eval or train) that it is in.
        inputs: input ids int64 [batch, length], or what a tokenizer gives, on the model's device. Padded on the left, or
            on the right with an `attention_mask`. For an encoder-decoder the text of the encoder. Its decoder begins with
            the model's `decoder_start_token_id`, unless there are `decoder_input_ids`.
        k: 1 <= k <= V.

    Returns:
        TopK: log-probabilities float32 [batch, k], tokens int64 [batch, k], logsumexp float32 [batch].

    Raises:
        TypeError: `inputs` are neither a tensor nor a mapping, or hold no ids of integers; or `model` is no model, or has no logits.
        ValueError: `k` is out of range, the ids have another shape, or nothing says which token an encoder-decoder's texts begin with.
    """
    arguments, mask = _model_arguments(model, inputs)
    # With padding on the right the last token of a text is not at the last place.
    if mask is None and "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    found = run_with_head(model, arguments)
    states = found.hidden if isinstance(found, HeadInput) else found
    if mask is None:
        rows = states[:, -1]
    else:
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last = (mask.to(places.dtype) * places).argmax(-1).to(states.device)
        rows = states[torch.arange(len(states), device=states.device), last]
    if not isinstance(found, HeadInput):
        return functional.log_softmax_topk(rows, k)
    return TopK(*found._replace(hidden=rows).log_softmax_topk(k))


def _model_arguments(model: nn.Module, inputs: Any) -> tuple[dict[str, Any], Tensor | None]:
    """What the model is called with, and the mask of the texts whose next tokens it predicts."""
    if not isinstance(inputs, (Tensor, Mapping)):
        raise TypeError(
            f"`inputs` must be a tensor of input ids or a mapping of the model's arguments, got {type(inputs).__name__}; "
            "call the tokenizer with return_tensors='pt'"
        )
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"`model` must be a transformers model, got {type(model).__name__}; pass the model itself, such as .module of a wrapper"
        )
    arguments: dict[str, Any] = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    _check_ids(model, arguments.get("input_ids"))
    config: Any = model.config
    mask = arguments.get("attention_mask")
    if getattr(config, "is_encoder_decoder", False):
        mask = arguments.get("decoder_attention_mask")
        if "decoder_input_ids" not in arguments:
            arguments["decoder_input_ids"] = _first_tokens(model, arguments)
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    arguments["return_dict"] = True
    return arguments, mask


def _check_ids(model: nn.Module, ids: Any) -> None:
    if ids is None:
        return
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"`inputs` must have ids as a tensor, got {type(ids).__name__}; call the tokenizer with return_tensors='pt'"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"`inputs` must have ids of int64 or int32, got {ids.dtype}; pass what the tokenizer gives")
    # For these torch's embedding gives memory that nobody has written. A model that is partly on disk has meta parameters, too.
    if ids.is_meta and not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("`inputs` must have ids on the model's device, got meta; use .to(model.device)")
    # Some models have several ids for a token, in further dimensions.
    if ids.dim() < 2 or ids.shape[1] == 0:
        raise ValueError(
            f"`inputs` must have ids of shape (batch, length) with at least one token a text, got {tuple(ids.shape)}; use "
            ".unsqueeze(0) for a single text"
        )


def _first_tokens(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    """int64 [batch, 1]: the token that each text of an encoder-decoder begins with."""
    configs = (getattr(model, name, None) for name in ("generation_config", "config"))
    starts = (getattr(config, "decoder_start_token_id", None) for config in configs)
    start = next((token for token in starts if token is not None), None)
    first = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
    if start is None or first is None:
        missing = (
            "a decoder_start_token_id of the model" if start is None else "a tensor that gives the number of texts"
        )
        raise ValueError(f"`inputs` must have `decoder_input_ids` without {missing}; pass decoder_input_ids")
    return torch.full((len(first), 1), start, device=first.device)

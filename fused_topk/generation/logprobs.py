# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in compact form: of the best next tokens, and of the tokens of whole texts, for scoring and training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..problem import TokenLogprobs, TopK
from .lm_head import HeadInput, run_with_head


def text_token_logprobs(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    tokens: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: str = "allowed",
    k: int = 0,
    ranks: bool = False,
    entropy: bool = False,
    tail: bool = False,
    ties: str = "index",
    recompute: bool = True,
) -> TokenLogprobs:
    """The log-probabilities of tokens at every position of given texts: by default of the texts' own next tokens.

    >>> text_token_logprobs(model, tokenizer(["The sky is"], return_tensors="pt")).logprobs  # doctest: +SKIP

    One forward pass. Where the model's head is a plain linear layer, its logits are never all in memory, not even in the
    backward pass. Other models compute them all.

    Args:
        model: see :func:`next_token_topk`.
        inputs: see :func:`next_token_topk`. All of a mapping goes to the model, so it must have no `labels`.
        tokens: int64 [batch, length], a token for each position, or [batch, length, n], n tokens for each, as a teacher's best
            ones; negative ones (such as -100) stand for none. None: the next token of the text at each position, and none at its
            last one and at padding.
        temperature: divides the logits: a positive number, or a tensor broadcastable to [batch, length].
        mask: the tokens that count at each position, bool [batch, length, V] or packed int32: for texts that were drawn from what
            top-k or top-p had left.
        normalize: "allowed" or "all", as :func:`fused_topk.token_logprobs` has it.
        k: how many of the best tokens of each position to return as well; 0 for none.
        ranks, entropy, tail: whether to compute them, as :func:`fused_topk.token_logprobs` does.
        ties: "index" or "last", as :func:`fused_topk.token_logprobs` has it.
        recompute: False keeps the logits for the backward pass, as :func:`fused_topk.linear_token_logprobs` has it.

    Returns:
        TokenLogprobs, as :func:`fused_topk.token_logprobs` returns it for logits [batch, length, V]. Differentiable with respect to
        the model's parameters.

    Raises:
        TypeError, ValueError: an argument of a wrong kind, dtype, shape or device.

    Contract:
        That of :func:`fused_topk.linear_token_logprobs`. Logits of 16 bits are not widened first.
    """
    arguments, attention_mask = _model_arguments(model, inputs)
    are_own = tokens is None
    if tokens is None:
        tokens = _next_tokens(arguments, attention_mask)
    found = run_with_head(model, arguments)
    if are_own:
        # The head may be on another device than the ids.
        tokens = tokens.to((found.hidden if isinstance(found, HeadInput) else found).device)
    wanted: dict[str, Any] = {
        "temperature": temperature,
        "mask": mask,
        "normalize": normalize,
        "k": k,
        "ranks": ranks,
        "entropy": entropy,
        "tail": tail,
        "ties": ties,
    }
    if isinstance(found, HeadInput):
        with found.as_it_is():
            head = found.hidden, found.weight, tokens, found.bias
            return functional.linear_token_logprobs(*head, recompute=recompute, **wanted)
    return functional.token_logprobs(found, tokens, **wanted)


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
    with found.as_it_is():
        return functional.linear_log_softmax_topk(rows, found.weight, k, found.bias)


def _next_tokens(arguments: Mapping[str, Any], mask: Tensor | None) -> Tensor:
    """int64 [batch, length]: the token that follows each position of the texts, -100 at the last one and at padding."""
    name = "decoder_input_ids" if "decoder_input_ids" in arguments else "input_ids"
    ids = arguments.get(name)
    if ids is None or ids.dim() != 2 or (name == "decoder_input_ids" and ids.shape[1] == 1):
        raise ValueError(
            f"`tokens` must be given where the inputs have no texts [batch, length] to take them from, got `{name}` "
            f"{'None' if ids is None else tuple(ids.shape)}; pass a token for each position"
        )
    tokens = torch.full_like(ids, -100, dtype=torch.int64)
    tokens[:, :-1] = ids[:, 1:]
    if mask is not None and mask.dim() == 2:
        is_text = mask != 0
        tokens[:, :-1].masked_fill_(~(is_text[:, :-1] & is_text[:, 1:]), -100)
    return tokens


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

# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in compact form: the next token's best, and those of whole sequences for scoring and distillation."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..functional.arguments import check_k, check_logits, check_same_device, check_tensor
from ..problem import TopK

# Logits looked at at once where ranks are counted: their comparison takes a byte each.
_CHUNK = 2**24


class TokenLogprobs(NamedTuple):
    """The result of :func:`topk_logprobs`.

    Attributes:
        values: float32 [..., k], log-probabilities, greatest first.
        indices: int64 [..., k], their tokens.
        logsumexp: float32 [...], of the logits: log-probability = logit - logsumexp.
        target_logprobs: float32 [...], of the targets; None without targets.
        target_ranks: int64 [...], 1 for the most probable token; of equal ones the smaller index first. None without targets.
    """

    values: Tensor
    indices: Tensor
    logsumexp: Tensor
    target_logprobs: Tensor | None
    target_ranks: Tensor | None


def topk_logprobs(logits: Tensor, k: int, targets: Tensor | None = None) -> TokenLogprobs:
    """The k most probable tokens at every position with their log-probabilities, and how the targets fare.

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

    Example:
        >>> import torch
        >>> found = topk_logprobs(torch.tensor([[0.0, 3.0, 1.0]]), 1, targets=torch.tensor([2]))
        >>> found.indices, found.target_ranks
        (tensor([[1]]), tensor([2]))
    """
    check_logits(logits)
    check_k(k, logits.shape[-1])
    best = functional.log_softmax_topk(logits, k)
    if targets is None:
        return TokenLogprobs(*best, None, None)
    check_tensor("targets", targets)
    if targets.dtype != torch.int64:
        raise TypeError(f"`targets` must be int64, got {targets.dtype}; use .long()")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"`targets` must have the shape {tuple(logits.shape[:-1])} of the positions, got {tuple(targets.shape)}; "
            "for a causal model drop the last logits and the first target"
        )
    check_same_device("targets", targets, logits)
    has_target = targets >= 0
    tokens = targets.clamp(min=0).unsqueeze(-1)
    their_logits = logits.gather(-1, tokens)
    # As the difference to the best token: a common offset of the logits costs no digits.
    best_logits = logits.gather(-1, best.indices[..., :1])
    dtype = best.values.dtype
    logprobs = best.values[..., :1] + (their_logits.to(dtype) - best_logits.to(dtype))
    logprobs = logprobs.squeeze(-1).where(has_target, torch.nan)
    ranks = _ranks(logits.detach(), tokens, their_logits.detach()).where(has_target, 0)
    return TokenLogprobs(*best, logprobs, ranks)


def _ranks(logits: Tensor, tokens: Tensor, their_logits: Tensor) -> Tensor:
    """int64 [...]: 1 + the number of tokens that come before each given one."""
    vocab_size = logits.shape[-1]
    try:
        rows = logits.view(-1, vocab_size)
    except RuntimeError:
        # Leading dimensions that do not merge, as after dropping the last position: one by one rather than copied.
        return torch.stack([_ranks(*each) for each in zip(logits, tokens, their_logits, strict=True)])
    theirs = their_logits.reshape(-1, 1)
    index = torch.arange(vocab_size, device=logits.device)
    tokens = tokens.reshape(-1, 1)
    ranks = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    size = max(1, _CHUNK // vocab_size)
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        is_before = rows[part] == theirs[part]
        is_before &= index < tokens[part]
        is_before |= rows[part] > theirs[part]
        ranks[part] = is_before.sum(-1)
    return ranks.add_(1).view(logits.shape[:-1])


@torch.no_grad()
def next_token_topk(model: nn.Module, inputs: Tensor | Mapping[str, Any], k: int) -> TopK:
    """The k most likely next tokens of each text, with their log-probabilities.

    One forward pass, of which only the last logits are computed where the model can (`logits_to_keep`).

    Args:
        model: a transformers model with a language modelling head, in the mode (eval or train) that it is in.
        inputs: input ids int64 [batch, length], or what a tokenizer gives, on the model's device. Padded on the left, or
            on the right with an `attention_mask`. For an encoder-decoder the text of the encoder, and
            `decoder_input_ids` if the decoder is not to begin.
        k: 1 <= k <= V.

    Returns:
        TopK: log-probabilities float32 [batch, k], tokens int64 [batch, k], logsumexp float32 [batch].

    Raises:
        TypeError: `inputs` are neither a tensor nor a mapping, or the model has no logits.
        ValueError: `k` is out of range.

    Example:
        >>> next_token_topk(model, tokenizer(["The sky is"], return_tensors="pt"), k=3)  # doctest: +SKIP
    """
    if not isinstance(inputs, (Tensor, Mapping)):
        raise TypeError(
            f"`inputs` must be a tensor of input ids or a mapping of the model's arguments, got {type(inputs).__name__}; "
            "call the tokenizer with return_tensors='pt'"
        )
    arguments: dict[str, Any] = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    known = inspect.signature(model.forward).parameters
    config: Any = model.config
    mask = arguments.get("attention_mask")
    if getattr(config, "is_encoder_decoder", False):
        mask = arguments.get("decoder_attention_mask")
        if "decoder_input_ids" not in arguments:
            first = next(value for value in arguments.values() if isinstance(value, Tensor))
            start = getattr(getattr(model, "generation_config", None), "decoder_start_token_id", None)
            start = config.decoder_start_token_id if start is None else start
            arguments["decoder_input_ids"] = torch.full((len(first), 1), start, device=first.device)
    # With padding on the right the last text is not the last place.
    if mask is None and "logits_to_keep" in known:
        arguments["logits_to_keep"] = 1
    if "use_cache" in known:
        arguments["use_cache"] = False
    arguments["return_dict"] = True
    output = model(**arguments)
    logits = getattr(output, "logits", None)
    if logits is None:
        raise TypeError(
            f"`model` must have a language modelling head, got {type(model).__name__}; "
            "load it with a class for generation, such as AutoModelForCausalLM"
        )
    if mask is None:
        rows = logits[:, -1]
    else:
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last = (mask.to(places.dtype) * places).argmax(-1).to(logits.device)
        rows = logits[torch.arange(len(logits), device=logits.device), last]
    return functional.log_softmax_topk(rows, k)

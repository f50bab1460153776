# SPDX-License-Identifier: Apache-2.0
"""The choice of a step's tokens, and their log-probabilities. It imports no vLLM: what it calls of vLLM is passed in.

vLLM's own operations change the logits first (masks, bad words, penalties, biases). Then one read of the logits draws, and reports
the best tokens; a second read counts ranks. Where log-probabilities of the logits before those changes are wanted, these logits are
read once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import functional
from .requests import KnownProcessors, Requests, change_logits, random_numbers, requests_of, unknown_outputs

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Vllm(NamedTuple):
    """The parts of vLLM that the choice needs."""

    sampler: Any  # types
    filtering: Any  # the module of top-k and top-p within the sampler
    processors: KnownProcessors
    apply_top_k_top_p: Callable[..., Tensor]


class Report(NamedTuple):
    """Log-probabilities of a step, as the fields of vLLM's LogprobsTensors."""

    tokens: Tensor  # int32 (R, 1 + n), the chosen token first
    logprobs: Tensor  # float32 (R, 1 + n)
    ranks: Tensor  # int64 (R,), of the chosen token: how many have at least its logit


def why_stock(sampler: Any, logits: Tensor, metadata: Any, is_plain: bool, vllm: Vllm) -> str | None:
    """Why vLLM's own sampler must run; None if it need not.

    The reason is the same for all steps of an engine: else a request with a seed would draw in two ways. Only steps of speculative
    decoding, and steps that vLLM makes up to warm itself up, may have another reason.

    Args:
        is_plain: whether the sampler is not called for speculative decoding.
    """
    if type(sampler) is not vllm.sampler or type(sampler.topk_topp_sampler) is not vllm.filtering:
        return f"the sampler is a {type(sampler).__name__} with a {type(sampler.topk_topp_sampler).__name__}"
    if not is_plain:
        return "a step of speculative decoding"
    if sampler.use_fp64_gumbel:
        return "noise in float64 is wanted"
    if sampler.logprobs_mode not in LOGPROBS_MODES:
        return f"logprobs_mode={sampler.logprobs_mode!r}"
    if logits.device.type not in ("cpu", "cuda") or torch.version.hip or logits.dtype not in _DTYPES:
        return f"logits of {logits.dtype} on {logits.device.type}"
    for processor in metadata.logitsprocs.argmax_invariant:
        if type(processor) is not vllm.processors.min_p:
            return f"the logits processor {type(processor).__name__} comes after the temperature"
    if unknown_outputs(metadata):
        return "the output tokens of requests with a seed are not known"
    return None


def is_only_argmax(metadata: Any) -> bool:
    """Whether a step wants the best tokens and no more."""
    return bool(metadata.all_greedy and metadata.max_num_logprobs is None and not metadata.logprob_token_ids)


def choose(sampler: Any, logits: Tensor, metadata: Any, vllm: Vllm) -> tuple[Tensor, Report | None]:
    """The tokens int64 (R,) of a step, and their report if one is wanted. Like vLLM's sampler, this may change the logits."""
    requests = requests_of(metadata, logits, vllm.processors)
    listed = metadata.logprob_token_ids
    # Where a step wants both the best tokens and listed ones, vLLM reports the listed ones.
    count = 0 if listed else metadata.max_num_logprobs
    is_raw = sampler.logprobs_mode == "raw_logprobs"
    is_min_p_first = requests.is_min_p_first and not metadata.all_greedy
    raw = logits
    is_changed = change_logits(metadata, vllm.processors)
    if is_changed or is_min_p_first:
        if is_raw and count is not None and logits.dtype == torch.float32:
            raw = logits.clone()
        logits = logits.to(torch.float32)
    if is_changed:
        logits = sampler.apply_logits_processors(logits, metadata, False)
    if is_min_p_first:
        logits = _after_min_p(sampler, logits, metadata)
        requests = requests._replace(temperature=_zero_or_one(requests.temperature))
    drawing = requests.filters()
    if not metadata.all_greedy:
        drawing |= random_numbers(requests, metadata, logits)
    if count is None:
        return functional.sample(logits, **drawing).tokens[:, 0], None
    vocab_size = logits.shape[-1]
    count = vocab_size if count < 0 else min(count, vocab_size)
    if not is_raw and not metadata.all_greedy:
        return _processed(sampler, logits, metadata, requests, drawing, count, vllm)
    if is_raw and raw is not logits:
        tokens = functional.sample(logits, **drawing).tokens
        found: Any = functional.token_logprobs(raw, tokens, k=count, ranks=True, ties="last")
        best, own, ranks = found.topk, found.logprobs, found.ranks[:, 0]
    else:
        drawn: Any = functional.sample(logits, **drawing, topk=count, ranks=True)
        tokens, own, ranks, best = drawn.tokens, drawn.logprobs, drawn.ranks[:, 0], drawn.topk
    if listed:
        return tokens[:, 0], _of_listed(raw if is_raw else logits, tokens, own, ranks, listed)
    if not count:
        return tokens[:, 0], Report(tokens.int(), own, ranks)
    return tokens[:, 0], of_best(tokens, own, best.indices, best.values, ranks)


def of_best(tokens: Tensor, own: Tensor, indices: Tensor, values: Tensor, ranks: Tensor) -> Report:
    return Report(torch.cat((tokens, indices), 1).int(), torch.cat((own, values), 1), ranks)


def _of_listed(logits: Tensor, tokens: Tensor, own: Tensor, ranks: Tensor, listed: dict[int, list[int]]) -> Report:
    """The report of tokens that requests name. Shorter lists are filled with token 0 at -inf, as vLLM does.

    A log-probability is that of the chosen token plus the difference of the two logits. So a common offset costs no digits.
    """
    longest = max(map(len, listed.values()))
    named = [listed.get(row, []) for row in range(len(logits))]
    table = torch.tensor([each + [-1] * (longest - len(each)) for each in named], dtype=torch.int64)
    table = table.to(logits.device, non_blocking=True)
    all_tokens = torch.cat((tokens, table.clamp(min=0)), 1)
    theirs = logits.gather(1, all_tokens).float()
    values = own + (theirs - theirs[:, :1])
    values[:, 1:].masked_fill_(table < 0, -torch.inf)
    return Report(all_tokens.int(), values, ranks)


def _after_min_p(sampler: Any, logits: Tensor, metadata: Any) -> Tensor:
    """The scaled logits, in which min-p has set tokens to -inf, by vLLM's own operations, in place."""
    logits = sampler.apply_temperature(logits, metadata.temperature, metadata.all_random)
    for processor in metadata.logitsprocs.argmax_invariant:
        logits = processor.apply(logits)
    return logits


def _zero_or_one(temperature: Any) -> Any:
    """What is left of the temperatures once the logits are scaled: 0 for greedy requests, 1 for others."""
    return temperature.sign() if isinstance(temperature, Tensor) else float(temperature > 0)


def _processed(
    sampler: Any, logits: Tensor, metadata: Any, requests: Requests, drawing: dict[str, Any], count: int, vllm: Vllm
) -> tuple[Tensor, Report]:
    """Tokens, with the log-probabilities of the distribution that they were drawn from."""
    drawn: Any = functional.sample(logits, **drawing, topk=max(count, 1), logprobs="kept", kept=True, ranks=True)
    tokens, own, best = drawn.tokens, drawn.logprobs, drawn.topk
    if metadata.logprob_token_ids:
        return tokens[:, 0], _of_listed_after_filters(sampler, logits, metadata, requests, tokens, vllm)
    rows = len(logits)

    def of_rows(number: Any) -> Tensor:
        return torch.as_tensor(number, device=logits.device).expand(rows)[:, None]

    temperature, top_k, top_p, min_p = (of_rows(drawing[name]) for name in ("temperature", "top_k", "top_p", "min_p"))
    is_greedy = temperature == 0
    # A draw at temperature 0 has log-probability 0. For a greedy request vLLM reports the row at temperature 1.
    own = own.where(~is_greedy, best.values[:, :1])
    scale = temperature.where(~is_greedy, 1).float()
    logits_of_best = logits.gather(1, best.indices).float()
    values = own + (logits_of_best - logits.gather(1, tokens).float()) / scale
    # `kept` may leave out tokens that are next to impossible. Top-k alone keeps these as well.
    vocab_size = logits.shape[-1]
    least = top_k.where((top_k > 0) & (top_p >= 1) & (min_p <= 0), 0)
    least = least.masked_fill(is_greedy | ((top_k == 0) & (top_p >= 1) & (min_p <= 0)), vocab_size)
    kept = drawn.kept.counts[:, None].maximum(least)
    values.masked_fill_(torch.arange(values.shape[1], device=logits.device) >= kept, -torch.inf)
    ranks = drawn.ranks.minimum(kept)[:, 0]
    if not count:
        return tokens[:, 0], Report(tokens.int(), own, ranks)
    return tokens[:, 0], of_best(tokens, own, best.indices, values, ranks)


def _of_listed_after_filters(
    sampler: Any, logits: Tensor, metadata: Any, requests: Requests, tokens: Tensor, vllm: Vllm
) -> Report:
    """The report of named tokens after top-k and top-p, which may remove any of them. By vLLM's own operations."""
    if not requests.is_min_p_first:
        logits = _after_min_p(sampler, logits.to(torch.float32), metadata)
    logits = vllm.apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
    scores = sampler.compute_logprobs(logits)
    return Report(*sampler.gather_specific_token_logprobs(scores, metadata.logprob_token_ids, tokens[:, 0])[:3])

# SPDX-License-Identifier: Apache-2.0
"""What the requests of a batch ask for, as arguments of :func:`fused_topk.sample`. It imports no vLLM: types are passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# vLLM takes the best token below this temperature.
_LEAST_TEMPERATURE = 1e-5
# Attributes that are added to vLLM's metadata: the output tokens of each request, for where vLLM leaves `output_token_ids` empty; and
# the `Requests` that were made from the metadata.
OUTPUTS = "fused_topk_outputs"
_MADE = "fused_topk_requests"


class KnownProcessors(NamedTuple):
    """The types of those logits processors of vLLM that are known."""

    min_p: Any  # types
    logit_bias: Any
    min_tokens: Any


class Requests(NamedTuple):
    """The requests of a batch. vLLM makes new metadata whenever they change.

    Each parameter is one number, or a tensor with one a row.
    """

    temperature: Any  # 0 for greedy ones
    top_k: Any  # 0 keeps all
    top_p: Any
    min_p: Any
    # vLLM's order is min-p, top-k, top-p; that of sample() top-k, top-p, min-p. It matters where there is top-p.
    is_min_p_first: bool
    seeded: Tensor  # int64 (n,), the rows with a seed of their own
    seeds: Tensor  # int64 (n,)

    def filters(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": 0.0 if self.is_min_p_first else self.min_p,
        }


def requests_of(metadata: Any, logits: Tensor, processors: KnownProcessors) -> Requests:
    """Args: metadata: vLLM's SamplingMetadata, which it makes anew when a request comes, goes or moves."""
    made: Requests | None = vars(metadata).get(_MADE)
    if made is None:
        made = _requests(metadata, logits, processors)
        setattr(metadata, _MADE, made)
    return made


def _requests(metadata: Any, logits: Tensor, processors: KnownProcessors) -> Requests:
    vocab_size = logits.shape[-1]
    temperature = 0.0 if metadata.all_greedy else _numbers(metadata.temperature.double())
    if isinstance(temperature, Tensor):
        temperature = temperature.where(temperature >= _LEAST_TEMPERATURE, 0)
    elif temperature < _LEAST_TEMPERATURE:
        temperature = 0.0
    top_k = 0 if metadata.top_k is None else metadata.top_k.long()
    if isinstance(top_k, Tensor):
        top_k = _numbers(top_k.where(top_k < vocab_size, 0))
    top_p = 1.0 if metadata.top_p is None else _numbers(metadata.top_p.double())
    min_p: Any = 0.0
    for processor in metadata.logitsprocs.argmax_invariant:
        if type(processor) is processors.min_p and processor.min_p_count:
            min_p = _numbers(processor.min_p.flatten().double())
    has = not isinstance(min_p, float) or min_p > 0
    rows = sorted(metadata.generators)
    seeds = [_as_int64(metadata.generators[row].initial_seed()) for row in rows]
    return Requests(
        temperature,
        top_k,
        top_p,
        min_p,
        is_min_p_first=has and not (isinstance(top_p, float) and top_p >= 1),
        seeded=torch.tensor(rows, dtype=torch.int64).to(logits.device, non_blocking=True),
        seeds=torch.tensor(seeds, dtype=torch.int64).to(logits.device, non_blocking=True),
    )


def _numbers(rows: Tensor) -> Any:
    """The number that all rows share, if they do; else the tensor.

    A number spares the checks of a tensor's values at each step. A tensor of a GPU stays one: to read it would wait for the GPU.
    """
    if rows.device.type != "cpu":
        return rows
    first, *others = rows.tolist()
    return rows if any(other != first for other in others) else first


def _as_int64(seed: int) -> int:
    """A generator gives its seed without a sign."""
    return (seed + 2**63) % 2**64 - 2**63


def outputs_of(metadata: Any) -> Sequence[Sequence[int] | None] | None:
    """The output tokens of each request; None if they are not known. While vLLM schedules ahead, the last token may be -1."""
    found: Sequence[Sequence[int] | None] | None = metadata.output_token_ids or vars(metadata).get(OUTPUTS)
    return found


def unknown_outputs(metadata: Any) -> bool:
    """Whether a request with a seed has output tokens that are not known."""
    rows = metadata.generators
    if not rows:
        return False
    outputs = outputs_of(metadata)
    return outputs is None or max(rows) >= len(outputs) or any(outputs[row] is None for row in rows)


def random_numbers(requests: Requests, metadata: Any, logits: Tensor) -> dict[str, Tensor]:
    """The arguments `seed` and `counter` of a step, none if no request has a seed.

    A request with a seed gets that seed, and the number of its output tokens as the counter. Any other request gets both at random,
    from the generator that vLLM seeds alike in all its workers.
    """
    count = len(requests.seeded)
    if not count:
        return {}
    outputs: Any = outputs_of(metadata)
    lengths = [len(outputs[row]) for row in sorted(metadata.generators)]
    counters = torch.tensor(lengths, dtype=torch.int64).to(logits.device, non_blocking=True)
    names = torch.randint(0, 2**63 - 1, (2, len(logits)), dtype=torch.int64, device=logits.device)
    names[0].index_copy_(0, requests.seeded, requests.seeds)
    names[1].index_copy_(0, requests.seeded, counters)
    return {"seed": names[0], "counter": names[1]}


def change_logits(metadata: Any, processors: KnownProcessors) -> bool:
    """Whether vLLM's operations before the choice may change the logits of this step."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.allowed_token_ids_mask is not None
        or bool(metadata.bad_words_token_ids)
        or not metadata.no_penalties
        or (holder is not None and holder.has_tracked_requests())
        or any(_may_change(each, processors) for each in metadata.logitsprocs.non_argmax_invariant)
    )


def _may_change(processor: Any, processors: KnownProcessors) -> bool:
    if type(processor) is processors.logit_bias:
        return bool(processor.biases)
    if type(processor) is processors.min_tokens:
        return bool(processor.min_toks)
    return True

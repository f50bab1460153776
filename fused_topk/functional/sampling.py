# SPDX-License-Identifier: Apache-2.0
"""The public function that draws tokens. It checks its arguments, makes rows of the logits and calls the operator.

How a token is drawn, and why so:

- Temperature, top-k, top-p and min-p keep a prefix of the row in the order of its logits. So a border says what is kept: a
  token is kept if it ranks at or before the border.
- One uniform number u a draw. The token is the first, by index, at which the running sum of the kept weights exceeds u
  times their total. A backend has the sums of a row's parts from the one read that it makes anyway: they say which part
  holds the draw, and only that part is read again. The Gumbel trick, the argmax of x / T - log(-log u_i), needs a random
  number and two logarithms for every token of the vocabulary: on a CPU that takes longer than all the rest of the row.
- By index, not by rank: no sort of what is kept, and one definition for a list of the best and for a whole row.
- The random numbers are Philox4x32-10 (:mod:`fused_topk.backends.philox`), named by seed, counter and sample.
- A caller who gives `noise` has paid for a random number of every token. So the token is the argmax of p_i / noise_i, as in
  torch.multinomial, by log p_i - log noise_i, which needs no sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..arguments import (
    check_backend,
    check_choice,
    check_flags,
    check_k,
    check_list,
    check_logits,
    check_no_transform,
    check_same_device,
    check_tensor,
)
from ..gone import refuse
from ..operators import sampling
from ..operators.ranks import target_ranks
from ..operators.results import Plan
from ..problem import Sample, SampleProblem, changed
from ..row_arguments import (
    TEMPERATURES,
    check_layout,
    check_row_numbers,
    check_rows,
    plain_rows,
)
from ..rows import Like, LogitRows, RowsLayout, like
from ..tracing import is_traced_by_dynamo

# A parameter as (the number of all rows, None), or (a number that is not used, the number of each row).
_Of = tuple[Any, Tensor | None]
# temperature, top_k, top_p and min_p in this form.
_Numbers = tuple[_Of, _Of, _Of, _Of]
_SEEDS = (-(2**63), 2**63 - 1)
# The seed and the counter of rows that draw no number.
_NO_NAME: _Of = (0, None)
_MOST_SAMPLES = 2**31 - 1
# The types of temperature to min_p, of num_samples to backend, and of seed, counter and noise that a plan serves.
_PLANNED_NUMBERS = {float, int, Tensor}
_PLANNED_REQUESTS = {int, bool, str, type(None)}
_PLANNED_NAMES = {int, type(None), Tensor}


def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seed: int | Tensor | None = None,
    counter: int | Tensor = 0,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    num_samples: int = 1,
    topk: int = 0,
    logprobs: str = "model",
    kept: bool = False,
    ranks: bool = False,
    backend: str | None = None,
    **gone: NoReturn,
) -> Sample:
    """Tokens drawn from `softmax(logits / temperature)` after top-k, top-p and min-p, with their log-probabilities.

    The distribution is that of transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and
    MinPLogitsWarper, in this order, each acting on what the one before it left. The vocabulary is the last dimension.

    The other arguments, and the errors, are those of :func:`softmax_topk`.

    Args:
        temperature: divides the logits; 0 takes the best token. This, top_k, top_p and min_p are one number, or a tensor with one
            number a row, broadcastable to the shape of `logits` without the vocabulary. The values of a CPU tensor are checked,
            those of a CUDA tensor are not.
        top_k: keeps the k most likely tokens, and all that tie with the k-th. 0, -1, or more than V, keeps all.
        top_p: keeps the fewest of the most likely tokens whose probabilities sum to at least `top_p`, and at least one.
            Of equal tokens at this border the smaller indices are kept. 1 keeps all.
        min_p: keeps the tokens whose probability is at least `min_p` times that of the most likely one. 0 keeps all.
        seed: names the random numbers, instead of a generator. An int64 tensor, broadcastable as `temperature`, has a seed for
            each row: a row then draws the same tokens in any batch, and at any place in it. An int is the seed of all rows:
            each row draws random numbers of its own, named by its place in the batch, too.
        counter: the number of the draw among those of the same seed: an int, or an int64 tensor with one number a row. A
            request that passes the number of its tokens so far gets new random numbers for each token, and the same ones if
            it is repeated.
        generator: names the random numbers where there is no `seed`. A call advances it once, on its device, as torch's own
            samplers do. None: torch's default generator of the device. A CUDA graph needs it registered.
        noise: float32 of the logits' shape, instead of random numbers of ours: an independent draw of the exponential
            distribution for each token, such as ``torch.empty_like(probs).exponential_(generator=g)`` of float32 `probs`. The token
            is the one with the greatest p_i / noise_i among those that are kept; of equal ones the smallest, as
            ``torch.multinomial(probs, 1, generator=g)`` draws. It takes the place of `seed`, `counter` and `generator`, and
            `num_samples` must be 1.
        num_samples: independent draws from each row; a token may come more than once.
        topk: how many of the row's best tokens to return as well; 0 for none.
        logprobs: what the log-probabilities are relative to. "model": of `log_softmax(logits)` over the allowed tokens. "kept": of
            the distribution that was drawn from, after temperature, top-k, top-p and min-p.
        kept: whether to return how many tokens of each row may be drawn, and the log of their mass.
        ranks: whether to return the ranks of the drawn tokens in their rows, by one more read.

    Returns:
        Sample with tokens int64 (..., num_samples), logprobs float32 (..., num_samples), topk, the TopK that
        `log_softmax_topk(logits, topk, mask=mask, lengths=lengths)` gives (None for topk = 0), kept, the :class:`Kept`
        of each row (None unless asked for), and ranks int64 (..., num_samples) (None unless asked for). float64 logits have
        float64 logprobs.

    Contract:
        A draw takes one uniform number u, of 52 bits, never 0 and never 1. It is Philox4x32-10 of (seed; counter, sample,
        row's number or 0), bit for bit the same on every backend. The token is the first by index at which the sum of the
        kept tokens' probabilities exceeds u. Backends draw the same token unless u is within 2^-19 of a border between two tokens,
        and keep the same tokens unless a token is that near to the border of top-p.
        With `noise` the token has the greatest (x_i - m) / T - log noise_i, in float32 or better. Backends draw the same token, and
        that of torch.multinomial, unless two quotients are equal to a part in 10^6, or a token is within rounding of the border of
        top-p. Noise that is not positive is no error: 0 wins, and NaN or less than 0 loses.
        A token that is not kept, not allowed, of probability 0, or beyond the row's length is never drawn.
        `kept` does not count logits of -inf. Of equal tokens at the border of top-p it counts those that are kept. Tokens with
        less than 2^-44 of the best token's probability (2^-30 in the longest rows) may be missing from it, and from the draw.
        For temperature 0 the count is 1, and the logsumexp is the best logit. For a row without a distribution the count is 0,
        and the logsumexp NaN.
        A rank is the number of tokens whose logit is at least the drawn token's, among all that are allowed and within the length.
        A row has no distribution if it has a NaN or a +inf, only -inf, or no allowed token. It gives the first token in the order
        of :func:`softmax_topk`, and NaN log-probabilities. A row on a GPU whose temperature is negative or NaN gives that token,
        too, and NaN as its log-probability among what is kept. Temperature 0 gives the same token, with 0 as that
        log-probability. Tokens are always in range.
        Not differentiable: for a gradient, gather the tokens from a log_softmax.
        With torch.compile, pass `seed` or `noise`, or leave out `seed` and `generator`.

    Example:
        >>> import torch, fused_topk
        >>> fused_topk.sample(torch.tensor([1.0, 9.0, 2.0]), top_k=2, top_p=0.9, seed=0).tokens
        tensor([1])
    """
    if gone:
        refuse("sample", gone)
    numbers: tuple[Any, ...] = (temperature, top_k, top_p, min_p)
    request = (num_samples, topk, logprobs, kept, backend)
    check_flags(ranks=ranks)
    rows = _plain_rows(logits, mask, lengths, numbers, request, (seed, counter, noise))
    plan = None
    if rows is not None:
        # The plan of the layout checks the rows, the numbers of all rows and the request.
        if Tensor in map(type, numbers):
            of_each = check_numbers(logits, _floating(logits.device.type), *numbers)
            plan = _plan(logits.device, rows.layout(), *(n if x is None else like(x) for n, x in of_each), *request)
        else:
            plan = _plan(logits.device, rows.layout(), *numbers, *request)
            of_each = plan.numbers
        if logits.dim() != 2 or rows.hides():
            rows = rows.broadcast().flat()
    else:
        check_logits(logits)
        rows, of_each = check_parameters(logits, logits.device.type, numbers, mask, lengths, request)
        check_no_transform("sample")
        rows = rows.with_logits(logits.detach()).flat()
    of_noise = None
    if noise is None:
        of_seed, of_counter = names_of(seed, counter, generator, logits)
    else:
        of_noise = _checked_noise(noise, logits, seed, counter, generator, num_samples)
        of_seed = of_counter = _NO_NAME
    problem = problem_of(rows, of_each, of_seed, of_counter, request, of_noise)
    result = sampling.sample(problem, backend) if plan is None else sampling.draw(problem, plan.prepared)
    if ranks:
        # torch.compile traces no _replace() of a named tuple in torch 2.11, and no slice of one in torch 2.6.
        tokens, of_tokens, best, of_kept, _ = result
        result = Sample(tokens, of_tokens, best, of_kept, target_ranks(rows, tokens, True, backend))
    return result if logits.dim() == 2 else shaped(result, logits.shape[:-1])


def check_parameters(
    logits: Tensor,
    device_type: str,
    numbers: tuple[Any, ...],
    mask: Tensor | None,
    lengths: Tensor | None,
    request: tuple[Any, ...],
) -> tuple[LogitRows, _Numbers]:
    """Checks the arguments. Returns the rows, at the temperature 1, and the numbers: temperature, top_k, top_p and min_p. The logits may
    be a meta tensor, in place of one on a device of that type. request: num_samples to backend."""
    num_samples, topk, logprobs, kept, backend = request
    rows = check_rows(logits, 1.0, mask, lengths)
    checked = check_numbers(logits, _floating(device_type), *numbers)
    check_backend(backend)
    check_k(num_samples, _MOST_SAMPLES, "samples of a row", "num_samples")
    check_list("topk", topk, logits.shape[-1])
    check_logprobs(logprobs)
    check_flags(kept=kept)
    return rows, checked


def check_logprobs(logprobs: Any) -> None:
    check_choice("logprobs", logprobs, ("model", "kept"))


def check_numbers(
    logits: Tensor, floating: torch.dtype, temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> _Numbers:
    return (
        _numbers("temperature", temperature, logits, floating, TEMPERATURES, or_zero=True),
        _numbers("top_k", top_k, logits, torch.int64, (-1, _SEEDS[1])),
        _numbers("top_p", top_p, logits, floating, (0, 1)),
        _numbers("min_p", min_p, logits, floating, (0, 1)),
    )


def _numbers(
    name: str, value: Any, logits: Tensor, dtype: torch.dtype, limits: tuple[float, float], or_zero: bool = False
) -> _Of:
    is_plain = type(value) is int or (type(value) is float and dtype.is_floating_point)
    if is_plain and (limits[0] <= value <= limits[1] or (or_zero and value == 0)):
        # The quick way of what most calls have.
        return float(value) if dtype.is_floating_point else value, None
    number, of_rows = check_row_numbers(name, value, logits, dtype, limits, or_zero)
    return number, None if of_rows is None else of_rows.detach().reshape(-1).contiguous()


def _floating(device_type: str) -> torch.dtype:
    """The dtype of numbers of each row."""
    return torch.float32 if device_type in ("mps", "xpu") else torch.float64


def problem_of(
    rows: LogitRows, numbers: _Numbers, seed: _Of, counter: _Of, request: tuple[Any, ...], noise: Tensor | None = None
) -> SampleProblem:
    """rows: at the temperature 1. request: checked, num_samples to backend of :func:`check_parameters`."""
    (temperature, row_temperature), top_k, top_p, min_p = numbers
    num_samples, topk, logprobs, kept, _ = request
    if row_temperature is not None or temperature != 1.0:
        logits, _, _, mask, lengths = rows
        rows = LogitRows(logits, temperature=temperature, row_temperature=row_temperature, mask=mask, lengths=lengths)
    parameters = (*top_k, *top_p, *min_p, *seed, *counter)
    return SampleProblem(rows, *parameters, num_samples, topk, logprobs == "kept", kept, 0, noise)


class _Plan(NamedTuple):
    """All of a call except its seeds and tensors."""

    numbers: _Numbers
    prepared: Plan[Any]


# Typed, because top_k=2.0 is an error, though 2.0 == 2.
@functools.lru_cache(maxsize=4096, typed=True)
def _plan(
    device: torch.device,
    layout: RowsLayout,
    temperature: float | Like,
    top_k: int | Like,
    top_p: float | Like,
    min_p: float | Like,
    *request: Any,
) -> _Plan:
    """Checks and plans a call, once for all calls with the same layout and arguments. Numbers of each row are flat. request: num_samples
    to backend of :func:`check_parameters`."""
    rows = check_layout(layout).flat()
    given = tuple(x.meta() if isinstance(x, Like) else x for x in (temperature, top_k, top_p, min_p))
    rows, numbers = check_parameters(rows.logits, device.type, given, rows.mask, rows.lengths, request)
    return _Plan(numbers, sampling.plan_of(problem_of(rows, numbers, _NO_NAME, _NO_NAME, request), request[-1], device))


def _plain_rows(
    logits: Any, mask: Any, lengths: Any, numbers: tuple[Any, ...], request: tuple[Any, ...], names: tuple[Any, ...]
) -> LogitRows | None:
    """The rows of a call that a plan serves, at the temperature 1, without torch's dispatcher. None if an argument may need more."""
    # torch.compile of torch 2.6 cannot trace the comparisons of sets.
    if is_traced_by_dynamo() or not (
        _PLANNED_NUMBERS.issuperset(map(type, numbers))
        and _PLANNED_REQUESTS.issuperset(map(type, request))
        and _PLANNED_NAMES.issuperset(map(type, names))
    ):
        return None
    return plain_rows(logits, 1.0, mask, lengths, [x for x in (*numbers, *names) if type(x) is Tensor])


def _checked_noise(noise: Any, logits: Tensor, seed: Any, counter: Any, generator: Any, num_samples: int) -> Tensor:
    """The noise as :class:`SampleProblem` has it."""
    for name, value, plain, is_given in (
        ("seed", seed, None, seed is not None),
        ("generator", generator, None, generator is not None),
        ("counter", counter, 0, not _is_zero(counter)),
        ("num_samples", num_samples, 1, num_samples != 1),
    ):
        if is_given:
            raise ValueError(
                f"`{name}` must be {plain} where `noise` is given, got {value}; leave it out: each draw needs noise of its own"
            )
    check_tensor("noise", noise)
    if noise.dtype != torch.float32:
        raise TypeError(f"`noise` must be float32, got {noise.dtype}; use .float()")
    check_same_device("noise", noise, logits)
    if noise.shape != logits.shape:
        raise ValueError(
            f"`noise` must have the shape of `logits`, {tuple(logits.shape)}, got {tuple(noise.shape)}; draw a number for each token"
        )
    flat: Tensor = noise.detach().reshape(-1, logits.shape[-1])
    return flat.contiguous()


def _is_zero(value: Any) -> bool:
    """Whether it is the int 0, of Python or of NumPy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value == 0)


def names_of(
    seed: int | Tensor | None, counter: int | Tensor, generator: torch.Generator | None, logits: Tensor
) -> tuple[_Of, _Of]:
    """The seeds and the counters of the rows, each as (of all, of each)."""
    if seed is not None:
        if generator is not None:
            raise ValueError("`generator` must be None where a `seed` is given, got both; leave one out")
        of_seed = _numbers("seed", seed, logits, torch.int64, _SEEDS)
        return of_seed, _numbers("counter", counter, logits, torch.int64, _SEEDS)
    if not _is_zero(counter):
        raise ValueError("`counter` must be left out without a `seed`, got one; a generator counts by itself")
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(
                f"`generator` must be a torch.Generator, got {type(generator).__name__}; an int is a `seed`"
            )
        if generator.device.type != logits.device.type:
            raise ValueError(
                f"`generator` must be on {logits.device}, the device of `logits`, got {generator.device}; "
                f"make it with torch.Generator({str(logits.device)!r})"
            )
    # A name has 126 random bits, too many for two rows ever to get the same name by chance.
    shape = 2, logits.shape[:-1].numel()
    names = torch.randint(0, 2**63 - 1, shape, dtype=torch.int64, device=logits.device, generator=generator)
    return (0, names[0]), (0, names[1])


def shaped(result: Sample, lead: Sequence[int]) -> Sample:
    """The result with the leading dimensions of the logits."""
    return changed(result, lambda x: x.reshape((*lead, *x.shape[1:])))

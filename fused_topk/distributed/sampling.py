# SPDX-License-Identifier: Apache-2.0
"""Tokens drawn from a vocabulary that is spread over processes: on every process the tokens that the unsharded call draws.

As in :mod:`fused_topk.functional.sampling`, a draw is one uniform number u: the first token, by index, at which the running sum of
the kept weights exceeds u times their total. Two forms need no gather of the logits:

- The whole row is kept. The states of the processes say which of them holds the draw. It finds the token in its columns, and
  tells the others: two collectives.
- What is kept lies within a list of the row's best tokens, as with top_k. Every process merges the list, and draws: one.

Where the list turns out too short, as it may for top_p alone, the logits are gathered after all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..arguments import check_backend, check_flags, check_k, check_list, check_logits
from ..functional import sampling as of_rows
from ..gone import refuse
from ..layout.topk_choice import MAX_K
from ..operators import merging
from ..operators.sampling import column
from ..problem import Sample, TopK
from ..row_arguments import check_rows
from ..rows import LogitRows
from .collective import group_of
from .draws import Columns, Exchanged, Names, Parameters, Wanted, from_all

# The length of a list that no top_k bounds.
_WINDOW = 1024
# The least room of a list for tokens that tie with the k-th.
_ROOM_FOR_TIES = 64


def sample(
    local_logits: Tensor,
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
    num_samples: int = 1,
    topk: int = 0,
    logprobs: str = "model",
    kept: bool = False,
    backend: str | None = None,
    group: Any = None,
    **gone: NoReturn,
) -> Sample:
    """Tokens drawn from the whole vocabulary, the same on every process of the group.

    What :func:`fused_topk.sample` draws from the columns of all processes in the order of their ranks, and returns for the whole
    vocabulary. Every process of the group must make the call, with the same arguments but for its columns, their mask and lengths.

    The other arguments, and the errors, are those of :func:`softmax_topk` and of :func:`fused_topk.sample`.

    Args:
        generator: names the random numbers where there is no `seed`. The first process's are taken; the others advance theirs,
            too.

    Contract:
        The tokens are those of the unsharded call, unless a draw's uniform number is within 2^-19 of a border between two
        tokens. On all processes of a group of like machines they are equal.
        Without top_k, top_p and min_p there are two small collectives. With any of them there is one, which moves at most 1024
        candidates a row, or k + max(64, k / 4) if top_k is a number. If more tokens than that are kept, as top_p and min_p may
        do, one more collective gathers the logits. With top_k above 1638 it always does.
        On a CPU a call of more bytes than the one before it has one more collective, as for :func:`softmax_topk`.
        With top_k, top_p or min_p a call waits for the device. It does not serve torch.compile and CUDA graphs.
    """
    if gone:
        refuse("sample", gone)
    group = group_of(group)
    check_logits(local_logits, "local_logits")
    check_backend(backend)
    check_k(num_samples, 2**31 - 1, "samples of a row", "num_samples")
    check_list("topk", topk, 2**31 - 1, "what an exchange takes")
    of_rows.check_logprobs(logprobs)
    *lead, length_here = local_logits.shape
    rows = local_logits.shape[:-1].numel()
    check_flags(kept=kept)
    numbers_of = of_rows.check_numbers(local_logits, torch.float64, temperature, top_k, top_p, min_p)
    parameters = Parameters(
        *_columns(numbers_of, (torch.float64, torch.int64, torch.float64, torch.float64), local_logits)
    )
    hidden = check_rows(local_logits, 1.0, mask, lengths, may_be_empty=True).uncounted()
    # With a seed the names are the same on all processes. Without one, those of the first process are taken.
    names = of_rows.names_of(seed, counter, generator, local_logits)
    logits = local_logits.detach().reshape(rows, length_here)
    allowed = None if hidden is None else ~hidden.reshape(rows, length_here)
    columns = Columns(LogitRows(logits, mask=allowed), group, backend)
    (_, row_seed), _ = names
    # A row with a seed of its own draws the same wherever it stands.
    stream = torch.arange(rows, device=logits.device) if row_seed is None else torch.zeros_like(row_seed)
    own_names = Names(*_columns((*names, (0, stream)), (torch.int64,) * 3, logits))
    is_whole_row = (_is_number(top_k, 0) or _is_number(top_k, -1)) and _is_number(top_p, 1) and _is_number(min_p, 0)
    length = 1 if is_whole_row else _length(top_k)
    numbers = [None if isinstance(x, Tensor) else float(x) for x in (temperature, top_k, top_p, min_p)]
    wanted = Wanted(int(num_samples), logprobs == "kept", kept)
    settings = (*numbers, *wanted, int(topk))
    counted = is_whole_row and kept
    found = Exchanged(columns, max(length or 1, topk), parameters.temperature, own_names, settings, counted)
    drawn = None
    if is_whole_row:
        drawn = found.of_whole_rows(wanted)
    elif length is not None:
        drawn = found.of_lists(parameters, wanted)
    if drawn is None:
        # Passed as the user gives it: with one seed for all rows, a row's number is part of its random numbers' names.
        seeds: dict[str, Any] = {"seed": found.names.seed.squeeze(1), "counter": found.names.counter.squeeze(1)}
        if seed is not None and not isinstance(seed, Tensor):
            seeds["seed"] = seed
        drawn = _gathered(columns, found, parameters, seeds, wanted)
    if topk:
        check_k(topk, found.vocab_size or topk, "the whole vocabulary", "topk")
        best = merging.merge_parts(*found.parts, topk, 1.0, None, "log_softmax", "allowed", backend)
        drawn = drawn._replace(topk=TopK(*best))
    return of_rows.shaped(drawn, lead)


def _is_number(value: Any, number: float) -> bool:
    return not isinstance(value, Tensor) and value == number


def _length(top_k: Any) -> int | None:
    """How many of the best tokens of a row are listed; None where no list is sure to be long enough."""
    if isinstance(top_k, Tensor) or top_k <= 0:
        return _WINDOW
    length = int(top_k) + max(_ROOM_FOR_TIES, int(top_k) // 4)
    return length if length <= MAX_K else None


def _columns(
    numbers: Iterable[tuple[Any, Tensor | None]], dtypes: Iterable[torch.dtype], of: Tensor
) -> Iterator[Tensor]:
    """A number for each row of `of`, (rows, 1), of each of the parameters."""
    rows = of.shape[:-1].numel()
    return (column(*each, dtype, of.device).expand(rows, 1) for each, dtype in zip(numbers, dtypes))


def _gathered(
    columns: Columns, found: Exchanged, parameters: Parameters, seeds: dict[str, Any], wanted: Wanted
) -> Sample:
    """Draws from the logits of all processes, which are gathered."""
    logits = columns.rows.counted()
    lengths = found.parts.lengths.tolist()
    padded = torch.nn.functional.pad(logits, (0, max(lengths) - logits.shape[1]))
    everyone = from_all(padded, columns.group)
    whole = torch.cat([x[:, :length] for x, length in zip(everyone, lengths, strict=True)], 1)
    numbers = {name: x.squeeze(1) for name, x in parameters._asdict().items()}
    num_samples, truncated, kept = wanted
    return of_rows.sample(
        whole,
        **numbers,
        **seeds,
        num_samples=num_samples,
        logprobs="kept" if truncated else "model",
        kept=kept,
        backend=columns.backend,
    )

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

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import (
    GREATEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    check_backend,
    check_k,
    check_logits,
    check_mask,
    check_row_numbers,
)
from ..backends import philox
from ..functional import sampling as of_rows
from ..layout.topk_choice import MAX_K
from ..operators import calls
from ..problem import Kept, Sample, TopK, result_dtype
from ..rows import LogitRows, unpacked
from .collective import all_gather, group_of
from .functions import Gathered, gather_states

# Of a list that no top_k bounds.
_WINDOW = 1024
# Room for tokens that tie with the k-th.
_ROOM_FOR_TIES = 64
# Columns whose sum is known from the read of all; those of the one that holds a draw are read again.
_BLOCK = 1024


class _Parameters(NamedTuple):
    """What may be drawn, for each row as (rows, 1) float64 or int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class _Wanted(NamedTuple):
    """What is wanted of each row."""

    num_samples: int
    truncated_log_probs: bool
    kept: bool


class _Names(NamedTuple):
    """The names of each row's random numbers, int64 (rows, 1)."""

    seed: Tensor
    counter: Tensor
    stream: Tensor


def sample(
    local_logits: Tensor,
    *,
    group: Any = None,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    mask: Tensor | None = None,
    seed: int | Tensor | None = None,
    counter: int | Tensor = 0,
    generator: torch.Generator | None = None,
    num_samples: int = 1,
    logprobs: int = 0,
    truncated_log_probs: bool = False,
    kept: bool = False,
    backend: str | None = None,
) -> Sample:
    """Tokens drawn from the whole vocabulary, the same on every process of the group.

    What :func:`fused_topk.sample` draws from the columns of all processes in the order of their ranks. Every process of the group
    must make the call, with the same arguments but for `local_logits` and `mask`.

    Args:
        local_logits: shape (..., V_local), this process's columns, as for :func:`softmax_topk`.
        group: the process group; None: all processes.
        temperature: this and all that follow are as for :func:`fused_topk.sample`.
        top_k: how many of the best tokens may be drawn; 0 or -1 for all.
        top_p: the share of the probability that may be drawn.
        min_p: the least probability, relative to the best token's.
        mask: the tokens of this process's columns that may be drawn.
        seed: names the random numbers, the same on all processes.
        counter: the same on all processes.
        generator: names the random numbers where there is no `seed`. The first process's are taken; the others advance theirs,
            too.
        num_samples: independent draws from each row.
        logprobs: how many of the row's best tokens to return as well.
        truncated_log_probs: whether log_probs are those of the distribution that was drawn from.
        kept: whether to return how many tokens of each row may be drawn, and the log of their mass.
        backend: None, "cuda", "cpu" or "reference": what reads the columns.

    Returns:
        Sample, as :func:`fused_topk.sample` returns it for the whole vocabulary.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fused_topk.sample` and :func:`softmax_topk`.

    Contract:
        The tokens are those of the unsharded call, unless a draw's uniform number is within 2^-19 of a border between two
        tokens. On all processes of a group of like machines they are equal.
        Without top_k, top_p and min_p there are two small collectives. With one of them there is one, of at most 1024 candidates
        a row, or k + max(64, k / 4) with top_k as a number. More tokens than that may be kept, as top_p and min_p may keep the
        whole vocabulary. Then the logits are gathered in two more collectives, as they are at once with top_k above 1638.
        On a CPU a call of more bytes than the one before it has one more, as for :func:`softmax_topk`.
        With top_k, top_p or min_p a call waits for the device. Not for torch.compile and CUDA graphs.
    """
    group = group_of(group)
    check_logits(local_logits)
    check_backend(backend)
    check_k(num_samples, 2**31 - 1, "samples of a row", "num_samples")
    if type(logprobs) is not int or logprobs != 0:
        check_k(logprobs, 2**31 - 1, "what an exchange takes", "logprobs")
    *lead, length_here = local_logits.shape
    rows = local_logits.shape[:-1].numel()
    of_rows.check_flags(truncated_log_probs=truncated_log_probs, kept=kept)
    parameters = _checked(local_logits, temperature, top_k, top_p, min_p)
    allowed = check_mask(mask, local_logits)
    # Named alike on all processes, or to be told by the first.
    names = of_rows.names_of(seed, counter, generator, local_logits)
    logits = local_logits.detach().reshape(rows, length_here)
    if allowed is not None:
        allowed = allowed.reshape(rows, allowed.shape[-1])
    columns = _Columns(logits, allowed, group, backend)
    own_names = _as_names(names, logits)
    is_whole_row = (_is_number(top_k, 0) or _is_number(top_k, -1)) and _is_number(top_p, 1) and _is_number(min_p, 0)
    length = 1 if is_whole_row else _length(top_k)
    numbers = [None if isinstance(x, Tensor) else float(x) for x in (temperature, top_k, top_p, min_p)]
    wanted = _Wanted(int(num_samples), truncated_log_probs, kept)
    settings = (*numbers, *wanted, int(logprobs))
    counted = is_whole_row and kept
    found = columns.exchanged(max(length or 1, logprobs), parameters.temperature, own_names, settings, counted)
    drawn = None
    if is_whole_row:
        drawn = found.of_whole_rows(wanted)
    elif length is not None:
        drawn = found.of_lists(parameters, wanted)
    if drawn is None:
        # A seed of all rows is told apart by the rows' numbers, which the unsharded call has, too.
        seeds: dict[str, Any] = {"seed": found.names.seed.squeeze(1), "counter": found.names.counter.squeeze(1)}
        if seed is not None and not isinstance(seed, Tensor):
            seeds["seed"] = seed
        drawn = _gathered(columns, found, parameters, seeds, wanted)
    if logprobs:
        check_k(logprobs, found.vocab_size or logprobs, "the whole vocabulary", "logprobs")
        best = calls.merge_parts(*found.call.parts, logprobs, 1.0, None, "log_softmax", "allowed", backend)
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


def _checked(logits: Tensor, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> _Parameters:
    limits = (LEAST_TEMPERATURE, GREATEST_TEMPERATURE)
    of_all = (
        check_row_numbers("temperature", temperature, logits, torch.float64, limits, or_zero=True),
        check_row_numbers("top_k", top_k, logits, torch.int64, (-1, of_rows._SEEDS[1])),
        check_row_numbers("top_p", top_p, logits, torch.float64, (0, 1)),
        check_row_numbers("min_p", min_p, logits, torch.float64, (0, 1)),
    )
    rows = logits.shape[:-1].numel()
    dtypes = (torch.float64, torch.int64, torch.float64, torch.float64)
    return _Parameters(
        *(_column(*each, rows, dtype, logits.device) for each, dtype in zip(of_all, dtypes, strict=True))
    )


def _column(number: Any, of_row: Tensor | None, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if of_row is None:
        return torch.full((rows, 1), number, dtype=dtype, device=device)
    return of_row.unsqueeze(1)


def _as_names(names: tuple[tuple[Any, Tensor | None], tuple[Any, Tensor | None]], logits: Tensor) -> _Names:
    (seed, row_seed), (counter, row_counter) = names
    rows, device = len(logits), logits.device
    # A row with a seed of its own draws the same wherever it stands.
    stream = (
        torch.arange(rows, device=device) if row_seed is None else torch.zeros(rows, dtype=torch.int64, device=device)
    )
    return _Names(
        _column(seed, row_seed, rows, torch.int64, device),
        _column(counter, row_counter, rows, torch.int64, device),
        stream.unsqueeze(1),
    )


class _Columns(NamedTuple):
    """This process's columns of the rows."""

    logits: Tensor  # (rows, V_local)
    mask: Tensor | None
    group: Any
    backend: str | None

    def exchanged(
        self, k: int, temperature: Tensor, names: _Names, settings: tuple[Any, ...], counted: bool
    ) -> _Exchanged:
        """The states of all processes, the sums at the temperature, the first process's names, and the number of tokens if they
        are counted. settings: what all processes must ask for alike."""
        # A row of temperature 0 takes its best token, whatever its sums.
        t = temperature.where(temperature > 0, 1.0)
        blocks = _Blocks.of(self, t)
        words = [*(x.view(torch.int64) for x in blocks.state()), names.seed, names.counter]
        tail = torch.cat([*words, self.num_tokens()] if counted else words, 1)
        call = gather_states(self.logits, k, self.group, None, self.mask, "allowed", self.backend, None, tail, settings)
        assert call.tails is not None
        told = _Names(call.tails[0, :, 2:3], call.tails[0, :, 3:4], names.stream)
        return _Exchanged(self, call, blocks, temperature, told, k)

    def num_tokens(self) -> Tensor:
        """How many tokens may be drawn, (rows, 1)."""
        return self.masked(self.logits != -torch.inf, False).sum(1, keepdim=True)

    def masked(self, x: Tensor, hidden: Any) -> Tensor:
        """x (rows, V_local), with `hidden` in the place of what the mask hides."""
        if self.mask is None:
            return x
        return x.masked_fill(~unpacked(self.mask.expand(len(x), -1), x.shape[1]), hidden)


class _Blocks(NamedTuple):
    """The sums of this process's columns at the temperature, a block at a time."""

    m: Tensor  # float64 (rows, blocks)
    d: Tensor
    temperature: Tensor  # (rows, 1), positive

    @staticmethod
    def of(columns: _Columns, temperature: Tensor) -> _Blocks:
        logits, mask, _, backend = columns
        rows, length = logits.shape
        if mask is not None:
            mask = unpacked(mask.expand(rows, -1), length)
        whole = length // _BLOCK * _BLOCK
        states = []
        for part in (slice(0, whole), slice(whole, length)):
            size = min(_BLOCK, part.stop - part.start)
            if size and rows:
                shape = (rows, (part.stop - part.start) // size, size)
                x = logits[:, part].view(shape)
                own = None if mask is None else mask[:, part].view(shape)
                of_row = temperature.expand(-1, x.shape[1]).to(result_dtype(logits.dtype))
                rows_of_part = LogitRows(x, row_temperature=of_row, mask=own)
                state = calls.row_topk(rows_of_part, 1, "state", "allowed", backend)
                states.append(state.logsumexp.double())
        if not states:
            none = torch.full((rows, 1), -torch.inf, dtype=torch.float64, device=logits.device)
            return _Blocks(none, torch.zeros_like(none), temperature)
        m, d = torch.cat(states, -1).unbind(0)
        return _Blocks(m, d, temperature)

    def state(self) -> tuple[Tensor, Tensor]:
        """m and d of all columns, (rows, 1)."""
        m = self.m.amax(1, keepdim=True)
        return m, self.weights(m).sum(1, keepdim=True)

    def weights(self, m: Tensor) -> Tensor:
        """The sums of exp((x - m) / temperature) of the blocks."""
        return _relative(self.m, m, self.temperature) * self.d


def _relative(x: Tensor, m: Tensor, temperature: Tensor) -> Tensor:
    """exp((x - m) / temperature), 0 where x is -inf, also if m is."""
    return ((x - m) / temperature).exp().where(x != -torch.inf, 0.0)


class _Exchanged:
    """What the processes have exchanged, the same on each of them."""

    def __init__(
        self, columns: _Columns, call: Gathered, blocks: _Blocks, temperature: Tensor, names: _Names, k: int
    ) -> None:
        self.call, self.names = call, names
        self.vocab_size = call.vocab_size
        self._columns, self._blocks, self._temperature = columns, blocks, temperature
        parts, backend = call.parts, columns.backend
        listed = k if call.vocab_size is None else min(k, call.vocab_size)
        values, self._ids, normalizer = calls.merge_parts(*parts, listed, 1.0, None, "state", "allowed", backend)
        # The best tokens of each row (rows, n), best first; and the model's own m and d.
        self._ranked = values.double()
        self._m, self._d = normalizer.double().unsqueeze(-1).unbind(0)
        self._has_distribution = self._ranked[:, :1].isfinite()
        assert call.tails is not None
        m, d = call.tails[..., :2].view(torch.float64).unsqueeze(-1).unbind(-2)
        # The sums of each process at the temperature, (processes, rows, 1).
        self._sums = _relative(m, self._m, blocks.temperature) * d

    def of_whole_rows(self, wanted: _Wanted) -> Sample:
        """Tokens of whole rows."""
        logits, _, group, _ = self._columns
        rank, length = dist.get_rank(group), logits.shape[1]
        ends = self._sums.squeeze(-1).cumsum(0)  # (processes, rows)
        total = ends[-1].unsqueeze(1)
        aim = _aim(self._uniforms(wanted.num_samples), total)
        owner = _first_beyond(ends.t().contiguous(), aim)
        before = ends - self._sums.squeeze(-1)
        rest = aim - before[rank].unsqueeze(1)
        place, logit = self._found_here(rest)
        last = self.call.parts.lengths.cumsum(0)[rank].long()
        # Every process says what it has found. The owner's counts.
        said = torch.stack([place + (last - length), logit.double().view(torch.int64)])
        tokens, logit_words = _from_all(said, group).gather(0, owner.expand(1, 2, -1, -1)).squeeze(0)
        assert self.call.tails is not None
        counts = self.call.tails[..., 4:].sum(0)
        return self._finished(tokens, logit_words.view(torch.float64), total, counts, wanted)

    def _found_here(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """The first of this process's columns at which its running sum exceeds `rest` (rows, samples), and its logit."""
        logits, mask, *_ = self._columns
        rows, length = logits.shape
        if not length:
            return torch.zeros_like(rest, dtype=torch.int64), torch.full_like(rest, -torch.inf)
        ends = self._blocks.weights(self._m).cumsum(1)
        block = _first_beyond(ends, _within(rest, ends[:, -1:]))
        before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
        columns = block.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=logits.device)
        places = columns.clamp(max=length - 1).flatten(1)
        x = logits.gather(1, places)
        if mask is not None:
            x = x.masked_fill(~unpacked(mask.expand(rows, -1), length).gather(1, places), -torch.inf)
        x = x.view_as(columns).double().masked_fill(columns >= length, -torch.inf)
        t = self._blocks.temperature.unsqueeze(-1)
        sums = _relative(x, self._m.unsqueeze(-1), t).cumsum(-1)
        within = _first_beyond(sums, _within((rest - before).unsqueeze(-1), sums[..., -1:]))
        return columns.gather(-1, within).squeeze(-1).clamp(max=length - 1), x.gather(-1, within).squeeze(-1)

    def of_lists(self, parameters: _Parameters, wanted: _Wanted) -> Sample | None:
        """Tokens of the lists; None where a list is too short. Waits for the device."""
        ranked, listed = self._ranked, self._ranked.shape[1]
        _, top_k, top_p, min_p = parameters
        t = self._blocks.temperature
        weights = _relative(ranked, self._m, t)
        # As reference_sampling.draw() does it with whole rows.
        has_k = (top_k > 0) & (top_k < (self.vocab_size or top_k + 1))
        last = (top_k.where(has_k, listed) - 1).clamp(max=listed - 1)
        is_kept = is_in_k = (ranked >= ranked.gather(1, last)) | ~has_k
        sums = (weights * is_kept).cumsum(1)
        # What top_p is a share of: what top_k keeps, or the whole row.
        total = sums[:, -1:].where(has_k, self._sums.sum(0))
        before = torch.nn.functional.pad(sums, (1, -1))
        is_kept = is_kept & (~(before >= top_p * total) | ~(top_p < 1)) & ~(weights < min_p)
        is_kept[:, 0] = True
        # All that tie with the k-th must be listed, for the total.
        is_cut = torch.where(has_k, ~is_in_k[:, -1:], ~is_kept[:, -1:])
        is_enough = is_cut | (ranked[:, -1:] == -torch.inf) | (self._temperature == 0) | ~self._has_distribution
        if listed != self.vocab_size and not bool(is_enough.all()):
            return None
        ids, order = self._ids.sort(1)
        of_token = (weights * is_kept).gather(1, order)
        ends = of_token.cumsum(1)
        place = _first_beyond(ends, _aim(self._uniforms(wanted.num_samples), ends[:, -1:]))
        tokens, logits = ids.gather(1, place), ranked.gather(1, order).gather(1, place)
        counts = (is_kept & (ranked != -torch.inf)).sum(1, keepdim=True)
        return self._finished(tokens, logits, ends[:, -1:], counts, wanted)

    def _uniforms(self, num_samples: int) -> Tensor:
        return philox.uniforms(*self.names, num_samples, torch.float64)

    def _finished(self, tokens: Tensor, logits: Tensor, total: Tensor, counts: Tensor, wanted: _Wanted) -> Sample:
        """Rows of temperature 0 and without a distribution, log-probabilities, and what is kept. total, counts: (rows, 1), the
        sum of exp((x - m) / temperature) over what is kept, and the number of its tokens."""
        is_drawn = self._has_distribution & (self._temperature > 0)
        is_greedy = self._has_distribution & (self._temperature == 0)
        tokens = tokens.where(is_drawn, self._ids[:, :1])
        shifted = logits.where(is_drawn, self._ranked[:, :1]) - self._m
        if wanted.truncated_log_probs:
            log_probs = (shifted / self._blocks.temperature - total.log()).where(is_drawn, 0.0)
            known = is_drawn | is_greedy
        else:
            log_probs = shifted - self._d.log()
            known = self._has_distribution
        dtype = result_dtype(self._columns.logits.dtype)
        kept = None
        if wanted.kept:
            mass = self._m / self._blocks.temperature + total.where(is_drawn, 1.0).log()
            kept = Kept(
                counts.where(is_drawn, is_greedy.long()).squeeze(1),
                mass.where(is_drawn | is_greedy, torch.nan).to(dtype).squeeze(1),
            )
        return Sample(tokens, log_probs.where(known, torch.nan).to(dtype), None, kept)


def _gathered(
    columns: _Columns, found: _Exchanged, parameters: _Parameters, seeds: dict[str, Any], wanted: _Wanted
) -> Sample:
    """Draws from the logits of all processes, which are gathered."""
    logits = columns.masked(columns.logits, -torch.inf)
    lengths = found.call.parts.lengths.tolist()
    padded = torch.nn.functional.pad(logits, (0, max(lengths) - logits.shape[1]))
    everyone = _from_all(padded, columns.group)
    whole = torch.cat([x[:, :length] for x, length in zip(everyone, lengths, strict=True)], 1)
    numbers = {name: x.squeeze(1) for name, x in parameters._asdict().items()}
    return of_rows.sample(whole, **numbers, **seeds, **wanted._asdict(), backend=columns.backend)


def _from_all(own: Tensor, group: Any) -> Tensor:
    """(processes, *shape): what each process has."""
    return all_gather(own.contiguous().view(1, own.numel()), group).view(dist.get_world_size(group), *own.shape)


def _aim(u: Tensor, total: Tensor) -> Tensor:
    # A product that is rounded up to the total would be beyond every token.
    return _within(u * total, total)


def _within(aim: Tensor, total: Tensor) -> Tensor:
    return torch.minimum(aim.clamp(min=0), total.nextafter(torch.zeros_like(total)))


def _first_beyond(ends: Tensor, aim: Tensor) -> Tensor:
    """The first place (..., samples) at which the running sums `ends` (..., n) exceed `aim`."""
    return torch.searchsorted(ends.contiguous(), aim.contiguous(), right=True).clamp(max=ends.shape[-1] - 1)

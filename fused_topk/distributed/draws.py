# SPDX-License-Identifier: Apache-2.0
"""Draws from columns that are spread over processes: what the processes exchange, and what each finds in its own columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import philox
from ..operators import merging, row_topk, sampling
from ..problem import Kept, Sample, result_dtype
from ..rows import LogitRows
from ..scale import Scale
from .collective import all_gather
from .functions import gather_states

# The columns of a block. The first read gives the sum of each block. The block that holds a draw is then read again.
_BLOCK = 1024


class Parameters(NamedTuple):
    """The parameters that say what may be drawn: a number for each row, (rows, 1) float64 or int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Wanted(NamedTuple):
    """What a call wants of each row."""

    num_samples: int
    truncated: bool  # whether log-probabilities are relative to what is kept
    kept: bool


class Names(NamedTuple):
    """The names of each row's random numbers, int64 (rows, 1)."""

    seed: Tensor
    counter: Tensor
    stream: Tensor


class Columns(NamedTuple):
    """This process's columns of the rows."""

    rows: LogitRows  # (rows, V_local), at the temperature 1
    group: Any
    backend: str | None


class _Blocks(NamedTuple):
    """The sums of this process's columns at the temperature, a block at a time."""

    m: Tensor  # float64 (rows, blocks)
    d: Tensor
    temperature: Tensor  # (rows, 1), positive

    @staticmethod
    def of(columns: Columns, temperature: Tensor) -> _Blocks:
        logits, mask = columns.rows.logits, columns.rows.mask
        rows, length = logits.shape
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
                state = row_topk.row_topk(rows_of_part, 1, "state", "allowed", columns.backend)
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
    """exp((x - m) / temperature), 0 where x is -inf, also if m is. temperature: (rows, 1), or with one more dimension if x has it."""
    return Scale(row_temperature=temperature.squeeze(-1)).weight(x, m).where(x != -torch.inf, 0.0)


class Exchanged:
    """What the processes have exchanged, the same on each of them."""

    def __init__(
        self,
        columns: Columns,
        k: int,
        temperature: Tensor,
        names: Names,
        settings: tuple[Any, ...],
        counted: bool,
    ) -> None:
        """Exchanges the states of all processes, their sums at the temperature, the first process's names, and if `counted` the
        numbers of tokens. settings: plain values that must be the same on all processes."""
        # A row of temperature 0 takes its best token, whatever its sums.
        blocks = _Blocks.of(columns, temperature.where(temperature > 0, 1.0))
        words = [*(x.view(torch.int64) for x in blocks.state()), names.seed, names.counter]
        if counted:
            words.append((columns.rows.counted() != -torch.inf).sum(1, keepdim=True))
        tail = torch.cat(words, 1)
        call = gather_states(columns.rows, k, "allowed", columns.backend, columns.group, None, tail, settings)
        assert call.tails is not None
        self.parts, self._tails, self.vocab_size = call.parts, call.tails, call.vocab_size
        self.names = Names(self._tails[0, :, 2:3], self._tails[0, :, 3:4], names.stream)
        self._columns, self._blocks, self._temperature = columns, blocks, temperature
        listed = k if self.vocab_size is None else min(k, self.vocab_size)
        values, self._ids, normalizer = merging.merge_parts(
            *self.parts, listed, 1.0, None, "state", "allowed", columns.backend
        )
        # The best tokens of each row (rows, n), best first; and the model's own m and d.
        self._ranked = values.double()
        self._m, self._d = normalizer.double().unsqueeze(-1).unbind(0)
        self._has_distribution = self._ranked[:, :1].isfinite()
        m, d = self._tails[..., :2].view(torch.float64).unsqueeze(-1).unbind(-2)
        # The sums of each process at the temperature, (processes, rows, 1).
        self._sums = _relative(m, self._m, blocks.temperature) * d

    def of_whole_rows(self, wanted: Wanted) -> Sample:
        """Tokens of whole rows."""
        group = self._columns.group
        rank, length = dist.get_rank(group), self._columns.rows.logits.shape[1]
        ends = self._sums.squeeze(-1).cumsum(0)  # (processes, rows)
        total = ends[-1].unsqueeze(1)
        aim = _aim(self._uniforms(wanted.num_samples), total)
        owner = _first_beyond(ends.t().contiguous(), aim)
        before = ends - self._sums.squeeze(-1)
        rest = aim - before[rank].unsqueeze(1)
        place, logit = self._found_here(rest)
        last = self.parts.lengths.cumsum(0)[rank].long()
        # Every process says what it has found. The owner's counts.
        said = torch.stack([place + (last - length), logit.double().view(torch.int64)])
        tokens, logit_words = from_all(said, group).gather(0, owner.expand(1, 2, -1, -1)).squeeze(0)
        counts = self._tails[..., 4:].sum(0)
        return self._finished(tokens, logit_words.view(torch.float64), total, counts, wanted)

    def _found_here(self, rest: Tensor) -> tuple[Tensor, Tensor]:
        """The first of this process's columns at which its running sum exceeds `rest` (rows, samples), and its logit."""
        given = self._columns.rows
        length = given.logits.shape[1]
        if not length:
            return torch.zeros_like(rest, dtype=torch.int64), torch.full_like(rest, -torch.inf)
        ends = self._blocks.weights(self._m).cumsum(1)
        block = _first_beyond(ends, _within(rest, ends[:, -1:]))
        before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
        columns = block.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=rest.device)
        places = columns.clamp(max=length - 1).flatten(1)
        x = given.logits.gather(1, places)
        counted = given.counted_at(places)
        if counted is not None:
            x = x.where(counted, -torch.inf)
        x = x.view_as(columns).double().masked_fill(columns >= length, -torch.inf)
        t = self._blocks.temperature.unsqueeze(-1)
        sums = _relative(x, self._m.unsqueeze(-1), t).cumsum(-1)
        within = _first_beyond(sums, _within((rest - before).unsqueeze(-1), sums[..., -1:]))
        return columns.gather(-1, within).squeeze(-1).clamp(max=length - 1), x.gather(-1, within).squeeze(-1)

    def of_lists(self, parameters: Parameters, wanted: Wanted) -> Sample | None:
        """Tokens of the lists; None where a list is too short. Waits for the device."""
        ranked, listed = self._ranked, self._ranked.shape[1]
        _, top_k, top_p, min_p = parameters
        t = self._blocks.temperature
        weights = _relative(ranked, self._m, t)
        has_k = (top_k > 0) & (top_k < (self.vocab_size or top_k + 1))
        last = (top_k.where(has_k, listed) - 1).clamp(max=listed - 1)
        is_in_k = (ranked >= ranked.gather(1, last)) | ~has_k
        sums = (weights * is_in_k).cumsum(1)
        # top_p is a share of this: of the tokens that top_k keeps, or of the whole row.
        total = sums[:, -1:].where(has_k, self._sums.sum(0))
        is_kept = sampling.kept_of(is_in_k, weights, sums, total, top_p, min_p)
        # The total must have all tokens that tie with the k-th. They are all listed if the last listed token is not one of them.
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

    def _finished(self, tokens: Tensor, logits: Tensor, total: Tensor, counts: Tensor, wanted: Wanted) -> Sample:
        rows = self._ids[:, :1], self._m, self._d, self._temperature
        result = sampling.finished(tokens, logits, *rows, total, counts, wanted.truncated)
        dtype = result_dtype(self._columns.rows.logits.dtype)
        kept = Kept(result.kept.counts, result.kept.logsumexp.to(dtype)) if wanted.kept and result.kept else None
        return Sample(result.tokens, result.logprobs.to(dtype), None, kept)


def from_all(own: Tensor, group: Any) -> Tensor:
    """(processes, *shape): the tensor of each process."""
    return all_gather(own.contiguous().view(1, own.numel()), group).view(dist.get_world_size(group), *own.shape)


def _aim(u: Tensor, total: Tensor) -> Tensor:
    # A product that is rounded up to the total would be beyond every token.
    return _within(u * total, total)


def _within(aim: Tensor, total: Tensor) -> Tensor:
    return torch.minimum(aim.clamp(min=0), total.nextafter(torch.zeros_like(total)))


def _first_beyond(ends: Tensor, aim: Tensor) -> Tensor:
    """The first place (..., samples) at which the running sums `ends` (..., n) exceed `aim`."""
    return torch.searchsorted(ends.contiguous(), aim.contiguous(), right=True).clamp(max=ends.shape[-1] - 1)

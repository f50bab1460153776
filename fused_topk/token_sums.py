# SPDX-License-Identifier: Apache-2.0
"""What log-probabilities, entropy and tail of a row are made of: sums that merge as the (m, d) of the paper do.

With z = (x - m) / T the state of a part is (m, d, s): d is the sum of e^z, and s the sum of z e^z. Where m grows by T D, e^z and z
become smaller, so

    (m, d, s)  is  (m + T D, d e^-D, (s - D d) e^-D)

and two states relative to one m are added. All terms of s are at most 0, so nothing cancels in entropy = log d - s / d. The tail has
a state of its own, of the tokens that are left. So it keeps its digits where these have next to no probability.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .scale import Scale


class TokenSums(NamedTuple):
    """The state of a part of each row. All fields are (...), and float32, or float64."""

    m: Tensor  # the greatest logit that counts
    d: Tensor  # the sum of e^z over the logits that count
    s: Tensor  # the sum of z e^z over them, where 0 log 0 is 0
    rest_m: Tensor  # m and d of the allowed tokens that are not among the row's given ones
    rest_d: Tensor

    @staticmethod
    def of(state: Tensor) -> TokenSums:
        """Of a tensor (..., 5), as backends write it."""
        return TokenSums(*state.unbind(-1))

    @staticmethod
    def of_logits(x: Tensor, rest: Tensor, scale: Scale) -> TokenSums:
        """x, rest: the logits (..., V) that count, and those that are left. Others are -inf."""
        m, d, s = _sums(x, scale)
        rest_m, rest_d, _ = _sums(rest, scale)
        return TokenSums(m, d, s, rest_m, rest_d)

    def merged(self, other: TokenSums, scale: Scale) -> TokenSums:
        """The state of both parts together."""
        m, (d, s) = _merged(self[:3], other[:3], scale)
        rest_m, (rest_d, _) = _merged((*self[3:], self.s), (*other[3:], other.s), scale)
        return TokenSums(m, d, s, rest_m, rest_d)

    def logsumexp(self, scale: Scale) -> Tensor:
        """The log of the sum of e^(x / T)."""
        scaled = scale.scaled(self.m.unsqueeze(-1)).squeeze(-1)
        return scaled + self.d.log().where(self.m.isfinite(), 0.0)

    def entropy(self) -> Tensor:
        """In nats; NaN in a row without probabilities."""
        return self.d.log() - self.s / self.d

    def tail(self, scale: Scale) -> Tensor:
        """The log-probability of the tokens that are left; NaN in a row without probabilities."""
        return _log_weight(self.rest_m, self.m, scale) + self.rest_d.log() - self.d.log()


def empty_sums(lead: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(*lead, 5): the state of no token."""
    state = torch.zeros((*lead, len(TokenSums._fields)), dtype=dtype, device=device)
    state[..., 0::3] = -torch.inf
    return state


def without(x: Tensor, tokens: Tensor) -> Tensor:
    """The logits (..., V) with -inf at the tokens (..., n). Tokens that are out of range stand for none."""
    is_here = (tokens >= 0) & (tokens < x.shape[-1])
    # None of the tokens may undo what another one does, so those that are none have a place of their own.
    places = tokens.where(is_here, x.shape[-1])
    return torch.nn.functional.pad(x, (0, 1)).scatter(-1, places, -torch.inf)[..., :-1]


def reference_point(m: Tensor) -> Tensor:
    """What is subtracted from logits whose maximum is m: -inf - -inf would be NaN."""
    return m.where(m != -torch.inf, 0.0)


def moment(z: Tensor, weight: Tensor) -> Tensor:
    """z e^z, given z and e^z; 0 for z = -inf."""
    return (z * weight).where(weight != 0, 0.0)


def _log_weight(x: Tensor, m: Tensor, scale: Scale) -> Tensor:
    return scale.log_weight(x.unsqueeze(-1), m.unsqueeze(-1)).squeeze(-1)


def _sums(x: Tensor, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
    m = x.amax(-1)
    z = scale.log_weight(x, reference_point(m).unsqueeze(-1))
    weight = z.exp()
    return m, weight.sum(-1), moment(z, weight).sum(-1)


def _merged(a: tuple[Tensor, ...], b: tuple[Tensor, ...], scale: Scale) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    m = torch.maximum(a[0], b[0])
    base = reference_point(m)
    d, s = torch.zeros_like(m), torch.zeros_like(m)
    for of_m, of_d, of_s in (a, b):
        shift = _log_weight(of_m, base, scale)
        weight = shift.exp()
        d = d + of_d * weight
        s = s + of_s * weight + moment(shift, weight) * of_d
    return m, (d, s)

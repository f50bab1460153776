# SPDX-License-Identifier: Apache-2.0
"""How logits are scaled: a logit x counts as x / T, with the temperature T, in every exponential and in every result but raw
logits. The formulas of the package's functions are here. CONTRIBUTING.md ("Find your way") says where the kernels have theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scale(NamedTuple):
    """The temperature of all rows, or one a row. In the methods x has the tokens in the last dimension, and m is (..., 1)."""

    temperature: float = 1.0  # positive and finite (0 too for draws); ignored where row_temperature is given
    row_temperature: Tensor | None = None  # (...), float32, or float64 for float64 logits and for draws

    # Not a property, which torch.compile of torch 2.6 cannot read from a named tuple.
    def _divisor(self) -> float | Tensor:
        """T in a form that broadcasts to the logits."""
        return self.temperature if self.row_temperature is None else self.row_temperature.unsqueeze(-1)

    def scaled(self, x: Tensor) -> Tensor:
        """x / T"""
        return x / self._divisor()

    def log_weight(self, x: Tensor, m: Tensor, out: Tensor | None = None) -> Tensor:
        """(x - m) / T. out: a tensor to compute it in, which may be x."""
        return torch.div(torch.sub(x, m, out=out), self._divisor(), out=out)

    def weight(self, x: Tensor, m: Tensor, out: Tensor | None = None) -> Tensor:
        """exp((x - m) / T). out: as for log_weight()."""
        return torch.exp(self.log_weight(x, m, out), out=out)

    def logsumexp(self, m: Tensor, d: Tensor) -> Tensor:
        """m / T + log d"""
        return m / self._divisor() + d.log()

    def back(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """The gradient of the logits, given that of the scaled logits. out: as for log_weight()."""
        return torch.div(gradient, self._divisor(), out=out)

    def with_nan(self, dtype: torch.dtype) -> Scale:
        """The same in a dtype to compute in. A row whose temperature is not positive has NaN, so that its results are NaN."""
        of_rows = self.row_temperature
        return (
            self if of_rows is None else self._replace(row_temperature=of_rows.to(dtype).where(of_rows > 0, torch.nan))
        )


# The fields of Scale as the arguments of an operator of torch.library.
SCALE_SCHEMA = "float temperature, Tensor? row_temperature"

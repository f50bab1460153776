# SPDX-License-Identifier: Apache-2.0
"""The package's functions of DTensor logits. If the logits are sharded over the vocabulary, the processes exchange states. If they
are sharded over rows, or replicated, each process works on what it has. The result is a DTensor: replicated where the logits were
sharded over the vocabulary, else placed as the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..arguments import check_beam_scores, check_dim, check_k, check_logits, check_result_dtype, check_vocabulary
from ..operators import full_rows as of_full_rows
from ..operators import row_topk
from ..problem import TopK, result_dtype
from ..row_arguments import check_mask, check_rows, check_temperature
from ..rows import unpacked
from . import full_rows as of_columns
from . import functions


def row(
    values: str,
    logits: Tensor,
    k: int,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    normalize: str,
    backend: str | None,
) -> TopK:
    """softmax_topk, log_softmax_topk or topk, whose logsumexp is empty."""
    _check(logits, dim)
    local = _Local(logits, mask, temperature)
    check_k(k, logits.shape[-1])
    if local.group is None:
        result = row_topk.row_topk(local.rows, k, values, normalize, backend)
    else:
        result = functions.row(values, local.rows, k, normalize, backend, local.group)
    leading, (best, indices, logsumexp) = tuple(logits.shape[:-1]), result
    if values != "logits":
        logsumexp = local.whole(logsumexp, leading)
    return TopK(local.whole(best, (*leading, k)), local.whole(indices, (*leading, k)), logsumexp)


def beams(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    normalize: str,
    backend: str | None,
) -> TopK:
    """beam_topk. The beams of a sequence must lie on one process."""
    _check(logits)
    beam_scores = _plain(beam_scores)
    check_beam_scores(beam_scores, logits)
    local = _Local(logits, mask, temperature, last_row_dim=1)
    scores = local.cut(beam_scores, logits.shape[:-1])
    check_k(k, logits.shape[1] * logits.shape[-1], "beams times the vocabulary size")
    if local.group is None:
        result = row_topk.beam_topk(local.rows, scores, k, normalize, backend)
    else:
        result = functions.best_of_beams(local.rows, scores, k, normalize, backend, local.group)
    batch = logits.shape[0]
    return TopK(*map(local.whole, result, ((batch, k), (batch, k), tuple(logits.shape[:-1]))))


def full_rows(
    values: str,
    logits: Tensor,
    dim: int,
    temperature: float | Tensor,
    mask: Tensor | None,
    dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    """softmax, log_softmax or logsumexp. Values stay where their logits are."""
    _check(logits, dim)
    local = _Local(logits, mask, temperature)
    out_dtype = result_dtype(logits.dtype) if values == "logsumexp" else check_result_dtype(dtype, logits)
    if local.group is None:
        result = of_full_rows.full_rows(local.rows, values, out_dtype, backend)
    else:
        result = of_columns.full_rows(values, local.rows, out_dtype, backend, local.group)
    if values == "logsumexp":
        return local.whole(result, tuple(logits.shape[:-1]))
    return local.whole(result, tuple(logits.shape), local.placements)


def _check(logits: Tensor, dim: int = -1) -> None:
    assert isinstance(logits, DTensor)
    check_logits(logits.to_local())
    check_vocabulary(logits.shape[-1])
    if check_dim(dim, logits.dim()) != logits.dim() - 1:
        raise ValueError(f"`dim` must be the last one where `logits` is a DTensor, got dim={dim}; use logits.movedim")


class _Local:
    """What this process has of the tensors of a call, and where results are placed."""

    def __init__(
        self, logits: Tensor, mask: Tensor | None, temperature: float | Tensor, last_row_dim: int | None = None
    ) -> None:
        assert isinstance(logits, DTensor)
        # Checked whole, before anything is sent: a share of a wrong tensor may have a right shape.
        whole_mask = check_mask(_plain(mask), logits)
        scale = check_temperature(_plain(temperature), logits, result_dtype(logits.dtype))
        self.mesh, self._dims = logits.device_mesh, logits.dim()
        last = self._dims - 1
        # Partial sums are summed, and the beams of a sequence are brought to one process.
        placements = [
            p if p.is_replicate() or (type(p) is Shard and p.dim % self._dims != last_row_dim) else Replicate()
            for p in logits.placements
        ]
        of_vocabulary = [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim % self._dims == last]
        # If several dimensions of the mesh shard the vocabulary, only the last one goes on doing so.
        for i in of_vocabulary[:-1]:
            placements[i] = Replicate()
        logits = logits.redistribute(placements=placements)
        self.placements = placements
        self.group = self.mesh.get_group(of_vocabulary[-1]) if of_vocabulary else None
        self.of_result = [Replicate() if i in of_vocabulary else p for i, p in enumerate(placements)]
        of_rows = scale.row_temperature
        own_mask = None if whole_mask is None else self.cut(unpacked(whole_mask, logits.shape[-1]), logits.shape)
        own_temperature = scale.temperature if of_rows is None else self.cut(of_rows, logits.shape[:-1])
        self.rows = check_rows(logits.to_local(), own_temperature, own_mask, may_be_empty=self.group is not None)

    def cut(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """This process's share of a tensor of that shape, the logits' or that of their rows, which every process has."""
        placements = [
            p if not isinstance(p, Shard) or p.dim % self._dims < len(shape) else Replicate() for p in self.placements
        ]
        whole = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        local: Tensor = whole.redistribute(placements=placements).to_local()
        return local

    def whole(self, local: Tensor, shape: tuple[int, ...], placements: Sequence[Any] | None = None) -> Tensor:
        """The result of that shape of which this process has `local`."""
        stride = torch.empty(shape, device="meta").stride()
        result: Tensor = DTensor.from_local(
            local, self.mesh, placements or self.of_result, run_check=False, shape=torch.Size(shape), stride=stride
        )
        return result


def _plain(argument: Any) -> Any:
    """All of a DTensor, on every process. Another argument is as it is."""
    return argument.full_tensor() if isinstance(argument, DTensor) else argument

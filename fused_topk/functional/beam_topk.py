# SPDX-License-Identifier: Apache-2.0
"""The public function of beam search's top-k."""

from __future__ import annotations

from torch import Tensor

from ..arguments import (
    check_backend,
    check_beam_scores,
    check_common_normalize,
    check_k,
    check_whole_rows,
    is_distributed,
)
from ..operators import row_topk
from ..problem import TopK, result_dtype
from ..row_arguments import check_rows, is_plain, plain_rows
from ..rows import like


def beam_topk(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: str = "allowed",
    backend: str | None = None,
) -> TopK:
    """The k best continuations of every sequence, over all of its beams: one step of beam search in one read.

    >>> beam_topk(torch.tensor([[[1.0, 3.0], [2.0, 0.0]]]), torch.zeros(1, 2), k=2).indices
    tensor([[1, 2]])

    Equals `torch.topk((log_softmax(logits.float(), -1) + beam_scores[..., None]).flatten(1), k)`.

    The other arguments, and the errors, are those of :func:`softmax_topk`.

    Args:
        logits: shape (batch, beams, V).
        beam_scores: shape (batch, beams), the accumulated log-probability of each beam.
        k: the number of results per sequence, 1 <= k <= beams * V.
        normalize: "allowed" (the mask comes before log_softmax) or "all" (after it, as in transformers' beam search).

    Returns:
        TopK with values float32 (batch, k), the accumulated log-probabilities; indices int64 (batch, k), each
        beam * V + token; logsumexp float32 (batch, beams).

    Contract:
        Order: greater accumulated values first, after rounding to float32; equal values by smaller beam, and within a
        beam in the order of its logits. So a beam contributes its best tokens even if its score is so low that all of its
        sums round to the same number. The rest is the contract of :func:`softmax_topk`.
    """
    check_common_normalize(normalize, "beam_topk")
    check_backend(backend)
    rows = plain_rows(logits, temperature, mask, lengths)
    if (
        rows is not None
        and type(k) is int
        and logits.dim() == 3
        and logits.shape[1] > 0
        and is_plain(beam_scores, logits, result_dtype(logits.dtype), logits.shape[:2])
    ):
        planned = row_topk.plan(logits.device, rows.layout(), k, "log_softmax", normalize, backend, like(beam_scores))
        return planned.run(rows, beam_scores)
    if is_distributed(logits):
        from ..distributed import dtensors

        check_whole_rows("lengths", lengths, "hide the tokens by a mask")
        return dtensors.beams(logits, beam_scores, k, temperature, mask, normalize, backend)
    rows = check_rows(logits, temperature, mask, lengths)
    check_beam_scores(beam_scores, logits)
    check_k(k, logits.shape[1] * logits.shape[2], "beams times the vocabulary size")
    return row_topk.beam_topk(rows, beam_scores, k, normalize, backend)

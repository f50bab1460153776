# SPDX-License-Identifier: Apache-2.0
"""What a result must be, and the comparison that says where it is not.

Indices, and the values of `topk`, must be equal bit for bit. Probabilities, log-probabilities and logsumexp are
rounded, so they have a bound. With u = 2^-24 (half an ulp of float32 at 1), z = (x - m) / T <= 0, and log d between 0
and log V:

    z        x - m, 1 / T, the change of base and the product round once each, twice for values that are
             exponentiated in base 2 and come back:                                          |error| <= 6 u |z|
    d        a term e^z has the relative error 6 u |z| of its argument and 4 u of the exponential. Weighted by the
             terms, |z| has the mean H - log d, H <= log V being the entropy of the row: so 6 u (log V - log d) + 4 u.
             The order of summation adds u for every level of the tree and every turn of a thread's loop that rounds
             up; blocked sums keep it below 16 u for the rows tested:   relative error <= u (6 log V - 6 log d + 20)
    log d    adds the relative error of d, and 2 u (1 + log d) of its own.

    log-probability   z - log d, rounded:     |error| <= u (6 |z| + 6 log V + 22 + |value|)    <= u (7 |z| + 7 log V + 22)
    probability       e^z / d:         relative error <= the same, as e^(its log-probability); below 2^-126 it may be 0
    logsumexp         m / T + log d, rounded: |error| <= u (4 |m / T| + 6 log V + 22 + |value|) <= u (5 |m / T| + 7 log V + 22)

For V = 128256 this is 104 u for the best tokens, 7 ulps of a log-probability of -12; measured errors are far below.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fused_topk import TopK, TopKLogits, operators
from fused_topk.backends import cuda
from fused_topk.problem import FullRowProblem, TopkProblem
from fused_topk.rows import LogitRows

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
VALUES_OF = {"softmax_topk": "softmax", "log_softmax_topk": "log_softmax", "topk": "logits"}
_BITS_OF = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bits of x as integers, in which NaNs and the signs of zeros differ."""
    return x.contiguous().view(_BITS_OF[x.element_size()])


def problem_of(
    entry: str,
    logits: Tensor,
    k: int,
    *,
    temperature=1.0,
    mask: Tensor | None = None,
    normalize="allowed",
    lengths=None,
) -> TopkProblem:
    """What a public function makes of its arguments."""
    lead = logits.shape[:-1]
    row_temperature = temperature.expand(lead) if isinstance(temperature, Tensor) else None
    if mask is not None:
        mask = mask.expand(logits.shape if mask.dtype == torch.bool else (*lead, mask.shape[-1]))
    scalar = 1.0 if temperature is None or row_temperature is not None else float(temperature)
    return TopkProblem(
        LogitRows(logits, temperature=scalar, row_temperature=row_temperature, mask=mask, lengths=lengths),
        k,
        VALUES_OF[entry],
        normalize,
    )


def start(backend, problem: TopkProblem, out: TopK, beam_scores: Tensor | None = None, **how) -> None:
    """Has a backend run a request on the tensors that it names. `how`: what its prepare function takes besides."""
    run = operators.row_topk.PREPARE[name_of(backend)](
        problem, _device_of(backend, problem.rows.logits), beam_scores, **how
    )
    run(problem.rows, out, beam_scores)


def start_full_rows(backend, problem: FullRowProblem, out: Tensor, **how) -> None:
    """Likewise."""
    run = operators.full_rows.PREPARE[name_of(backend)](
        problem, _device_of(backend, problem.rows.logits), out.dtype, **how
    )
    run(problem.rows, out)


def name_of(backend) -> str:
    """The name of a module of fused_topk.backends."""
    return backend.__name__.rpartition(".")[2]


def _device_of(backend, logits: Tensor) -> torch.device:
    """Of CPU tensors the emulated GPU, where the backend is for one."""
    return torch.device("cuda", 0) if backend is cuda and not logits.is_cuda else logits.device


def expected(entry: str, logits: Tensor, k: int, **settings) -> TopK:
    """The result by the reference, with values in float64. Those of `topk` have the dtype of the logits; its logsumexp is not written."""
    lead = logits.shape[:-1]
    values_dtype = logits.dtype if entry == "topk" else torch.float64
    out = TopK(
        torch.empty(*lead, k, dtype=values_dtype, device=logits.device),
        torch.empty(*lead, k, dtype=torch.int64, device=logits.device),
        torch.empty(lead, dtype=torch.float64, device=logits.device),
    )
    operators.row_topk.reference(problem_of(entry, logits, k, **settings), out)
    return out


def check(backend, entry: str, logits: Tensor, k: int, *, row_names=None, out=None, **settings) -> TopK:
    """Run a public function on a backend and compare the result with the reference's."""
    got = backend(entry, logits, k, **settings, **({} if out is None else {"out": out}))
    want = expected(entry, logits, k, **settings)
    assert_topk(got, want, logits, entry, temperature=settings.get("temperature"), row_names=row_names)
    return got


def assert_topk(
    got: TopK | TopKLogits, want: TopK, logits: Tensor, entry: str, *, temperature=1.0, row_names=None
) -> None:
    """Compare with a result of `expected`; on failure, say which row, which rank, both pairs and who ties there."""
    floating = torch.float64 if logits.dtype == torch.float64 else torch.float32
    # Of logits there is no logsumexp.
    fields = TopKLogits._fields if entry == "topk" else TopK._fields
    for name in fields:
        of_got, of_want = getattr(got, name), getattr(want, name)
        assert of_got.shape == of_want.shape, f"{name}: shape {tuple(of_got.shape)}, not {tuple(of_want.shape)}"
        assert of_got.device == logits.device, f"{name}: on {of_got.device}"
        assert of_got.is_contiguous(), name
    assert got.indices.dtype == torch.int64
    assert entry == "topk" or got.logsumexp.dtype == floating
    assert got.values.dtype == (logits.dtype if entry == "topk" else floating)

    def fail(what: str, wrong: Tensor) -> None:
        raise AssertionError(_describe(what, wrong, got, want, logits, row_names))

    wrong = got.indices != want.indices
    if wrong.any():
        fail("indices", wrong)

    vocab_size = logits.shape[-1]
    unit = torch.finfo(floating).eps / 2
    scale = temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else float(temperature or 1.0)
    if entry == "topk":
        wrong = bits(got.values) != bits(want.values)
    else:
        log_probs = want.values.log() if entry == "softmax_topk" else want.values
        # |z| <= |log-probability| + log d, and log d <= log V. Beyond 1000 a probability is 0.
        bound = unit * (7 * log_probs.abs() + 14 * math.log(vocab_size) + 22)
        if entry == "softmax_topk":
            bound = (bound.clamp(max=1000) * want.values).clamp(min=torch.finfo(floating).tiny)
        wrong = _differs(got.values, want.values, bound)
    if wrong.any():
        fail("values", wrong)
    if entry == "topk":
        return

    largest = logits.double().where(logits.isfinite(), 0.0).abs().amax(-1, keepdim=True)
    bound = unit * (5 * largest / scale + 7 * math.log(vocab_size) + 22)
    wrong = _differs(got.logsumexp.unsqueeze(-1), want.logsumexp.unsqueeze(-1), bound)
    if wrong.any():
        fail("logsumexp", wrong)


def assert_same(got: TopK, want: TopK) -> None:
    """Bit for bit, but for NaNs, whose bits nobody promises."""
    for name, of_got, of_want in zip(TopK._fields, got, want):
        assert of_got.dtype == of_want.dtype, name
        if of_got.is_floating_point():
            assert torch.equal(of_got.isnan(), of_want.isnan()), name
            of_got, of_want = of_got.masked_fill(of_got.isnan(), 0.0), of_want.masked_fill(of_want.isnan(), 0.0)
        assert torch.equal(bits(of_got), bits(of_want)), name


def _differs(got: Tensor, want: Tensor, bound: Tensor) -> Tensor:
    """Where got is not want: outside the bound, or NaN, +inf or -inf on one side only."""
    rounded = want.to(got.dtype).double()
    special = ~rounded.isfinite() | ~got.isfinite()
    same_special = (rounded == got) | (rounded.isnan() & got.isnan())
    return torch.where(special, ~same_special, ~((got.double() - want).abs() <= bound))


def _describe(what: str, wrong: Tensor, got: TopK, want: TopK, logits: Tensor, row_names) -> str:
    place = tuple(wrong.nonzero()[0].tolist())
    row, rank = place[:-1], place[-1]
    name = f" ({row_names[row[-1]]})" if row_names else ""
    lines = [f"{what} differ in {int(wrong.sum())} places, first in row {row}{name}, rank {rank}"]
    for title, side in (("got", got), ("want", want)):
        index = int(side.indices[row][rank])
        logit = logits[row][index].item() if 0 <= index < logits.shape[-1] else "out of range"
        lines.append(
            f"  {title:4}: index {index}, logit {logit!r}, value {side.values[row][rank].item()!r}, "
            f"logsumexp {side.logsumexp[row].item() if len(side) == 3 else None!r}"
        )
    logit = logits[row][want.indices[row][rank]]
    tied = (logits[row].isnan() if logit.isnan() else logits[row] == logit).nonzero().flatten()
    lines.append(f"  {len(tied)} tokens tie with the wanted one: {tied[:16].tolist()}")
    return "\n".join(lines)


def numpy_topk(
    logits: np.ndarray,
    k: int,
    *,
    values: str,
    temperature: float = 1.0,
    allowed: np.ndarray | None = None,
    normalize: str = "allowed",
) -> tuple[np.ndarray, np.ndarray, float]:
    """One row, from the contract alone and sharing nothing with the package: (values, indices, logsumexp)."""
    x = logits.astype(np.longdouble)
    allowed = np.ones(len(x), dtype=bool) if allowed is None else allowed
    candidates = np.where(allowed, x, -np.inf)
    is_nan = np.isnan(candidates)
    # lexsort: the last key decides first.
    order = np.lexsort((np.arange(len(x)), -np.where(is_nan, 0, candidates), ~is_nan))[:k]
    if values == "logits":
        temperature, normalize = 1.0, "allowed"

    with np.errstate(all="ignore"):
        m, log_d = _longdouble_normalizer((x if normalize == "all" else candidates) / np.longdouble(temperature))
        if values == "logits":
            return candidates[order], order, m + log_d
        scaled = candidates[order] / np.longdouble(temperature)
        if normalize == "topk":
            log_probs = scaled - m - _longdouble_normalizer(scaled)[1]
        else:
            log_probs = scaled - m - log_d
        if not np.isfinite(m):
            log_probs = np.full(k, np.nan)
        return (np.exp(log_probs) if values == "softmax" else log_probs), order, m + log_d


def _longdouble_normalizer(x: np.ndarray) -> tuple[float, float]:
    """(maximum, log of the sum relative to it)."""
    m = x.max()
    return m, (np.log(np.exp(x - m).sum()) if np.isfinite(m) else np.longdouble(0))

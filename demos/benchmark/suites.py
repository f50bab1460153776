# SPDX-License-Identifier: Apache-2.0
"""The shapes that are timed, as tables, with the time that each should reach on an H200 (on any CPU for `cpu`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

# How logits are drawn; inputs.py makes them.
DISTRIBUTIONS = ("normal", "peaked", "ascending", "descending", "equal", "sparse")
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


# Host time of an eager call from Python, µs.
HOST_TARGET_US = 12.0


# What sample() is asked for, by name.
SAMPLING: dict[str, dict[str, float]] = {
    "whole": {},
    "top-k top-p": {"top_k": 50, "top_p": 0.9},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
}


# What router_topk() is asked for, by the name of a model. "bias" stands for a float32 (experts,).
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"renormalize": True},
    "deepseek-v3": {
        "scoring": "sigmoid",
        "bias": True,
        "groups": 8,
        "topk_groups": 4,
        "renormalize": True,
        "scale": 2.5,
    },
    "deepseek-v4": {"scoring": "sqrtsoftplus", "bias": True, "renormalize": True, "scale": 1.5},
}


class Target(NamedTuple):
    """At most `times` x (the time of `of` in the same run) + `plus` µs."""

    times: float
    # "read", "copy", "torch", "rows" (the row function at a beam case's rows), "normal" (the same shape, normal data) or
    # "aligned" (the same shape, but for the length: aligned_vocab)
    of: str
    plus: float = 0.0

    def limit(self, measured: dict[str, float]) -> float | None:
        """The limit in µs, or None where what it is relative to was not measured."""
        if self.times == 0:
            return self.plus
        return self.times * measured[self.of] + self.plus if self.of in measured else None


def read(times: float, plus: float = 0.0) -> Target:
    return Target(times, "read", plus)


def copy(times: float) -> Target:
    return Target(times, "copy")


def micros(limit: float) -> Target:
    return Target(0, "read", limit)


class Case(NamedTuple):
    """One shape. With `beams`, `rows` counts batch entries and the operation is beam_topk; with k = 0, it is softmax.

    With `sampling`, a key of SAMPLING, it is sample(), and "rows" is log_softmax_topk of the same rows and this k. With
    `router`, a key of ROUTERS, it is router_topk().
    """

    rows: int
    vocab: int
    k: int
    dtype: str
    target: Target | None = None
    hot: Target | None = None  # where it differs from `target`, which is for inputs that come from memory
    distribution: str = "normal"
    beams: int = 0
    sampling: str = ""
    router: str = ""
    is_ragged: bool = False  # rows have lengths, uniform from 0 to vocab (inputs.py)

    @property
    def num_rows(self) -> int:
        return self.rows * max(self.beams, 1)

    @property
    def input_bytes(self) -> int:
        return self.num_rows * self.vocab * ITEM_BYTES[self.dtype]

    @property
    def bytes_moved(self) -> int:
        """Logits read once; float32 values, int64 indices and a float32 logsumexp written once. softmax: as a copy.
        sample(): a token and its log-probability. router_topk(): weights and experts."""
        if self.k == 0:
            return 2 * self.input_bytes
        if self.is_ragged:
            # Half of the logits, as many as there are on average.
            return self.input_bytes // 2 + self.rows * (self.k * 12 + 4)
        if self.sampling:
            return self.input_bytes + self.rows * 12
        return self.input_bytes + self.rows * self.k * 12 + (0 if self.router else self.num_rows * 4)

    @property
    def aligned_vocab(self) -> int:
        """The least length from this one on whose rows all start at a multiple of 128 bytes."""
        return -(-self.vocab // 64) * 64

    @property
    def label(self) -> str:
        rows = f"{self.rows} x {self.beams} beams" if self.beams else f"{self.rows}"
        data = "" if self.distribution == "normal" else f" {self.distribution}"
        what = f"sample {self.sampling}" if self.sampling else f"k={self.k}" if self.k else "softmax"
        what += f" {self.router}" if self.router else ""
        return f"{rows} x {self.vocab} {self.dtype} {what}{data}{' ragged' if self.is_ragged else ''}"

    def target_for(self, cache: str) -> Target | None:
        return self.hot if cache == "hot" and self.hot else self.target


_FEW_ROWS = read(1, plus=4)
# The paper's and the decoding tables, where no closer target is set.
_ANY_DECODE = read(3, plus=5)
_ROUTING = read(1.5, plus=2)
_FLAT_IN_K = read(1.25)
_BEAMS = Target(1, "rows", plus=2)

_DECODE = (
    Case(1, 32000, 8, "bf16", _FEW_ROWS),
    Case(1, 128256, 8, "bf16", _FEW_ROWS),
    Case(1, 128256, 8, "fp32", _FEW_ROWS),
    Case(1, 262144, 64, "bf16", _FEW_ROWS),
    Case(4, 128256, 8, "bf16", _FEW_ROWS),
    Case(8, 50257, 50, "fp32", _FEW_ROWS),
    Case(16, 128256, 8, "bf16", _FEW_ROWS),
    Case(16, 262144, 64, "bf16", _FEW_ROWS),
    Case(32, 151936, 50, "bf16", micros(9.5)),
    Case(32, 262144, 20, "bf16", micros(11)),
    Case(64, 32000, 8, "fp32", _ANY_DECODE),
    Case(64, 128256, 8, "bf16", micros(10), hot=micros(9)),
    Case(64, 128256, 8, "fp32", micros(14)),
    Case(64, 128256, 128, "fp32", micros(18)),
    Case(64, 128256, 1024, "fp32", micros(35)),
    Case(256, 128256, 8, "bf16", micros(22)),
    Case(256, 128256, 8, "fp32", micros(36)),
)

# Online normalizer calculation for softmax (Milakov & Gimelshein 2018), its two batch sizes.
_PAPER = (
    *(Case(10, vocab, 5, "fp32", _FEW_ROWS) for vocab in (1000, 4000, 10000, 25000, 100000)),
    Case(4000, 1000, 5, "fp32", _ANY_DECODE),
    *(Case(4000, vocab, 5, "fp32", read(1.15)) for vocab in (4000, 10000, 25000, 100000)),
)

_ROUTING_SHAPES = ((4096, 64), (4096, 256), (16384, 128), (65536, 256))

_LONG = (
    Case(1, 1048576, 5, "fp32", _ANY_DECODE),
    Case(1, 4194304, 5, "fp32", micros(12)),
    Case(128, 1048576, 5, "fp32", read(1.2)),
)

_K = (
    *(Case(4000, 25000, k, "fp32", _FLAT_IN_K) for k in (5, 10, 16, 30, 64)),
    *(Case(64, 128256, k, "fp32") for k in (1, 8, 32, 64)),
    Case(64, 128256, 128, "fp32", micros(18)),
    *(Case(64, 128256, k, "fp32") for k in (256, 512)),
    Case(64, 128256, 1024, "fp32", micros(35)),
    Case(64, 128256, 2048, "fp32"),
    # As sparse attention chooses positions; the limits are of an H100.
    *(
        Case(rows, vocab, k, dtype, micros(limit))
        for rows, vocab, dtype, k, limit in (
            (1, 131072, "bf16", 2048, 22),
            (16, 131072, "bf16", 2048, 28),
            (64, 131072, "bf16", 2048, 42),
            (64, 131072, "fp32", 2048, 52),
            (64, 32768, "bf16", 2048, 26),
            (256, 32768, "bf16", 2048, 60),
            (1, 32768, "bf16", 1024, 14),
        )
    ),
)

# No distribution may be much slower than normal logits: each shape's first row is the normal one. Each way to own a row, and each
# method, for a small k and a large one of those that it serves.
_DISTRIBUTION_SHAPES = (
    # A block of 16 warps a row, or several.
    (10, 10000, 5, "fp32"),
    (1, 32000, 8, "bf16"),
    (1, 128256, 8, "bf16"),
    (8, 50257, 50, "fp32"),
    (16, 262144, 64, "bf16"),
    (32, 262144, 20, "bf16"),
    (64, 128256, 8, "bf16"),
    (64, 128256, 128, "fp32"),
    (64, 128256, 1024, "fp32"),
    (16, 131072, 2048, "bf16"),
    (64, 32768, 2048, "bf16"),
    # A block of 8.
    (10, 4000, 5, "fp32"),
    (256, 128256, 50, "bf16"),
    (256, 128256, 8, "fp32"),
    (256, 128256, 50, "fp32"),
    (4000, 25000, 5, "fp32"),
    (4000, 100000, 5, "fp32"),
    # A warp a row.
    (4000, 1000, 5, "fp32"),
    (4000, 25000, 64, "fp32"),
    (2048, 32000, 50, "bf16"),
    # Some lanes of a warp.
    (65536, 256, 8, "fp32"),
    (16384, 128, 32, "bf16"),
)

# Models that beam search is used for, whose rows start at no multiple of 16 bytes: NLLB, Whisper, Marian, BART, GPT-2. Each after
# the same with rows that do.
_UNALIGNED_SHAPES = (
    (80, 256206, 10, "bf16"),
    (160, 51866, 10, "bf16"),
    (96, 58101, 12, "bf16"),
    (256, 50265, 8, "bf16"),
    (1000, 50257, 10, "bf16"),
    (4000, 50257, 5, "bf16"),
    (80, 256206, 10, "fp32"),
    (160, 51866, 10, "fp32"),
    (1000, 50257, 10, "fp32"),
    (4000, 50257, 5, "fp32"),
)

# Against torch on the same threads in the same run.
_AS_TORCH = Target(1, "torch")
_CPU_SHAPES = (
    *((1, vocab) for vocab in (1000, 32000, 128256, 262144)),
    *((8, vocab) for vocab in (1000, 32000)),
    *((64, vocab) for vocab in (1000, 32000, 262144)),
)
# Where most of a row is wanted there is little to save.
_CPU_LARGE_K = (
    *((1, 32000, k) for k in (16000, 32000)),
    *((8, 32000, k) for k in (1000, 32000)),
    *((64, 1000, k) for k in (500, 1000)),
    (1, 262144, 131072),
    (4096, 128, 128),
)

# Expert routers, and whole rows as short as theirs or as an attention head's.
_CPU_ROUTERS = ((4096, 8, 2), (4096, 16, 4), (4096, 64, 8), (4096, 128, 8), (4096, 256, 8), (4096, 256, 1))
_CPU_SOFTMAX = ((4000, 8), (4000, 30), (4000, 100), (4096, 128), (65536, 64), (64, 128), (1, 128), (8, 128256))

# Rows, length, and how many times a copy softmax may take: the paper's two batches, and longer rows.
_SOFTMAX_SHAPES = (
    *((128, vocab, 1.1) for vocab in (2048, 32728, 65536, 131072, 262144)),
    *((128, vocab, 1.35) for vocab in (1048576, 2097152, 4194304)),
    *((4000, vocab, 1.1) for vocab in (1000, 4000, 10000, 25000, 100000)),
)

# Relative to the top-k of the same rows: k = 8 for the whole vocabulary, else 50.
_SAMPLING_SHAPES = ((1, 128256), (8, 32000), (8, 128256), (64, 128256), (256, 128256), (512, 128256))
# Of normal logits more tokens are kept than any list holds. That takes one more read for min-p, and two for top-p.
_BROAD = {"top-p": 3.8, "min-p": 2.8}


def _sampling_case(rows: int, vocab: int, dtype: str, sampling: str, data: str) -> Case:
    k, times = (8, 1.4) if sampling == "whole" else (50, 1.5)
    times = _BROAD.get(sampling, times) if data == "normal" else times
    return Case(rows, vocab, k, dtype, Target(times, "rows"), distribution=data, sampling=sampling)


# Tokens, experts, k, model, and the limit in µs on an H100. More tokens than fit at once are bound by what they read.
_ROUTER_SHAPES = (
    *((rows, 128, 8, "mixtral", limit) for rows, limit in ((1, 2.5), (64, 2.5), (4096, 5.5))),
    *((rows, 256, 8, "deepseek-v3", limit) for rows, limit in ((1, 3.0), (64, 3.5), (4096, 9.0))),
    (16384, 512, 10, "mixtral", 40.0),
    (4096, 256, 8, "deepseek-v4", 9.0),
)
# On a CPU, against transformers' operations.
_CPU_ROUTER_CHOICES = ((4, Target(1 / 3, "torch")), (1024, Target(1 / 6, "torch")))


SUITES: dict[str, tuple[Case, ...]] = {
    "decode": _DECODE,
    "paper": _PAPER,
    "routing": tuple(Case(*shape, 8, dtype, _ROUTING) for shape in _ROUTING_SHAPES for dtype in ("fp32", "bf16")),
    "long": _LONG,
    "k": _K,
    "beams": tuple(
        Case(batch, 128256, 2 * beams, "bf16", _BEAMS, beams=beams) for batch, beams in ((8, 4), (16, 5), (32, 8))
    ),
    "softmax": (
        *(
            Case(rows, vocab, 0, dtype, copy(times))
            for dtype in ("fp32", "bf16")
            for rows, vocab, times in _SOFTMAX_SHAPES
        ),
        *(Case(1, vocab, 0, "fp32", copy(1.5)) for vocab in (4194304, 67108864)),
    ),
    "sampling": tuple(
        _sampling_case(*shape, dtype, sampling, data)
        for dtype in ("fp32", "bf16")
        for shape in _SAMPLING_SHAPES
        for data in ("normal", "peaked")
        for sampling in SAMPLING
    ),
    "routers": tuple(
        Case(rows, experts, k, "fp32", micros(limit), router=model) for rows, experts, k, model, limit in _ROUTER_SHAPES
    ),
    "distributions": tuple(
        Case(*shape, None if data == "normal" else Target(2.5, "normal"), distribution=data)
        for shape in _DISTRIBUTION_SHAPES
        for data in DISTRIBUTIONS
    ),
    # Each after the same with whole rows.
    "ragged": tuple(
        Case(rows, 131072, k, dtype, is_ragged=is_ragged)
        for dtype in ("bf16", "fp32")
        for k in (512, 2048)
        for rows in (4, 64, 256, 1024)
        for is_ragged in (False, True)
    ),
    "unaligned": tuple(
        case
        for shape in _UNALIGNED_SHAPES
        for unaligned in [Case(*shape, Target(1.08, "aligned"))]
        for case in (unaligned._replace(vocab=unaligned.aligned_vocab, target=None), unaligned)
    ),
    "cpu": (
        *(Case(8, 128256, k, dtype, Target(1 / 5, "torch")) for k in (8, 50) for dtype in ("fp32", "bf16")),
        *(Case(*shape, 8, "fp32", _AS_TORCH) for shape in _CPU_SHAPES),
        *(Case(*shape, 50, "bf16", _AS_TORCH) for shape in _CPU_SHAPES),
        Case(8, 32000, 128, "fp32", _AS_TORCH),
        *(Case(*shape, "fp32", Target(1.2, "torch")) for shape in _CPU_LARGE_K),
        *(Case(*shape, dtype, Target(1 / 8, "torch")) for shape in _CPU_ROUTERS for dtype in ("fp32", "bf16")),
        *(Case(rows, 256, 8, "fp32", target, router="deepseek-v3") for rows, target in _CPU_ROUTER_CHOICES),
        Case(1, 128, 8, "fp32", _AS_TORCH),
        Case(4096, 128, 50, "bf16", _AS_TORCH),
        *(Case(*shape, 0, dtype, _AS_TORCH) for shape in _CPU_SOFTMAX for dtype in ("fp32", "bf16")),
    ),
}


def select(
    names: Iterable[str],
    rows: Iterable[int] = (),
    vocab: Iterable[int] = (),
    k: Iterable[int] = (),
    dtype: Iterable[str] = (),
) -> list[tuple[str, Case]]:
    """The named suites' cases, with their suite; each filter, where given, lists the values that pass."""
    rows, vocab, k, dtype = list(rows), list(vocab), list(k), list(dtype)
    return [(name, case) for name in names for case in filtered(SUITES[name], rows, vocab, k, dtype)]


def filtered(
    cases: Iterable[Case],
    rows: Iterable[int] = (),
    vocab: Iterable[int] = (),
    k: Iterable[int] = (),
    dtype: Iterable[str] = (),
) -> list[Case]:
    """The cases that pass; each filter, where given, lists the values that do."""
    filters = [(name, set(wanted)) for name, wanted in (("rows", rows), ("vocab", vocab), ("k", k), ("dtype", dtype))]
    return [case for case in cases if all(not wanted or getattr(case, field) in wanted for field, wanted in filters)]

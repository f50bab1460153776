# SPDX-License-Identifier: Apache-2.0
"""The shapes that are timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

# How logits are drawn; inputs.py makes them.
DATA = ("normal", "peaked", "ascending", "descending", "equal", "sparse")

# What sample() is asked for, by the kind of a case.
SAMPLING: dict[str, dict[str, Any]] = {
    "whole": {},
    "top-k top-p": {"top_k": 50, "top_p": 0.9},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
}

# What router_topk() is asked for, by the kind of a case: a model. "bias" stands for a float32 (experts,).
_GROUPS = {"groups": 8, "topk_groups": 4}
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"renormalize": True},
    "deepseek-v3": {"scoring": "sigmoid", "bias": True, **_GROUPS, "renormalize": True, "scale": 2.5},
    "deepseek-v4": {"scoring": "sqrtsoftplus", "bias": True, "renormalize": True, "scale": 1.5},
}


class Case(NamedTuple):
    """One shape: logits of `rows` rows of `vocab` tokens (or experts), of which k are wanted."""

    rows: int
    vocab: int
    k: int
    dtype: str
    kind: str = ""  # a key of SAMPLING or ROUTERS, or "ragged": rows have lengths, uniform from 0 to vocab
    data: str = "normal"  # one of DATA
    beams: int = 0  # of each of the rows, which are then texts
    depth: int = 0  # of hidden states, which are then given instead of logits

    @property
    def num_rows(self) -> int:
        return self.rows * max(self.beams, 1)

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def logit_bytes(self) -> int:
        return self.num_rows * self.vocab * self.itemsize

    @property
    def label(self) -> str:
        """The shape, without the data."""
        rows = f"{self.rows} x {self.beams} beams" if self.beams else f"{self.rows}"
        size = f"{rows} x {self.depth} -> {self.vocab}" if self.depth else f"{rows} x {self.vocab}"
        return " ".join(filter(None, (size, self.dtype, f"k={self.k}" if self.k else "", self.kind)))


def cases(shapes: Iterable[tuple[int, int, int]], dtypes: Iterable[str] = ("fp32",), **more: Any) -> tuple[Case, ...]:
    """A case for each (rows, vocab, k) and each dtype."""
    return tuple(Case(*shape, dtype, **more) for dtype in dtypes for shape in shapes)


BOTH = ("bf16", "fp32")

DECODE = (
    *cases([(1, 32000, 8), (1, 262144, 64), (4, 128256, 8), (16, 128256, 8), (16, 262144, 64)], ["bf16"]),
    *cases([(32, 151936, 50), (32, 262144, 20)], ["bf16"]),
    *cases([(1, 128256, 8), (64, 128256, 8), (256, 128256, 8)], BOTH),
    *cases([(8, 50257, 50), (64, 32000, 8), (64, 128256, 128), (64, 128256, 1024)]),
)
# Online normalizer calculation for softmax (Milakov & Gimelshein 2018), its two batch sizes.
PAPER = cases([(rows, vocab, 5) for rows in (10, 4000) for vocab in (1000, 4000, 10000, 25000, 100000)])
ROUTING = cases([(4096, 64, 8), (4096, 256, 8), (16384, 128, 8), (65536, 256, 8)], BOTH)
LONG = cases([(1, 1048576, 5), (1, 4194304, 5), (128, 1048576, 5)])
GROWING_K = (
    *cases([(4000, 25000, k) for k in (5, 10, 16, 30, 64)]),
    *cases([(64, 128256, k) for k in (1, 8, 32, 64, 128, 256, 512, 1024, 2048)]),
)
# As engines sample from (k = 50), and as sparse attention chooses positions.
LARGE_K = cases(
    [
        (rows, vocab, k)
        for vocab, rows_of in ((131072, (1, 16, 64)), (32768, (1, 4, 64, 256)))
        for rows in rows_of
        for k in (50, 512, 1024, 2048)
    ],
    BOTH,
)
RAGGED = tuple(
    Case(rows, 131072, k, dtype, kind)
    for dtype in BOTH
    for k in (512, 2048)
    for rows in (4, 64, 256, 1024)
    for kind in ("", "ragged")
)
BEAMS = tuple(Case(texts, 128256, 2 * beams, "bf16", beams=beams) for texts, beams in ((8, 4), (16, 5), (32, 8)))
# Each way to own a row, and each method, for a small k and a large one of those that it serves.
DISTRIBUTIONS = tuple(
    case._replace(data=data)
    for case in (
        # A block of 16 warps a row, or several.
        *cases([(1, 32000, 8), (1, 128256, 8), (16, 262144, 64), (32, 262144, 20), (64, 128256, 8)], ["bf16"]),
        *cases([(16, 131072, 2048), (64, 32768, 2048)], ["bf16"]),
        *cases([(10, 10000, 5), (8, 50257, 50), (64, 128256, 128), (64, 128256, 1024)]),
        # A block of 8.
        *cases([(10, 4000, 5), (256, 128256, 8), (4000, 25000, 5), (4000, 100000, 5)]),
        *cases([(256, 128256, 50)], BOTH),
        # A warp a row.
        *cases([(2048, 32000, 50)], ["bf16"]),
        *cases([(4000, 1000, 5), (4000, 25000, 64)]),
        # Some lanes of a warp.
        *cases([(16384, 128, 32)], ["bf16"]),
        *cases([(65536, 256, 8)]),
    )
    for data in DATA
)
# Models that beam search is used for, whose rows start at no multiple of 16 bytes: NLLB, Whisper, Marian, BART, GPT-2. Each
# before the same with rows that all start at a multiple of 128 bytes.
_MODELS = ((80, 256206, 10), (160, 51866, 10), (96, 58101, 12), (256, 50265, 8), (1000, 50257, 10), (4000, 50257, 5))
UNALIGNED = cases([(rows, size, k) for rows, v, k in _MODELS for size in (v, -(-v // 64) * 64)], BOTH)
# The paper's two batches, and longer rows.
SOFTMAX = (
    *cases([(128, v, 0) for v in (2048, 32728, 65536, 131072, 262144, 1048576, 2097152, 4194304)], BOTH),
    *cases([(4000, vocab, 0) for vocab in (1000, 4000, 10000, 25000, 100000)], BOTH),
    *cases([(1, 4194304, 0), (1, 67108864, 0)]),
)
DRAWS = tuple(
    Case(rows, vocab, 0, dtype, kind, data)
    for dtype in ("fp32", "bf16")
    for rows, vocab in ((1, 128256), (8, 32000), (8, 128256), (64, 128256), (256, 128256), (512, 128256))
    for kind in SAMPLING
    for data in ("normal", "peaked")
)
# Tokens, experts and k of a model.
MODEL_ROUTERS = (
    *cases([(rows, 128, 8) for rows in (1, 64, 4096)], kind="mixtral"),
    *cases([(rows, 256, 8) for rows in (1, 64, 4096)], kind="deepseek-v3"),
    Case(16384, 512, 10, "fp32", "mixtral"),
    Case(4096, 256, 8, "fp32", "deepseek-v4"),
)
EAGER = (Case(1, 1024, 8, "fp32"),)
HEADS = (
    *cases([(rows, 128256, 8) for rows in (1, 16, 64, 256, 2048, 8192)], ["bf16"], depth=2048),
    Case(2048, 128256, 256, "bf16", depth=2048),
)
_SMALL_HEADS = ((128, 32000), (512, 50257), (2048, 128256))
CPU_HEADS = tuple(
    case for depth, v in _SMALL_HEADS for case in cases([(rows, v, 8) for rows in (1, 8, 64)], BOTH, depth=depth)
)
TRAINING = (
    Case(8192, 128256, 0, "bf16", depth=2048),
    Case(2048, 151936, 0, "bf16", depth=4096),
    Case(8192, 151936, 0, "bf16", depth=4096),
)
SHARDED = cases([(rows, vocab, k) for vocab in (128256, 262144) for rows in (1, 8, 32, 256) for k in (8, 50)], ["bf16"])

_CPU_LENGTHS = {1: (1000, 32000, 128256, 262144), 8: (1000, 32000), 64: (1000, 32000, 262144)}
_CPU_SHAPES = [(rows, length) for rows, lengths in _CPU_LENGTHS.items() for length in lengths]
CPU_TOPK = (
    *cases([(8, 128256, 8), (8, 128256, 50)], BOTH),
    *cases([(*shape, 8) for shape in _CPU_SHAPES]),
    *cases([(*shape, 50) for shape in _CPU_SHAPES], ["bf16"]),
    # Where most of a row is wanted there is little to save.
    *cases([(8, 32000, 128), (1, 32000, 16000), (1, 32000, 32000), (8, 32000, 1000), (8, 32000, 32000)]),
    *cases([(64, 1000, 500), (64, 1000, 1000), (1, 262144, 131072), (4096, 128, 128)]),
    # Expert routers.
    *cases([(4096, 8, 2), (4096, 16, 4), (4096, 64, 8), (4096, 128, 8), (4096, 256, 8), (4096, 256, 1)], BOTH),
    Case(1, 128, 8, "fp32"),
    Case(4096, 128, 50, "bf16"),
)
_SHORT_ROWS = ((4000, 8), (4000, 30), (4000, 100), (4096, 128), (65536, 64), (64, 128), (1, 128), (8, 128256))
CPU_SOFTMAX = cases([(*shape, 0) for shape in _SHORT_ROWS], BOTH)

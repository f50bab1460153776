# SPDX-License-Identifier: Apache-2.0
"""The CUDA source as one translation unit."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

SOURCES = (
    "order.h",
    "normalizer.h",
    "platform.cuh",
    "policy.cuh",
    "format.cuh",
    "row.cuh",
    "group.cuh",
    "bound.cuh",
    "sort.cuh",
    "candidates.cuh",
    "problem.cuh",
    "result.cuh",
    "tile_reader.cuh",
    "part_folder.cuh",
    "tile_selector.cuh",
    "scan.cuh",
    "windows.cuh",
    "merge.cuh",
    "row_output.cuh",
    "softmax_topk.cu",
    "short_row.cuh",
    "short_rows.cu",
    "router_rows.cu",
    "read_rows.cu",
)
"""Reading order, and the order in which they are joined. Their own #include lines are for editors and C++ compilers."""

_ROW_SOURCES = SOURCES[: SOURCES.index("row.cuh") + 1]

FULL_ROW_SOURCES = (*_ROW_SOURCES, "full_row.cuh", "waiting.cuh", "softmax_rows.cu")
"""The sources of the kernels in the namespace fused_topk::full_rows. They are a unit of their own, so that each compiles quickly."""

MERGING_SOURCES = (*_ROW_SOURCES, "problem.cuh", "result.cuh", "merge_states.cu")
"""The sources of the kernels in the namespace fused_topk::merging."""

GRADIENT_SOURCES = (*_ROW_SOURCES, "problem.cuh", "full_row.cuh", "logit_gradient.cu")
"""The sources of the kernels in the namespace fused_topk::gradients."""
PIECE_SOURCES = (
    *_ROW_SOURCES,
    "group.cuh",
    "bound.cuh",
    "problem.cuh",
    "tile_reader.cuh",
    "part_folder.cuh",
    "accumulate_piece.cu",
)
"""The sources of the kernels in the namespace fused_topk::pieces."""

SAMPLE_SOURCES = (
    *_ROW_SOURCES,
    "philox.h",
    "sample_request.cuh",
    "sample_part.cuh",
    "full_row.cuh",
    "sample_vocabulary.cu",
    "sample_list.cuh",
    "sample_row_sums.cuh",
    "sample_rows.cu",
)
"""The sources of the kernels in the namespace fused_topk::sampling."""

LADDER_SOURCES = (*SOURCES[:3], "ladder/ladder.cu")
"""The sources of the kernels in the namespace fused_topk::ladder."""

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 103, 120)
"""Compute capabilities (times ten) that every kernel is compiled for in the tests."""

OLDEST_ARCHITECTURE = 70
"""Kernels take their parameters in place (__grid_constant__), which older GPUs cannot."""

OPTIONS = (
    "-std=c++17",
    # Functions without an annotation are device functions: the headers shared with the CPU then need no macro for it.
    "-default-device",
)


def source_folder() -> Path:
    """Where csrc/ is: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def sources_of(kernel: str) -> tuple[str, ...]:
    """The files that a kernel, named as NVRTC wants it, is compiled from."""
    if kernel.startswith("fused_topk::full_rows::"):
        return FULL_ROW_SOURCES
    if kernel.startswith("fused_topk::merging::"):
        return MERGING_SOURCES
    if kernel.startswith("fused_topk::gradients::"):
        return GRADIENT_SOURCES
    if kernel.startswith("fused_topk::pieces::"):
        return PIECE_SOURCES
    if kernel.startswith("fused_topk::sampling::"):
        return SAMPLE_SOURCES
    return LADDER_SOURCES if kernel.startswith("fused_topk::ladder::") else SOURCES


def translation_unit(kernel: str) -> str:
    """The CUDA code that has a kernel, one file after the other. Compiling it needs no include path."""
    return _joined(sources_of(kernel))


@cache
def _joined(sources: tuple[str, ...]) -> str:
    folder = source_folder()
    pieces = []
    for name in sources:
        text = (folder / name).read_text(encoding="utf-8")
        pieces.append(
            f'#line 1 "{name}"\n'
            + re.sub(
                r'^[ \t]*#[ \t]*(include "|pragma once).*$',
                "",
                text,
                flags=re.MULTILINE,
            )
        )
    return "\n".join(pieces)


def cache_key(kernel: str, architecture: int, compiler: str) -> str:
    """A name for a compiled kernel that changes with everything that changes the binary."""
    parts = (kernel, str(architecture), compiler, *OPTIONS, translation_unit(kernel))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()

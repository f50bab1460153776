# SPDX-License-Identifier: Apache-2.0
"""The CUDA source as one translation unit."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

UNITS = {
    "": ("topk/softmax_topk.cu", "topk/short_rows.cu", "routers/router_rows.cu", "rows/read_rows.cu"),
    "full_rows": ("full_rows/softmax_rows.cu",),
    "merging": ("topk/merge_states.cu",),
    "gradients": ("linear/logit_gradient.cu",),
    "pieces": ("linear/accumulate_piece.cu",),
    "ranks": ("ranks/target_ranks.cu",),
    "tokens": ("tokens/token_sums.cu",),
    "attention": ("attention/step_attention.cu",),
    "sampling": ("draws/sample_vocabulary.cu", "draws/sample_rows.cu"),
    "routers": ("routers/route_experts.cu",),
    "ladder": ("ladder/ladder.cu",),
}
"""The files of csrc/ that have the kernels of each namespace within fused_topk. A namespace is a unit of its own, so that each
compiles quickly."""

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 103, 120)
"""Compute capabilities (times ten) that every kernel is compiled for in the tests, and whose needs of shared memory a launch
meets."""

OLDEST_ARCHITECTURE = 70
"""Kernels take their parameters in place (__grid_constant__), which older GPUs cannot."""

OPTIONS = (
    "-std=c++17",
    # Functions without an annotation are device functions: the headers shared with the CPU then need no macro for it.
    "-default-device",
)


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include "([^"]+)".*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma once.*$", re.MULTILINE)


def source_folder() -> Path:
    """Where csrc/ is: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def translation_unit(kernel: str) -> str:
    """The CUDA code that has a kernel, named as NVRTC wants it: one file after the other. Compiling it needs no include path."""
    within = re.match(r"fused_topk::(\w+)::", kernel)
    return _joined(within[1] if within else "")


def sources_of(unit: str) -> list[str]:
    """The files of a unit, each once and after those that it includes."""
    found: dict[str, None] = {}

    def add(path: Path) -> None:
        for included in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            add((path.parent / included).resolve())
        found[path.relative_to(folder).as_posix()] = None

    folder = source_folder().resolve()
    for name in UNITS[unit]:
        add(folder / name)
    return list(found)


@cache
def _joined(unit: str) -> str:
    pieces = []
    for name in sources_of(unit):
        text = (source_folder() / name).read_text(encoding="utf-8")
        pieces.append(f'#line 1 "{name}"\n' + _ONCE.sub("", _INCLUDE.sub("", text)))
    return "\n".join(pieces)


def cache_key(kernel: str, architecture: int, compiler: str) -> str:
    """A name for a compiled kernel that changes with everything that changes the binary."""
    parts = (kernel, str(architecture), compiler, *OPTIONS, translation_unit(kernel))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()

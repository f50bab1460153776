# SPDX-License-Identifier: Apache-2.0
"""What this machine has, and which backends work on it. Something missing or broken is a value, never an error."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__, backends, env
from .backends import cpu
from .cuda_runtime import kernel_cache

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def describe() -> dict[str, Any]:
    """Versions, devices, backends and the cache of compiled kernels, by their names."""
    cache = env.kernel_cache_dir()
    return {
        "versions": versions(),
        "cpu": {
            "model": _cpu_model(),
            "native kernel": _or_cause(cpu.instruction_set),
            "threads": torch.get_num_threads(),
        },
        "gpus": _gpus(),
        "backends": {name: cause or "works" for name, cause in backends.available().items()},
        "compiled kernels": {"folder": cache and str(cache), "kept": kernel_cache.problem() or "yes"},
    }


def as_text(found: dict[str, Any]) -> str:
    """The result of describe() as text: each group of values under its name."""
    lines = []
    for group, values in found.items():
        lines.append(group)
        lines += [f"  {name:22} {value or 'none'}" for name, value in values.items()]
    return "\n".join(lines)


def versions() -> dict[str, str | None]:
    """The version of each part, None for one that is not installed."""
    return {
        "fused_topk": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": _installed("numpy"),
        "transformers": _installed("transformers"),
        "cupy": _installed(*_CUPY),
        "cuda driver": _or_cause(_driver_version),
        "cuda runtime of torch": torch.version.cuda,
        "nvrtc": _or_cause(_nvrtc_version),
    }


def _or_cause(read: Callable[[], Any]) -> Any:
    """The result of `read()`, or its error in one line. `info` must describe a broken driver, not fail because of
    it."""
    try:
        return read()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _installed(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _driver_version() -> str | None:
    """The newest CUDA version that the driver supports."""
    if not torch.cuda.is_available() or not _installed(*_CUPY):
        return None
    number = importlib.import_module("cupy_backends.cuda.api.runtime").driverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def _nvrtc_version() -> str | None:
    if not _installed(*_CUPY):
        return None
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    return ".".join(str(part) for part in nvrtc.getVersion())


def _gpus() -> dict[str, Any]:
    count = _or_cause(lambda: torch.cuda.is_available() and torch.cuda.device_count())
    if not isinstance(count, int) or not count:
        return {"all": count}
    return {str(index): _or_cause(partial(_gpu, index)) for index in range(count)}


def _gpu(index: int) -> str:
    gpu, problem = torch.cuda.get_device_properties(index), backends.available(torch.device("cuda", index))["cuda"]
    return (
        f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, "
        f"{gpu.L2_cache_size >> 20} MiB L2, {gpu.total_memory / 2**30:.0f} GiB{f'; no kernels: {problem}' if problem else ''}"
    )


def _cpu_model() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()

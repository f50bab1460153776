# SPDX-License-Identifier: Apache-2.0
"""What this machine has and what of the package works on it. What is missing or broken is a value, never an error."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__, backends, env
from .cuda_runtime import kernel_cache


def describe() -> dict[str, Any]:
    """Versions, devices, backends and the cache of compiled kernels, as plain JSON values."""
    return {
        "versions": versions(),
        "cpu": {
            "model": _cpu_model(),
            "instructions": _or_cause(_cpu_instructions),
            "threads": torch.get_num_threads(),
        },
        "gpus": _or_cause(_gpus),
        "backends": backends.available(),
        "kernel_cache": _kernel_cache(),
    }


def versions() -> dict[str, str | None]:
    """Version of each part, None where it is not installed."""
    return {
        "fused_topk": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": _installed("numpy"),
        "transformers": _installed("transformers"),
        "cupy": _installed("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "cuda driver": _or_cause(_driver_version),
        "cuda runtime of torch": torch.version.cuda,
        "nvrtc": _or_cause(_nvrtc_version),
    }


def _or_cause(read: Callable[[], Any]) -> Any:
    """What `read` gives, or the error in one line: a broken driver or half an install is what `info` is asked about."""
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


def _has_cupy() -> bool:
    return _installed("cupy-cuda13x", "cupy-cuda12x", "cupy") is not None


def _driver_version() -> str | None:
    """The newest CUDA that the driver supports."""
    if not torch.cuda.is_available() or not _has_cupy():
        return None
    number = importlib.import_module("cupy_backends.cuda.api.runtime").driverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def _nvrtc_version() -> str | None:
    if not _has_cupy():
        return None
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    return ".".join(str(part) for part in nvrtc.getVersion())


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": gpu.multi_processor_count,
            "l2_bytes": gpu.L2_cache_size,
            "memory_bytes": gpu.total_memory,
            "problem": backends.available(torch.device("cuda", index))["cuda"],
        }
        for index, gpu in enumerate(found)
    ]


def _cpu_instructions() -> str | None:
    """The instruction set that the native kernel chose, None where it does not work."""
    if backends.available().get("cpu") is not None:
        return None
    return str(importlib.import_module("fused_topk.backends.cpu").instruction_set())


def _cpu_model() -> str:
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()


def _kernel_cache() -> dict[str, Any]:
    folder, kept = env.kernel_cache_dir(), kernel_cache.kept()
    return {
        "path": None if folder is None else str(folder),
        "files": len(kept),
        "bytes": sum(file.bytes for file in kept),
        "problem": kernel_cache.problem(),
    }

# SPDX-License-Identifier: Apache-2.0
"""What this machine has, and which backends work on it. Something missing or broken is a value, never an error."""

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
from .backends import cpu
from .cuda_runtime import kernel_cache

_MIB = 1 << 20
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def describe() -> dict[str, Any]:
    """Versions, devices, backends and the cache of compiled kernels, as plain JSON values."""
    return {
        "versions": versions(),
        "cpu": {
            "model": _cpu_model(),
            "instructions": _or_cause(cpu.instruction_set),
            "threads": torch.get_num_threads(),
        },
        "gpus": _or_cause(_gpus),
        "backends": backends.available(),
        "kernel_cache": _kernel_cache(),
    }


def as_text(found: dict[str, Any]) -> str:
    """The result of describe() as text: in each line a name, and what was found."""
    lines = [(name, version or "not found") for name, version in found["versions"].items()]
    cpu = found["cpu"]
    kernel = f"native kernel: {cpu['instructions']}" if cpu["instructions"] else "no native kernel"
    lines.append(("CPU", f"{cpu['model']}, {kernel}, {cpu['threads']} threads"))
    # "gpus" is a list, or the error that prevented one.
    gpus = found["gpus"] if isinstance(found["gpus"], list) else []
    if not gpus:
        lines.append(("GPU", found["gpus"] or "none that torch sees"))
    for number, gpu in enumerate(gpus):
        does = (
            f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['multiprocessors']} multiprocessors, "
            f"{gpu['l2_bytes'] / _MIB:.0f} MiB L2, {gpu['memory_bytes'] / _MIB / 1024:.0f} GiB"
        )
        lines.append((f"GPU {number}", does))
        if gpu["problem"]:
            lines.append(("", f"no kernels: {gpu['problem']}"))
    for name, cause in found["backends"].items():
        lines.append((f"backend {name}", "works" if cause is None else f"no: {cause}"))
    cache = found["kernel_cache"]
    held = f"{cache['files']} files, {cache['bytes'] / _MIB:.1f} MiB"
    lines.append(("compiled kernels", f"{cache['path'] or 'no folder'} ({held})"))
    if cache["problem"]:
        lines.append(("", f"not kept: {cache['problem']}"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {what}" for name, what in lines)


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

# SPDX-License-Identifier: Apache-2.0
"""What this machine has, and which backends work on it. Something missing or broken is a value, never an error."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import __version__, backends, env
from .cuda_runtime import kernel_cache

if TYPE_CHECKING:
    from rich.console import Console

_MIB = 1 << 20


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


def print_description(found: dict[str, Any], console: Console) -> None:
    """Prints the result of describe() as a table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, version in found["versions"].items():
        table.add_row(name, escape(version or "not found"))
    cpu = found["cpu"]
    kernel = f"native kernel: {cpu['instructions']}" if cpu["instructions"] else "no native kernel"
    table.add_row("CPU", escape(f"{cpu['model']}, {kernel}, {cpu['threads']} threads"))
    # "gpus" is a list, or the error that prevented one.
    gpus = found["gpus"] if isinstance(found["gpus"], list) else []
    if not gpus:
        table.add_row("GPU", escape(found["gpus"] or "none that torch sees"))
    for number, gpu in enumerate(gpus):
        table.add_row(
            f"GPU {number}",
            f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['multiprocessors']} multiprocessors, "
            f"{gpu['l2_bytes'] / _MIB:.0f} MiB L2, {gpu['memory_bytes'] / _MIB / 1024:.0f} GiB",
        )
        if gpu["problem"]:
            table.add_row("", f"[yellow]no kernels:[/] {escape(gpu['problem'])}")
    for name, cause in found["backends"].items():
        table.add_row(f"backend {name}", "[green]works[/]" if cause is None else f"[yellow]no:[/] {escape(cause)}")
    cache = found["kernel_cache"]
    held = f"{cache['path'] or 'no folder'} ({cache['files']} files, {cache['bytes'] / _MIB:.1f} MiB)"
    table.add_row("compiled kernels", escape(held))
    if cache["problem"]:
        table.add_row("", f"[yellow]not kept:[/] {escape(cache['problem'])}")
    console.print(table)


def versions() -> dict[str, str | None]:
    """The version of each part, None for one that is not installed."""
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


def _has_cupy() -> bool:
    return _installed("cupy-cuda13x", "cupy-cuda12x", "cupy") is not None


def _driver_version() -> str | None:
    """The newest CUDA version that the driver supports."""
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
    """The instruction set that the native kernel uses, None if the kernel does not work."""
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

# SPDX-License-Identifier: Apache-2.0
"""GPUs that compile, load and launch nothing, but remember what they were asked for: for the host's part of the CUDA backend."""

import contextlib
import sys
import types
from typing import Any

import pytest
import torch

from fused_topk.cuda_runtime import driver, tickets


class StandInGpus:
    """In the place of CuPy, NVRTC and the driver, until the test ends. Capability 9.0 but where `capability` says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability: dict[int, tuple[int, int]] = {}
        self.targets = (75, 80, 86, 89, 90, 100, 103, 120)
        self.compiler = "NVRTC 13.5.37"
        self.compiled: list[tuple[str, int]] = []
        self.loaded: list[bytes] = []
        self.synchronized: list[int] = []

        of_cupy = types.SimpleNamespace(funcGetAttribute=lambda *_: 0, funcSetAttribute=lambda *_: None)
        function = types.SimpleNamespace(Module=lambda: _Module(self))
        cupy = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(driver=of_cupy, function=function)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        nvrtc = types.SimpleNamespace(getVersion=lambda: (13, 5), getSupportedArchs=lambda: self.targets)

        monkeypatch.setattr(driver, "_loaded", {})
        monkeypatch.setattr(driver, "_most_dynamic_shared_bytes", {})
        monkeypatch.setattr(driver, "_cupy_problem", lambda: None)
        monkeypatch.setattr(driver, "_nvrtc", lambda: nvrtc)
        monkeypatch.setattr(driver, "_compiler", lambda: self.compiler)
        monkeypatch.setattr(driver, "compile_kernel", self._compile)
        monkeypatch.setattr(driver, "max_shared_bytes_per_block", lambda device: 227 << 10)
        monkeypatch.setattr(tickets, "prepare", self.synchronized.append)
        driver._gpu_problem.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._properties)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability.get(device, (9, 0)))

    def restart(self) -> None:
        """What a new process finds: nothing is loaded."""
        driver._loaded.clear()
        self.compiled.clear()
        self.loaded.clear()

    def _properties(self, device: int) -> Any:
        major, minor = torch.cuda.get_device_capability(device)
        sizes = {"multi_processor_count": 132, "L2_cache_size": 50 << 20, "total_memory": 80 << 30}
        return types.SimpleNamespace(name=f"GPU {device}", major=major, minor=minor, **sizes)

    def _compile(self, kernel: str, architecture: int) -> tuple[bytes, str, str]:
        self.compiled.append((kernel, architecture))
        return f"binary of {kernel} for {architecture}".encode(), f"entry of {kernel}", "log"


class _Module:
    def __init__(self, gpus: StandInGpus) -> None:
        self._gpus = gpus

    def load(self, binary: bytes) -> None:
        self._gpus.loaded.append(binary)

    def get_function(self, entry: str) -> Any:
        return types.SimpleNamespace(ptr=0, entry=entry)

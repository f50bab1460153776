# SPDX-License-Identifier: Apache-2.0
"""The one module that knows CuPy: which GPUs have kernels, and how a kernel of csrc/ is compiled, loaded and launched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from . import kernel_cache, kernel_source, tickets
from .tickets import raw_stream

# Values of the driver's enumerations CUfunction_attribute and CUdevice_attribute.
_SHARED_SIZE_BYTES = 1
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_MAX_SHARED_BYTES_PER_BLOCK = 97  # what a kernel may ask for

# A private function of torch that saves a microsecond. Versions without it get the public one.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def unavailable(device: torch.device | None = None) -> str | None:
    """None if the kernels can run on that GPU, else the cause and the remedy in one sentence. Without `device`: on any GPU."""
    # is_initialized() is quicker than is_available(), and true whenever there is a CUDA tensor.
    if not (torch.cuda.is_initialized() or torch.cuda.is_available()):  # type: ignore[no-untyped-call]
        return "torch sees no CUDA device; install a CUDA build of torch on a machine with an NVIDIA GPU and its driver"
    if torch.version.hip:
        return "torch is built for AMD's GPUs, which the CUDA kernels do not serve; torch operations do"
    cause = _cupy_problem()
    if cause is not None:
        return cause
    index = device.index if device is not None and device.type == "cuda" else None
    try:
        causes = [_gpu_problem(i) for i in (range(torch.cuda.device_count()) if index is None else [index])]
    except RuntimeError as error:
        return f"the GPU cannot be used ({str(error).partition(chr(10))[0]}); `nvidia-smi` may say more"
    return causes[0] if causes and all(causes) else None


def compile_kernel(kernel: str, architecture: int) -> tuple[bytes, str, str]:
    """Compiles one variant: (binary, mangled name of its entry, the compiler's log with registers, stack and spills).

    Needs NVRTC but no GPU. A RuntimeError carries the log.
    """
    nvrtc: Any = _nvrtc()
    program = nvrtc.createProgram(kernel_source.translation_unit(kernel), "fused_topk.cu", [], [])
    try:
        nvrtc.addNameExpression(program, kernel)
        options = [*kernel_source.OPTIONS, f"-arch=sm_{architecture}", "--ptxas-options=-v"]
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            message = f"NVRTC could not compile {kernel} for sm_{architecture} with {' '.join(options)}:\n{log}"
            raise RuntimeError(message) from error
        return nvrtc.getCUBIN(program), nvrtc.getLoweredName(program, kernel), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


_loading: dict[int, threading.Lock] = {}
_loaded: dict[tuple[int, str], Any] = {}
_most_dynamic_shared_bytes: dict[tuple[int, str], int] = {}


def function(device: int, kernel: str) -> Any:
    """The loaded kernel, compiled on first use in this process unless an earlier one has left it on disk."""
    found = _loaded.get((device, kernel))
    if found is None:
        # One thread compiles for a GPU at a time. The others find its result. Threads of other GPUs do not wait.
        with _loading.setdefault(device, threading.Lock()):
            found = _loaded.get((device, kernel))
            if found is None:
                found = _loaded[device, kernel] = _load(device, kernel)
    return found


def affordable_shared_bytes(device: int, kernel: str, wanted: int) -> int:
    """`wanted` bytes of shared memory for a launch of a loaded kernel, or as many as the GPU has."""
    return min(wanted, _most_dynamic_shared_bytes.get((device, kernel), wanted))


def argument(filled: bytes | bytearray) -> np.ndarray[Any, Any]:
    """A struct as a kernel's argument."""
    return np.frombuffer(filled, _by_value(len(filled)))


@cache
def _by_value(size: int) -> np.dtype[Any]:
    """One element of that many bytes, which CuPy passes by value."""
    return np.dtype(f"V{size}")


def call(
    kernel: Any,
    grid: tuple[int, ...],
    threads: int,
    arguments: tuple[Any, ...],
    device: int,
    shared_bytes: int = 0,
    is_cooperative: bool = False,
) -> None:
    """Launches a kernel. All blocks of a cooperative launch run at the same time, so they may wait for each other."""
    stream = _stream(raw_stream(device))
    if device == _current_device():
        kernel(grid, (threads,), arguments, shared_bytes, stream, is_cooperative)
    else:
        with torch.cuda.device(device):
            kernel(grid, (threads,), arguments, shared_bytes, stream, is_cooperative)


@cache
def _stream(handle: int) -> Any:
    """torch's stream as a CuPy object, to be passed to a launch. CuPy's own current stream is another one."""
    import cupy

    return cupy.cuda.Stream.from_external(_StreamHandle(handle))


class _StreamHandle(NamedTuple):
    """The CUDA stream protocol: a version and the stream's address."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@cache
def max_shared_bytes_per_block(device: int) -> int:
    """How much shared memory, static and dynamic, a block of a kernel that asks for it can have."""
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(_MAX_SHARED_BYTES_PER_BLOCK, device))


def _load(device: int, kernel: str) -> Any:
    import cupy

    cause = _cupy_problem()
    if cause is not None:
        raise RuntimeError(cause)
    architecture = architecture_of(device)
    key = kernel_source.cache_key(kernel, architecture, _compiler())
    stored = kernel_cache.load(key)
    if stored is None:
        binary, name, _ = compile_kernel(kernel, architecture)
        # The entry's mangled name is stored in front of the binary.
        stored = name.encode() + b"\0" + binary
        kernel_cache.store(key, stored)
    entry, _, binary = stored.partition(b"\0")
    with torch.cuda.device(device):
        # torch makes the device's context current. CuPy then loads into the same context.
        torch.cuda.current_stream()
        module = cupy.cuda.function.Module()
        module.load(binary)
        tickets.prepare(device)
        loaded = module.get_function(entry.decode())
        static = cupy.cuda.driver.funcGetAttribute(_SHARED_SIZE_BYTES, loaded.ptr)
        most = max_shared_bytes_per_block(device) - static
        cupy.cuda.driver.funcSetAttribute(loaded.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
        _most_dynamic_shared_bytes[device, kernel] = most
        return loaded


@cache
def _cupy_problem() -> str | None:
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        major = "12" if (torch.version.cuda or "13").startswith("12") else "13"
        return f"CuPy cannot be imported ({error}); install it with `pip install 'cupy-cuda{major}x[ctk]'`"
    try:
        _nvrtc().getVersion()
    except Exception as error:
        return f"CuPy finds no NVRTC ({error}); install it with `pip install 'cupy-cuda13x[ctk]'` (or cupy-cuda12x)"
    return None


@cache
def _gpu_problem(index: int) -> str | None:
    """None if the kernels can be compiled for that GPU."""
    architecture = architecture_of(index)
    nvrtc = _nvrtc()
    targets = nvrtc.getSupportedArchs()
    if architecture >= kernel_source.OLDEST_ARCHITECTURE and architecture in targets:
        return None
    gpu = f"{torch.cuda.get_device_name(index)} has compute capability {architecture / 10}"
    if architecture < kernel_source.OLDEST_ARCHITECTURE:
        return f"{gpu}, and the kernels need {kernel_source.OLDEST_ARCHITECTURE / 10}; torch operations serve it"
    version = ".".join(map(str, nvrtc.getVersion()))
    is_too_old = architecture < min(targets)
    remedy = "cupy-cuda12x[ctk] in place of cupy-cuda13x" if is_too_old else "a newer CuPy and NVRTC"
    return f"{gpu}, for which NVRTC {version} does not compile; install {remedy}"


def architecture_of(device: int) -> int:
    """The compute capability times ten, as compilers name their targets."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _compiler() -> str:
    """The PTX of an empty program. It names the compiler with its patch and build, which getVersion() does not."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram("", "empty.cu", [], [])
    try:
        nvrtc.compileProgram(program, [])
        return bytes(nvrtc.getPTX(program)).decode()
    finally:
        nvrtc.destroyProgram(program)


@cache
def _nvrtc() -> Any:
    from cupy.cuda import nvrtc

    return nvrtc

# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: compiles csrc/ with NVRTC and launches it, both through CuPy. No other module knows CuPy.

A launch goes to torch's current stream on the logits' device, waits for nothing, and takes all its memory from torch's
caching allocator, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import env, kernel_cache, kernel_source, launch
from .kernel_choice import MAX_K, KernelChoice, choose
from .problem import Problem, Start, TopK

_PROBLEM_DTYPE = np.dtype(f"V{launch.PROBLEM_BYTES}")
_FORMATS = launch.FORMATS
_MAX_ROWS = launch.MAX_ROWS
# Of the driver's enumerations CUfunction_attribute and CUdevice_attribute.
_SHARED_SIZE_BYTES = 1
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_MAX_SHARED_BYTES_PER_BLOCK = 97  # what a kernel may ask for
_SHARED_BYTES_UNASKED = 48 << 10  # what it has without asking


def _public_raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# Private names of torch, which save a microsecond each; a version without them has the public ones.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_raw_stream)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def unavailable(device: torch.device | None = None) -> str | None:
    """None if the kernels can run on that GPU, or without one on any, else the cause and the remedy in one sentence."""
    # Where there is a CUDA tensor, torch is initialized: that is quicker to see than the device.
    if not (torch.cuda.is_initialized() or torch.cuda.is_available()):  # type: ignore[no-untyped-call]
        return "torch sees no CUDA device; install a CUDA build of torch on a machine with an NVIDIA GPU and its driver"
    if torch.version.hip:
        return "torch is built for AMD's GPUs, which the CUDA kernels do not serve; torch operations do"
    cause = _cupy_problem()
    if cause is not None:
        return cause
    index = None if device is None else device.index
    try:
        causes = [_gpu_problem(i) for i in (range(torch.cuda.device_count()) if index is None else [index])]
    except RuntimeError as error:
        return f"the GPU cannot be used ({str(error).partition(chr(10))[0]}); `nvidia-smi` may say more"
    return causes[0] if causes and all(causes) else None


def supports(dtype: torch.dtype, k: int) -> bool:
    """Whether the kernels take logits of that dtype and that k."""
    return dtype in _FORMATS and k <= MAX_K


def row_topk(problem: Problem, out: TopK, choice: KernelChoice | None = None) -> None:
    """Launches the kernel on the rows of `problem` and writes `out`; with another layout than its own if one is given."""
    _launch(problem, None, out, choice)


def prepare(problem: Problem, device: torch.device, beam_scores: Tensor | None = None) -> Start:
    """row_topk(), or with beam_scores beam_topk(), of tensors like these, which may be meta tensors: all that does not change
    with their addresses."""
    shape, strides, itemsize = problem.logits.shape, problem.logits.stride(), problem.logits.element_size()
    rows, index = launch.row_count(shape), device.index
    if rows == 0:
        return lambda logits, out, beam_scores=None, mask=None, row_temperature=None: None
    choice = _choice(rows, shape[-1], problem.k, itemsize, index, beam_scores is not None)
    unaligned, aligned = (
        launch.plan(_layout(problem, is_aligned, beam_scores), choice) for is_aligned in (False, True)
    )
    has_adjacent = strides[-1] == 1 or shape[-1] == 1

    def run(
        logits: Tensor,
        out: TopK,
        beam_scores: Tensor | None = None,
        mask: Tensor | None = None,
        row_temperature: Tensor | None = None,
    ) -> None:
        address = logits.data_ptr()
        planned = unaligned if address % 16 else aligned
        if planned is None or not has_adjacent or address % itemsize:
            _launch(problem.at(logits, mask, row_temperature), beam_scores, out)
            return
        _start(
            planned,
            index,
            address,
            problem.temperature,
            0 if row_temperature is None else row_temperature.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            0 if beam_scores is None else beam_scores.data_ptr(),
            out,
        )

    return run


def beam_topk(problem: Problem, beam_scores: Tensor, out: TopK) -> None:
    """The same, then the merge over the beams of each batch entry, in the same launch."""
    _launch(problem, beam_scores, out)


def read_rows(logits: Tensor) -> None:
    """Reads the tensor's bytes with 16-byte loads and writes nothing: the floor that a single pass is measured against.

    Args:
        logits: contiguous CUDA tensor whose data starts at a multiple of 16 bytes; a tail below 16 bytes is not read.
    """
    device = logits.get_device()
    vectors = logits.numel() * logits.element_size() // 16
    threads, per_thread = 256, 8
    blocks = max(1, min(-(-vectors // (threads * per_thread)), 2**31 - 1))
    function = _function(device, "fused_topk::read_rows_kernel")
    arguments = (np.uint64(logits.data_ptr()), np.int64(vectors), np.uint64(0))
    _call(function, (blocks,), threads, arguments, device)


def kernel_names() -> list[str]:
    """Every variant that a launch can ask for, as name expressions for NVRTC."""
    return ["fused_topk::read_rows_kernel", *launch.kernel_names()]


def compile_kernel(kernel: str, architecture: int) -> tuple[bytes, str, str]:
    """Compiles one variant. Needs NVRTC but no GPU.

    Returns:
        (binary, mangled name of its entry, the compiler's log with registers, stack and spills).

    Raises:
        RuntimeError: the code does not compile; carries the compiler's log.
    """
    nvrtc: Any = _nvrtc()
    program = nvrtc.createProgram(kernel_source.translation_unit(kernel), "fused_topk.cu", [], [])
    try:
        nvrtc.addNameExpression(program, kernel)
        options = (
            *kernel_source.OPTIONS,
            f"-arch=sm_{architecture}",
            "--ptxas-options=-v",
        )
        try:
            nvrtc.compileProgram(program, list(options))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            message = f"NVRTC could not compile {kernel} for sm_{architecture} with {' '.join(options)}:\n{log}"
            raise RuntimeError(message) from error
        return (
            nvrtc.getCUBIN(program),
            nvrtc.getLoweredName(program, kernel),
            nvrtc.getProgramLog(program),
        )
    finally:
        nvrtc.destroyProgram(program)


def choice_of(problem: Problem) -> KernelChoice:
    """The layout over the GPU that a launch of `problem` gets."""
    vocab_size = problem.logits.shape[-1]
    rows = problem.logits.numel() // vocab_size
    return _choice(
        rows,
        vocab_size,
        problem.k,
        problem.logits.element_size(),
        problem.logits.get_device(),
    )


def _launch(
    problem: Problem,
    beam_scores: Tensor | None,
    out: TopK,
    choice: KernelChoice | None = None,
) -> None:
    logits, mask, row_temperature = readable(problem.logits), problem.mask, problem.row_temperature
    shape, device, address = logits.shape, logits.get_device(), logits.data_ptr()
    rows = launch.row_count(shape)
    if rows == 0:
        return
    if choice is None:
        choice = _choice(rows, shape[-1], problem.k, logits.element_size(), device, beam_scores is not None)
    planned = launch.plan(_layout(problem._replace(logits=logits), address % 16 == 0, beam_scores), choice)
    if planned is None:
        # More unrelated strides than the kernel walks: the one case in which rows are copied.
        contiguous = problem._replace(
            logits=logits.contiguous(),
            mask=None if mask is None else mask.contiguous(),
            row_temperature=None if row_temperature is None else row_temperature.contiguous(),
        )
        return _launch(contiguous, beam_scores, out, choice)
    _start(
        planned,
        device,
        address,
        problem.temperature,
        0 if row_temperature is None else row_temperature.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if beam_scores is None else beam_scores.data_ptr(),
        out,
    )


def _layout(problem: Problem, is_aligned: bool, beam_scores: Tensor | None) -> launch.Layout:
    logits, mask, row_temperature = problem.logits, problem.mask, problem.row_temperature
    return launch.Layout(
        logits.shape,
        logits.stride(),
        logits.dtype,
        is_aligned,
        problem.k,
        problem.values,
        problem.normalize,
        mask is not None and mask.dtype != torch.bool,
        None if mask is None else mask.stride(),
        None if row_temperature is None else row_temperature.stride(),
        None if beam_scores is None else beam_scores.stride(),
    )


def _start(
    planned: launch.Launch,
    device: int,
    logits: int,
    temperature: float,
    row_temperature: int,
    mask: int,
    beam_scores: int,
    out: TopK,
) -> None:
    """Launches what is planned, with the addresses of this call."""
    function = _function(device, planned.kernel)
    scratch = tickets = 0
    if planned.scratch_words:
        workspace = torch.empty(planned.scratch_words, dtype=torch.int64, device=out.values.device)
        scratch = workspace.data_ptr()
        tickets = _tickets(device, planned.row_tickets + planned.beam_tickets)
    filled = planned.fill(
        logits,
        temperature,
        row_temperature,
        mask,
        beam_scores,
        scratch,
        tickets,
        out.values.data_ptr(),
        out.indices.data_ptr(),
        out.logsumexp.data_ptr(),
    )
    # One element of that many bytes: CuPy passes it by value.
    argument = np.frombuffer(filled, _PROBLEM_DTYPE)
    shared_bytes = planned.shared_bytes
    if shared_bytes > _SHARED_BYTES_UNASKED:
        # A kernel for hardware that has less than this needs less.
        shared_bytes = min(shared_bytes, _most_dynamic_shared_bytes.get((device, planned.kernel), shared_bytes))
    _call(function, planned.grid, planned.threads, (argument,), device, shared_bytes)


def readable(logits: Tensor) -> Tensor:
    """The logits themselves, unless their elements are not adjacent or not aligned to their own size."""
    if (logits.stride(-1) != 1 and logits.shape[-1] > 1) or logits.data_ptr() % logits.element_size():
        return logits.clone(memory_format=torch.contiguous_format)
    return logits


def _call(
    function: Any,
    grid: tuple[int, ...],
    threads: int,
    arguments: tuple[Any, ...],
    device: int,
    shared_bytes: int = 0,
    is_cooperative: bool = False,
) -> None:
    """Launches; all blocks of a cooperative launch run at the same time, so that they may wait for each other."""
    stream = _stream(_raw_stream(device))
    if device == _current_device():
        function(grid, (threads,), arguments, shared_bytes, stream, is_cooperative)
    else:
        with torch.cuda.device(device):
            function(grid, (threads,), arguments, shared_bytes, stream, is_cooperative)


@cache
def _stream(handle: int) -> Any:
    """A CuPy name for torch's stream. Given to the launch itself: CuPy's own current stream is another one."""
    import cupy

    if not hasattr(cupy.cuda.Stream, "from_external"):  # before CuPy 14
        return cupy.cuda.ExternalStream(handle)
    return cupy.cuda.Stream.from_external(_StreamHandle(handle))


class _StreamHandle(NamedTuple):
    """The CUDA stream protocol: a version and the stream's address."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@cache
def _choice(rows: int, vocab_size: int, k: int, itemsize: int, device: int, has_beams: bool = False) -> KernelChoice:
    choice = choose(
        rows, vocab_size, k, itemsize, torch.cuda.get_device_properties(device).multi_processor_count, has_beams
    )
    if env.print_choice():
        print(
            f"fused_topk: {rows} x {vocab_size} of {itemsize} bytes, k={k}: {choice.regime}, {choice}",
            file=sys.stderr,
        )
    return choice


@cache
def max_shared_bytes_per_block(device: int) -> int:
    """How much shared memory, static and dynamic, a block of a kernel that asks for it can have."""
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(_MAX_SHARED_BYTES_PER_BLOCK, device))


_loading = threading.Lock()
_loaded: dict[tuple[int, str], Any] = {}
_most_dynamic_shared_bytes: dict[tuple[int, str], int] = {}


def _function(device: int, kernel: str) -> Any:
    """The loaded kernel, compiled on first use in this process unless an earlier one has left it on disk."""
    function = _loaded.get((device, kernel))
    if function is None:
        # One thread compiles; the others find its result.
        with _loading:
            function = _loaded.get((device, kernel))
            if function is None:
                function = _loaded[device, kernel] = _load(device, kernel)
    return function


def _load(device: int, kernel: str) -> Any:
    import cupy

    cause = _cupy_problem()
    if cause is not None:
        raise RuntimeError(cause)
    architecture = _architecture(device)
    key = kernel_source.cache_key(kernel, architecture, _compiler())
    stored = kernel_cache.load(key)
    if stored is None:
        binary, name, _ = compile_kernel(kernel, architecture)
        # The entry's mangled name travels in front of the binary.
        stored = name.encode() + b"\0" + binary
        kernel_cache.store(key, stored)
    entry, _, binary = stored.partition(b"\0")
    with torch.cuda.device(device):
        # torch makes the device's context current; CuPy then loads into the same one.
        torch.cuda.current_stream()
        module = cupy.cuda.function.Module()
        module.load(binary)
        _reserve_tickets(device)
        function = module.get_function(entry.decode())
        static = cupy.cuda.driver.funcGetAttribute(_SHARED_SIZE_BYTES, function.ptr)
        most = max_shared_bytes_per_block(device) - static
        cupy.cuda.driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
        _most_dynamic_shared_bytes[device, kernel] = most
        return function


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
    architecture = _architecture(index)
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


def _architecture(device: int) -> int:
    """The compute capability times ten, as compilers name their targets."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _compiler() -> str:
    """What an empty program becomes: PTX that names its compiler, with the patch and the build. getVersion() has neither."""
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


class _TicketReserve(NamedTuple):
    """Zeroed counters for captured graphs, and how many are taken: graphs may replay at any time, so none is reused."""

    tickets: Tensor
    taken: list[int]


_RESERVED_TICKETS = 1 << 20
_reserves: dict[int, _TicketReserve] = {}
_stream_tickets: dict[tuple[int, int], Tensor] = {}
_outgrown_tickets: list[Tensor] = []


def _reserve_tickets(device: int) -> None:
    if device not in _reserves and not torch.cuda.is_current_stream_capturing():
        tickets = torch.zeros(_RESERVED_TICKETS, dtype=torch.int32, device=f"cuda:{device}")
        # Once for each device: a graph may be replayed on another stream than this one.
        torch.cuda.current_stream(device).synchronize()
        _reserves[device] = _TicketReserve(tickets, [0])


def _tickets(device: int, count: int) -> int:
    """Address of `count` zeroed counters that no launch running at the same time uses.

    A launch leaves them zero, so the launches of one stream share one set. A captured launch gets a set of its own.
    """
    if torch.cuda.is_current_stream_capturing():
        with _loading:
            reserve = _reserves.get(device)
            if reserve is not None and reserve.taken[0] + count <= _RESERVED_TICKETS:
                first = reserve.taken[0]
                reserve.taken[0] += count
                return reserve.tickets.data_ptr() + 4 * first
        # None left: zeroed by the graph itself, in its own memory, at every replay.
        return torch.zeros(count, dtype=torch.int32, device=f"cuda:{device}").data_ptr()
    key = device, _raw_stream(device)
    tickets = _stream_tickets.get(key)
    if tickets is None or tickets.numel() < count:
        with _loading:
            tickets = _stream_tickets.get(key)
            if tickets is None or tickets.numel() < count:
                if tickets is not None:
                    # Another thread may be about to launch with them.
                    _outgrown_tickets.append(tickets)
                tickets = torch.zeros(max(count, 4096), dtype=torch.int32, device=f"cuda:{device}")
                _stream_tickets[key] = tickets
    return tickets.data_ptr()

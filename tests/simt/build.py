# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels together with the emulated machine into shared libraries, each once for each text and set of options."""

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fused_topk.cuda_runtime import kernel_source
from kept import built, key

from .translate import translate

_HERE = Path(__file__).parent
_FOR_KERNELS = ("simt.h", "cuda.h", "ptx.h")
_COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "g++"
_COMMON = ("-std=c++17", "-fPIC", "-fno-exceptions", "-ffp-contract=off", f"-I{_HERE}")
# A kernel then calls the machine's own functions (kernel_calls.cpp, ubsan.cpp): no sanitizer is linked. memory.cpp checks
# pointers, so the compiler need not.
_INSTRUMENT = (
    "-fsanitize=thread,undefined",
    "--param=tsan-distinguish-volatile=1",
    "-fno-sanitize=null,alignment,object-size,vptr,pointer-overflow",
)
# The real sanitizers instead of the harness's own checks. Checks that are calls compile faster than inline ones.
_ADDRESS_SANITIZER = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "--param=asan-instrumentation-with-call-threshold=0",
)


class Kernel(NamedTuple):
    """What to compile."""

    source: str  # CUDA
    name: str  # in C++, with its template arguments
    architecture: int = 90
    # With AddressSanitizer and UndefinedBehaviorSanitizer instead of the harness's checks.
    address_sanitizer: bool = False
    debug: bool = False  # with local variables, for a debugger


def unavailable() -> str | None:
    """None if the harness works on this machine, else why not."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return "the emulated machine switches its threads with x86-64 instructions, on Linux"
    if shutil.which(_COMPILER) is None:
        return f"no C++ compiler {_COMPILER!r}; install g++ or set CXX"
    if "Free Software Foundation" not in _compiler():
        return f"{_COMPILER!r} is not GCC, whose -fsanitize=thread tells volatile accesses apart; set CXX to a g++"
    return None


@functools.cache
def _compiler() -> str:
    """The compiler's name and version."""
    return _COMPILER + subprocess.run([_COMPILER, "--version"], capture_output=True, text=True).stdout


@functools.cache
def library(kernel: Kernel) -> Path:
    """The shared library of a kernel."""
    sanitize = _ADDRESS_SANITIZER if kernel.address_sanitizer else ()
    # Without optimisation a kernel compiles faster and runs slower. Most tests run each kernel only a few times.
    options = (*_COMMON, *(sanitize or _INSTRUMENT), "-O0", "-g" if kernel.debug else "-g1")
    options += (f"-D__CUDA_ARCH__={kernel.architecture}0", "-w")
    source = f'#include "ptx.h"\n#line 1 "kernel.cu"\n{translate(kernel.source)}\n'
    call = f'#line 1 "host.cpp"\nextern "C" void simt_kernel(void** arguments) {{ simt_call({kernel.name}, arguments); }}\n'
    # The text of csrc/ is compiled for many kernels, so it becomes a precompiled header. An edited text is compiled for few.
    has_header = kernel.source == kernel_source.translation_unit(kernel.name)
    machine = machine_library()

    def build(folder: Path, path: Path) -> None:
        (folder / "kernel.cpp").write_text(call if has_header else source + call)
        include = ("-include", _header(source, options)) if has_header else ()
        _run(folder, *options, *include, "-c", "kernel.cpp", "-o", "kernel.o")
        _run(folder, "-shared", *sanitize, "-Wl,-z,now", "kernel.o", str(machine), "-o", str(path))

    return built(f"{_key(source, call, _texts(_FOR_KERNELS), *options, machine.name)}.so", build)


@functools.cache
def _header(text: str, options: tuple[str, ...]) -> str:
    """The path of a header with that text. Beside it is the precompiled header, which the compiler takes in its place."""
    name = f"{_key(text, _texts(_FOR_KERNELS), *options)}.h"
    header = built(name, lambda _, path: path.write_text(text))
    built(f"{name}.gch", lambda folder, path: _run(folder, *options, "-x", "c++-header", str(header), "-o", str(path)))
    return str(header)


def address_sanitizer_environment() -> dict[str, str]:
    """The variables of a process that can load libraries of `address_sanitizer` kernels."""
    shared = [
        subprocess.run(
            [_COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    # Python never gives back all of its memory.
    return {**os.environ, "LD_PRELOAD": " ".join(shared), "ASAN_OPTIONS": "detect_leaks=0"}


@functools.cache
def machine_library() -> Path:
    """The emulated machine, which all kernels of a process share."""
    options = (*_COMMON, "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-Wl,-z,now")
    names = sorted(path.name for path in _HERE.glob("*.cpp"))
    headers = sorted(path.name for path in _HERE.glob("*.h") if path.name not in ("cuda.h", "ptx.h"))

    def build(folder: Path, path: Path) -> None:
        # One unit: reading the standard headers takes longer than compiling any of the files.
        (folder / "machine_library.cpp").write_text("".join(f'#include "{name}"\n' for name in names))
        _run(folder, *options, "machine_library.cpp", "-o", str(path))

    return built(f"{_key(_texts((*names, *headers)), *options)}.so", build)


def _key(*parts: str) -> str:
    """The key is the same for another checkout with the same texts."""
    return key(_compiler(), *(part for part in parts if part != f"-I{_HERE}"))


def _texts(names: Sequence[str]) -> str:
    return "".join((_HERE / name).read_text() for name in names)


def _run(folder: Path, *arguments: str) -> None:
    command = [_COMPILER, *arguments]
    # AddressSanitizer is for the kernel, not for its compiler.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[:10000]}")

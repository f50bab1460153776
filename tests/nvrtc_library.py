# SPDX-License-Identifier: Apache-2.0
"""A second NVRTC beside CuPy's: what driver.py calls of cupy.cuda.nvrtc, of a library loaded from its pip package."""

import ctypes
import os
from pathlib import Path


class NVRTCError(RuntimeError):
    """NVRTC's own number of the error."""


class Nvrtc:
    """In the place of cupy.cuda.nvrtc."""

    NVRTCError = NVRTCError

    def __init__(self, folder: Path) -> None:
        # Loaded first: NVRTC asks for it by name, which is found only once it is loaded.
        for builtins in folder.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        (library,) = folder.glob("libnvrtc.so.*")
        self._library = ctypes.CDLL(str(library))

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> tuple[int, ...]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return tuple(found)

    def createProgram(self, source: str, name: str, headers: list[str], header_names: list[str]) -> ctypes.c_void_p:
        assert not headers and not header_names
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        return program

    def addNameExpression(self, program: ctypes.c_void_p, name: str) -> None:
        self._call("nvrtcAddNameExpression", program, name.encode())

    def compileProgram(self, program: ctypes.c_void_p, options: list[str]) -> None:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", program, len(options), encoded)

    def getLoweredName(self, program: ctypes.c_void_p, name: str) -> str:
        lowered = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(lowered))
        assert lowered.value is not None
        return lowered.value.decode()

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self._bytes("ProgramLog", program).rstrip(b"\0").decode()

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:
        return self._bytes("CUBIN", program)

    def destroyProgram(self, program: ctypes.c_void_p) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        error = getattr(self._library, function)(*arguments)
        if error:
            raise NVRTCError(f"{function} returned {error}")


def of_cuda12() -> Nvrtc:
    """That of the package nvidia-cuda-nvrtc-cu12, from the folder FUSED_TOPK_CUDA12_PACKAGES.

    Not from the environment, where CuPy for CUDA 13 may take it for its own.
    """
    folder = os.environ.get("FUSED_TOPK_CUDA12_PACKAGES")
    if not folder:
        raise ImportError("FUSED_TOPK_CUDA12_PACKAGES names no folder with nvidia-cuda-nvrtc-cu12")
    return Nvrtc(Path(folder) / "nvidia" / "cuda_nvrtc" / "lib")

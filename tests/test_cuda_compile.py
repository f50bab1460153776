# SPDX-License-Identifier: Apache-2.0
"""Every CUDA kernel compiles for every supported architecture and spills no register. Needs NVRTC, but no GPU."""

import json
import os
import re
from importlib import metadata

import pytest

import kernel_names
from fused_topk.cuda_runtime import driver, kernel_source
from fused_topk.layout.attention_launch import OLDEST_ARCHITECTURE as OLDEST_OF_ATTENTION
from fused_topk.layout.topk_choice import Method
from kept import built, key
from nvrtc_library import of_cuda12

pytestmark = pytest.mark.exhaustive

DTYPES = ("Float32", "Float16", "BFloat16")


# A kernel takes about a second, nearly all of it in the optimizer: several in one program take no less time than alone. So
# the second NVRTC gets a share of the kernels for each architecture. With CuPy for CUDA 12 it is CuPy's and gets all.
SHARES = 4


# CuPy's NVRTC, and that of CUDA 12 beside it, whatever CUDA CuPy is for.
@pytest.fixture(params=["cupy", "cuda12"])
def nvrtc(request, monkeypatch):
    try:
        # CuPy's comes first: CuPy takes an NVRTC that is loaded already for its own.
        own = driver._nvrtc().getVersion()
        if request.param == "cuda12":
            library = of_cuda12()
            if library.getVersion() == own:
                pytest.skip("it is CuPy's NVRTC too")
            monkeypatch.setattr(driver, "_nvrtc", lambda: library)
        found = driver._nvrtc()
        version = found.getVersion()
    except Exception as error:  # whatever a missing library raises
        if request.param in os.environ.get("FUSED_TOPK_REQUIRE_NVRTC", "").split(","):
            raise
        pytest.skip(f"no NVRTC: {error}")
    architecture = getattr(request.node, "callspec", None) and request.node.callspec.params.get("architecture")
    if architecture is not None and architecture not in found.getSupportedArchs():
        pytest.skip(f"NVRTC {version[0]}.{version[1]} does not know sm_{architecture}")
    if version >= (12, 9):
        # Beside a driver NVRTC keeps what it compiles, and a kernel from there comes without the assembler's report.
        monkeypatch.setattr(kernel_source, "OPTIONS", (*kernel_source.OPTIONS, "--no-cache"))
    package = "nvidia-cuda-nvrtc-cu12" if request.param == "cuda12" else "nvidia-cuda-nvrtc"
    release = next((d.version for d in metadata.distributions(name=package)), "")
    compiler, compile_kernel = f"{version} {package} {release}", driver.compile_kernel
    monkeypatch.setattr(driver, "compile_kernel", lambda *what: kept_report(compiler, compile_kernel, *what))
    return found


def kept_report(compiler: str, compile_kernel, kernel: str, architecture: int) -> tuple[bytes, str, str]:
    """compile_kernel(kernel, architecture), of the binary only the beginning. A kernel that this compiler has compiled before is
    not compiled again; to NVRTC, texts that differ in comments are the same."""
    code = re.sub(r"\s*\n\s*", "\n", re.sub(r"//[^\n]*", "", kernel_source.translation_unit(kernel)))

    def build(_, path) -> None:
        binary, entry, log = compile_kernel(kernel, architecture)
        path.write_text(json.dumps([binary[:64].hex(), entry, log]))

    name = key(compiler, code, *kernel_source.OPTIONS, str(architecture), kernel)
    begin, entry, log = json.loads(built(f"{name}.nvrtc.json", build).read_text())
    return bytes.fromhex(begin), entry, log


def most_static_bytes(warps: int, method: int) -> int:
    """Of shared memory, for a kernel of softmax_topk.cu; test_kernel_choice.py adds the rest."""
    return {1: 6, 8: 7, 16: 48 if method == Method.FOR_MANY else 40}[warps] << 10


def kernels_of(dtype: str) -> list[str]:
    return [name for name in kernel_names.of_topk() if f"::{dtype}," in name]


def share(kernels: list[str], nvrtc: str, architecture: int) -> list[str]:
    """Those that "cupy" or "cuda12" compiles for the architecture."""
    if nvrtc == "cupy":
        return kernels
    return kernels[kernel_source.ARCHITECTURES.index(architecture) % SHARES :: SHARES]


def test_shares_are_every_kernel_for_an_older_and_for_a_newer_architecture():
    for kernels in map(kernels_of, DTYPES):
        for architectures in (kernel_source.ARCHITECTURES[:SHARES], kernel_source.ARCHITECTURES[-SHARES:]):
            found = [kernel for each in architectures for kernel in share(kernels, "cuda12", each)]
            assert sorted(found) == sorted(kernels)


def test_kernel_names_are_all_tested():
    tested = [name for dtype in DTYPES for name in kernels_of(dtype)]
    assert len(tested) == len(set(tested)) == len(kernel_names.of_topk()) == 208


FAMILIES = {
    **{f"top-k of {dtype}": kernels_of(dtype) for dtype in DTYPES},
    **{f"full rows of {dtype}": [x for x in kernel_names.of_full_rows() if f"<fused_topk::{dtype}," in x] for dtype in DTYPES},
    **{f"routers of {dtype}": [x for x in kernel_names.of_routers() if f"<fused_topk::{dtype}," in x] for dtype in DTYPES},
    "attention": kernel_names.of_attention(),
    "small": [kernel_names.READ_ROWS, *kernel_names.small()],
}  # fmt: skip


@pytest.mark.parametrize("architecture", kernel_source.ARCHITECTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_without_spills(nvrtc, request, family, architecture):
    if family == "attention" and architecture < OLDEST_OF_ATTENTION:
        pytest.skip("it has no such kernel")
    kernels = FAMILIES[family]
    for kernel in kernels if family == "small" else share(kernels, request.node.callspec.params["nvrtc"], architecture):
        binary, entry, log = driver.compile_kernel(kernel, architecture)
        assert binary[:4] == b"\x7fELF"
        assert kernel.partition("<")[0].split("::")[-1] in entry
        assert_no_spills(kernel, log)
        (used,) = re.findall(r"(\d+) bytes smem", log) or ["0"]
        parameters = re.search(r"softmax_topk_kernel<[^,]*, (\d+), (\d)", kernel)
        assert int(used) <= (most_static_bytes(*map(int, parameters.groups())) if parameters else 48 << 10), kernel


def test_the_second_nvrtc_is_cuda_12s(nvrtc, request):
    if request.node.callspec.params["nvrtc"] == "cuda12":
        assert nvrtc.getVersion()[0] == 12
        assert set(kernel_source.ARCHITECTURES) - {100, 103, 120} <= set(nvrtc.getSupportedArchs())


def test_compile_error_carries_the_log(nvrtc, monkeypatch):
    monkeypatch.setattr(kernel_source, "translation_unit", lambda kernel: "__global__ void broken() { undeclared(); }")
    with pytest.raises(RuntimeError, match=r"(?s)NVRTC could not compile broken for sm_90 .*undeclared"):
        driver.compile_kernel("broken", 90)


def assert_no_spills(kernel: str, log: str) -> None:
    """The compiler's log must tell of every entry, and of no byte of local memory."""
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert found, f"{kernel}: no resource report in the compiler's log:\n{log}"
    assert set(found) == {("0", "0", "0")}, f"{kernel} uses local memory:\n{log}"
    assert re.search(r"Used \d+ registers", log)
    assert "warning" not in log, f"{kernel}:\n{log}"

# SPDX-License-Identifier: Apache-2.0
"""Which GPUs the CUDA backend serves, and what becomes of tensors on the others. Needs no GPU."""

import re
from pathlib import Path

import pytest
import torch

import fused_topk
import kernel_names
from benchmark.devices import best_device
from command_line import invoke
from fused_topk import backends
from fused_topk.cuda_runtime import driver, kernel_source
from gpu_stand_in import StandInGpus

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch):
    yield StandInGpus(monkeypatch)
    driver._gpu_problem.cache_clear()


@pytest.mark.parametrize(
    ("capability", "targets", "cause"),
    [
        ((7, 0), (75, 80, 90, 120), r"7\.0.*NVRTC 13\.5 does not compile.*cupy-cuda12x"),
        ((6, 1), (50, 61, 70, 90), r"6\.1.*need 7\.0"),
        ((13, 0), (75, 90, 120), r"13\.0.*does not compile.*newer"),
        ((9, 0), (75, 90, 120), None),
        ((7, 0), (50, 70, 90), None),
        ((12, 1), (120, 121), None),
    ],
)
def test_a_gpu_that_no_kernel_is_compiled_for_gets_torch_operations(gpus, capability, targets, cause):
    gpus.capability[0], gpus.targets = capability, targets
    if cause is None:
        assert backends.pick(FIRST, torch.float32, 8, None) == "cuda"
        assert backends.pick(FIRST, torch.float32, 8, "cuda") == "cuda"
        assert backends.available(FIRST)["cuda"] is None
        return
    assert backends.pick(FIRST, torch.float32, 8, None) == "reference"
    assert re.search(cause, backends.available(FIRST)["cuda"])
    with pytest.raises(RuntimeError, match=cause):
        backends.pick(FIRST, torch.float32, 8, "cuda")
    assert gpus.compiled == []


def test_each_gpu_counts_for_itself(gpus):
    gpus.capability[0] = (7, 0)
    assert [backends.pick(gpu, torch.float32, 8, None) for gpu in (FIRST, SECOND)] == ["reference", "cuda"]
    assert backends.available()["cuda"] is None and best_device().type == "cpu"
    gpus.capability[1] = (6, 0)
    driver._gpu_problem.cache_clear()
    assert "7.0" in backends.available()["cuda"]


def test_info_says_which_gpu_has_no_kernels(gpus):
    gpus.capability[0] = (7, 0)
    shown = invoke("info")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"no kernels: GPU 0 has compute capability 7\.0, for which NVRTC", " ".join(shown.output.split()))
    assert shown.output.count("no kernels:") == 1


def test_a_gpu_that_does_not_answer_is_a_cause(gpus, monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA error: uncorrectable ECC error\nsee the log")

    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    for device in (None, SECOND):
        assert "uncorrectable ECC error)" in backends.available(device)["cuda"]
    assert best_device().type == "cpu"


def test_gpus_of_another_maker_get_torch_operations(gpus, monkeypatch):
    """Their tensors are on a device of the type cuda too, and CuPy may be there for another purpose."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert backends.pick(FIRST, torch.float32, 8, None) == "reference"
    assert "AMD" in backends.available()["cuda"]


@pytest.mark.parametrize("capability", [(5, 2), (7, 0), (7, 5), (9, 0), (9, 9)])
def test_what_is_said_of_a_gpu_is_what_compiling_gives(monkeypatch, capability):
    try:
        driver._nvrtc().getVersion()
    except Exception as error:
        pytest.skip(f"no NVRTC: {error}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "GPU")
    driver._gpu_problem.cache_clear()
    cause = driver._gpu_problem(0)
    driver._gpu_problem.cache_clear()
    try:
        driver.compile_kernel(kernel_names.of_topk()[0], 10 * capability[0] + capability[1])
    except RuntimeError as error:
        assert cause is not None, error
    else:
        assert cause is None


def test_pages_list_the_gpus():
    """Every target of the gate, and the oldest."""
    page = Path(fused_topk.__file__).parents[1] / "docs/install.md"
    if not page.exists():
        pytest.skip("only in a checkout")
    (line,) = re.findall(r"^\| GPU \|.*", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for architecture in (kernel_source.OLDEST_ARCHITECTURE, *kernel_source.ARCHITECTURES):
        assert str(architecture / 10) in line

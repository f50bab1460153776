# SPDX-License-Identifier: Apache-2.0
"""The sweep over choices of kernel. Without a GPU, its launches and its clock are replaced; with one, it runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmark import cli, devices, inputs, suites, sweep
from benchmark.runner import Settings
from benchmark.timing import summarize
from fused_topk.backends import cpu, cuda
from fused_topk.cuda_runtime import driver

H200 = SimpleNamespace(multi_processor_count=132, major=9, minor=0, L2_cache_size=50 << 20)
SETTINGS = Settings(torch.device("cpu"), "cuda", (), quick=True)
TOPK = suites.Case(40, 4000, 5, "fp32")
SOFTMAX = suites.Case(3, 20000, 0, "bf16")


@pytest.fixture
def no_gpu(monkeypatch):
    """Launches compute on the CPU and are recorded; each takes as many µs as its place among them."""
    if cpu.unavailable():
        pytest.skip("no native CPU kernel")
    launched = []

    def prepare_topk(problem, device, choice):
        launched.append(choice)
        return cpu.prepare_topk(problem, device)

    def prepare_full_rows(problem, device, dtype, choice):
        launched.append(choice)
        return cpu.prepare_full_rows(problem, device, dtype)

    def time_graph(function, given, effort):
        function(given[0])
        return summarize([float(len(set(launched)))])

    monkeypatch.setattr(cuda, "prepare_topk", prepare_topk)
    monkeypatch.setattr(devices, "read_rows", lambda logits: None)
    monkeypatch.setattr(driver, "max_shared_bytes_per_block", lambda device: 227 << 10)
    monkeypatch.setattr(cuda, "prepare_full_rows", prepare_full_rows)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(sweep, "inputs_from_memory", lambda case, device: inputs.make_inputs(case, device, 2))
    monkeypatch.setattr(sweep, "time_graph", time_graph)
    return launched


@pytest.mark.parametrize("case", [TOPK, SOFTMAX, suites.Case(2, 4000, 8, "bf16", beams=4)], ids=lambda case: case.label)
def test_every_alternative_is_checked_and_timed(no_gpu, case):
    (swept,) = sweep.run([case], SETTINGS)
    rows = case._replace(rows=case.num_rows, beams=0)
    choices = sweep.alternatives(rows, torch.device("cpu"))
    assert len(choices) > 2
    assert list(swept.times) == choices == list(dict.fromkeys(no_gpu))
    assert swept.failures == {}
    # The first is the quickest here.
    assert swept.best == swept.chosen == choices[0] and swept.loss == 1


def test_best_and_loss(no_gpu):
    (swept,) = sweep.run([TOPK], SETTINGS)
    second = list(swept.times)[1]
    swept.times[second] = summarize([0.5])
    assert swept.best == second
    assert swept.loss == pytest.approx(2.0)


def test_wrong_answer_and_failed_launch_get_no_time(no_gpu, monkeypatch):
    right = cuda.prepare_topk
    choices = sweep.alternatives(TOPK, torch.device("cpu"))

    def broken(problem, device, choice):
        def run(logits, out):
            right(problem, device, choice)(logits, out)
            if choice == choices[0]:
                out.indices.copy_(out.indices.flip(-1))
            if choice == choices[1]:
                raise RuntimeError("too many resources\nrequested")

        return run

    monkeypatch.setattr(cuda, "prepare_topk", broken)
    (swept,) = sweep.run([TOPK], SETTINGS)
    assert set(swept.failures) == set(choices[:2])
    assert "wrong answer" in swept.failures[choices[0]]
    assert swept.failures[choices[1]] == "RuntimeError: too many resources"
    assert list(swept.times) == choices[2:] and swept.loss is None


def test_table_and_document(no_gpu):
    sweeps = list(sweep.run([TOPK, SOFTMAX], SETTINGS))
    console = Console(width=200, record=True)
    sweep.print_sweeps(sweeps, console)
    shown = console.export_text()
    for part in (TOPK.label, SOFTMAX.label, "1.00", sweep.label(sweeps[0].best), "(shared, "):
        assert part in shown
    kept = json.loads(json.dumps(sweep.document(sweeps, {"cpu": "x"})))
    assert [shape["shape"] for shape in kept["shapes"]] == [TOPK.label, SOFTMAX.label]
    assert len(kept["shapes"][0]["choices"]) == len(sweeps[0].times)


def test_command_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(cli.app, ["sweep"])
    assert result.exit_code == 2 and "needs a GPU" in result.output


@pytest.mark.skipif(bool(cuda.unavailable()), reason="needs the CUDA kernels")
@pytest.mark.parametrize("suite", ["paper", "softmax"])
def test_command_on_a_gpu(suite, tmp_path):
    vocab = {"paper": "1000", "softmax": "2048"}[suite]
    path = tmp_path / "sweep.json"
    arguments = ["sweep", "--suite", suite, "--vocab", vocab, "--dtype", "fp32", "--quick", "--json", str(path)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert all(shape["choices"] and not shape["failures"] for shape in json.loads(path.read_text())["shapes"])

# SPDX-License-Identifier: Apache-2.0
"""The commands of the benchmark."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fused_topk
from benchmark import cli, results
from fused_topk import backends
from fused_topk.backends import cpu

FOLDER = Path(__file__).parents[1] / "demos" / "benchmark"
BENCH = ["bench", "--device", "cpu", "--quick"]
ONE_SHAPE = ["--suite", "paper", "--only", "10 x 1000"]
needs_native = pytest.mark.skipif(bool(cpu.unavailable()), reason="no native CPU kernel")


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def python(*arguments, cwd=None):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def test_folder_runs_wherever_it_is_called_from(tmp_path):
    done = python(FOLDER, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout and "publish" in done.stdout


@pytest.mark.exhaustive
def test_folder_says_what_it_lacks():
    code = "import sys, runpy; sys.modules['typer'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = python("-c", code, FOLDER)
    assert done.returncode == 1
    assert "'typer'" in done.stderr and "pip install" in done.stderr


@needs_native
def test_bench_writes_what_it_prints(tmp_path):
    pytest.importorskip("matplotlib")
    run, figure = tmp_path / "new" / "run.csv", tmp_path / "run.png"
    result = invoke(*BENCH, *ONE_SHAPE, "--csv", run, "--plot", figure)
    assert result.exit_code == 0, result.output
    assert "10 x 1000 fp32 k=5" in result.output and "Slower than a rival" in result.output
    assert figure.stat().st_size > 1000
    records = results.read(run)
    assert {record.case for record in records} == {"10 x 1000 fp32 k=5"}
    assert {record.way for record in records} == {"fused_topk", "read", "torch", "predicted"}
    assert f"torch {torch.__version__}" in records[0].origin.versions

    again = invoke(*BENCH, *ONE_SHAPE, "--rivals", "none", "--compare", run)
    assert again.exit_code == 0, again.output
    assert "1 compared" in again.output


@pytest.mark.parametrize("content", [None, "no CSV", "a,b\n1,2\n"])
def test_bench_looks_at_an_older_run_before_it_measures(tmp_path, content):
    older = tmp_path / "older.csv"
    if content is not None:
        older.write_text(content)
    result = invoke(*BENCH, *ONE_SHAPE, "--compare", older)
    assert result.exit_code == 2 and "--compare" in result.output


@needs_native
def test_bench_fails_on_a_wrong_answer(monkeypatch):
    right = fused_topk.log_softmax_topk

    def wrong(logits, k, **kwargs):
        got = right(logits, k, **kwargs)
        return got._replace(logsumexp=got.logsumexp + 1)

    monkeypatch.setattr(fused_topk, "log_softmax_topk", wrong)
    result = invoke(*BENCH, *ONE_SHAPE)
    assert result.exit_code == 1
    assert "FAILED 10 x 1000 fp32 k=5: wrong answer" in result.output


def test_bench_says_why_a_device_does_not_work(monkeypatch):
    monkeypatch.setattr(backends, "available", lambda *_: {"cpu": "the native module was not built"})
    result = invoke("bench", "--device", "cpu")
    assert result.exit_code == 2
    assert "the native module was not built" in " ".join(result.output.replace("│", " ").split())


@needs_native
@pytest.mark.parametrize(
    "arguments",
    [
        ["--suite", "decoding"],
        ["--device", "tpu"],
        ["--device", "meta"],
        ["--rivals", "numpy"],
        ["--suite", "paper", "--only", "5 x 1000"],  # no such shape
        ["--suite", "large k"],  # of GPUs
        ["--suite", "distributed,paper"],
        ["--suite", "distributed"],  # without torchrun
    ],
    ids=" ".join,
)
def test_bench_refuses_unknown_choices(arguments):
    result = invoke("bench", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert "Invalid value" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_on_cuda_without_a_gpu():
    result = invoke("bench", "--device", "cuda")
    assert result.exit_code == 2 and "(it sees 0)" in " ".join(result.output.replace("│", " ").split())


def test_a_gpu_that_there_is_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = invoke("bench", "--device", "cuda:9")
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.replace("│", " ").split())
    assert "--device must be a GPU that torch sees (it sees 2), got 'cuda:9'" in said


def test_publish_writes_what_is_published(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmark import publish

    document, drawn = tmp_path / "page.md", []
    document.write_text("some older text")
    monkeypatch.setattr(publish, "DOCUMENTS", [document])
    monkeypatch.setattr(publish, "draw_pictures", lambda: drawn.append(True))
    monkeypatch.setattr(publish, "published_again", lambda path: f"of {path.name}")
    origin = results.Origin("a CPU", "torch 2.13", "2026-11-28", "")
    run, file = tmp_path / "run.csv", tmp_path / "cpu.csv"
    results.write(run, [results.Record("k", "4 x 5", "time", "fused_topk", 1.5, "µs", None, None, origin)])
    assert invoke("publish", run).exit_code == 2 and not drawn
    result = invoke("publish", run, file)
    assert result.exit_code == 0, result.output
    assert document.read_text() == "of page.md" and drawn
    assert results.read(file) == results.read(run)

# SPDX-License-Identifier: Apache-2.0
"""The commands of the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fused_topk
from benchmark import calls, cli, timing
from fused_topk import backends

FOLDER = Path(__file__).parents[1] / "demos" / "benchmark"
BENCH = ["bench", "--device", "cpu", "--backend", "reference", "--quick"]
ONE_SHAPE = ["--suite", "paper", "--rows", "10", "--vocab", "1000"]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def python(*arguments, cwd=None):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def test_folder_runs_wherever_it_is_called_from(tmp_path):
    done = python(FOLDER, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for command in ("bench", "calls", "sweep", "counters", "publish"):
        assert command in done.stdout


def test_folder_says_what_it_lacks():
    code = "import sys, runpy; sys.modules['typer'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = python("-c", code, FOLDER)
    assert done.returncode == 1
    assert "'typer'" in done.stderr and "pip install" in done.stderr


def test_bench_writes_what_it_prints(tmp_path):
    pytest.importorskip("matplotlib")
    run, figure = tmp_path / "new" / "run.json", tmp_path / "run.png"
    result = invoke(*BENCH, *ONE_SHAPE, "--json", run, "--plot", figure)
    assert result.exit_code == 0, result.output
    assert "10 x 1000 fp32 k=5" in result.output
    assert figure.stat().st_size > 1000
    written = json.loads(run.read_text())
    (entry,) = written["results"]
    assert entry["shape"] == "10 x 1000 fp32 k=5"
    assert set(entry["times"]) == {"read", "fused", "torch"}
    assert written["command"].startswith("python demos/benchmark")
    assert written["machine"]["versions"]["torch"] == torch.__version__

    again = invoke(*BENCH, *ONE_SHAPE, "--no-peers", "--compare", run)
    assert again.exit_code == 0, again.output
    assert "1 compared" in again.output


@pytest.mark.parametrize("content", [None, "no JSON", '{"format": 1, "results": []}'])
def test_bench_looks_at_an_older_run_before_it_measures(tmp_path, content):
    older = tmp_path / "older.json"
    if content is not None:
        older.write_text(content)
    result = invoke(*BENCH, *ONE_SHAPE, "--compare", older)
    assert result.exit_code == 2 and "--compare" in result.output


@pytest.mark.parametrize("option", ["--plot", "--compare"])
def test_suites_of_their_own_say_which_options_they_do_not_have(tmp_path, option):
    path = tmp_path / "run.json"
    path.write_text("{}")
    result = invoke("bench", "--suite", "linear", "--device", "cpu", "--rows", 10**6, option, path)
    assert result.exit_code == 2 and option in result.output


@pytest.mark.parametrize(
    ("suite", "arguments", "judged"),
    [
        ("paper", [], False),
        ("paper", ["--targets"], False),  # a GPU's
        ("cpu", [], False),
        ("cpu", ["--targets"], True),
        *(
            pytest.param("sampling", *case, marks=pytest.mark.exhaustive)
            for case in ((["--targets"], True), ([], False))
        ),
    ],
)
def test_bench_judges_by_the_targets_of_the_machine_if_asked(suite, arguments, judged):
    rows, vocab_size = {"paper": (10, 1000), "cpu": (1, 1000), "sampling": (8, 32000)}[suite]
    shape = ["--rows", rows, "--vocab", vocab_size, *([] if suite == "paper" else ["--k", 8, "--dtype", "fp32"])]
    result = invoke(*BENCH, "--suite", suite, *map(str, shape), *arguments)
    assert result.exit_code == 0, result.output
    assert ("target" in result.output) == judged


def test_bench_fails_on_a_wrong_answer(monkeypatch):
    right = fused_topk.log_softmax_topk

    def wrong(logits, k, **kwargs):
        got = right(logits, k, **kwargs)
        return got._replace(logsumexp=got.logsumexp + 1)

    monkeypatch.setattr(fused_topk, "log_softmax_topk", wrong)
    result = invoke(*BENCH, *ONE_SHAPE)
    assert result.exit_code == 1
    assert "FAILED 10 x 1000 fp32 k=5: wrong answer" in result.output


def test_bench_says_why_a_backend_does_not_work(monkeypatch):
    monkeypatch.setattr(backends, "available", lambda *_: {"cpu": "the native module was not built"})
    result = invoke("bench", "--device", "cpu")
    assert result.exit_code == 1
    assert "the native module was not built" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--suite", "decoding"],
        ["--device", "tpu"],
        ["--device", "meta"],
        ["--backend", "opencl"],
        ["--peers", "numpy"],
        ["--rows", "many"],
        ["--dtype", "fp8"],
        ["--rows", "5", "--suite", "paper"],  # no such shape
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
    assert result.exit_code == 2
    assert "GPU" in result.output


@pytest.mark.parametrize("command", ["bench", "sweep", "counters"])
def test_a_gpu_that_there_is_not(monkeypatch, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = invoke(command, "--device", "cuda:9")
    assert result.exit_code == 2, result.output
    assert "--device must be a GPU that torch sees (it sees 2), got 'cuda:9'" in " ".join(
        result.output.replace("│", " ").split()
    )


@pytest.mark.parametrize("command", ["sweep", "counters"])
def test_what_only_a_gpu_does_is_refused_for_a_cpu(command):
    result = invoke(command, "--device", "cpu")
    assert result.exit_code == 2 and "must be cuda or cuda:N" in result.output


def test_calls_times_what_the_words_choose(monkeypatch):
    monkeypatch.setattr(calls, "FULL", timing.QUICK)
    result = invoke("calls", "softmax", "8", "fp32")
    assert result.exit_code == 0, result.output
    assert "softmax 1 x 8 fp32 / torch" in result.output


def test_publish_writes_what_is_published(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmark import publish

    document = tmp_path / "page.md"
    document.write_text("some older text")
    monkeypatch.setattr(publish, "DOCUMENTS", [document])
    monkeypatch.setattr(publish, "published_again", lambda path: f"of {path.name}")
    result = invoke("publish")
    assert result.exit_code == 0, result.output
    assert document.read_text() == "of page.md"

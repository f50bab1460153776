# SPDX-License-Identifier: Apache-2.0
"""The command line and the environment variables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fused_topk
from fused_topk import backends, env

cli = pytest.importorskip("fused_topk.cli")

BENCH = ["bench", "--device", "cpu", "--backend", "reference", "--quick"]
ONE_SHAPE = ["--suite", "paper", "--rows", "10", "--vocab", "1000"]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def python(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_module_runs():
    done = python("-m", "fused_topk", "--help")
    assert done.returncode == 0, done.stderr
    assert "info" in done.stdout and "bench" in done.stdout


def test_import_leaves_optional_packages_alone():
    optional = "{'typer', 'rich', 'matplotlib', 'cupy', 'transformers'}"
    done = python("-c", f"import sys, fused_topk; print(sorted({optional} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_module_says_what_it_lacks():
    code = "import sys, runpy; sys.modules['typer'] = None; runpy.run_module('fused_topk', run_name='__main__')"
    done = python("-c", code)
    assert done.returncode == 1
    assert "pip install" in done.stderr


def test_info_names_every_part():
    result = invoke("info")
    assert result.exit_code == 0, result.output
    named = [f"backend {name}" for name in backends.available()]
    for part in ["fused_topk", "torch", "numpy", "CPU", "compiled kernels", *named]:
        assert part in result.output


def test_info_shows_causes_in_full(monkeypatch):
    # Square brackets would be markup to rich.
    cause = "CuPy is not installed: pip install fused_topk[cuda13]"
    monkeypatch.setattr(backends, "available", lambda: {"cuda": cause, "reference": None})
    assert cause in invoke("info").output


def test_info_json(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(tmp_path))
    (tmp_path / f"{'a' * 64}.cubin").write_bytes(bytes(1000))
    (tmp_path / "thesis.tex").write_bytes(bytes(1000))
    result = invoke("info", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["versions"]["fused_topk"] == fused_topk.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["backends"] == backends.available()
    assert found["kernel_cache"] == {"path": str(tmp_path), "files": 1, "bytes": 1000, "problem": None}


def test_info_survives_a_broken_driver_and_a_missing_cache(monkeypatch, tmp_path):
    def broken():
        raise RuntimeError("CUDA driver initialization failed\nsee the log")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(backends, "available", lambda: {"reference": None})
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(tmp_path / "nowhere"))
    for arguments in (["info"], ["info", "--json"]):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.output
        assert "RuntimeError: CUDA driver initialization failed" in result.output


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
    assert written["machine"]["versions"]["torch"] == torch.__version__

    again = invoke(*BENCH, *ONE_SHAPE, "--no-peers", "--compare", run)
    assert again.exit_code == 0, again.output
    assert "1 compared" in again.output


@pytest.mark.parametrize(
    ("suite", "arguments", "judged"),
    [
        ("paper", [], False),
        ("paper", ["--targets"], False),  # a GPU's
        ("cpu", [], False),
        ("cpu", ["--targets"], True),
        ("sampling", ["--targets"], True),
        ("sampling", [], False),
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


def test_kernel_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(tmp_path))
    assert env.kernel_cache_dir() == tmp_path
    monkeypatch.delenv("FUSED_TOPK_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.kernel_cache_dir() == tmp_path / "fused_topk" / "kernels"
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.kernel_cache_dir() == tmp_path / ".cache" / "fused_topk" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.kernel_cache_dir() == tmp_path / ".cache" / "fused_topk" / "kernels"


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_print_choice(monkeypatch, value, expected):
    monkeypatch.setenv("FUSED_TOPK_PRINT_CHOICE", value)
    assert env.print_choice() is expected
    monkeypatch.delenv("FUSED_TOPK_PRINT_CHOICE")
    assert env.print_choice() is False


@pytest.mark.parametrize("command", ["sweep", "counters"])
def test_what_only_a_gpu_does_is_refused_for_a_cpu(command):
    result = invoke(command, "--device", "cpu")
    assert result.exit_code == 2 and "must be cuda or cuda:N" in result.output

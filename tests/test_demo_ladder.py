# SPDX-License-Identifier: Apache-2.0
"""demos/ladder.py: measures, prints and draws, and refuses to time a wrong answer."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmark import results
from fused_topk.backends import cpu

DEMOS = Path(__file__).parent.parent / "demos"
sys.path.insert(0, str(DEMOS))
pytest.importorskip("matplotlib")


import ladder  # noqa: E402
import ladder_rungs  # noqa: E402

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The whole demo, on shapes of up to 300,000 elements."""
    folder = tmp_path_factory.mktemp("ladder")
    command = [sys.executable, str(DEMOS / "ladder.py"), "--device", "cpu", "--most", "300000"]
    command += ["--plot", str(folder / "a.png"), "--csv", str(folder / "a.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return folder, done.stdout


@pytest.mark.exhaustive
def test_prints_draws_and_keeps_its_numbers(run):
    folder, text = run
    assert "naive softmax makes nan, safe 1.0" in text
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    records = results.read(folder / "a.csv")
    assert {record.case for record in records if record.suite == "ladder"} == {
        *(rung.number for rung in ladder_rungs.RUNGS if rung.name != "shuffle"),
        *("torch, softmax", "torch, top-k", "copy", "read"),
    }
    names = {record.way for record in records if record.suite == "ladder by length"}
    assert names == {rung.name for rung in ladder_rungs.RUNGS if rung.name != "shuffle"} | {"torch", "copy", "read"}
    assert all(record.value > 0 for record in records)


@pytest.mark.exhaustive
def test_shows_an_older_run(run):
    folder, text = run
    command = [sys.executable, str(DEMOS / "ladder.py"), "--from-csv", str(folder / "a.csv")]
    done = subprocess.run([*command, "--plot", str(folder / "b.png")], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:10] == text.splitlines()[1:11]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "nonsense"], "--device must be cuda, cuda:N or cpu, got 'nonsense'"),
        (["--device", "meta"], "--device must be cuda, cuda:N or cpu, got 'meta'"),
        (["--device", "cpu", "--most", "4"], "--most"),
        (["--from-csv", str(Path(__file__))], "--from-csv must be a CSV file that --csv wrote"),
        (["--from-csv", str(DEMOS / "results" / "cpu.csv")], "which has no ladder"),
    ],
)
def test_says_what_is_wrong_with_an_option(options, text, tmp_path):
    result = CliRunner().invoke(ladder.app, [*options, "--plot", str(tmp_path / "a.png")])
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.replace("│", " ").split())


def test_on_a_gpu_that_there_is_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = CliRunner().invoke(ladder.app, ["--device", "cuda:9"])
    assert result.exit_code == 2 and "it sees 2" in result.output


@pytest.mark.parametrize("name", ("online", "online_topk"))
def test_wrong_answer_is_not_timed(monkeypatch, name):
    right = ladder_rungs.climb

    def wrong(rung, logits, scratch):
        right(rung, logits, scratch)
        if rung.name == name:
            (scratch.y if rung.gives == "softmax" else scratch.values)[0] *= 1.01

    monkeypatch.setattr(ladder_rungs, "climb", wrong)
    shape = ladder.Shape("ladder by length", 4, 100, 5 if "topk" in name else 0)
    with pytest.raises(RuntimeError, match="off by 1"):
        list(ladder.measure(shape, CPU, results.origin_on(CPU)))


def test_shapes_are_those_of_the_paper():
    shapes = ladder.shapes(on_gpu=True, most_elements=1 << 34)
    assert {shape.rows for shape in shapes} == {4000}
    assert {shape.k for shape in shapes if shape.suite == "ladder by k"} == {5, 10, 15, 30}
    assert max(shape.vocab for shape in shapes) == 1_000_000

# SPDX-License-Identifier: Apache-2.0
"""demos/ladder.py: measures, prints and draws, and refuses to time a wrong answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fused_topk.backends import cpu

DEMOS = Path(__file__).parent.parent / "demos"
sys.path.insert(0, str(DEMOS))
pytest.importorskip("matplotlib")

import ladder  # noqa: E402
import ladder_measure  # noqa: E402
import ladder_rungs  # noqa: E402

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The whole demo, on shapes of up to 300,000 elements."""
    folder = tmp_path_factory.mktemp("ladder")
    command = [sys.executable, str(DEMOS / "ladder.py"), "--device", "cpu", "--most", "300000"]
    command += ["--plot", str(folder / "a.png"), "--json", str(folder / "a.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return folder, done.stdout, json.loads((folder / "a.json").read_text())


@pytest.mark.exhaustive
def test_prints_draws_and_keeps_its_numbers(run):
    folder, text, document = run
    assert "naive softmax makes nan, safe 1.0" in text
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    assert {"date", "machine", "device", "overflow", "points"} <= set(document)
    names = {point["name"] for point in document["points"]}
    assert names >= {rung.name for rung in ladder_rungs.RUNGS if rung.name != "shuffle"} | {"torch", "copy", "read"}
    assert all(point["us"] > 0 for point in document["points"])


@pytest.mark.exhaustive
def test_shows_an_older_run(run):
    folder, text, _ = run
    command = [sys.executable, str(DEMOS / "ladder.py"), "--from-json", str(folder / "a.json")]
    done = subprocess.run([*command, "--plot", str(folder / "b.png")], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:10] == text.splitlines()[:10]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "nonsense"], "--device must be cuda, cuda:N or cpu, got 'nonsense'"),
        (["--device", "meta"], "--device must be cuda, cuda:N or cpu, got 'meta'"),
        (["--device", "cpu", "--most", "-1"], "--most must be at least 10, or 0 for no limit, got -1"),
        (["--device", "cpu", "--most", "4"], "--most must be at least 10, or 0 for no limit, got 4"),
        (["--from-json", str(Path(__file__))], "--from-json must be a JSON file that --json wrote"),
        (["--from-json", str(DEMOS / "results" / "cpu.json")], "--from-json must be a JSON file that --json wrote"),
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
    with pytest.raises(RuntimeError, match="off by 1"):
        list(ladder_measure.measure(ladder_measure.Shape("batch", 4, 100, 5 if "topk" in name else 0), CPU))


def test_shapes_are_those_of_the_paper():
    shapes = ladder_measure.shapes(on_gpu=True, most_elements=1 << 34)
    assert {shape.rows for shape in shapes if shape.part == "batch"} == {4000, 10}
    assert {shape.k for shape in shapes if shape.part == "k"} == {5, 10, 15, 30}
    assert max(shape.vocab for shape in shapes if shape.part == "rows") == 4194304

# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of each shape's launch. Without a GPU and Nsight Compute, a script writes what `ncu` would."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmark import cli, counters
from benchmark.suites import Case
from fused_topk.backends import cuda

DEVICE = torch.device("cuda", 0)
CASES = [Case(64, 128256, 8, "bf16"), Case(4, 4, 2, "bf16", beams=2)]
METRICS = [counters._TIME, counters._INSTRUCTIONS, *counters.SHARES.values(), *counters.STATES.values()]


def line(*values):
    return ",".join(f'"{value}"' for value in values)


def launch(number, time="12,345.5", instructions="1,600,000", share="37.5", memory="3.0"):
    states = [memory if name == counters.STATES["memory"] else "0.25" for name in counters.STATES.values()]
    return line(number, "kernel", time, instructions, *[share] * len(counters.SHARES), *states)


def written(launches):
    names = line("ID", "Kernel Name", *METRICS)
    units = line("", "", "nsecond", "inst", *["%"] * (len(METRICS) - 2))
    return "\n".join(["==PROF== Connected to process 1", names, units, *launches]) + "\n"


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """An `ncu` that writes what it is told to, and keeps its arguments."""

    def install(text, status=0, said=""):
        (tmp_path / "text").write_text(text)
        program = tmp_path / "ncu"
        program.write_text(
            "#!/bin/sh\n"
            f'printf "%s\\n" "$@" > {tmp_path}/arguments\n'
            'while [ "$1" != --log-file ]; do shift; done\n'
            f'cp {tmp_path}/text "$2"\n'
            f"echo '{said}' >&2\nexit {status}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return tmp_path / "arguments"

    return install


def test_counts_are_those_of_ncu(ncu):
    arguments = ncu(written([launch(0), launch(1, time="2000", memory="n/a")]))
    first, second = counters.count(CASES, DEVICE)
    assert (first.case, second.case) == tuple(CASES)
    assert first.us == pytest.approx(12.3455) and second.us == 2
    assert first.instructions == 1_600_000
    assert set(first.shares.values()) == {0.375}
    others = 0.25 * (len(counters.STATES) - 1)
    assert next(iter(first.states.items())) == ("memory", pytest.approx(3 / (3 + others)))
    assert sum(first.states.values()) == pytest.approx(1)
    # What the hardware does not have counts for nothing.
    assert second.states["memory"] == 0
    given = arguments.read_text().splitlines()
    assert given[given.index("--metrics") + 1].split(",") == METRICS
    assert [Case(*values) for values in json.loads(given[-2])] == CASES and given[-1] == "cuda:0"


def test_the_program_that_is_watched_starts(ncu, tmp_path, monkeypatch):
    """Wherever the command was called from."""
    ncu(written([]))
    program = tmp_path / "ncu"
    program.write_text('#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec "' + sys.executable + '" "$@"\n')
    monkeypatch.chdir(tmp_path)
    counters.count([], DEVICE)


@pytest.mark.parametrize(("hot", "control"), [(False, "all"), (True, "none")])
def test_caches_are_emptied_or_not(ncu, hot, control):
    arguments = ncu(written([launch(0), launch(1)]))
    counters.count(CASES, DEVICE, hot)
    given = arguments.read_text().splitlines()
    assert given[given.index("--cache-control") + 1] == control


@pytest.mark.parametrize(("hot", "cache", "title"), [(False, "cold", "empty"), (True, "hot", "left them")])
def test_table_and_document(ncu, hot, cache, title):
    ncu(written([launch(0), launch(1)]))
    counted = counters.count(CASES, DEVICE)
    console = Console(width=250, record=True)
    counters.print_counted(counted, console, hot)
    shown = console.export_text()
    # 1,600,000 instructions of 64 rows of 126 tiles.
    for part in (title, CASES[0].label, "12.3", "198", "38%", "memory 50%"):
        assert part in shown
    kept = json.loads(json.dumps(counters.document(counted, {"cpu": "x"}, hot)))
    assert [found["case"] for found in kept["launches"]] == [case.label for case in CASES]
    assert kept["cache"] == cache


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (written([launch(0)]), 0, r"1 launches counted of 2 shapes"),
        (written([launch(0), launch(1)]), 9, r"ended with 9"),
        ("==ERROR== ERR_NVGPUCTRPERM", 1, r"(?s)0 launches.*ERR_NVGPUCTRPERM.*no permission"),
    ],
)
def test_what_ncu_says_is_told(ncu, text, status, message):
    ncu(text, status, said="no permission")
    with pytest.raises(RuntimeError, match=message):
        counters.count(CASES, DEVICE)


def test_ncu_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"`ncu` is not on the PATH; install"):
        counters.count(CASES, DEVICE)


@pytest.mark.parametrize(("option", "cache", "control"), [([], "cold", "all"), (["--hot"], "hot", "none")])
def test_command(ncu, monkeypatch, tmp_path, option, cache, control):
    monkeypatch.setattr(cli, "gpu_of", lambda name: DEVICE)
    given = ncu(written([launch(0)]))
    path = tmp_path / "new" / "counters.json"
    arguments = ["counters", "--rows", "64", "--vocab", "128256", "--dtype", "bf16", *option]
    result = CliRunner().invoke(cli.app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "64 x 128256 bf16 k=8" in result.output
    assert ("left them" in result.output) == bool(option)
    kept = json.loads(path.read_text())
    assert kept["launches"][0]["us"] == pytest.approx(12.3455) and kept["cache"] == cache
    assert f"--cache-control\n{control}\n" in given.read_text()
    ncu(written([]))
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1 and "0 launches counted of 1" in result.output


def test_command_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(cli.app, ["counters"])
    assert result.exit_code == 2 and "needs a GPU" in result.output


@pytest.mark.skipif(bool(cuda.unavailable()) or not shutil.which("ncu"), reason="needs a GPU and Nsight Compute")
def test_command_on_a_gpu():
    result = CliRunner().invoke(cli.app, ["counters", "--suite", "paper", "--rows", "10", "--vocab", "1000"])
    # It may not be allowed to read the counters.
    assert result.exit_code == 0 or "ncu" in result.output

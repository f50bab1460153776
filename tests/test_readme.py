# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/distributed.md show is what happens: their Python blocks run, and print what the text says they print.
Published figures are those of the runs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_topk
from benchmark import published
from fused_topk import generation

ROOT = Path(__file__).parents[1]
pytest.importorskip("matplotlib", reason="the demos' tables are made beside their figures")

from benchmark import publish  # noqa: E402

README = ROOT / "README.md"
# A python block, and the text block that follows it with nothing but blank lines between them.
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\s*\n(?:\s*```text\n(?P<output>.*?)^```)?", re.MULTILINE | re.DOTALL)


def _blocks() -> list[tuple[str, str | None]]:
    text = README.read_text() if README.exists() else ""
    return [(match["code"], match["output"]) for match in _BLOCK.finditer(text)]


def _runs_here(code: str) -> bool:
    return torch.cuda.is_available() or "cuda" not in code


def test_readme_has_an_example_with_its_output():
    """The first screen's, and one for each recipe."""
    assert sum(output is not None for _, output in _blocks()) >= 4


def test_readme_examples_print_what_they_say():
    """In the order of the text, in one namespace, as a reader would type them."""
    namespace: dict[str, object] = {}
    torch.manual_seed(0)
    generation.stats(reset=True)
    for code, output in _blocks():
        if not _runs_here(code):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(README), "exec"), namespace)
        if output is not None:
            assert printed.getvalue().strip() == output.strip()


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_the_example_of_several_processes_prints_what_it_says(tmp_path):
    text = (ROOT / "docs" / "distributed.md").read_text()
    (code,), (output,) = (re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S) for language in ("py", "text"))
    (tmp_path / "sharded.py").write_text(code)
    # A file for each process: lines of two processes in one pipe can run into each other.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(tmp_path / "logs"), "--redirects", "3", "sharded.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    printed = [file.read_text() for file in (tmp_path / "logs").rglob("stdout.log")]
    assert run.returncode == 0, run.stderr + "".join(f.read_text() for f in (tmp_path / "logs").rglob("stderr.log"))
    assert printed == [output, output]


def test_readme_names_every_public_function():
    text = README.read_text()
    for name in fused_topk.__all__:
        assert name.startswith("__") or re.search(rf"\b{name}\b", text), f"README.md does not mention {name}"


DOCUMENTS = sorted(
    p for p in (*ROOT.glob("*.md"), *(q for d in ("csrc", "demos", "docs", "tests") for q in (ROOT / d).rglob("*.md")))
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(document):
    """Links and file names that moved are the commonest stale line."""
    text = document.read_text()
    for path in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", text):
        assert (document.parent / path).exists(), f"{document.name} links to {path}"
    for path in re.findall(r"`((?:fused_topk|csrc|tests|demos|docs)/[\w./-]*\w)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"


@pytest.mark.parametrize("document", publish.DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_have_the_published_figures(document):
    assert "<!-- figures: " in document.read_text()
    assert publish.published_again(document) == document.read_text(), "run `python demos/benchmark publish`"


@pytest.mark.parametrize("run", sorted((ROOT / "demos" / "results").glob("*.json")), ids=lambda path: path.name)
def test_every_run_is_shown_in_a_document(run):
    assert any(re.search(rf"<!-- figures: \S*\b{run.name}\b", document.read_text()) for document in publish.DOCUMENTS)


_TABLE = """\
<!-- figures: demos/results/h200.json -->
| rows x V | read | {heading} |
|---|---|---|
| {row} | 0.0 | 0.0 |

| of no run | 1 |
"""


def filled(text):
    return published.filled(text, ROOT, publish.VIEWS)


def test_figures_are_filled_in_from_the_json():
    made = filled(_TABLE.format(heading="fused_topk", row="64 x 128256, bf16, k = 8, ascending"))
    assert "| 64 x 128256, bf16, k = 8, ascending | 5.42 | 16.0 |" in made
    assert "| of no run | 1 |" in made


@pytest.mark.parametrize(
    ("heading", "row", "message"),
    [("fused_topk", "65 x 128256, bf16, k = 8", "65 x 128256"), ("cub", "64 x 128256, bf16, k = 8", "got cub")],
)
def test_figures_that_no_run_has_are_an_error(heading, row, message):
    with pytest.raises(ValueError, match=message):
        filled(_TABLE.format(heading=heading, row=row))


def test_a_view_writes_all_up_to_its_end():
    begin, end = "<!-- figures: demos/results/cpu.json summary -->", "<!-- end of figures -->"
    made = filled(f"before\n{begin}\nof an older run\n{end}\nafter")
    lines = made.split("\n")
    assert lines[:2] == ["before", begin] and lines[-2:] == [end, "after"]
    assert "slower than torch" in made and "older" not in made
    assert filled(made) == made
    with pytest.raises(ValueError, match="must be followed by"):
        filled(begin)
    with pytest.raises(ValueError, match="got totals"):
        filled(begin.replace("summary", "totals"))


def _result(shape: str, to_torch: float | None) -> dict[str, object]:
    return {"shape": shape, "cache": "cold", "ratio_to_torch": to_torch}


def test_summary_names_the_shapes_that_are_slower_than_torch():
    run = {"results": [_result("1 x 8 fp32 k=8", 1.25), _result("9 x 9 fp32 k=8", 0.5)], "host": {}}
    assert published.summary(run) == (
        "Of 2 measurements 1 is slower than torch: 1 x 8 fp32 k=8 takes 1.25 times as long."
    )
    run["results"] = [_result("9 x 9 fp32 k=8", 0.5), _result("9 x 9 fp32 k=9", None)]
    assert published.summary(run) == "Of 2 measurements none is slower than torch."


def test_about_says_what_a_run_did_not_record():
    machine = {"versions": {"torch": "2.11"}, "gpus": [], "cpu": {"model": "A CPU", "threads": 2}}
    run = {"machine": machine, "device": "cpu"}
    assert published.about(run) == "*A CPU, 2 threads; torch 2.11; date and commit not recorded.*"
    run |= {"date": "2026-11-23T11:02:53+00:00", "git_commit": "8e6619c24a15"}
    assert published.about(run) == "*A CPU, 2 threads; torch 2.11; 2026-11-23, commit 8e6619c24a15.*"

# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ show is what happens: their Python blocks run, and print what the text says they print.
Published figures are those of the runs."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import fused_topk
from fused_topk import distributed, generation, gone

ROOT = Path(__file__).parents[1]
pytest.importorskip("matplotlib", reason="the demos' tables are made beside their figures")

from benchmark import publish  # noqa: E402

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
# A python block, and the text block that follows it with nothing but blank lines between them.
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\s*\n(?:\s*```text\n(?P<output>.*?)^```)?", re.MULTILINE | re.DOTALL)
# The programs of distributed.md for several processes, and what each process prints.
_PROGRAM = re.compile(r"^```py\n(?P<code>.*?)^```.*?^```text\n(?P<output>.*?)^```", re.MULTILINE | re.DOTALL)


def _blocks(document: Path) -> list[tuple[str, str | None]]:
    text = document.read_text() if document.exists() else ""
    return [(match["code"], match["output"]) for match in _BLOCK.finditer(text)]


def _programs() -> list[tuple[str, str]]:
    return _PROGRAM.findall((ROOT / "docs" / "distributed.md").read_text())


def _runs_here(code: str) -> bool:
    return torch.cuda.is_available() or "cuda" not in code


def test_readme_has_examples_with_their_output():
    assert sum(output is not None for _, output in _blocks(README)) >= 2


def _documents_with_examples() -> list[object]:
    """Beside README.md those that generate texts take seconds."""
    takes_seconds = {"generation.md", "constrained_beams.md", "routers.md"}
    return [
        pytest.param(path, id=path.name, marks=[pytest.mark.exhaustive] * (path.name in takes_seconds))
        for path in (README, *PAGES)
        if _blocks(path)
    ]


def _of_the_reader() -> dict[str, object]:
    """The model and the inputs that README.md takes for granted."""
    config = transformers.LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return {"model": model, "inputs": {"input_ids": torch.tensor([[1, 5, 9]]), "attention_mask": torch.ones(1, 3)}}


@pytest.mark.parametrize("document", _documents_with_examples())
def test_examples_print_what_they_say(document):
    """In the order of the text, in one namespace, as a reader would type them."""
    namespace: dict[str, object] = _of_the_reader() if document == README else {}
    torch.manual_seed(0)
    generation.stats(reset=True)
    for code, output in _blocks(document):
        if not _runs_here(code):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(document), "exec"), namespace)
        if output is not None:
            assert printed.getvalue().strip() == output.strip()


def test_all_python_on_pages_is_run():
    for document in (README, *PAGES):
        fences = re.findall(r"^```(\w+)$", document.read_text(), re.MULTILINE)
        # Those of training.md need an environment of their own: tests/clients.py runs them.
        elsewhere = {"distributed.md": len(_programs()), "training.md": 1}
        assert fences.count("py") == elsewhere.get(document.name, 0), document.name
        assert set(fences) <= {"python", "py", "text", "bash"}, document.name


def _printed_by_processes(folder: Path, name: str, code: str, *arguments: str) -> list[str]:
    (folder / name).write_text(code)
    # A file for each process: lines of two processes in one pipe can run into each other.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(folder / "logs"), "--redirects", "3", name, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    logs = [file.read_text() for file in (folder / "logs").rglob("stderr.log")]
    assert run.returncode == 0, run.stderr + "".join(logs)
    return [file.read_text() for file in (folder / "logs").rglob("stdout.log")]


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_the_example_of_several_processes_prints_what_it_says(tmp_path):
    (code, output), _ = _programs()
    assert _printed_by_processes(tmp_path, "sharded.py", code) == [output, output]


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_the_example_of_a_tensor_parallel_model_prints_what_it_says(tmp_path):
    pytest.importorskip("transformers", minversion="5.24", reason="earlier versions leave heads whole")
    pytest.importorskip("accelerate", reason="transformers loads tensor-parallel models with accelerate")
    _, (code, output) = _programs()
    config = transformers.LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    assert _printed_by_processes(tmp_path, "parallel.py", code, "model") == [output, output]


@pytest.mark.parametrize(
    ("page", "module"),
    [("api", fused_topk), ("api_generation", generation), ("api_distributed", distributed)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_api_pages_have_every_public_function(page, module):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    shown = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(name for name in module.__all__ if not name.startswith("__"))


def test_picture_shows_the_published_runs():
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures" / "step_time.py"))["drawn"]()
    assert (ROOT / "docs" / "pictures" / "step_time.svg").read_text() == drawn, "run docs/pictures/step_time.py"


def test_documents_name_this_version():
    for document in (README, *PAGES):
        named = re.findall(r"fused_topk[- ](\d+\.\d+\.\d+)", document.read_text())
        assert {*named} <= {fused_topk.__version__}, document.name
    first = re.search(r"^## (\S+), \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first and first[1] == fused_topk.__version__


def test_changes_name_what_is_gone():
    changes = (ROOT / "CHANGELOG.md").read_text().split("## 0.1.0")[0]
    for name in (*gone._ARGUMENTS, *gone._NAMES):
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", changes), name


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


@pytest.mark.parametrize("file", sorted((ROOT / "demos" / "results").glob("*.csv")), ids=lambda path: path.name)
def test_every_suite_of_a_file_is_shown_in_a_document(file):
    """Some by a picture, which is drawn from the file."""
    text = "".join(document.read_text() for document in publish.DOCUMENTS)
    shown = re.findall(rf"<!-- figures: \S*\b{file.name}(?: (.+?))? -->", text)
    named = {suite for suites in shown for suite in suites.split(",")}
    drawn = {"parts of a stock step", "ladder by length", "ladder by k"}
    # Tables whose rows name their cases.
    by_row = {"h200.csv": {"ladder"}, "cpu.csv": {"vLLM"}}.get(file.name, set())
    assert {record.suite for record in publish.read(file)} <= named | drawn | by_row


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_stay_short(page):
    assert len(page.read_text().splitlines()) <= 200


def test_results_stay_small():
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "demos" / "results").iterdir()) <= 4000


_TABLE = """\
<!-- figures: demos/results/h100.csv -->
| rows x V | read | {heading} | in words <!-- text --> |
|---|---|---|---|
| {row} | 0.0 | 0.0 | seven |

| of no run | 1 |
"""


def filled(text):
    return publish.filled(text, ROOT)


@pytest.mark.parametrize(
    ("heading", "row", "cells"),
    [
        ("fused_topk", "64 x 128256, bf16, k = 8", "6.99 | 13.6"),
        ("ours <!-- fused_topk -->", "a step <!-- 64 x 128256 bf16 k=8 -->", "6.99 | 13.6"),
        ("torch / fused_topk", "64 x 128256, bf16, k = 8", "6.99 | 17.2"),
        ("hot: fused_topk", "64 x 128256, bf16, k = 8", "6.99 | 10.8"),
        ("hot: flashinfer", "64 x 128256, bf16, k = 8", "6.99 | -"),
        ("cold, ascending: fused_topk", "64 x 128256, bf16, k = 8", "6.99 | 17.5"),
    ],
)
def test_figures_are_filled_in_from_the_file(heading, row, cells):
    made = filled(_TABLE.format(heading=heading, row=row))
    assert f"| {row} | {cells} | seven |" in made
    assert made.endswith("\n| of no run | 1 |\n")
    assert filled(made) == made


@pytest.mark.parametrize(
    ("heading", "row", "message"),
    [("fused_topk", "65 x 128256, bf16, k = 8", "65 x 128256"), ("cub", "64 x 128256, bf16, k = 8", "got 'cub'")],
)
def test_figures_that_no_run_has_are_an_error(heading, row, message):
    with pytest.raises(ValueError, match=message):
        filled(_TABLE.format(heading=heading, row=row))


def _of_suites(suites, *rows):
    rule = "| a | fused_topk | torch |\n|---|---|---|\n"
    return (
        f"before\n<!-- figures: demos/results/cpu.csv {suites} -->\n{rule}"
        + "".join(f"{row}\n" for row in rows)
        + "\nafter"
    )


def test_a_suite_has_a_row_for_each_case():
    made = filled(_of_suites("draws", "| of an older run | 1 | 2 |"))
    assert "older" not in made and made.endswith("\n\nafter") and made.count("\n| 8 x 128256 fp32 ") == 4
    assert made == filled(_of_suites("draws"))
    with pytest.raises(ValueError, match="got totals"):
        filled(_of_suites("totals"))


def test_origins_and_losses_have_a_row_each():
    made = filled(_of_suites("origins"))
    assert "| cpu, cpu softmax | AMD EPYC, 2 threads | 2026-11-25 | 1a3463d97737 | torch 2.13.0+cpu, " in made
    assert "| cpu softmax | 1 x 128 fp32 | time | torch | 1.27 | 5.05 | 3.98 |" in filled(_of_suites("losses"))

# SPDX-License-Identifier: Apache-2.0
"""What README.md shows is what happens: its Python blocks run, and print what it says they print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import fused_topk
from fused_topk.benchmark.published import filled

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# A python block, and the text block that follows it with nothing but blank lines between them.
_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\s*\n(?:\s*```text\n(?P<output>.*?)^```)?", re.MULTILINE | re.DOTALL)


def _blocks() -> list[tuple[str, str | None]]:
    text = README.read_text() if README.exists() else ""
    return [(match["code"], match["output"]) for match in _BLOCK.finditer(text)]


def _runs_here(code: str) -> bool:
    return torch.cuda.is_available() or "cuda" not in code


def test_readme_has_an_example_with_its_output():
    assert any(output is not None for _, output in _blocks())


def test_readme_examples_print_what_they_say():
    """In the order of the text, in one namespace, as a reader would type them."""
    namespace: dict[str, object] = {}
    torch.manual_seed(0)
    for code, output in _blocks():
        if not _runs_here(code):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(README), "exec"), namespace)
        if output is not None:
            assert printed.getvalue().strip() == output.strip()


def test_readme_names_every_public_function():
    text = README.read_text()
    for name in fused_topk.__all__:
        assert name.startswith("__") or re.search(rf"\b{name}\b", text), f"README.md does not mention {name}"


DOCUMENTS = sorted(
    p for p in (*ROOT.glob("*.md"), *(q for d in ("csrc", "demos", "tests") for q in (ROOT / d).rglob("*.md")))
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(document):
    """Links and file names that moved are the commonest stale line."""
    text = document.read_text()
    for path in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", text):
        assert (document.parent / path).exists(), f"{document.name} links to {path}"
    for path in re.findall(r"`((?:fused_topk|csrc|tests|demos)/[\w./-]*\w)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_readme_tables_have_the_published_figures():
    text = README.read_text()
    assert text.count("<!-- figures: ") == 2
    assert filled(text, ROOT) == text, "run `python demos/results/fill_tables.py`"


_TABLE = """\
<!-- figures: demos/results/h200.json -->
| rows x V | read | {heading} |
|---|---|---|
| {row} | 0.0 | 0.0 |

| of no run | 1 |
"""


def test_readme_figures_are_filled_in_from_the_json():
    made = filled(_TABLE.format(heading="fused_topk", row="64 x 128256, bf16, k = 8, ascending"), ROOT)
    assert "| 64 x 128256, bf16, k = 8, ascending | 5.42 | 16.0 |" in made
    assert "| of no run | 1 |" in made


@pytest.mark.parametrize(
    ("heading", "row", "message"),
    [("fused_topk", "65 x 128256, bf16, k = 8", "65 x 128256"), ("cub", "64 x 128256, bf16, k = 8", "got cub")],
)
def test_readme_figures_that_no_run_has_are_an_error(heading, row, message):
    with pytest.raises(ValueError, match=message):
        filled(_TABLE.format(heading=heading, row=row), ROOT)

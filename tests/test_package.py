# SPDX-License-Identifier: Apache-2.0
"""The package as an import: light, documented, and honest about what is missing."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys

import pytest
import torch

import fused_topk
from contract import parameters
from fused_topk import backends

FUNCTIONS = [name for name in fused_topk.__all__ if inspect.isfunction(getattr(fused_topk, name))]


def run_python(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light():
    """Nothing optional is imported, and little that torch has not imported already."""
    code = """
        import sys, torch
        before = set(sys.modules)
        import fused_topk
        new = sorted(name for name in set(sys.modules) - before)
        print(*new, sep="\\n")
    """
    new = run_python(inspect.cleandoc(code)).split()
    optional = {"cupy", "cupy_backends", "transformers", "tokenizers", "matplotlib", "typer", "click", "rich", "tqdm"}
    assert not {name.split(".")[0] for name in new} & optional
    of_others = [name for name in new if not name.startswith("fused_topk")]
    assert len(of_others) < 100, of_others


def test_without_optional_packages():
    """The functions and the commands work where none of the extras is installed. With a GPU the cause names the package."""
    code = """
        import contextlib, runpy, sys
        for name in ("cupy", "transformers", "matplotlib", "typer", "click", "rich", "tqdm"):
            sys.modules[name] = None
        import torch, fused_topk
        from fused_topk import backends
        print(fused_topk.softmax_topk(torch.tensor([1.0, 3.0, 2.0]), 2).indices.tolist())
        sys.argv[1:] = ["info"]
        with contextlib.suppress(SystemExit):
            runpy.run_module("fused_topk", run_name="__main__")
        torch.cuda.is_available = lambda: True
        print("cause:", backends.available()["cuda"])
    """
    best, *shown, cause = run_python(inspect.cleandoc(code)).strip().splitlines()
    assert best == "[1, 2]" and any(line.startswith("  cpu  ") for line in shown)
    assert re.search(r"cause: CuPy.*cupy-cuda1[23]x\[ctk\]", cause)


def test_unavailable_says_cause_and_remedy():
    available = backends.available()
    assert set(available) == {"cuda", "cpu", "reference"}
    assert available["reference"] is None
    for cause in available.values():
        assert cause is None or (isinstance(cause, str) and len(cause) > 20 and "\n" not in cause)


def test_all_is_sorted_and_exists():
    assert fused_topk.__all__ == sorted(fused_topk.__all__)
    expected = {"softmax_topk", "log_softmax_topk", "topk", "beam_topk", "TopK", "__version__"}
    assert expected <= set(fused_topk.__all__)
    assert all(hasattr(fused_topk, name) for name in fused_topk.__all__)
    assert re.match(r"\d+\.\d+", fused_topk.__version__) or fused_topk.__version__ == "0+unknown"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_names_the_parameters(name):
    """The Args section lists the parameters in their order, but those that the docstring says are described elsewhere. Likewise
    results and errors."""
    function = getattr(fused_topk, name)
    docstring = inspect.getdoc(function)
    assert docstring and docstring.splitlines()[0].endswith((".", ":"))
    sections = re.split(r"^(\w+):$", docstring, flags=re.MULTILINE)
    sections = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert "Returns" in sections or re.search(r"\bresult, .* are those of", docstring)
    assert "Raises" in sections or re.search(r"\berrors\b.* are those of", docstring)
    documented = described_in(sections.get("Args", ""))
    assert documented == [x for x in parameters(name) if x in documented]
    assert set(parameters(name)) <= described_at(name)


def described_in(arguments: str) -> list[str]:
    return re.findall(r"^ +(\w+): ", arguments, flags=re.MULTILINE)


def described_at(name: str) -> set[str]:
    """The parameters that a function describes, or says where they are described."""
    docstring = inspect.getdoc(getattr(fused_topk, name))
    elsewhere = re.findall(r"rguments\b.* are those of (:func:`\w+`.*)\.(?: .*)?$", docstring, flags=re.MULTILINE)
    return set(described_in(docstring)).union(*map(described_at, re.findall(r":func:`(\w+)`", " ".join(elsewhere))))


@pytest.mark.parametrize(
    "module", ["fused_topk.functional.row_topk", "fused_topk.functional.full_rows", "fused_topk.functional.routing"]
)
def test_docstring_examples(module):
    module = importlib.import_module(module)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0 and result.failed == 0

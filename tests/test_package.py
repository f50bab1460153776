# SPDX-License-Identifier: Apache-2.0
"""The package as an import: light, documented, and honest about what is missing."""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fused_topk
from contract import FUNCTIONS, function_of, parameters
from fused_topk import backends


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
    results and errors, but of distributed functions."""
    docstring = inspect.getdoc(function_of(name))
    assert docstring and docstring.splitlines()[0].endswith((".", ":"))
    sections = re.split(r"^(\w+):$", docstring, flags=re.MULTILINE)
    sections = dict(zip(sections[1::2], sections[2::2], strict=True))
    is_whole = name in fused_topk.__all__
    assert not is_whole or "Returns" in sections or re.search(r"\bresult, .* are those of", docstring)
    assert not is_whole or "Raises" in sections or re.search(r"\berrors\b.* are those of", docstring)
    documented = described_in(sections.get("Args", ""))
    assert documented == [x for x in parameters(name) if x in documented]
    assert set(parameters(name)) <= described_at(name)


def described_in(arguments: str) -> list[str]:
    return re.findall(r"^ +(\w+): ", arguments, flags=re.MULTILINE)


def described_at(name: str) -> set[str]:
    """The parameters that a function describes, or says where they are described."""
    docstring = inspect.getdoc(function_of(name))
    elsewhere = re.findall(
        r"rguments\b.* are those of (:func:`[\w.]+`.*?)(?:\.(?: .*)?|, the .*)$", docstring, flags=re.MULTILINE
    )
    found = re.findall(r":func:`(fused_topk\.)?(\w+)`", " ".join(elsewhere))
    module = name.rpartition(".")[0]
    others = [other if package or not module else f"{module}.{other}" for package, other in found]
    return set(described_in(docstring)).union(*map(described_at, others))


@pytest.mark.parametrize(
    "module", ["fused_topk.functional.row_topk", "fused_topk.functional.full_rows", "fused_topk.functional.routing"]
)
def test_docstring_examples(module):
    module = importlib.import_module(module)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0 and result.failed == 0


# Its modules import each other one way: from public functions down to backends, never back up.


PACKAGE = Path(fused_topk.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imported(name: str) -> set[str]:
    """The modules of the package that a module imports, also within functions."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in running(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                module = f"{source}.{alias.name}"
                found.add(module if module in MODULES else source)
    return (found & MODULES.keys()) - {name}


def running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without what only type checkers read."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from running(child)


def test_no_module_imports_one_that_imports_it():
    imports = {name: imported(name) for name in MODULES}
    below = {name: set(direct) for name, direct in imports.items()}
    assert "fused_topk.problem" in below["fused_topk.backends.reference"], "the search finds nothing"
    # A few rounds: each doubles how far a module sees.
    for _ in MODULES:
        further = {name: seen.union(*(below[each] for each in seen)) for name, seen in below.items()}
        if further == below:
            break
        below = further
    assert not {name for name, seen in below.items() if name in seen}


def test_rows_are_made_by_the_names_of_their_fields():
    """Rows that list the fields of others by place would lose a new field."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "LogitRows":
                by_place = [each for each in node.args[1:] if not isinstance(each, ast.Starred)]
                assert not by_place, f"{name}, line {node.lineno}: {ast.unparse(node)}"

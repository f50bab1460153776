# SPDX-License-Identifier: Apache-2.0
"""The package's modules import each other one way: from public functions down to backends, never back up."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fused_topk

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

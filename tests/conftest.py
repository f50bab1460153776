# SPDX-License-Identifier: Apache-2.0
"""Which backends the tests run on.

A test with a `backend` argument runs on every backend of this machine: `cpu` and `reference` on CPU tensors, and on a
machine with a GPU also `cuda` and `reference` on CUDA tensors. A test with a `native` argument, one that would compare
the reference with itself at length, runs on `cpu` and `cuda`. A backend that does not work here is skipped, unless
FUSED_TOPK_REQUIRE_BACKENDS (a comma list, such as "cpu,cuda") names it: then its tests fail with the cause.

`pytest -m exhaustive` runs the full product of shapes, for which the default run takes a covering subset.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

import fused_topk
from fused_topk import TopK, backends
from fused_topk.layout.topk_choice import MAX_K

REQUIRED = tuple(
    filter(
        None,
        os.environ.get("FUSED_TOPK_REQUIRE_BACKENDS", "").replace(" ", "").split(","),
    )
)


class Backend(NamedTuple):
    """A backend and the device whose tensors it is given; a test calls it with the name of a public function."""

    name: str
    device: str

    def __call__(self, entry: str, *args, **kwargs) -> TopK:
        k = next((a for a in args if isinstance(a, int)), 0)
        # Beyond the kernels' limit only the automatic choice serves, with torch operations.
        name = None if self.name == "cuda" and k > MAX_K else self.name
        return getattr(fused_topk, entry)(*args, backend=name, **kwargs)

    def __str__(self) -> str:
        return self.name if self.name != "reference" or self.device == "cpu" else "reference_on_cuda"


CPU = Backend("cpu", "cpu")
REFERENCE = Backend("reference", "cpu")
CUDA = Backend("cuda", "cuda")
BACKENDS = [CPU, REFERENCE]
if torch.cuda.is_available() or "cuda" in REQUIRED:
    BACKENDS += [CUDA, Backend("reference", "cuda")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exhaustive: the full product of shapes (only with -m exhaustive)")
    config.addinivalue_line("markers", "sanitize: small tests of every kernel, for tests/sanitize.sh")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "exhaustive" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, ids=str, indirect=True)
    if "native" in metafunc.fixturenames:
        metafunc.parametrize(
            "native",
            [b for b in BACKENDS if b.name != "reference"],
            ids=str,
            indirect=True,
        )


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each of the backends in turn."""
    _require(request.param)
    return request.param


@pytest.fixture
def native(request: pytest.FixtureRequest) -> Backend:
    """Each of the backends that have kernels of their own."""
    _require(request.param)
    return request.param


@pytest.fixture
def cpu() -> Backend:
    """The native CPU backend."""
    _require(CPU)
    return CPU


@pytest.fixture
def cuda() -> Backend:
    """The CUDA backend, on a machine that has a GPU."""
    _require(CUDA)
    return CUDA


@pytest.fixture
def threads():
    """A function that sets the number of torch's CPU threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _require(backend: Backend) -> None:
    cause = backends.available()[backend.name]
    if cause is None and backend.device == "cuda" and not torch.cuda.is_available():
        cause = "torch sees no GPU"
    if cause is not None:
        (pytest.fail if backend.name in REQUIRED else pytest.skip)(f"backend {backend.name!r}: {cause}")

# SPDX-License-Identifier: Apache-2.0
"""Which backends the tests run on.

A test with a `backend` argument runs on every backend of this machine: `cpu` and `reference` on CPU tensors, and on a
machine with a GPU also `cuda` and `reference` on CUDA tensors. A test with a `native` argument, one that would compare
the reference with itself at length, runs on `cpu` and `cuda`. A backend that does not work here is skipped, unless
FUSED_TOPK_REQUIRE_BACKENDS (a comma list, such as "cpu,cuda") names it: then its tests fail with the cause.

There are two tiers. Plain `pytest` takes minutes. It runs no test, and no value of a parameter, that is marked exhaustive.
Of every other test it runs as few cases as have each value of each parameter once on each backend. `pytest -m exhaustive`
runs all that this leaves out. `.ci/run` runs both. A test whose address is given with its parameters runs in any case.

`pytest -m all_shapes` takes hours. Nothing else runs its tests, for which the other tiers take a covering subset.
"""

import dataclasses
import importlib.util
import itertools
import os
import re
import sys
from pathlib import Path

import pytest

# Before torch is loaded: threads that wait sleep. Two workers of pytest-xdist have twice as many threads as there are cores, and
# those that spin while they wait took more time than the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

import fused_topk
from fused_topk import TopK, backends
from fused_topk.layout.topk_choice import MAX_K
from simt import build

REQUIRED = tuple(filter(None, os.environ.get("FUSED_TOPK_REQUIRE_BACKENDS", "").replace(" ", "").split(",")))

# The tests of generate() need transformers: pip install 'fused_topk[transformers]'.
_OF_GENERATE = re.compile("^(import|from) (transformers|decoding|multimodal|whole_)", re.MULTILINE)
collect_ignore = []
if importlib.util.find_spec("transformers") is None:
    collect_ignore = [path for path in Path(__file__).parent.glob("*.py") if _OF_GENERATE.search(path.read_text())]


# Not a NamedTuple: torch.compile of torch 2.6 does not trace a call of one.
@dataclasses.dataclass(frozen=True)
class Backend:
    """A backend and the device whose tensors it is given; a test calls it with the name of a public function."""

    name: str
    device: str

    def __call__(self, entry: str, *args, **kwargs) -> TopK:
        # A list, because torch.compile of torch 2.6 does not trace next() of a generator.
        k = [*(a for a in args if isinstance(a, int)), 0][0]
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


@pytest.fixture(autouse=True)
def _few_logits(monkeypatch):
    """The tests' models are so small that greedy search on a CPU would run as stock: see test_generation_default.py."""
    reasons = sys.modules.get("fused_topk.generation.whole_step.reasons")
    if reasons is not None:
        monkeypatch.setattr(reasons, "FEW_LOGITS", 0)


@pytest.fixture(autouse=True)
def _no_counts():
    """generate() counts for the whole process: each test begins at 0."""
    generation = sys.modules.get("fused_topk.generation")
    if generation is not None:
        generation.stats(reset=True)


# Repetitions of a plain test that take seconds each, by the test and the ids of its cases. A test without parameters has the id "".
REPETITIONS = {
    # Of random calls. Each of their options has a test.
    "test_generation_random.py::test_random_calls": ("0",),
    "test_generation_overlap.py::test_any_interleaving_leaves_the_model_as_it_was": ("2", "3"),
    "test_whole_step.py::test_families": ("Qwen2-1",),
    "test_whole_step_encoder_decoders.py::test_families": ("Marian-1", "M2M100-1"),
    "test_whole_step_graphs.py::test_each_room_is_captured_once": ("at-once-1",),
    "test_whole_step_graphs.py::test_captured_steps_give_the_stock_sequences": ("Gemma2-4", "GPT2-1"),
    # With the compiler itself, or compiled steps where others are tested.
    "test_whole_step_caches.py::test_compiled_steps_go_on_from_a_cache": ("do_sample-top_k",),
    "test_whole_step_layers.py::test_compiled_layers_give_the_stock_sequences": ("",),
    "test_whole_step_snapshot.py::test_weights_that_go_are_not_held": ("True-replaced in a layer-compiled",),
    "test_whole_step_streaming.py::test_a_streamer_gets_each_token_and_none_after_the_end": ("compiled-eos_token_id",),
    "test_whole_step_memory.py::test_what_is_allowed_is_not_held": ("4",),
}

# Each of their values has a cover of the other parameters to itself.
PLACES = ("backend", "native", "place")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # `-k cuda` selects all that needs a GPU, not only what has it in its name.
        if "cuda" in getattr(item, "fixturenames", ()):
            item.extra_keyword_matches.add("cuda")
        if item.path.name.startswith("test_simt") and build.unavailable() is not None:
            item.add_marker(pytest.mark.skip(reason=str(build.unavailable())))
    for _, of_test in itertools.groupby(items, key=_test_and_place):
        cases = [case for case in of_test if case.get_closest_marker("exhaustive") is None]
        covering = _covering(cases)
        for case in cases:
            name, _, of_case = case.nodeid.rpartition("/")[2].rstrip("]").partition("[")
            if case not in covering or of_case in REPETITIONS.get(name, ()):
                case.add_marker("exhaustive")


def _test_and_place(item: pytest.Item) -> tuple[str, ...]:
    places = [f"{name}={value}" for name, value in _parameters(item).items() if name in PLACES]
    return item.nodeid.partition("[")[0], *places


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _settings(item: pytest.Item) -> set[str]:
    """What each list of parameters gives to a case; parameters of one list, such as "rows, k", go together."""
    parameters = dict(_parameters(item))
    settings = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        settings.add(repr([(name, parameters.pop(name)) for name in names if name in parameters]))
    return settings | {repr(parameter) for parameter in parameters.items()}


def _covering(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Some of the cases of a test that have between them each setting of all. First those that add the most."""
    settings = [_settings(case) for case in cases]
    missing = set().union(*settings)
    chosen = set()
    for added in range(max(map(len, settings), default=0), 0, -1):
        for case, of_case in zip(cases, settings):
            if len(of_case & missing) >= added:
                chosen.add(case)
                missing -= of_case
    return chosen or set(cases)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, ids=str, indirect=True)
    if "native" in metafunc.fixturenames:
        metafunc.parametrize("native", [b for b in BACKENDS if b.name != "reference"], ids=str, indirect=True)


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


@pytest.fixture
def exact_library_products():
    """cuBLAS may add parts of a 16-bit product after it has rounded them; then no sum is exact."""
    if not torch.cuda.is_available():
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def _require(backend: Backend) -> None:
    cause = backends.available()[backend.name]
    if cause is None and backend.device == "cuda" and not torch.cuda.is_available():
        cause = "torch sees no GPU"
    if cause is not None:
        (pytest.fail if backend.name in REQUIRED else pytest.skip)(f"backend {backend.name!r}: {cause}")

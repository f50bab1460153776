# SPDX-License-Identifier: Apache-2.0
"""What torch sees of every function of contract.py: its operators, tensors without data, torch.compile, and torch.func.vmap."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from contract import Case, calls, function_of, functions
from contract_results import LEARNED, assert_close, call, exact, flat, gradients, parts_of, with_gradients

pytestmark = pytest.mark.usefixtures("exact_library_products")

NAMES = functions("gradients")
# One function of each operator.
OPERATORS = (
    "softmax_topk", "beam_topk", "softmax", "merge_states", "router_topk", "sample", "token_logprobs",
    "linear_log_softmax_topk", "linear_sample", "linear_token_logprobs",
)  # fmt: skip
# torch.compile takes seconds. test_operators.py compiles row_topk and beam_topk.
COMPILED = (
    "softmax",
    "merge_states",
    "router_topk",
    "sample",
    "token_logprobs",
    "linear_log_softmax_topk",
    "linear_token_logprobs",
)
EACH_OPERATOR = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in OPERATORS else pytest.mark.exhaustive) for x in NAMES]
)
# Draws refuse transforms.
EACH_MAPPED = pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in OPERATORS else pytest.mark.exhaustive) for x in NAMES if "sample" not in x],
)


def call_of(name: str, told: str, *learned: str, seed: int = 0) -> dict[str, Any]:
    """What the function is called with. Merges take states, which have tensors of their own."""
    given = with_gradients(dict(calls(name, "gradients", Case(seed=seed)))[told], *learned)
    if name.startswith("merge"):
        logits = given.pop("logits")
        given["parts"] = parts_of(given | {"logits": logits})
    return given


def run(name: str, given: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(flat(function_of(name)(**given)))


def learned_of(name: str) -> list[str]:
    return [x for x in LEARNED if x in dict(calls(name, "gradients", Case()))["plain"]]


class Listener(TorchFunctionMode):
    """Notes the package's operators, each with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "namespace", "") == "fused_topk":
            self.seen.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@EACH_OPERATOR
@pytest.mark.parametrize("told", [pytest.param("plain", marks=pytest.mark.exhaustive), "all"])
def test_operators_are_well_formed(native, name, told):
    given = call_of(name, told, *learned_of(name))
    if "tokens" in given:
        # Those that are none have NaN, which opcheck takes for different.
        given["tokens"] = given["tokens"].clamp(min=0)
    if "recompute" in given:
        # Kept logits become their gradient in place. torch.compile keeps none.
        given["recompute"] = True
    given = tree_map_only(Tensor, lambda x: x.to(native.device), given)
    # Where a mode listens to the dispatcher, no call goes past it.
    with BaseTorchDispatchMode(), Listener() as listener:
        run(name, given | {"backend": native.name})
    assert listener.seen
    for operator, args, kwargs in listener.seen:
        torch.library.opcheck(operator, args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_without_data(name):
    """Meta tensors, and fake ones of a CPU and of a GPU, which need not be there."""
    # A CPU build of torch does not cut fake tensors of a GPU.
    is_cut = name.startswith("linear") or name == "token_logprobs"
    devices = ["meta", "cpu", *(["cuda"] if torch.version.cuda or not is_cut else [])]
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    for (told, _), dtype in itertools.product(calls(name, "gradients", Case()), dtypes):
        if "generator" in told or (told != "plain" and dtype != torch.float32):
            continue
        given = call_of(name, told)
        given |= {x: given[x].to(dtype) for x in LEARNED if x in given and x != "beam_scores"}
        want = run(name, given)
        for device in devices:
            with FakeTensorMode() if device != "meta" else contextlib.nullcontext():
                got = run(name, tree_map_only(Tensor, lambda x, d=device: empty_like(x, d), given))
            for of_got, of_want in zip(got, want, strict=True):
                found = of_got.shape, of_got.dtype, of_got.device.type
                assert found == (of_want.shape, of_want.dtype, device), f"{name} {told}"


@pytest.mark.parametrize("lead", [(), (0, 3), (2, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_few_rows_and_none(backend, name, lead):
    """And in inference mode, whose results are those outside of it."""
    if lead in ((), (2, 0)) and name == "beam_topk":
        return  # without a beam there is nothing to choose from
    for told, given in calls(name, "gradients", Case(lead)):
        want = call(name, given, backend)
        assert_close(want, exact(name, given), f"{name} {told}")
        with torch.inference_mode():
            got = call(name, given, backend)
        assert all(x.is_inference() for x in got)
        assert_close([x.clone() for x in got], want, f"{name} {told}", 0.0)


def empty_like(x: Tensor, device: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in COMPILED else pytest.mark.exhaustive) for x in NAMES]
)
def test_compiled(native, name):
    """Without a graph break, and its gradients."""
    torch._dynamo.reset()
    function, learned = function_of(name), learned_of(name)
    results = []
    for is_compiled in (False, True):
        given = call_of(name, "all", *learned)
        given = tree_map_only(Tensor, lambda x: x.to(native.device), given)
        tensors = {x: y for x, y in given.items() if isinstance(y, (Tensor, list))}
        others = {x: y for x, y in given.items() if x not in tensors} | {"backend": native.name}
        step = lambda tensors, others=others: function(**tensors, **others)  # noqa: E731
        step = torch.compile(step, fullgraph=True, backend="aot_eager") if is_compiled else step
        found = [x.cpu() for x in flat(step(tensors))]
        results.append([x.detach() for x in found])
        if learned and not name.startswith("merge"):
            results[-1] += gradients(found, given, *learned)
    assert_close(results[1], results[0], name, 1e-6)


@EACH_MAPPED
@pytest.mark.filterwarnings("error")
def test_mapped_over(name):
    """vmap over each tensor alone, over all but each, and over all, against a loop."""
    # Of another weight for each another product is made.
    tolerance = 1e-6 if "linear" in name else 0.0
    for place in (0, -1):
        check_mapped(name, lambda given: run(name, given), place, tolerance)


@EACH_MAPPED
@pytest.mark.filterwarnings("error")
def test_gradients_mapped_over(name):
    """Of every tensor that has one."""

    def gradients_of(given: dict[str, Any]) -> tuple[Tensor, ...]:
        leaves, layout = tree_flatten(given)
        learned = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and i in places]

        def loss(*values: Tensor) -> Tensor:
            those = dict(zip(learned, values, strict=True))
            found = run(name, tree_unflatten([those.get(i, x) for i, x in enumerate(leaves)], layout))
            found = [x for x in found if x.is_floating_point()]
            return sum((x.where(x.isfinite(), 0.0) * (1 + torch.arange(x.shape[-1]) % 3)).sum() for x in found)

        return torch.func.grad(loss, argnums=tuple(range(len(learned))))(*(leaves[i] for i in learned))

    given = call_of(name, "all")
    # Of states the candidates, and m and d.
    live = [x for option in (*LEARNED, "parts") if option in given for x in tree_flatten(given[option])[0]]
    live = {id(x) for x in live if x.is_floating_point()}
    places = {i for i, x in enumerate(tree_flatten(given)[0]) if id(x) in live}
    check_mapped(name, gradients_of, 0, 1e-5)


def check_mapped(
    name: str, function: Callable[[dict[str, Any]], tuple[Tensor, ...]], place: int, tolerance: float
) -> None:
    """place: of the dimension that is mapped over."""
    cases = [tree_flatten(call_of(name, "all", seed=seed)) for seed in range(2)]
    layout = cases[0][1]
    tensors = [i for i, x in enumerate(cases[0][0]) if isinstance(x, Tensor)]
    for mapped in (*([i] for i in tensors), *([i for i in tensors if i != each] for each in tensors), tensors):
        # What is not mapped over is of the last case.
        leaves = list(cases[-1][0])
        for i in mapped:
            leaves[i] = torch.stack([case[i] for case, _ in cases], place)

        def of_tensors(*values: Tensor, leaves=leaves) -> tuple[Tensor, ...]:
            those = dict(zip(tensors, values, strict=True))
            return function(tree_unflatten([those.get(i, x) for i, x in enumerate(leaves)], layout))

        dims = tuple(place if i in mapped else None for i in tensors)
        got = torch.func.vmap(of_tensors, in_dims=dims)(*(leaves[i] for i in tensors))
        for number, (case, _) in enumerate(cases):
            want = of_tensors(*(case[i] if i in mapped else leaves[i] for i in tensors))
            assert_close([x[number] for x in got], list(want), f"{name}, mapped: {mapped} at {place}", tolerance)

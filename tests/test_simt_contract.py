# SPDX-License-Identifier: Apache-2.0
"""Kinds of contract.py on the emulated machine: public functions of CPU tensors, whose kernels run there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from conftest import Backend
from contract import Case, calls, functions
from contract_results import assert_close, call, exact
from fused_topk import backends
from fused_topk.backends import cuda
from fused_topk.cuda_runtime import driver, tickets
from fused_topk.functional import merging as of_states
from fused_topk.functional import sampling
from fused_topk.layout import launch
from fused_topk.operators import dispatch, full_rows, merging, results, routing, row_topk
from fused_topk.operators import sampling as of_draws
from simt.emulate import emulated
from simt.launch import Array
from test_contract import FEW, MANY, behind_lengths, check_strides, check_what_broadcasts

GPU = Backend("cuda", "cpu")


@contextmanager
def as_on_a_gpu(index: int) -> Iterator[None]:
    """Calls of public functions with CPU tensors and backend="cuda" are planned and launched as for that GPU."""
    gpu = torch.device("cuda", index)

    def of_cpu_tensors(prepare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda problem, device, *others: prepare(problem, gpu, *others)

    def about(value: int) -> Callable[[int], int]:
        def of_device(device: int) -> int:
            assert device == index
            return value

        return of_device

    with ExitStack() as stack:
        for cached in (sampling._plan, of_states._planned, row_topk.plan_of_logits):
            stack.callback(cached.cache_clear)
        for family in (row_topk, full_rows, merging, routing, of_draws):
            stack.callback(family.plan.cache_clear)
            stack.enter_context(mock.patch.dict(family.PREPARE, {"cuda": of_cpu_tensors(family.prepare_cuda)}))
        for module, replaced in (
            (backends, {"pick": lambda *_: "cuda"}),
            (results, {"few_like": lambda result: None}),
            (cuda, {"multiprocessors": about(132), "cache_bytes": about(50 << 20)}),
            (driver, {"max_shared_bytes_per_block": about(227 << 10), "architecture_of": about(90)}),
            (torch.Tensor, {"get_device": lambda tensor: index}),
            # The modes that watch the allocations would send the call to torch's dispatcher, which hides them.
            (dispatch, {"_OTHER_THREAD_KEYS": 0}),
        ):
            stack.enter_context(mock.patch.multiple(module, **replaced))
        yield


@contextmanager
def on_the_emulated_gpu(tensors: Sequence[Tensor]) -> Iterator[None]:
    arrays = [Array(f"argument {i}", x, "input") for i, x in enumerate(tensors)]
    # A row has one block, where its kernel allows it: the machine then takes a tenth of the time.
    blocks = dict.fromkeys(("summing_blocks", "searching_blocks"), lambda *_: 1)
    with as_on_a_gpu(0), mock.patch.multiple(launch, **blocks), emulated(arrays, is_public=True) as outcomes:
        yield
        assert outcomes
        for outcome in outcomes:
            outcome.check()


def call_there(name: str, given: dict[str, Any]) -> list[Tensor]:
    # No kernel computes gradients here.
    given = {x: y.detach() if isinstance(y, Tensor) else y for x, y in given.items()}
    with on_the_emulated_gpu([x for x in given.values() if isinstance(x, Tensor)]):
        return call(name, given, GPU)


@pytest.mark.parametrize("name", functions("gradients"))
def test_every_argument(name):
    for told, given in calls(name, "gradients", Case()):
        assert_close(call_there(name, behind_lengths(given)), exact(name, given), f"{name} {told}")


# One function of each family; the others launch the same kernels.
FAMILIES = ("softmax_topk", "topk_state", "softmax", "merge_topk", "router_topk")
PLAIN = (*FAMILIES, "beam_topk", "sample", "token_logprobs")


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *(
            pytest.param(name, FEW, marks=() if name in PLAIN else pytest.mark.exhaustive)
            for name in functions("broadcast")
            if name != "linear_sample"
        ),
        *(pytest.param(name, MANY, marks=pytest.mark.exhaustive) for name in FAMILIES),
    ],
    ids=str,
)
def test_what_broadcasts(name, rows):
    """Of many rows by one function of each family. Of draws the mask, which alone reaches their kernels as it is given."""
    check_what_broadcasts(call_there, name, (rows,), only="mask" if name == "sample" else "")


@pytest.mark.parametrize("name", [name for name in functions("strides") if name.endswith("topk") and "." not in name])
def test_strides_of_what_is_multiplied(name):
    check_strides(call_there, name)


@pytest.mark.parametrize("name", [name for name in functions("devices") if "." not in name])
def test_launches_for_a_gpu_that_is_not_current(name):
    """On its stream, in its context, with its counters."""
    current, launched = [0], []

    @contextmanager
    def device(number: int) -> Iterator[None]:
        current[0] = number
        yield
        current[0] = 0

    def kernel_of(number: int, kernel: str) -> Callable[..., None]:
        def run(grid: Any, threads: Any, arguments: Any, shared_bytes: int, stream: Any, is_cooperative: bool) -> None:
            launched.append((number, current[0], stream))

        return run

    def zeroed(number: int, count: int) -> int:
        assert number == 1
        return 0

    of_driver = {
        "function": kernel_of,
        "raw_stream": lambda number: f"stream of {number}",
        "_stream": lambda handle: handle,
        "_current_device": lambda: current[0],
    }
    with (
        as_on_a_gpu(1),
        # Nothing is computed, but what is read of a result must be in range.
        mock.patch.object(results, "empty", torch.zeros),
        mock.patch.multiple(driver, **of_driver),
        mock.patch.object(torch.cuda, "device", device),
        mock.patch.object(tickets, "zeroed", zeroed),
        # Blocks that share a row have counters.
        mock.patch.multiple(launch, **dict.fromkeys(("summing_blocks", "searching_blocks"), lambda *_: 2)),
    ):
        for _, given in calls(name, "gradients", Case()):
            call(name, given, GPU)
    assert launched and set(launched) == {(1, 1, "stream of 1")}

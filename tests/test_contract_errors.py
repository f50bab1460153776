# SPDX-License-Identifier: Apache-2.0
"""Every argument of every function is checked (contract.py), and every error has one form: `argument` must rule, value; remedy."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from contract import (
    WITH,
    WITHOUT,
    Case,
    argument,
    arguments,
    beyond,
    calls,
    function_of,
    functions,
    parameters,
    required,
    values,
)
from contract_results import LEARNED, call, parts_of, with_gradients
from fused_topk.operators import dispatch
from test_contract import FEW, MANY, moved, one_process  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def valid(name: str, parameter: str, case: Case) -> list[Any]:
    """What an argument may be, one value at least."""
    plain = parameter.removeprefix("local_")
    given = required(name, case)
    if plain == "parts":
        return [parts_of(given)]
    if plain == "out":
        return [function_of(name)(**given)]
    return list(values(name, parameter, case).values()) or [given.get(plain)]


def ways(name: str, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A call on each way through its function: the quick one, with a gradient, with the vocabulary elsewhere, and of DTensors."""
    yield given
    tensors = {x: y for x, y in given.items() if isinstance(y, Tensor)}
    if name in functions("dtensors") and tensors.get("logits", torch.empty(0)).dim() == 3 and "lengths" not in given:
        logits = tensors["logits"]
        if not logits.is_sparse and logits.is_cpu and given.get("out") is None:
            yield given | {"logits": DTensor.from_local(logits, init_device_mesh("cpu", (1,)), [Shard(2)])}
    learned = [x for x in LEARNED if x in tensors and tensors[x].is_floating_point() and not tensors[x].is_sparse]
    if learned and given.get("out") is None:
        yield with_gradients(given, *learned)
    is_movable = (
        "dim" in parameters(name)
        and "dim" not in given
        and "out" not in given
        and given["k" if "k" in given else "logits"] is not None
    )
    if (
        is_movable
        and all(x in tensors and not tensors[x].is_sparse for x in ("logits", "mask") if x in given)
        and tensors["logits"].dim() == 3
    ):
        yield moved(given, 0)


def assert_refused(error: type[Exception], name: str, parameter: str, run: Callable[[], Any], told: str) -> None:
    try:
        run()
    except Exception as caught:
        message = str(caught)
        rule, _, remedy = message.partition("; ")
        is_named = message.startswith((f"`{parameter}`", f"`{parameter}.", f"`{parameter}["))
        assert type(caught) is error and is_named and " must " in rule and remedy, f"{told}: {caught!r}"
    else:
        raise AssertionError(f"{told}: nothing raised")


def wrong_values(name: str, parameter: str, field: str, case: Case) -> Iterator[Any]:
    for wrong in getattr(argument(name, parameter), field):
        if not inspect.isfunction(wrong):
            yield wrong
            continue
        for right in valid(name, parameter, case):
            if wrong is beyond or isinstance(right, (Tensor, tuple, list)):
                yield wrong(right)


def called_with(name: str, parameter: str, value: Any, case: Case) -> dict[str, Any]:
    """The plainest call with this argument, and with what it needs."""
    plain = parameter.removeprefix("local_")
    given = required(name, case)
    if name.startswith("merge"):
        given["parts"] = parts_of(given)
    for other in set(WITH.get(plain, ())) & set(parameters(name)):
        given[other] = next(iter(values(name, other, case).values()))
    given.pop(WITHOUT.get(plain), None)
    if plain != "counter":
        # The numbers would then come from a generator, which an error must not advance.
        given.pop("seed", None)
    return given | {plain: value}


@pytest.mark.parametrize("name", functions("errors"))
def test_types_of_errors(name):
    before = torch.random.get_rng_state()
    # Of many rows the logits of heads come another way.
    cases = (FEW, MANY) if "linear" in name else (FEW,)
    for case, parameter in itertools.product(cases, arguments(name, "errors")):
        if name != "warm_up":
            # Its plan must let nothing through that is equal to its key.
            call(name, required(name, case))
        for error, field in ((TypeError, "wrong_type"), (ValueError, "wrong_value")):
            for value in wrong_values(name, parameter, field, case):
                for given in ways(name, called_with(name, parameter, value, case)):
                    told = f"{name}({parameter}={value!r})"
                    assert_refused(error, name, parameter, functools.partial(call, name, given), told)
    # How large the whole vocabulary is, processes learn in the exchange that has the drawn names, too.
    assert name == "distributed.sample" or torch.equal(before, torch.random.get_rng_state())


def elsewhere(value: Any) -> Iterator[Any]:
    """The tensors of an argument on another device: each of them alone."""
    if isinstance(value, Tensor):
        yield value.to("meta")
    elif isinstance(value, (tuple, list)):
        for i, each in enumerate(value):
            for moved_one in elsewhere(each):
                found = [*value[:i], moved_one, *value[i + 1 :]]
                yield type(value)(*found) if hasattr(value, "_fields") else type(value)(found)


@pytest.mark.parametrize("name", functions("devices"))
def test_tensors_on_another_device(name, monkeypatch):
    """On each way through a function, alone and beside all other arguments."""
    # The quick way takes tensors of the CPU and of GPUs. Here meta tensors stand for those of a GPU.
    as_of_a_gpu = dispatch._OTHER_TENSOR_KEYS & ~dispatch._keys("Meta", "AutogradMeta")
    monkeypatch.setattr(dispatch, "_OTHER_TENSOR_KEYS", as_of_a_gpu)
    # Not a kernel, which would read at the address 0 where a check is missing.
    reference = {"backend": "reference"} if "backend" in parameters(name) else {}
    everything = dict(calls(name, "devices", FEW)).get("all", required(name, FEW))
    for parameter in arguments(name, "devices"):
        plain = parameter.removeprefix("local_")
        for value in itertools.chain(*map(elsewhere, valid(name, parameter, FEW))):
            if plain in ("logits", "hidden"):
                # The others are then elsewhere.
                if len(everything) > len(required(name, FEW)):
                    with pytest.raises(ValueError, match=r"` must (be on|fit) .*; "):
                        call(name, everything | {plain: value})
                continue
            excluded = ("seed", "counter") if plain == "noise" else ()
            others = {x: y for x, y in everything.items() if x not in excluded}
            for base in (called_with(name, parameter, value, FEW), others | called_with(name, parameter, value, FEW)):
                for given in ways(name, base | reference):
                    told = f"{name}({parameter}={value!r}), {list(given)}"
                    assert_refused(ValueError, name, parameter, functools.partial(call, name, given), told)

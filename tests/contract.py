# SPDX-License-Identifier: Apache-2.0
"""The public functions, their arguments, and the kinds of tests that take both: a table of functions x arguments x kinds.

A kind (KINDS) tests each function of its row in FUNCTIONS with each argument of its row in ARGUMENTS that the function has. A new
function or argument is in all of a kind's tests as soon as it is listed; test_contract.py fails where one is not listed. An argument of
distributed functions that begins with local_ is this process's share of the argument without that prefix.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fused_topk
import fused_topk.distributed
from linear_heads import exact_head
from rows import packed, random_logits, random_mask

KINDS = {
    "groups": "several groups of processes at once, none of which is the world (distributed_contract_checks.py)",
    "dtensors": "logits that are a DTensor, on a mesh of two dimensions (distributed_contract_checks.py)",
    "broadcast": "scalars, lower ranks, stride 0, other dimensions; few and many rows; bounds (test_contract.py)",
    "strides": "operands of a product, in each layout (test_contract.py)",
    "gradients": "each subset of what may require a gradient; values and gradients in float64 (test_contract.py); what torch sees (test_contract_torch.py)",
    "devices": "a tensor on another device (test_contract_errors.py)",
    "errors": "wrong types, values and shapes (test_contract_errors.py)",
}
_ROWS = "dtensors broadcast gradients devices errors"
_HEADS = "strides broadcast gradients devices errors"
FUNCTIONS = {
    "softmax_topk": _ROWS,
    "log_softmax_topk": _ROWS,
    "topk": _ROWS,
    "beam_topk": _ROWS,
    "softmax": _ROWS,
    "log_softmax": _ROWS,
    "logsumexp": _ROWS,
    "topk_state": "broadcast gradients devices errors",
    "merge_states": "broadcast gradients devices errors",
    "merge_topk": "broadcast gradients devices errors",
    "router_topk": "broadcast gradients devices errors",
    "sample": "broadcast gradients devices errors",
    "token_logprobs": "broadcast gradients devices errors",
    "linear_softmax_topk": _HEADS,
    "linear_log_softmax_topk": _HEADS,
    "linear_topk": _HEADS,
    "linear_sample": _HEADS,
    "linear_token_logprobs": _HEADS,
    "warm_up": "errors",
    **{f"distributed.{name}": "groups errors devices" for name in ("softmax_topk", "log_softmax_topk", "topk", "beam_topk", "sample")},
    **{f"distributed.linear_{name}": "groups strides errors devices" for name in ("softmax_topk", "log_softmax_topk", "topk", "token_logprobs")},
}  # fmt: skip

V, DEPTH, K = 96, 8, 4
_NOT_TENSORS = (3, "1", [1.0], (1, 2), {})
# Some are equal to the k that calls are made with, for which a plan is kept.
_NOT_INTS = ("2", float(K), None, True, [2], torch.tensor(float(K)), 1j)


class Case(NamedTuple):
    """The tensors of calls: logits, and a head whose products are exact."""

    lead: tuple[int, ...] = (2, 3)
    seed: int = 0

    def random(self, low: float, high: float, salt: int = 0) -> Tensor:
        """A number a row."""
        x = torch.rand(self.lead, generator=torch.Generator().manual_seed(self.seed + salt))
        return low + (high - low) * x

    def tokens(self, *shape: int, salt: int = 0, high: int = V) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + salt)
        return torch.randint(0, high, (*self.lead, *shape), generator=generator)

    def logits(self) -> Tensor:
        # Of few levels, so that some tie.
        return (random_logits(*self.lead, V, seed=self.seed) * 4).round() / 4

    def head(self, part: int) -> Tensor:
        return exact_head(self.lead, DEPTH, V, torch.float32, seed=self.seed)[part]

    def mask(self) -> Tensor:
        return random_mask(*self.lead, V, share=0.7, seed=self.seed)

    def lengths(self) -> Tensor:
        return V // 2 + self.tokens(high=V // 2)

    def given_tokens(self) -> Tensor:
        """Three a row, of which some are none."""
        found = self.tokens(3, salt=1)
        return found.masked_fill(found % 7 == 0, -100)


class GeneratorOf(int):
    """Stands for a new generator of that seed."""


class Argument(NamedTuple):
    """An argument, whoever takes it."""

    kinds: str
    # What a call may be given beside the default: each value with its name; for what is always given, the value alone.
    values: Callable[[Case], dict[str, Any]] = lambda case: {}
    wrong_type: Sequence[Any] = ()
    wrong_value: Sequence[Any] = ()  # a function makes one from a valid value, or if there is none from a case


def _of_rows(number: Any, rows: Callable[[Case], Tensor]) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {"number": number, "rows": rows(case)}


def _nested(layout: torch.layout, x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x, x], layout=layout)


def _tensor(*wrong: Any, dtype: torch.dtype = torch.int64, others: Sequence[torch.dtype] = ()) -> dict[str, Any]:
    """The wrong values of a tensor: no tensors, those of another dtype, of another layout; and `wrong`."""
    of_dtypes = [functools.partial(Tensor.to, dtype=each) for each in (dtype, *others)]
    nested = (lambda x: _nested(torch.strided, x), lambda x: _nested(torch.jagged, x))
    layouts = (lambda x: x.float().to_sparse().to(x.dtype), *nested)
    types = (*_NOT_TENSORS, *(lambda x, to=to: to(x) for to in of_dtypes), *layouts)
    return {"wrong_type": types, "wrong_value": wrong}


def _rows(*wrong: Any, also_numbers: bool = True, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    """The wrong values of one number a row: `wrong` ones for all rows and for one, and wrong shapes."""

    def in_one_row(x: Any) -> Callable[[Tensor], Tensor]:
        return lambda rows: torch.cat((rows.flatten()[:-1], torch.tensor([x], dtype=rows.dtype))).view(rows.shape)

    shapes = (lambda x: x.unsqueeze(-1), lambda x: x.flatten()[:-1], lambda x: x[:0], lambda x: torch.stack((x, x)))
    one = wrong if also_numbers else ()
    found = _tensor(*one, *map(in_one_row, wrong), *shapes, dtype=dtype)
    return found | {"wrong_type": tuple(x for x in found["wrong_type"] if also_numbers is False or x != 3)}


def _one_field(i: int, change: Callable[[Tensor], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A result or a state of which the i-th field, or the last, is another."""
    return lambda x: tuple(change(y) if j == min(i, len(x) - 1) else y for j, y in enumerate(x))


def _one_state(**changes: Callable[[Tensor], Any]) -> Callable[[list[Any]], list[Any]]:
    """States of which the last one has other fields."""
    return lambda x: [
        *x[:-1],
        x[-1]._replace(**{name: change(getattr(x[-1], name)) for name, change in changes.items()}),
    ]


def beyond(k: int) -> int:
    """What no k may be where the given one is of all tokens."""
    return k + 1


_ONE_A_ROW = "groups dtensors broadcast gradients devices errors"
_MAY_LEARN = "groups dtensors gradients devices errors"
_MULTIPLIED = f"strides {_MAY_LEARN}"
_PLAIN = "groups dtensors gradients errors"
_INT = {"wrong_type": _NOT_INTS}
_FLAG = {"wrong_type": (1, "yes", None)}
_TEMPERATURES = (-1.0, float("nan"), float("inf"), 1e-37, 1e38)
_OTHER_LOGITS = (torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)

ARGUMENTS = {
    # What is read.
    "logits": Argument(_MAY_LEARN, Case.logits, **_tensor(lambda x: x[0, 0, 0], lambda x: x[..., :0], others=_OTHER_LOGITS)),
    "hidden": Argument(_MULTIPLIED, lambda case: case.head(0), **_tensor(lambda x: x[0, 0, 0], lambda x: x[..., :0])),
    "weight": Argument(_MULTIPLIED, lambda case: case.head(1), **_tensor(lambda x: x[0], lambda x: x[:, 1:], lambda x: x.unsqueeze(0))),
    "bias": Argument(_MULTIPLIED, lambda case: {"bias": case.head(2)}, **_tensor(lambda x: x[1:], lambda x: x.unsqueeze(0))),
    "beam_scores": Argument(_MAY_LEARN, lambda case: case.random(-5, 0), **_tensor(lambda x: x[:1], lambda x: x.unsqueeze(-1))),
    "parts": Argument(
        "gradients devices errors", lambda case: None,
        (None, 3, lambda x: x[0], lambda x: [3], lambda x: [tuple(x[0])], _one_state(logits=Tensor.int), _one_state(logits=Tensor.half), _one_state(m=lambda m: None)),
        (
            [], _one_state(d=Tensor.double), _one_state(m=lambda m: m[:1]), _one_state(indices=Tensor.int), lambda x: [x[0], type(x[1])(*(y[:1] for y in x[1]))],
            _one_state(**dict.fromkeys(("logits", "indices"), lambda y: y[..., :0])),
        ),
    ),
    "temperature": Argument(_ONE_A_ROW, _of_rows(0.7, lambda case: case.random(0.5, 2)), **_rows(*_TEMPERATURES, 0.0)),
    "mask": Argument(_ONE_A_ROW, lambda case: {"bool": case.mask(), "packed": packed(case.mask())},
        **_tensor(lambda x: x[..., 1:], lambda x: x[:1, :2], lambda x: torch.stack((x, x)))),
    "lengths": Argument(_ONE_A_ROW, lambda case: {"int64": case.lengths(), "int32": case.lengths().int()},
        **_rows(-1, V + 1, also_numbers=False, dtype=torch.float32)),
    # What is wanted.
    "k": Argument(_PLAIN, lambda case: {"all": V}, **_INT, wrong_value=(0, -1, 2**70, beyond)),
    "normalize": Argument(_PLAIN, lambda case: {x: x for x in ("topk", "all")}, (None, 1), ("none",)),
    "kind": Argument(_PLAIN, lambda case: {x: x for x in ("log_softmax", "logits")}, (None, 1), ("state",)),
    "tokens": Argument("groups devices errors", Case.given_tokens,
        **_tensor(lambda x: x[:1], lambda x: x[..., :0], lambda x: torch.full_like(x, V), dtype=torch.int32)),
    "ties": Argument("gradients errors", lambda case: {"last": "last"}, (None, 1), ("first",)),
    "start": Argument("groups gradients errors", lambda case: {"start": 7}, _NOT_INTS[:2], (-1, 2**62 + 1)),
    "dtype": Argument("dtensors errors", lambda case: {}, ("float32", 1), (torch.float16,)),
    "scoring": Argument(_PLAIN, lambda case: {x: x for x in ("sigmoid", "sqrtsoftplus")}, (None, 1), ("relu",)),
    "groups": Argument(_PLAIN, lambda case: {"4": 4}, **_INT, wrong_value=(0, 7, V + 1)),
    "topk_groups": Argument(_PLAIN, lambda case: {"2": 2}, **_INT, wrong_value=(0, 5)),
    "group_score": Argument(_PLAIN, lambda case: {"max": "max"}, (None, 1), ("sum",)),
    "scale": Argument(_PLAIN, lambda case: {"2.5": 2.5}, ("2", None, True)),
    "index_dtype": Argument(_PLAIN, lambda case: {"int32": torch.int32}, (torch.int16, "int32")),
    "top_k": Argument(_ONE_A_ROW, _of_rows(5, lambda case: 1 + case.tokens(high=9)), **_rows(-2, dtype=torch.float32)),
    "top_p": Argument(_ONE_A_ROW, _of_rows(0.6, lambda case: case.random(0.2, 0.9, 1)), **_rows(-0.5, 1.5, float("nan"))),
    "min_p": Argument(_ONE_A_ROW, _of_rows(0.1, lambda case: case.random(0.01, 0.5, 2)), **_rows(-0.5, 1.5, float("nan"))),
    "seed": Argument(_ONE_A_ROW, _of_rows(7, lambda case: case.tokens(high=2**62)), **_rows(dtype=torch.float32), ),
    "counter": Argument(_ONE_A_ROW, _of_rows(2, lambda case: case.tokens(salt=4)), **_rows(dtype=torch.float32)),
    "generator": Argument("groups errors", lambda case: {"of 5": GeneratorOf(5)}, (3, "0", torch.tensor(1))),
    "noise": Argument("gradients devices errors", lambda case: {"exponential": -case._replace(lead=(*case.lead, V)).random(0.01, 0.99).log()}, **_tensor(lambda x: x[..., 1:], lambda x: x[0])),
    "num_samples": Argument("groups gradients errors", lambda case: {"3": 3}, **_INT, wrong_value=(0, 2**31)),
    "topk": Argument("groups gradients errors", lambda case: {"5": 5}, **_INT, wrong_value=(-1, V + 1)),
    "logprobs": Argument("groups gradients errors", lambda case: {"kept": "kept"}, (None, 5), ("none",)),
    "kept": Argument("groups gradients errors", lambda case: {"yes": True}, **_FLAG),
    "ranks": Argument("gradients errors", lambda case: {"yes": True}, **_FLAG),
    "entropy": Argument("gradients errors", lambda case: {"yes": True}, **_FLAG),
    "tail": Argument("gradients errors", lambda case: {"yes": True}, **_FLAG),
    "recompute": Argument("gradients errors", lambda case: {"no": False}, **_FLAG),
    # Where.
    "dim": Argument("broadcast dtensors errors", lambda case: {}, _NOT_INTS[:4], (3, -4)),
    "out": Argument("dtensors devices errors", lambda case: {}, (3, "abc", lambda x: x[0], lambda x: x[:1], lambda x: (*x, x[0]), *(_one_field(i, lambda y: y.to(torch.int16)) for i in range(3))), tuple(_one_field(i, change) for i in range(3) for change in (lambda y: y.unsqueeze(0), lambda y: y[:1]))),
    "backend": Argument("broadcast strides errors", lambda case: {}, (1, []), ("tpu", "")),
    "group": Argument("groups errors", lambda case: {}, ("tp", 0)),
    # What is said of calls to come.
    "shapes": Argument("errors", lambda case: (2, V), (3, "2", None, [2.0], torch.zeros(2, V), (2, (3, V)), [(2, V), ("3", V)], (True, V)), ((2, 0), (-1, V), ())),
    "functions": Argument("errors", lambda case: {}, (3, None, [print]), ("sum", "linear_topk")),
    "dtypes": Argument("errors", lambda case: {}, ("float32", torch.int64)),
    "device": Argument("errors", lambda case: {}, (1.5, [])),
    # What differs in one function.
    **{
        f"{name}.normalize": Argument(_PLAIN, lambda case: {"all": "all"}, (None, 1), ("none", "topk"))
        for name in ("beam_topk", "distributed.beam_topk", "token_logprobs", "linear_token_logprobs", "distributed.linear_token_logprobs")
    },
    "beam_topk.logits": Argument(_MAY_LEARN, Case.logits, **_tensor(lambda x: x[0], lambda x: x.unsqueeze(0), lambda x: x[:, :0], others=_OTHER_LOGITS)),
    # A process may have no token.
    **{f"{name}.logits": Argument(_MAY_LEARN, Case.logits, **_tensor(lambda x: x[0, 0, 0])) for name in FUNCTIONS if name.startswith("distributed.")},
    **{
        f"{name}.k": Argument(_PLAIN, lambda case: {"all": case.lead[-1] * V}, **_INT, wrong_value=(0, -1, 2**70, beyond))
        for name in ("beam_topk", "distributed.beam_topk")
    },
    "router_topk.renormalize": Argument(_PLAIN, lambda case: {"yes": True}, **_FLAG),
    "router_topk.k": Argument(_PLAIN, lambda case: {"7": 7}, **_INT, wrong_value=(0, V + 1)),
    "warm_up.normalize": Argument("errors", lambda case: {}, (None, 1), ("none",)),
    "warm_up.k": Argument("errors", lambda case: {}, ("2", 2.0, True), (0, V + 1)),
    "warm_up.mask": Argument("errors", lambda case: {}, **_FLAG),
    "warm_up.lengths": Argument("errors", lambda case: {}, **_FLAG),
    "warm_up.ranks": Argument("errors", lambda case: {}, **_FLAG),
    **{
        f"{name}.k": Argument(_PLAIN, lambda case: {"all": V}, **_INT, wrong_value=(-1, 2**70, beyond))
        for name in ("token_logprobs", "linear_token_logprobs", "distributed.linear_token_logprobs")
    },
    **{
        f"{name}.temperature": Argument(_ONE_A_ROW, _of_rows(0.7, lambda case: case.random(0.5, 2)), **_rows(*_TEMPERATURES))
        for name in ("sample", "linear_sample", "distributed.sample")
    },
    "merge_topk.k": Argument(_PLAIN, lambda case: {"7": 7}, **_INT, wrong_value=(0, -1, 9)),
    "merge_states.k": Argument(_PLAIN, lambda case: {"7": 7}, **_INT, wrong_value=(0, -1)),
    "topk_state.k": Argument(_PLAIN, lambda case: {"all": V}, **_INT, wrong_value=(0, -1)),
    # Any process may have a token.
    "distributed.linear_token_logprobs.tokens": Argument("groups devices errors", Case.given_tokens, **_tensor(lambda x: x[:1], lambda x: x[..., :0], dtype=torch.int32)),
    "distributed.linear_token_logprobs.start": Argument("errors", lambda case: 0, _NOT_INTS[:2], (-1, 2**62 + 1)),
}  # fmt: skip

# What keyword arguments of every function are called, in this order: what is read, then what is wanted, `normalize` first, and where.
READ = {"temperature": 1.0, "mask": None, "lengths": None}
WHERE = {"dim": -1, "out": None, "backend": None, "group": None}

# Arguments that mean nothing by themselves: what is given with them.
WITH = {"ties": ("ranks",), "topk_groups": ("groups",), "group_score": ("groups",)}
# Of two arguments that exclude each other the second.
WITHOUT = {"generator": "seed", "seed": "generator", "noise": "seed"}


def function_of(name: str) -> Callable[..., Any]:
    module, _, last = name.rpartition(".")
    return getattr(fused_topk.distributed if module else fused_topk, last)


def parameters(name: str) -> list[str]:
    """All but the one that refuses names that are gone."""
    found = inspect.signature(function_of(name)).parameters.values()
    return [x.name for x in found if x.kind is not inspect.Parameter.VAR_KEYWORD]


def argument(name: str, parameter: str) -> Argument:
    """The entry of a function's argument, if need be that of the argument without local_."""
    plain = parameter.removeprefix("local_")
    return ARGUMENTS.get(f"{name}.{plain}") or ARGUMENTS[plain]


def functions(kind: str) -> list[str]:
    return [name for name, kinds in FUNCTIONS.items() if kind in kinds.split()]


def arguments(name: str, kind: str) -> list[str]:
    """The parameters of a function that a kind takes."""
    return [x for x in parameters(name) if kind in argument(name, x).kinds.split()]


def required(name: str, case: Case) -> dict[str, Any]:
    """The arguments of the plainest call. `parts` come from their logits in call()."""
    given: dict[str, Any] = {}
    of_function = inspect.signature(function_of(name)).parameters
    for parameter in map(of_function.__getitem__, parameters(name)):
        plain = parameter.name.removeprefix("local_")
        if plain == "k":
            given["k"] = K
        elif plain == "seed":
            given["seed"] = 3
        elif plain == "parts":
            given["logits"] = case.logits()
        elif parameter.default is parameter.empty:
            given[plain] = argument(name, parameter.name).values(case)
    return given


def values(name: str, parameter: str, case: Case) -> dict[str, Any]:
    """What an argument may be beside its default, by name; nothing for one that is always given."""
    has_default = (
        parameter == "k"
        or inspect.signature(function_of(name)).parameters[parameter].default is not inspect.Parameter.empty
    )
    return argument(name, parameter).values(case) if has_default else {}


def calls(name: str, kind: str, case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls of a function in a kind, each with a name: the plainest, one with each value of each argument, and one of all."""
    plain, together = required(name, case), {}
    yield "plain", plain
    for parameter in arguments(name, kind):
        option = parameter.removeprefix("local_")
        for label, value in values(name, parameter, case).items():
            given = plain | {option: value}
            for other in WITH.get(option, ()):
                if other in parameters(name):
                    given = given | {other: next(iter(values(name, other, case).values()))}
            given.pop(WITHOUT.get(option), None)
            yield f"{option}={label}", given
            if option not in ("k", "generator", "noise"):
                together |= {x: y for x, y in given.items() if x not in plain or x == option}
    if together:
        yield "all", plain | together

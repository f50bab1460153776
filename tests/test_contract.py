# SPDX-License-Identifier: Apache-2.0
"""Each kind of contract.py that needs no other process, over all functions and arguments of the core."""

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fused_topk
import fused_topk.distributed
from contract import (
    ARGUMENTS,
    FUNCTIONS,
    KINDS,
    READ,
    WHERE,
    Case,
    V,
    argument,
    arguments,
    calls,
    function_of,
    functions,
    parameters,
)
from contract_results import LEARNED, assert_close, call, exact, gradients, parts_of, with_gradients

FEW, MANY = Case(), Case((5, 7), seed=1)


@pytest.fixture
def one_process(tmp_path):
    """A group of this process alone, for the functions that need one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_all_functions_and_arguments_are_listed():
    public = [
        f"{prefix}{name}"
        for module, prefix in ((fused_topk, ""), (fused_topk.distributed, "distributed."))
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    ]
    assert sorted(FUNCTIONS) == sorted(public)
    for name in public:
        assert all(argument(name, x).kinds for x in parameters(name))
    used = {x.removeprefix("local_") for name in public for x in parameters(name)}
    assert {x.rpartition(".")[2] for x in ARGUMENTS} == used
    for listed in (*FUNCTIONS.values(), *(x.kinds for x in ARGUMENTS.values())):
        assert set(listed.split()) <= set(KINDS)


@pytest.mark.parametrize("name", [x for x in FUNCTIONS if x != "warm_up"])
def test_arguments_have_one_order_and_one_default(name):
    of_function = inspect.signature(function_of(name)).parameters
    named = [x for x in parameters(name) if of_function[x].kind is inspect.Parameter.KEYWORD_ONLY]
    read, where = ([x for x in group if x in named] for group in (READ, WHERE))
    own = [x for x in named if x not in (*read, *where)]
    assert named == [*read, *own, *where] and "normalize" not in own[1:]
    for x, default in {**READ, **WHERE, "normalize": "allowed"}.items():
        assert x not in of_function or of_function[x].default == default, x
    if {"logits", "local_logits"} & set(of_function) and name != "router_topk":
        # Of logits themselves there is no temperature.
        assert read == [x for x in READ if x != "temperature" or (not name.endswith(".topk") and name != "topk")]


def behind_lengths(given: dict[str, Any]) -> dict[str, Any]:
    """The call with +inf in the logits behind the lengths, where nothing may be read."""
    if "lengths" not in given or "logits" not in given:
        return given
    lengths = given["lengths"].expand(given["logits"].shape[:-1])
    return given | {"logits": given["logits"].masked_fill(torch.arange(V) >= lengths.unsqueeze(-1), torch.inf)}


@pytest.mark.parametrize("name", functions("gradients"))
def test_values_and_gradients_of_every_argument(name, backend):
    """In float64; and with each subset of what may require a gradient, of which the rest is frozen."""
    for told, given in calls(name, "gradients", FEW):
        learned = [x for x in LEARNED if x in given]
        live = with_gradients(given, *learned)
        want = exact(name, live)
        wanted = dict(zip(learned, gradients(want, live, *learned), strict=False))
        # The subsets are of the operands alone, so the other arguments come together.
        sizes = range(len(learned) + 1) if told in ("plain", "bias=bias", "all") else (0, len(learned))
        for some in itertools.chain(*(itertools.combinations(learned, size) for size in sizes)):
            live = with_gradients(behind_lengths(given), *some)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                got = call(name, live, backend)
                found = gradients(got, live, *some)
            assert_close([x.detach() for x in got], [x.detach() for x in want], f"{name} {told} {some}")
            assert_close(found, [wanted[x] for x in some if wanted], f"{name} {told} gradient {some}")


@pytest.mark.parametrize("name", functions("gradients"))
def test_values_and_gradients_of_other_dtypes(name, backend):
    """Each result alone: the others have no gradient. And with the vocabulary elsewhere."""
    dtypes = (torch.float16, torch.bfloat16, *([torch.float64] if backend.name == "reference" else []))
    dims = (-1, 1) if "dim" in parameters(name) and name != "beam_topk" else (-1,)
    given = dict(calls(name, "gradients", FEW))["all"]
    # What tells of beams has no gradient of their scores.
    learned = [x for x in LEARNED if x in given and x != "beam_scores"]
    for dtype, dim, i in itertools.product(dtypes, dims, range(len(exact(name, given)))):
        told, tolerance = f"{name} of {dtype} at {dim}, result {i}", 1e-12 if dtype == torch.float64 else 2e-2
        here = given | {x: given[x].to(dtype) for x in learned}
        live = with_gradients(here, *learned)
        there = with_gradients(here if dim == -1 else moved(here, dim), *learned)
        got, want = call(name, there, backend)[i], exact(name, live)[i]
        got = got.movedim(dim, -1) if got.dim() == 3 else got
        assert_close([got.detach()], [want.detach()], told, tolerance)
        found = [x.movedim(dim, -1) if x.dim() == 3 else x for x in gradients([got], there, *learned)]
        assert_close(found, gradients([want], live, *learned), f"{told}, gradient", tolerance)


@pytest.mark.parametrize("name", ["merge_states", "merge_topk"])
def test_gradients_of_some_fields_of_states(backend, name):
    """As with all of them learned, which test_merge.py checks by finite differences."""
    case = Case()
    given = {"logits": case.logits(), "k": 5, "temperature": case.random(0.5, 2)}
    fields = ("logits", "m", "d")

    def found(*learned: str) -> list[Tensor]:
        parts = parts_of(given)
        live = {f"{x}{i}": getattr(part, x).clone().requires_grad_() for i, part in enumerate(parts) for x in learned}
        parts = [p._replace(**{x: live[f"{x}{i}"] for x in learned}) for i, p in enumerate(parts)]
        results = call(name, {"parts": parts, "k": 5, "temperature": given["temperature"]}, backend)
        return gradients(results, live, *live)

    whole = dict(zip([(x, i) for i in range(2) for x in fields], found(*fields), strict=True))
    for some in itertools.chain(*(itertools.combinations(fields, size) for size in (1, 2))):
        assert_close(found(*some), [whole[x, i] for i in range(2) for x in some], f"{name} {some}")


def broadcastable(x: Tensor) -> dict[str, Tensor]:
    """Tensors of lower rank, of sizes of 1, and of other strides, cut from one for all rows."""
    return {
        "of all": x[0, 0],
        "of columns": x[0],
        "of rows": x[:, :1],
        "of one": x[:1, :1],
        "expanded": x[:1].expand(x.shape),
        "expanded from one": x[0, 0].expand(x.shape),
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "apart": torch.stack((x, x.roll(1)), -1)[..., 0],
        "between others": torch.cat((x, x), 1)[:, 1 : 1 + x.shape[1]],
    }


def moved(given: dict[str, Any], dim: int) -> dict[str, Any]:
    """The same call with the vocabulary at `dim`. A packed mask has its words last all the same."""
    found = given | {"dim": dim, "logits": given["logits"].movedim(-1, dim).contiguous()}
    mask = given.get("mask")
    if mask is not None and mask.dim() == 3 and mask.dtype != torch.int32:
        found["mask"] = mask.movedim(-1, dim)
    return found


@pytest.mark.parametrize("name", functions("broadcast"))
def test_what_broadcasts(backend, name):
    # The reference takes few rows and many alike.
    cases = (FEW,) if backend.name == "reference" else (FEW, MANY)
    check_what_broadcasts(functools.partial(call, backend=backend), name, cases)


def check_what_broadcasts(
    run: Callable[[str, dict[str, Any]], list[Tensor]], name: str, cases: Sequence[Case] = (FEW, MANY), only: str = ""
) -> None:
    """Every argument of which there is one number a row or a token, in each form, alone and with all others; other dimensions."""
    for rows in cases:
        all_calls = dict(calls(name, "broadcast", rows))
        options = only.split() or arguments(name, "broadcast")
        for option, base in itertools.product(options, ("plain", "all")):
            for label, value in argument(name, option).values(rows).items():
                for form, cut in broadcastable(value).items() if isinstance(value, Tensor) else ():
                    told = f"{name} of {rows.lead}, {base} with {option}={label} {form}"
                    whole = {option: cut.expand(value.shape).contiguous()}
                    got = run(name, behind_lengths(all_calls[base] | {option: cut}))
                    assert_close(got, exact(name, all_calls[base] | whole), told)
        for (told, given), dim in itertools.product(all_calls.items(), (0, 1, -2)) if "dim" in parameters(name) else ():
            got = [x.movedim(dim, -1) if x.dim() == 3 else x for x in run(name, moved(behind_lengths(given), dim))]
            assert_close(got, exact(name, given), f"{name} {told} dim={dim}")


def laid_out(x: Tensor) -> dict[str, Tensor]:
    """The same numbers in other layouts, and other numbers that lie in one place."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    wide[..., 3:-2] = x
    found = {"contiguous": x, "sliced": wide[..., 3:-2], "apart": torch.stack((x, -x), -1)[..., 0]}
    for dim in range(x.dim()):
        found[f"expanded along {dim}"] = x.narrow(dim, 1, 1).expand(x.shape)
        if dim:
            found[f"transposed {dim}"] = x.transpose(0, dim).contiguous().transpose(0, dim)
    return found


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", functions("strides"))
def test_strides_of_what_is_multiplied(native, name):
    check_strides(functools.partial(call, backend=native), name)


def check_strides(run: Callable[[str, dict[str, Any]], list[Tensor]], name: str) -> None:
    """By the native kernel of few rows and by the library: each operand in each layout, beside others that are contiguous or not."""
    for rows, other, dtype in (
        (FEW, "contiguous", torch.float32),
        (FEW, "apart", torch.bfloat16),
        (MANY, "sliced", torch.float32),
        (MANY, "contiguous", torch.float16),
    ):
        given = dict(calls(name, "strides", rows))["all"]
        operands = [x for x in LEARNED if x in given]
        given |= {x: laid_out(given[x].to(dtype))[other] for x in operands}
        for operand in operands:
            for form, laid in laid_out(given[operand].contiguous()).items():
                live = with_gradients(given | {operand: laid}, *operands)
                plain = with_gradients({x: y.contiguous() if x in operands else y for x, y in live.items()}, *operands)
                got, want = run(name, live), exact(name, plain)
                told = f"{name} of {rows.lead}, {operand} {form}, the others {other}"
                assert_close(got, want, told)
                if dtype is torch.float32 and any(x.requires_grad for x in got):
                    assert_close(
                        gradients(got, live, *operands), gradients(want, plain, *operands), f"{told}, gradient"
                    )

# SPDX-License-Identifier: Apache-2.0
"""Calls that native code serves from the arguments to the result: the same results, and what it must leave to others."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor

import fused_topk
from fused_topk import TopK
from fused_topk.functional import full_rows, row_topk, short_calls
from oracle import assert_same
from rows import random_logits

pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__") or short_calls._calls is None,
    reason="tensors of torch before 2.10 have no C interface",
)


def served(entry: str, logits: Tensor, *args, **kwargs) -> object:
    """The result, if native code serves the call by itself, else None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_topk, "_row", lambda *arguments: None)
        patch.setattr(full_rows, "_values", lambda *arguments: None)
        patch.setattr(full_rows, "_planned", lambda *arguments: None)
        patch.setattr(full_rows, "_checked", lambda *arguments: (None, None, None))
        patch.setattr(full_rows, "_run", lambda *arguments: None)
        return getattr(fused_topk, entry)(logits, *args, **kwargs)


def options(rows: int, vocab_size: int) -> dict[str, dict[str, object]]:
    generator = torch.Generator().manual_seed(rows)
    mask = torch.rand(rows, vocab_size, generator=generator) < 0.7
    words = torch.randint(-(2**31), 2**31 - 1, (rows, (vocab_size + 31) // 32), generator=generator).int()
    temperature = torch.rand(rows, generator=generator) + 0.5
    return {
        "plain": {},
        "number": {"temperature": 0.7},
        "whole number": {"temperature": 2},
        "of each row": {"temperature": temperature},
        "of all rows": {"temperature": temperature[:1]},
        "bools": {"mask": mask},
        "bools of all rows": {"mask": mask[0]},
        "words": {"mask": words},
        "both": {"mask": mask, "temperature": temperature, "normalize": "topk"},
    }


KINDS = tuple(options(1, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab_size", "k"), [(1, 128, 8), (5, 40, 3), (5, 300, 9)])
def test_topk_is_that_of_the_longer_way(cpu, kind, dtype, rows, vocab_size, k):
    logits = random_logits(rows, vocab_size, dtype=dtype)
    given = options(rows, vocab_size)[kind]
    temperature, mask, normalize = given.get("temperature"), given.get("mask"), given.get("normalize", "allowed")
    for entry, values in (("softmax_topk", "softmax"), ("log_softmax_topk", "log_softmax")):
        want = row_topk._row(values, logits, k, -1, temperature, mask, normalize, None, None)
        got = served(entry, logits, k, **given)
        assert type(got) is TopK
        assert_same(got, want)
        for index_dtype in (torch.int64, torch.int32):
            out = (torch.empty(rows, k), torch.empty(rows, k, dtype=index_dtype), torch.empty(rows))
            got = served(entry, logits, k, out=out, **given)
            assert type(got) is TopK and all(x is y for x, y in zip(got, out))
            assert_same(got._replace(indices=got.indices.long()), want)
            out = TopK(*out)
            assert served(entry, logits, k, out=out, **given) is out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 128), (7, 40), (3, 5000)])
def test_full_rows_are_those_of_the_longer_way(cpu, dtype, rows, vocab_size):
    logits = random_logits(rows, vocab_size, dtype=dtype)
    for temperature in (None, torch.rand(rows) + 0.5, torch.tensor(0.7)):
        for entry, wanted in (("softmax", torch.float32), ("log_softmax", None), ("logsumexp", None)):
            given = {"temperature": temperature} | ({"dtype": wanted} if wanted else {})
            want = getattr(fused_topk, entry)(logits, **given)
            got = served(entry, logits, **given)
            assert got.dtype is want.dtype and torch.equal(got, want)
            assert got.data_ptr() != want.data_ptr()


def test_what_differs_from_a_kept_call_is_not_served_by_it(cpu):
    logits = random_logits(4, 50)
    fused_topk.softmax_topk(logits, 5)
    assert served("softmax_topk", logits, 5) is not None
    assert served("softmax_topk", logits, 5, 1) is not None  # the last dimension by another name
    others = {
        "k": (logits, 6),
        "rows": (logits[:3], 5),
        "strides": (logits.repeat(1, 2)[:, :50], 5),
        "dtype": (logits.half(), 5),
        "leading dimensions": (logits[None], 5),
        "dim": (logits, 4, 0),
        "kind of k": (logits, True),
        "float64": (logits.double(), 5),
    }
    assert {name for name, arguments in others.items() if served("softmax_topk", *arguments) is not None} == set()
    for given in ({"normalize": "all"}, {"backend": "reference"}, {"temperature": 0.5}, {"temperature": True}):
        assert served("softmax_topk", logits, 5, **given) is None
    assert served("log_softmax_topk", logits, 5) is None
    assert served("softmax", logits) is None


class Subclass(Tensor):
    pass


def test_what_torch_must_see_is_not_served(cpu):
    logits, temperature = random_logits(4, 50), torch.ones(4)
    call = lambda x=logits, t=temperature: served("softmax_topk", x, 5, temperature=t)  # noqa: E731
    fused_topk.softmax_topk(logits, 5, temperature=temperature)
    assert call() is not None
    assert call(logits.as_subclass(Subclass)) is None
    assert call(logits.clone().requires_grad_()) is None
    with torch.no_grad():
        assert call(logits.clone().requires_grad_()) is not None
        assert call(t=temperature.clone().requires_grad_()) is None
    with torch.inference_mode():
        assert call() is not None
    assert call(logits._neg_view()) is None and call(t=temperature._neg_view()) is None
    with torch.autograd.forward_ad.dual_level():
        assert call() is None
    with torch._subclasses.FakeTensorMode() as mode:
        assert call() is None
    assert call(mode.from_tensor(logits)) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(served("softmax_topk", row, 5)) or row)(logits[None])
    torch.func.functionalize(lambda rows: seen.append(call(rows)) or rows)(logits)
    torch.func.vmap(lambda row: seen.append(call()) or row)(logits)
    torch.jit.trace(lambda rows: seen.append(call(rows)) or rows, logits, check_trace=False)
    assert seen == [None] * 4


def test_contents_are_looked_at_in_each_call(cpu):
    logits, temperature = random_logits(4, 50), torch.ones(4)
    fused_topk.softmax_topk(logits, 5, temperature=temperature)
    fused_topk.softmax(logits, temperature=temperature)
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 1e-39):
        temperature[3] = wrong
        for entry, arguments in (("softmax_topk", (5,)), ("softmax", ())):
            assert served(entry, logits, *arguments, temperature=temperature) is None
            with pytest.raises(ValueError, match="`temperature` must be positive and finite in every row"):
                getattr(fused_topk, entry)(logits, *arguments, temperature=temperature)


def test_out_that_may_be_wrong_is_left_to_the_checks(cpu):
    logits = random_logits(4, 50)
    out = fused_topk.softmax_topk(logits, 5)
    assert served("softmax_topk", logits, 5, out=out) is out
    buffer = torch.empty(100)
    wrong = {
        "shape": out._replace(values=torch.empty(5, 4)),
        "leading dimensions": out._replace(logsumexp=torch.empty(4, 1)),
        "dtype": out._replace(values=torch.empty(4, 5, dtype=torch.float16)),
        "dtype of indices": out._replace(indices=torch.empty(4, 5)),
        "strides": out._replace(values=torch.empty(5, 4).T),
        "an input": out._replace(values=logits.view(-1)[:20].view(4, 5)),
        "each other": out._replace(values=buffer[:20].view(4, 5), logsumexp=buffer[19:23]),
        "gradient": out._replace(values=torch.empty(4, 5, requires_grad=True)),
        "subclass": out._replace(values=out.values.as_subclass(Subclass)),
        "list": list(out),
        "two": out[:2],
    }
    assert {name for name, given in wrong.items() if served("softmax_topk", logits, 5, out=given) is not None} == set()
    beside = out._replace(values=buffer[:20].view(4, 5), logsumexp=buffer[20:24])
    assert served("softmax_topk", logits, 5, out=beside) is beside


def test_threads_get_their_own_results(cpu):
    """More layouts than there are places for, at once."""
    errors = []

    def work(seed):
        for step in range(300):
            logits = random_logits(2, 20 + step % 60, seed=seed)
            want = torch.softmax(logits, -1)
            got = fused_topk.softmax_topk(logits, 1 + (seed + step) % 8)
            if not torch.allclose(got.values, want.gather(-1, got.indices)):
                errors.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_results_are_tensors_like_others(cpu):
    logits = random_logits(2, 30)
    for _ in range(2):
        result = fused_topk.softmax_topk(logits, 4)
    assert copy.deepcopy(result)._fields == TopK._fields
    assert all(x.is_contiguous() and not x.requires_grad and x.untyped_storage().resizable() for x in result)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in result)


def test_calls_in_a_mode_that_changes_results_spoil_no_later_one(cpu, monkeypatch):
    class Other(Tensor):
        pass

    class Changing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(Other) if type(found) is Tensor else found

    monkeypatch.setattr(short_calls, "_memory", {})
    for vocab_size in (13, 11):
        logits = random_logits(4, vocab_size)
        want = fused_topk.topk(logits.double(), 3)
        if vocab_size == 13:
            with Changing():
                assert torch.equal(fused_topk.topk(logits, 3).indices, want.indices)
        for _ in range(2):
            found = fused_topk.topk(logits, 3)
            assert type(found.values) is Tensor and torch.equal(found.indices, want.indices)


def test_calls_where_others_have_replaced_functions_of_torch(cpu, monkeypatch):
    """As accelerate's init_empty_weights does."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **{**kwargs, "device": "meta"}))
    logits = random_logits(4, 17)
    for _ in range(2):
        found = fused_topk.topk(logits, 3)
        assert found.values.is_cpu and torch.equal(found.values, logits.topk(3).values)

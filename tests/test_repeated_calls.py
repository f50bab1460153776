# SPDX-License-Identifier: Apache-2.0
"""A call whose plan is kept from an earlier one: what differs must be seen, and what each call must look at anew."""

import copy
import functools
import threading

import pytest
import torch
from torch import Tensor

import fused_topk
from fused_topk import TopK
from fused_topk.row_arguments import plain_rows
from oracle import assert_same, check
from rows import random_logits


class Subclass(Tensor):
    pass


def variants(rows: int, vocab_size: int) -> dict[str, dict[str, object]]:
    """Each optional argument alone, in each of its kinds, and several together."""
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
        "all": {"mask": mask, "normalize": "all"},
    }


@pytest.mark.parametrize("entry", ["softmax_topk", "log_softmax_topk"])
def test_a_call_that_differs_in_one_thing(backend, entry):
    """Each after each other, twice: none is served by another's plan, and the second gives the bits of the first."""
    rows, vocab_size = 5, 70
    shapes = {
        "rows": random_logits(rows, vocab_size, device=backend.device),
        "strides": random_logits(vocab_size, rows, device=backend.device).T,
        "dtype": random_logits(rows, vocab_size, dtype=torch.float16, device=backend.device),
    }
    first: dict[object, TopK] = {}
    for turn in range(2):
        for name, logits in shapes.items():
            for kind, settings in variants(rows, vocab_size).items():
                given = {key: x.to(backend.device) if isinstance(x, Tensor) else x for key, x in settings.items()}
                for k in (3, 9):
                    got = backend(entry, logits, k, **given)
                    if turn == 0:
                        check(backend, entry, logits, k, **given)
                        first[name, kind, k] = got
                    assert_same(got, first[name, kind, k])


def test_what_torch_must_see_is_no_plain_call(cpu):
    logits, temperature = random_logits(4, 50), torch.ones(4)
    call = lambda x=logits, t=temperature: plain_rows(x, t)  # noqa: E731
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
    torch.func.vmap(lambda row: seen.append(plain_rows(row)) or row)(logits[None])
    torch.func.functionalize(lambda rows: seen.append(call(rows)) or rows)(logits)
    torch.func.vmap(lambda row: seen.append(call()) or row)(logits)
    torch.jit.trace(lambda rows: seen.append(call(rows)) or rows, logits, check_trace=False)
    assert seen == [None] * 4


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


def test_calls_in_a_mode_that_changes_results_spoil_no_later_one(cpu):
    class Other(Tensor):
        pass

    class Changing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(Other) if type(found) is Tensor else found

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


def test_given_tokens_by_a_plan_and_without_one(backend):
    """Tensors that are broadcast, too. Logits that autograd watches are not served by a plan."""
    logits = random_logits(6, 70).view(2, 3, 70).to(backend.device)
    logits[0, 0, 5], logits[0, 1] = torch.nan, -torch.inf
    one, several = torch.tensor([[3, 69, 0], [-100, 5, 7]]), torch.arange(12).view(2, 3, 2) - 1
    settings = {
        **variants(3, 70),
        "a number without dimension": {"temperature": torch.tensor(0.5)},
        "lengths of the last dimension": {"lengths": torch.tensor([0, 4, 70])},
        "no token of one row": {"mask": torch.tensor([[True], [False], [True]]), "normalize": "all"},
    }
    for given in settings.values():
        if given.get("normalize") == "topk":
            continue
        given = {key: x.to(backend.device) if isinstance(x, Tensor) else x for key, x in given.items()}
        for tokens in (one.to(backend.device), several.to(backend.device), several.abs().to(backend.device)):
            for k in (0, 1, 4):
                call = functools.partial(backend, "token_logprobs", tokens=tokens, k=k, ranks=True, tail=True, **given)
                for planned, watched in zip(
                    flat(call(logits)), flat(call(logits.clone().requires_grad_())), strict=True
                ):
                    torch.testing.assert_close(planned, watched.detach(), equal_nan=True)


def flat(result):
    return [x for x in (*result[:-1], *(result.topk or ())) if x is not None]


def test_contents_are_looked_at_in_each_call(cpu):
    logits, tokens = random_logits(4, 50), torch.tensor([1, 2, -5, 49])
    top_p, top_k, lengths, scale = torch.full((4,), 0.5), torch.full((4,), 3), torch.full((4,), 50), torch.ones(4)
    softmax_topk = functools.partial(fused_topk.softmax_topk, logits, 5, temperature=scale)
    softmax = functools.partial(fused_topk.softmax, logits, temperature=scale)
    token_logprobs = functools.partial(fused_topk.token_logprobs, logits, tokens)
    sample = functools.partial(fused_topk.sample, logits, top_p=top_p, top_k=top_k, lengths=lengths, seed=1)
    token_logprobs(), sample(), softmax_topk(), softmax()
    of_scale = "`temperature` must satisfy .* in every row"
    for call, tensor, wrong, message in (
        (token_logprobs, tokens, 50, "`tokens` must be below the vocabulary size 50, got 50"),
        (sample, top_p, 1.5, "`top_p` must satisfy 0 <= top_p <= 1 in every row, got 1.5"),
        (sample, top_k, -2, "`top_k` must satisfy -1 <= top_k"),
        (sample, lengths, 51, "`lengths` must satisfy 0 <= lengths <= 50"),
        *((call, scale, wrong, of_scale) for call in (softmax_topk, softmax) for wrong in (0.0, torch.nan, 1e-39)),
    ):
        right = tensor[3].item()
        tensor[3] = wrong
        with pytest.raises(ValueError, match=message):
            call()
        tensor[3] = right
        call()

# SPDX-License-Identifier: Apache-2.0
"""linear_sample(): the draws of sample() from logits that are computed some rows at a time.

The sums of products of these heads are exact, whatever their order. So the logits are those of the whole product bit for bit,
and so must be the tokens.
"""

from __future__ import annotations

import functools

import pytest
import torch

import fused_topk
from fused_topk.layout import linear_pieces as layout
from fused_topk.operators import dispatch
from linear_heads import ALL_DTYPES, exact_head, exact_logits
from live_bytes import live_bytes
from oracle import DTYPES
from rows import INF, NAN, packed, random_mask
from test_sampling import SETTINGS, check_graph

# How many rows have their logits at once: all, or some of them, the last time fewer.
BLOCKS = [None, 1, 4]


def in_blocks(monkeypatch, rows: int | None) -> None:
    if rows is not None:
        monkeypatch.setattr(layout, "whole_rows", lambda total, *_: min(rows, total))


def check(got: fused_topk.Sample, want: fused_topk.Sample) -> None:
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=0, equal_nan=True)
    assert (got.topk is None) == (want.topk is None)
    if want.topk is not None:
        assert torch.equal(got.topk.indices, want.topk.indices)
        for name in ("values", "logsumexp"):
            of_both = (getattr(x.topk, name) for x in (got, want))
            torch.testing.assert_close(*of_both, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", BLOCKS)
@pytest.mark.parametrize("name", SETTINGS)
def test_draws_are_those_of_the_whole_logits(backend, monkeypatch, name, size, dtype):
    hidden, weight, bias = exact_head((9,), 24, 2003, dtype, backend.device)
    logits = exact_logits(hidden, weight, bias)
    in_blocks(monkeypatch, size)
    settings = {**SETTINGS[name], "num_samples": 5, "topk": 3, "logprobs": "kept" if name != "hot" else "model"}
    for names in ({"seed": 11}, {"seed": torch.arange(9, device=backend.device) + 40, "counter": 6}):
        got = backend("linear_sample", hidden, weight, bias, **settings, **names)
        assert got.logprobs.dtype == torch.float32
        check(got, backend("sample", logits, **settings, **names))


def test_float64_hidden_states_have_float64_log_probabilities(monkeypatch):
    hidden, weight, bias = exact_head(5, 24, 700, torch.float64)
    in_blocks(monkeypatch, 2)
    got = fused_topk.linear_sample(hidden, weight, bias, seed=3, top_p=0.9, topk=2)
    assert got.logprobs.dtype == got.topk.values.dtype == torch.float64
    check(got, fused_topk.sample(exact_logits(hidden, weight, bias), seed=3, top_p=0.9, topk=2))


@pytest.mark.parametrize("size", BLOCKS)
def test_shapes_masks_and_names(backend, monkeypatch, size):
    hidden, weight, bias = exact_head((3, 4), 8, 700, torch.float32, backend.device)
    logits = exact_logits(hidden, weight)
    mask = random_mask(12, 700, share=0.5).view(3, 4, 700).to(backend.device)
    mask[1, 2] = False
    in_blocks(monkeypatch, size)
    seed = torch.arange(12, device=backend.device).view(3, 4)
    settings = {"top_k": 40, "num_samples": 2, "topk": 2}
    for names in ({"seed": -3, "counter": seed}, {"seed": seed}, {"seed": seed[:1], "counter": 2**40}):
        for given in (None, mask, packed(mask), mask[0, 0], packed(mask[:1])):
            got = backend("linear_sample", hidden, weight, mask=given, **settings, **names)
            check(got, backend("sample", logits, mask=given, **settings, **names))
    # Rows that do not merge.
    for turned in (hidden.transpose(0, 1), torch.cat([hidden, hidden], 1)[:, :4], hidden[0], hidden[0, 0], hidden[:0]):
        got = backend("linear_sample", turned, weight, bias, seed=5, **settings)
        assert got.tokens.shape == (*turned.shape[:-1], 2)
        check(got, backend("sample", exact_logits(turned, weight, bias), seed=5, **settings))


@pytest.mark.parametrize("size", BLOCKS)
def test_parameters_of_each_row(backend, monkeypatch, size):
    names = list(SETTINGS)
    hidden, weight, bias = exact_head(len(names), 24, 2003, torch.float32, backend.device)
    settings = {
        name: torch.tensor([SETTINGS[each].get(name, default) for each in names], device=backend.device)
        for name, default in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0), ("top_k", 0))
    }
    settings["temperature"][3] = 0.0
    in_blocks(monkeypatch, size)
    got = backend("linear_sample", hidden, weight, bias, seed=2, num_samples=20, **settings)
    check(got, backend("sample", exact_logits(hidden, weight, bias), seed=2, num_samples=20, **settings))
    # Greedy.
    assert (got.tokens[3] == got.tokens[3, 0]).all()


@pytest.mark.parametrize("size", BLOCKS)
def test_special_rows(backend, monkeypatch, size):
    """NaN, +inf, -inf, only -inf, and nothing that is allowed."""
    hidden, weight, bias = exact_head(7, 4, 90, torch.float32, backend.device)
    hidden[1, 2] = NAN
    bias[5], bias[60:] = INF, -INF
    all_of_it = torch.full_like(bias, -INF)
    mask = torch.ones(7, 90, dtype=torch.bool, device=backend.device)
    mask[:5, 5] = False
    mask[3] = False
    in_blocks(monkeypatch, size)
    for of_all, given in ((bias, mask), (bias, None), (all_of_it, None)):
        logits = torch.nn.functional.linear(hidden, weight, of_all)
        for settings in ({}, {"top_k": 5}, {"top_p": 0.8, "temperature": 0.0}):
            for is_truncated in (False, True):
                call = {
                    "seed": 1,
                    "mask": given,
                    "logprobs": "kept" if is_truncated else "model",
                    "topk": 2,
                    **settings,
                }
                got = backend("linear_sample", hidden, weight, of_all, **call)
                check(got, backend("sample", logits, **call))
                assert got.logprobs.isnan().any()


def test_generators_are_advanced_as_by_sample(backend, monkeypatch):
    hidden, weight, _ = exact_head(7, 8, 700, torch.float32, backend.device)
    logits = exact_logits(hidden, weight)
    in_blocks(monkeypatch, 3)
    of_head, of_logits = (torch.Generator(backend.device).manual_seed(4) for _ in range(2))
    for _ in range(2):
        got = backend("linear_sample", hidden, weight, generator=of_head, num_samples=3)
        check(got, backend("sample", logits, generator=of_logits, num_samples=3))
    assert torch.equal(of_head.get_state(), of_logits.get_state())
    torch.manual_seed(4)
    first = backend("linear_sample", hidden, weight)
    torch.manual_seed(4)
    check(first, backend("sample", logits))


@pytest.mark.parametrize(
    ("rows", "vocab_size", "dtype", "settings"),
    [
        (300, 128256, "bf16", {}),
        (70, 128256, "bf16", {"backend": "reference", "top_p": 0.9, "mask": True, "logprobs": "kept"}),
        (40, 500000, "fp32", {"top_k": 50, "top_p": 0.9, "mask": True}),
        pytest.param(200, 128256, "fp32", {"top_p": 0.999, "topk": 2000}, marks=pytest.mark.exhaustive),
        pytest.param(50, 30000, "fp64", {"num_samples": 9000, "topk": 30000}, marks=pytest.mark.exhaustive),
    ],
    ids=["whole", "reference", "masked", "listed", "float64"],
)
def test_scratch_memory(monkeypatch, rows, vocab_size, dtype, settings):
    dtype = ALL_DTYPES[dtype]
    hidden, weight, bias = exact_head((2, rows), 2, vocab_size, dtype)
    # Rows that do not merge may be copied, and a mask that they share, but not all at once.
    hidden = hidden[:, : rows // 2]
    if "mask" in settings:
        settings = {**settings, "mask": torch.arange(vocab_size) % 3 > 0}
    # Past the dispatcher, which would show the mode the operator alone.
    monkeypatch.setattr(dispatch, "_OTHER_THREAD_KEYS", 0)
    with live_bytes() as live:
        result = fused_topk.linear_sample(hidden, weight, bias, seed=0, **settings)
    results = [result.tokens, result.logprobs, *(result.topk or ())]
    scratch = live.most - sum(x.nbytes for x in results)
    assert scratch <= 64 << 20
    # The counting sees the logits, and they are more than one row's.
    assert scratch > 2 * vocab_size * dtype.itemsize


def test_blocks_are_of_equal_rows_and_at_least_one():
    assert layout.whole_rows(8, 128256, 2, 0) == 8
    for rows, vocab_size, logit_bytes, row_bytes in (
        (8192, 128256, 2, 50_000),
        (131, 128256, 4, 0),
        (3, 30_000_000, 4, 9),
    ):
        size = layout.whole_rows(rows, vocab_size, logit_bytes, row_bytes)
        assert size == 1 or size * (vocab_size * logit_bytes + row_bytes) <= layout.SCRATCH_BYTES
        assert size * -(-rows // size) - rows < -(-rows // size)
    assert size == 1


def test_a_graph_draws_anew_at_each_replay(cuda, monkeypatch):
    hidden, weight, _ = exact_head(9, 32, 9001, torch.float32, "cuda")
    in_blocks(monkeypatch, 4)
    check_graph(functools.partial(cuda, "linear_sample", hidden, weight, top_p=0.99, num_samples=4), 3)


def test_no_transform_maps_over_it():
    def mapped(hidden):
        return fused_topk.linear_sample(hidden, torch.zeros(10, 4), seed=0).tokens

    with pytest.raises(RuntimeError, match="`linear_sample` must not be called under a transform"):
        torch.vmap(mapped)(torch.zeros(3, 2, 4))

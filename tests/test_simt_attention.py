# SPDX-License-Identifier: Apache-2.0
"""The kernel of csrc/attention/step_attention.cu on the emulated machine, compared with attention in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from attention_by_table import Case, attention, case, seen_by
from fused_topk.layout import attention_launch
from fused_topk.operators import attention as by_table
from simt import build
from simt.emulate import emulated
from simt.launch import SCHEDULES, Array

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.setattr(by_table.cuda, "multiprocessors", lambda index: 132)


def check(
    given: Case, *, scale=0.125, cap=0.0, window=0, sinks=None, keys_of_part: int = 0, multiprocessors=132, **how
) -> None:
    """keys_of_part: as many as that; 0: as many as the layout says. multiprocessors: few make blocks of several parts."""
    arrays = [Array(name, tensor, "input") for name, tensor in given._asdict().items() if tensor is not None]
    arrays += [Array("sinks", sinks, "input")] if sinks is not None else []
    with (
        emulated(arrays, **how) as outcomes,
        mock.patch.object(attention_launch, "_keys_of_part", lambda *_: keys_of_part)
        if keys_of_part
        else mock.MagicMock(),
    ):
        by_table._plan.cache_clear()
        with mock.patch.object(by_table.cuda, "multiprocessors", lambda index: multiprocessors):
            found = by_table.run(*given[:4], scale, cap, window, sinks)
    by_table._plan.cache_clear()
    outcomes[0].check()
    want = attention(*given[:3], seen_by(given, window), scale, cap, sinks)
    # Weights are rounded to 16 bits before the product, and so is the result: each an error of half a unit in the last place, of
    # weights that sum to 1 and values of up to 4.
    bound = 4 * torch.finfo(given.query.dtype).eps
    torch.testing.assert_close(found.double(), want, rtol=0, atol=bound)


DTYPES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, pytest.param(96, marks=pytest.mark.exhaustive), 128, pytest.param(192, marks=pytest.mark.exhaustive), 256])  # fmt: skip
def test_dims(dim, dtype):
    check(case(dim=dim, dtype=dtype), scale=dim**-0.5, schedule="random")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("beams", "groups", "prompt", "written", "room"),
    [(1, 1, 1, 1, 1), (1, 4, 70, 3, 3), (4, 4, 33, 9, 16), (3, 7, 31, 4, 4), (10, 7, 40, 2, 4), (2, 20, 64, 1, 2)],
)
def test_shapes(schedule, beams, groups, prompt, written, room):
    given = case(beams=beams, groups=groups, prompt=prompt, written=written, room=room, seed=beams)
    check(given, schedule=schedule, seed=groups, keys_of_part=(0, 16, 32)[beams % 3], multiprocessors=groups)


def test_windows_caps_and_sinks():
    given = case(beams=4, prompt=50, written=6)
    sinks = torch.tensor([0.5, -3.0, 4.0, -torch.inf]).bfloat16()
    for window in (1, 3, 6, 7, 20, 100):
        check(given, window=window, keys_of_part=16, multiprocessors=window % 3 + 1)
    check(given, cap=5.0)
    check(given, sinks=sinks, cap=2.0, window=9)


def test_stages_and_parts_of_long_texts():
    """Of one warp, and of four warps with rows of their own, which share keys."""
    few, many = case(beams=4, prompt=150, written=6), case(batch=1, beams=10, groups=7, prompt=248, written=2, room=2)
    # The stage from key 144 on has no padding. So without a cap it is taken as a whole. The next one is so in its first half alone.
    for given, options in ((few, {"window": 7}), (many, {"cap": 1.0}), (many, {}), (many, {"scale": -20.0})):
        check(given, **options, keys_of_part=144, multiprocessors=1000, schedule="random")


def test_layouts():
    """Tensors with strides of their own, as views of a cache and of projections have."""
    given = case(beams=2)
    query = torch.cat([given.query, given.query], -1)[..., :64]
    key, value = (torch.cat([each, each], 2)[:, :, : given.key.shape[2]] for each in (given.key, given.value))
    check(given._replace(query=query, key=key.transpose(1, 2).contiguous().transpose(1, 2), value=value))


def test_a_text_has_the_same_bits_in_every_batch(monkeypatch):
    given = case(batch=3, beams=2)
    arrays = [Array(name, tensor, "input") for name, tensor in given._asdict().items()]
    monkeypatch.setattr(attention_launch, "_keys_of_part", lambda *_: 16)
    with emulated(arrays, is_public=True):
        # Blocks with many parts, and with one.
        monkeypatch.setattr(by_table.cuda, "multiprocessors", lambda index: 1)
        whole = by_table.run(*given[:4], 0.125)
        monkeypatch.setattr(by_table.cuda, "multiprocessors", lambda index: 132)
        alone = by_table.run(given.query[2:4], *(each[1:2] for each in given[1:4]), 0.125)
    assert torch.equal(whole[2:4], alone)

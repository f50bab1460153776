# SPDX-License-Identifier: Apache-2.0
"""Blocks, enable() and single calls of one model that overlap in threads and tasks: each gets what it asks for, and the
model is as it was afterwards."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch

from decoding import OPTIONS, inputs_for, one_thread, own_model, run, stats  # noqa: F401
from fused_topk.generation import disable, enable, fused_decoding
from whole_steps import traced_only  # noqa: F401

STEPS = OPTIONS["max_new_tokens"]
THREADS = 8


@contextmanager
def left_as_it_was(model):
    """The attributes of the model and its forward hooks are the same objects after it as before."""

    def state():
        return dict(model.__dict__), dict(model._forward_hooks)

    # What whole steps of other tests have left.
    disable(model)
    before = state()
    yield
    # The steps that are kept for the next block.
    disable(model)
    after = state()
    assert [each.keys() for each in after] == [each.keys() for each in before]
    assert all(each[name] is value for each, old in zip(after, before, strict=True) for name, value in old.items())


def decode(model, **options):
    with torch.no_grad():
        return model.generate(**inputs_for(model), **{**OPTIONS, **options})


@pytest.fixture
def expected(model):
    found = decode(model)
    stats(reset=True)
    return found


def test_blocks_left_in_the_order_of_their_entry(model, expected):
    with left_as_it_was(model):
        first, second = (
            fused_decoding(model, topk_per_step=2),
            fused_decoding(model, topk_per_step=3),
        )
        first_given, second_given = first.__enter__(), second.__enter__()
        assert torch.equal(decode(model), expected)
        first.__exit__(None, None, None)
        assert [step.values.shape[1] for step in second_given.topk] == [3] * STEPS
        assert first_given.topk == []
        second_given.topk.clear()
        assert torch.equal(decode(model), expected)
        assert len(second_given.topk) == STEPS
        second.__exit__(None, None, None)
    assert stats(reset=True)[:3] == (2 * STEPS, 0, {})
    assert run(model)[1][:3] == (0, 0, {})


def test_a_call_that_fails_leaves_no_trace(model, expected):
    class Failure(Exception):
        pass

    def fail(*args):
        raise Failure

    with left_as_it_was(model):
        with pytest.raises(Failure), fused_decoding(model):
            decode(model, stopping_criteria=[fail])
        with fused_decoding(model):
            with pytest.raises(Failure):
                decode(model, prefix_allowed_tokens_fn=fail)
            assert torch.equal(decode(model), expected)


def test_a_task_that_outlives_its_block_is_not_in_it(model):
    async def both():
        async def later():
            await ended.wait()
            return run(model)[1]

        ended = asyncio.Event()
        with fused_decoding(model):
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
        ended.set()
        assert (await task)[:3] == (0, 0, {})

    asyncio.run(both())


@pytest.mark.parametrize("how", ["block", "disable"])
def test_a_call_that_outlives_what_asked_for_it_stays_fused(model, expected, how):
    is_running, may_go_on = threading.Event(), threading.Event()

    class Waits:
        def put(self, value):
            is_running.set()
            assert may_go_on.wait(60)

        def end(self):
            pass

    def work():
        with torch.no_grad():
            return model.generate(
                **{name: each[:1] for name, each in inputs_for(model).items()}, **OPTIONS, streamer=Waits()
            )

    with left_as_it_was(model), ThreadPoolExecutor(1) as pool:
        if how == "block":
            with fused_decoding(model):
                found = pool.submit(work)
                assert is_running.wait(60)
        else:
            enable(model)
            found = pool.submit(work)
            assert is_running.wait(60)
            disable(model)
        may_go_on.set()
        assert torch.equal(found.result(), expected[:1])
        assert stats(reset=True)[:3] == (STEPS, 0, {})


def test_enable_and_disable_within_a_block_hold_after_it(model):
    with left_as_it_was(model):
        with fused_decoding(model):
            enable(model)
        assert run(model)[1][:3] == (STEPS, 0, {})
        with fused_decoding(model):
            disable(model)
            assert run(model)[1][:3] == (STEPS, 0, {}), "the block goes on"
    assert run(model)[1][:3] == (0, 0, {})


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving_leaves_the_model_as_it_was(model, expected, seed):
    """In half of them the model is enabled throughout, so that every call is counted; in the others plain calls may be."""
    is_enabled = seed % 2 == 0
    num_counted, num_calls = [0] * THREADS, [0] * THREADS
    start = threading.Barrier(THREADS, timeout=60)

    def call(worker, is_asked_for, **options):
        assert torch.equal(decode(model, **options), expected)
        num_calls[worker] += 1
        num_counted[worker] += is_asked_for

    def in_block(worker, chance):
        with ExitStack() as stack:
            blocks = []
            for k in chance.sample(range(1, 5), 2):
                blocks.append((k, stack.enter_context(fused_decoding(model, topk_per_step=k))))
                call(worker, True)
                k, given = blocks[-1]
                assert [step.values.shape[1] for step in given.topk] == [k] * STEPS
            # The innermost has the record, the other keeps its own.
            assert [len(given.topk) for _, given in blocks] == [STEPS, STEPS]

    def in_tasks(worker, chance):
        async def one():
            with fused_decoding(model, topk_per_step=1) as given:
                await asyncio.sleep(0)
                call(worker, True)
                assert len(given.topk) == STEPS

        async def both():
            await asyncio.gather(one(), one())

        asyncio.run(both())

    actions = [
        lambda worker, chance: call(worker, is_enabled),
        lambda worker, chance: enable(model),
        in_block,
        in_tasks,
    ]
    if not is_enabled:
        actions.append(lambda worker, chance: disable(model))

    def work(worker):
        chance = random.Random(f"{seed} {worker}")
        start.wait()
        for _ in range(4):
            chance.choice(actions)(worker, chance)

    with left_as_it_was(model):
        if is_enabled:
            enable(model)
        with ThreadPoolExecutor(THREADS) as pool:
            for each in [pool.submit(work, worker) for worker in range(THREADS)]:
                each.result()
        disable(model)
    steps = stats(reset=True)
    assert steps.reasons == {} and steps.stock == 0
    assert STEPS * sum(num_counted) <= steps.whole <= STEPS * sum(num_calls)
    assert run(model)[1][:3] == (0, 0, {})
    assert torch.equal(decode(model), expected)


def test_a_block_does_not_change_the_options_of_other_threads(model, traced, caplog):
    enable(model)
    with fused_decoding(model, compile=True, topk_per_step=2) as block, ThreadPoolExecutor(1) as pool:
        pool.submit(decode, model, do_sample=True).result()
        assert stats(reset=True)[:3] == (STEPS, 0, {})
        assert not block.topk and not caplog.messages
        decode(model)
        assert len(block.topk) == STEPS and "was compiled" in caplog.text

# SPDX-License-Identifier: Apache-2.0
"""warm_up() readies exactly the kernels that the calls then ask for, and GPUs do not wait for each other's compilers."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch

import fused_topk
from fused_topk import operators
from fused_topk.backends import cuda
from fused_topk.cuda_runtime import driver, tickets
from fused_topk.layout import launch
from fused_topk.problem import FullRowProblem, RankProblem, Sample, SampleProblem, TopkProblem
from fused_topk.rows import LogitRows
from gpu_stand_in import StandInGpus
from oracle import problem_of, start, start_full_rows
from simt.emulate import recorded
from simt.row_topk import empty_result

# Deadlocked, a test fails after as long.
PATIENCE = 60


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(tmp_path / "kernels"))
    caches = (cuda.topk_choice, operators.full_rows.choice_on, cuda.cache_bytes)
    for cache in caches:
        cache.cache_clear()
    yield StandInGpus(monkeypatch)
    for cache in (*caches, driver._gpu_problem):
        cache.cache_clear()


def compiled(gpus):
    return {kernel for kernel, _ in gpus.compiled}


def asked_by(function, shape, k, dtype, mask=None, normalize="allowed"):
    """The kernels that a call asks for."""
    logits = torch.zeros(shape, dtype=dtype)
    with recorded() as names:
        if function in ("softmax", "log_softmax", "logsumexp"):
            out = torch.empty(shape[:-1]) if function == "logsumexp" else torch.empty_like(logits)
            start_full_rows(cuda, FullRowProblem(LogitRows(logits), function), out)
        elif function == "beam_topk":
            problem = problem_of("log_softmax_topk", logits, k, mask=mask, normalize=normalize)
            scores = torch.zeros(shape[:2])
            start(cuda, problem, empty_result(problem, scores), scores)
        else:
            problem = problem_of(function, logits, k, mask=mask, normalize=normalize)
            start(cuda, problem, empty_result(problem))
    return set(names)


SHAPES = [(1, 1000), (4000, 60), (2, 128256), (3, 50257), (300, 9001), (5, 400), (2, 3, 700), (77,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", ["softmax_topk", "topk", "softmax", "logsumexp"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(gpus, function, shape, dtype):
    wanted = set().union(*(asked_by(function, shape, k, dtype) for k in (1, 8, 60)))
    assert fused_topk.warm_up(shape, (1, 8, 60), functions=function, dtypes=dtype, device="cuda:1") == len(wanted)
    assert compiled(gpus) == wanted and {device for device, _ in driver._loaded} == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1000), (4000, 60), (3, 50257)], ids=str)
def test_draws(gpus, shape, dtype):
    def asked(top_k, row_top_k, top_p, mask, noise):
        out = Sample(torch.empty(shape[0], 1, dtype=torch.int64), torch.empty(shape[0], 1), None)
        filters = (top_k, row_top_k, top_p, None, 0.0, None)
        with recorded() as names:
            rows = LogitRows(torch.zeros(shape, dtype=dtype), mask=mask)
            problem = SampleProblem(rows, *filters, 0, None, 0, None, 1, 0, False, noise=noise)
            operators.sampling.prepare_cuda(problem, rows.logits.device)(problem, out)
        return set(names)

    of_rows, mask, noise = torch.full(shape[:1], 40), torch.ones(shape, dtype=torch.bool), torch.ones(shape)
    calls = ((0, None, 1.0), (0, None, 0.9), (900, None, 1.0), (0, of_rows, 0.9))
    wanted = set().union(
        *(asked(*call, hidden, given) for call in calls for hidden in (None, mask) for given in (None, noise))
    )
    options = {"functions": "sample", "dtypes": dtype, "mask": True, "device": 1}
    assert fused_topk.warm_up(shape, 900, **options) == len(wanted)
    assert compiled(gpus) == wanted


@pytest.mark.parametrize("normalize", ["allowed", "all", "topk"])
@pytest.mark.parametrize("function", ["log_softmax_topk", "topk", "beam_topk"])
def test_masks(gpus, function, normalize):
    if (function, normalize) == ("beam_topk", "topk"):
        pytest.skip("beams need a common measure")
    shape, dtype = (2, 3, 40_000), torch.float16
    masks = (None, torch.ones(shape, dtype=torch.bool), torch.ones(1250, dtype=torch.int32))
    # topk() has no `normalize`.
    over = "allowed" if function == "topk" else normalize
    wanted = set().union(*(asked_by(function, shape, 8, dtype, mask, over) for mask in masks))
    options = {"functions": function, "dtypes": dtype, "mask": True, "normalize": normalize}
    assert fused_topk.warm_up(shape, 8, **options, device=0) == len(wanted) == 2
    assert compiled(gpus) == wanted


@pytest.mark.parametrize("function", ["log_softmax_topk", "topk_state", "sample"])
def test_lengths(gpus, function):
    """One kernel more, which a call with lengths asks for; with a mask too it asks for the mask's."""
    shape, options = (3, 40_000), {"functions": function, "dtypes": torch.float16, "device": 0}
    without = fused_topk.warm_up(shape, 8, **options)
    plain = compiled(gpus)
    assert fused_topk.warm_up(shape, 8, **options, lengths=True) > without
    logits, lengths = torch.zeros(shape, dtype=torch.float16), torch.tensor([0, 7, 40_000])
    values = "log_softmax" if function == "log_softmax_topk" else "state"
    k = 8 if function != "sample" else launch.sample_list_length(40_000, 8)
    with recorded() as names:
        problem = TopkProblem(LogitRows(logits, lengths=lengths), k, values, "allowed")
        start(cuda, problem, empty_result(problem))
    assert names[0] in compiled(gpus) - plain


@pytest.mark.parametrize("function", ["token_logprobs", "sample"])
def test_ranks(gpus, function):
    """The ranks' kernel alone, beside those of the best token and of the k best."""
    shape, options = (3, 40_000), {"functions": function, "dtypes": torch.float16, "device": 0}
    fused_topk.warm_up(shape, 1025, **options)
    plain = compiled(gpus)
    if function == "token_logprobs":
        assert plain == {x for k in (1, 1025) for x in asked_by("log_softmax_topk", shape, k, torch.float16)}
    fused_topk.warm_up(shape, 1025, **options, ranks=True)
    logits, tokens = torch.zeros(shape, dtype=torch.float16), torch.zeros(3, 1, dtype=torch.int64)
    with recorded() as names, mock.patch.object(cuda, "multiprocessors", lambda device: 132):
        operators.ranks.on_cuda(RankProblem(LogitRows(logits), tokens, True), torch.empty_like(tokens))
    assert compiled(gpus) - plain == set(names)


def test_whole_rows_with_lengths(gpus):
    logits, lengths = torch.zeros(3, 40_000), torch.tensor([0, 7, 40_000])
    fused_topk.warm_up(logits.shape, functions="softmax", dtypes=torch.float32, lengths=True, device=0)
    with recorded() as names:
        start_full_rows(cuda, FullRowProblem(LogitRows(logits, lengths=lengths), "softmax"), torch.empty_like(logits))
    assert names[0] in compiled(gpus)


def test_several_at_once_and_again(gpus):
    shapes = [(rows, 32_000) for rows in (1, 8, 64, 512)]
    kinds = {"functions": ["softmax_topk", "log_softmax"], "dtypes": [torch.float32, torch.bfloat16]}
    ready = fused_topk.warm_up(shapes, [1, 50], **kinds, device=torch.device("cuda", 0))
    assert ready == len(gpus.compiled) == len(compiled(gpus)) > 4
    loads = len(gpus.loaded)
    assert fused_topk.warm_up(shapes, [1, 50], **kinds) == ready and len(gpus.loaded) == loads
    gpus.restart()
    assert fused_topk.warm_up(shapes, [1, 50], **kinds) == ready and gpus.compiled == []


def test_after_it_a_call_neither_loads_nor_waits(gpus, monkeypatch):
    fused_topk.warm_up((2, 128256), 8, dtypes=torch.float32, device=0)
    compilations, loads, waits = (len(x) for x in (gpus.compiled, gpus.loaded, gpus.synchronized))
    assert compilations == loads == waits == 1
    launches = []
    monkeypatch.setattr(driver, "call", lambda *arguments: launches.append(arguments))
    monkeypatch.setattr(tickets, "zeroed", lambda device, count: 0)
    problem = problem_of("softmax_topk", torch.zeros(2, 128256), 8)
    start(cuda, problem, empty_result(problem))
    assert len(launches) == 1
    assert (len(gpus.compiled), len(gpus.loaded), len(gpus.synchronized)) == (1, 1, 1)


def test_calls_without_kernels_need_none(gpus):
    assert fused_topk.warm_up((2, 1000), 8, device="cpu") == 0
    assert fused_topk.warm_up((2, 1000), 8, dtypes=torch.float64) == 0
    assert fused_topk.warm_up((2, 10_000), 5000) == 0
    assert fused_topk.warm_up((0, 1000), 5) == 0
    assert fused_topk.warm_up((0, 1000), functions="softmax") == 0
    gpus.capability[0] = (7, 0)
    assert fused_topk.warm_up((2, 1000), 8, device=0) == 0
    assert gpus.compiled == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_do():
    assert fused_topk.warm_up((2, 1000), 8) == 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((2, 10),), {}, r"`k` must be given for softmax_topk"),
        (((2, 10), 0), {"functions": "topk_state"}, r"`k` must satisfy 1 <= k"),
        (((2, 10), -2), {"functions": "sample"}, r"`k` must satisfy -1 <= k for sample, got k=-2"),
        (((2, 10), 2), {"functions": ["topk", "linear_sample"]}, r"'linear_sample'; make one such call ahead"),
        (((2, 3, 10), 2), {"functions": "beam_topk", "normalize": "topk"}, r"`normalize` must be 'allowed' or 'all'"),
        (([()], 2), {}, r"`shapes` must have the vocabulary"),
        (((2, 10), 2), {"functions": "beam_topk"}, r"`shapes` must be \(batch, beams, V\)"),
        (((2, 10), 2), {"device": "nonsense"}, r"`device` must name a device of torch, got 'nonsense'; .*\"cuda:0\""),
        (((2, 10), 2), {"device": -1}, r"`device` must name a device of torch, got -1"),
    ],
)
def test_what_the_functions_would_refuse_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        fused_topk.warm_up(*arguments, **options)


def test_a_gpu_that_there_is_not_is_refused(gpus):
    with pytest.raises(ValueError, match=r"`device` must be a GPU that torch sees, which are 2, got cuda:9"):
        fused_topk.warm_up((2, 10), 2, device="cuda:9")


def test_numpy_integers_and_iterables_are_taken(gpus):
    shapes = ((rows, 1000) for rows in np.array([1, 8]))
    assert fused_topk.warm_up(shapes, np.int64(8)) == fused_topk.warm_up(np.array([[1, 1000], [8, 1000]]), [8]) > 0


def test_a_gpu_does_not_wait_for_the_compiler_of_another(monkeypatch):
    """Nor do launches of what is loaded, which need counters."""
    compiling, compiled = threading.Event(), threading.Event()

    def load(device, kernel):
        if device == 0:
            compiling.set()
            assert compiled.wait(PATIENCE)
        return f"{kernel} of {device}"

    monkeypatch.setattr(driver, "_loaded", {(0, "loaded"): "loaded of 0"})
    monkeypatch.setattr(driver, "_load", load)
    monkeypatch.setattr(tickets, "_is_capturing", lambda device: False)
    monkeypatch.setattr(tickets, "raw_stream", lambda device: 7)
    monkeypatch.setattr(tickets, "_stream_tickets", {})
    monkeypatch.setattr(tickets, "_spare_tickets", {})
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    with ThreadPoolExecutor(6) as pool:
        slow = [pool.submit(driver.function, 0, "kernel") for _ in range(2)]
        try:
            assert compiling.wait(PATIENCE)
            quick = [pool.submit(driver.function, *key) for key in ((1, "kernel"), (0, "loaded"))]
            assert [each.result(PATIENCE) for each in quick] == ["kernel of 1", "loaded of 0"]
            assert all(pool.submit(tickets.zeroed, device, 5).result(PATIENCE) for device in (0, 1))
            assert not any(each.done() for each in slow)
        finally:
            compiled.set()
        assert [each.result(PATIENCE) for each in slow] == ["kernel of 0"] * 2


@pytest.mark.parametrize("function", ["merge_states", "merge_topk", "topk_state"])
def test_states(gpus, function):
    """A merge has two kernels a dtype, a state that of its row."""
    ready = fused_topk.warm_up((3, 50), 100, functions=function, dtypes=torch.bfloat16, device="cuda:1")
    wanted = {launch.kernel(launch.MERGE, torch.bfloat16, warps) for warps in launch.MERGE_WARPS}
    if function == "topk_state":
        wanted = asked_by("topk", (3, 50), 50, torch.bfloat16)
    assert compiled(gpus) == wanted and ready == len(wanted)

# SPDX-License-Identifier: Apache-2.0
"""Citizenship of torch: operators, fake tensors, torch.compile, inference mode, threads."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fused_topk import TopK
from oracle import assert_same
from rows import random_logits, random_mask

ENTRIES = ("softmax_topk", "log_softmax_topk", "topk")


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_row_topk_compile(backend, entry, dynamic):
    """Without graph breaks, and for other shapes without a new graph where shapes are dynamic."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(logits, mask):
        values, *others = backend(entry, logits * 2, 5, mask=mask)
        return (values + 1, *others)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=count)
    shapes = [(2, 50), (3, 70), (4, 1030)] if dynamic else [(2, 50), (2, 50)]
    for rows, vocab_size in shapes:
        logits = random_logits(rows, vocab_size, device=backend.device)
        mask = random_mask(rows, vocab_size, device=backend.device)
        assert_same(compiled(logits, mask), step(logits, mask))
    assert len(graphs) == 1


@pytest.mark.parametrize("entry", [*ENTRIES, "beam_topk"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compile_forward_and_backward(native, entry, dynamic, compiler):
    if compiler == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler")
    torch._dynamo.reset()

    def step(logits, scores):
        arguments = (logits * 2, scores, 5) if entry == "beam_topk" else (logits * 2, 5)
        values, indices, *logsumexp = native(entry, *arguments)
        return (values.square().sum() + sum(x.sum() for x in logsumexp)), indices

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=compiler)
    for shape in ((2, 3, 50), (4, 3, 60)) if dynamic else ((2, 3, 50),):
        gradients = []
        for function in (step, compiled):
            logits = random_logits(*shape, device=native.device).requires_grad_()
            scores = random_logits(*shape[:2], device=native.device)
            loss, indices = function(logits, scores)
            loss.backward()
            gradients.append((loss.detach(), indices, logits.grad))
        for eager, of_compiled in zip(*gradients, strict=True):
            torch.testing.assert_close(of_compiled, eager, rtol=1e-5, atol=1e-5)


def test_row_topk_compile_with_out(backend):
    torch._dynamo.reset()
    logits = random_logits(3, 60, device=backend.device)
    want = backend("softmax_topk", logits, 5)
    out = TopK(*(torch.zeros_like(x) for x in want))

    def step(logits, out):
        backend("softmax_topk", logits, 5, out=out)
        return out[0] * 2

    doubled = torch.compile(step, fullgraph=True, backend="aot_eager")(logits, out)
    assert_same(out, want)
    assert torch.equal(doubled, want.values * 2)


def test_topk_compile_with_k_from_a_shape(native):
    """A k that is symbolic when shapes are dynamic."""
    torch._dynamo.reset()

    def step(logits, like):
        return native("topk", logits, like.shape[0])

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    logits = random_logits(3, 60, device=native.device)
    for k in (4, 9):
        like = torch.empty(k, device=native.device)
        assert_same(compiled(logits, like), step(logits, like))


def test_row_topk_keeps_the_number_of_threads(backend, threads):
    threads(2)
    backend("softmax_topk", random_logits(50, 5000, device=backend.device), 4)
    assert torch.get_num_threads() == 2


def test_row_topk_from_many_threads(native):
    """Callers share nothing that a neighbour could disturb."""
    shapes = [(1, 40000, 8), (3, 5003, 65), (40, 1000, 5), (2, 300, 300), (5, 128256, 20), (1, 100000, 600)]
    cases = [(random_logits(rows, v, device=native.device, seed=v), k) for rows, v, k in shapes]
    wants = [native("softmax_topk", logits, k) for logits, k in cases]

    def work(number: int) -> None:
        for turn in range(8):
            logits, k = cases[(number + turn) % len(cases)]
            assert_same(native("softmax_topk", logits, k), wants[(number + turn) % len(cases)])

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, number) for number in range(16)]:
            future.result()

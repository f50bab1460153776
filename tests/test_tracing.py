# SPDX-License-Identifier: Apache-2.0
"""What the package does while torch traces: in the thread that traces, and in all others meanwhile."""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fused_topk
from fused_topk.tracing import is_traced


@contextmanager
def another_thread_compiles():
    """A with block during which another thread is in torch.compile."""
    has_begun, may_end = threading.Event(), threading.Event()

    def backend(graph, inputs):
        has_begun.set()
        assert may_end.wait(60)
        return graph

    thread = threading.Thread(target=torch.compile(lambda x: x * 2, backend=backend), args=(torch.ones(3),))
    thread.start()
    try:
        assert has_begun.wait(60)
        yield
    finally:
        may_end.set()
        thread.join()


class Traced(torch.nn.Module):
    """Says in its result whether it is traced."""

    def forward(self, x):
        return x + (1 if is_traced() else 0)


def test_it_is_told_from_what_other_threads_do():
    assert not is_traced()
    with another_thread_compiles():
        assert not is_traced()
    x = torch.zeros(2)
    assert torch.compile(Traced(), backend="eager", fullgraph=True)(x)[0] == 1
    for strict in (True, False):
        assert torch.export.export(Traced(), (x,), strict=strict).module()(x)[0] == 1
    assert not is_traced()


def test_arguments_are_checked_while_another_thread_compiles():
    logits = torch.randn(2, 50)
    with another_thread_compiles():
        with pytest.raises(ValueError, match="temperature"):
            fused_topk.softmax_topk(logits, 3, temperature=torch.tensor([1.0, torch.nan]))
        with pytest.raises(ValueError, match="overlap"):
            fused_topk.topk(logits, 3, out=(logits[:, :3], torch.empty(2, 3, dtype=torch.int64)))
        with pytest.raises(ValueError, match="tokens"):
            fused_topk.linear_token_logprobs(logits, torch.randn(9, 50), torch.tensor([1, 9]))


def test_steps_are_fused_while_another_thread_compiles(monkeypatch, threads):
    threads(1)
    pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")
    from decoding import assert_whole
    from fused_topk.generation.whole_step import reasons
    from whole_steps import family

    # conftest.py does so where this module is imported before a test begins.
    monkeypatch.setattr(reasons, "FEW_LOGITS", 0)
    with another_thread_compiles():
        for beams in (1, 3):
            assert_whole(family("Llama"), num_beams=beams)


def test_no_other_place_asks_whether_torch_compiles():
    package = Path(fused_topk.__file__).parent
    asking = [path.relative_to(package) for path in package.rglob("*.py") if "_compiling" in path.read_text()]
    assert asking == [Path("tracing.py")]

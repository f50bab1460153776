# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: regimes, streams, graphs, devices, and tensors of more than 2^31 elements."""

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fused_topk
from choices import of_topk as alternatives
from fused_topk import TopK
from fused_topk.backends import cuda as kernels
from fused_topk.layout.topk_choice import MAX_K, choose
from oracle import DTYPES, assert_same, assert_topk, check, expected, problem_of, start
from rows import adversarial_rows, random_logits, random_mask

SPLIT = [(1, 128256, 8), (3, 50257, 64), (2, 300007, 300)]
CYCLES = 20_000_000


def empty_like(result: TopK) -> TopK:
    return TopK(*(torch.full_like(x, -1) for x in result))


def capture(function):
    """(graph, what the function returned): warmed up on a side stream first, as torch demands."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def gigabytes_free() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


# Which path ran.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "vocab_size", "k", "regime"),
    [
        (5000, 100, 5, "router rows"),
        (5000, 100, 9, "short rows"),
        (3, 400, 32, "warp per row"),
        (3, 400, 64, "block per row"),
        (6000, 3000, 5, "warp per row"),
        (1, 128256, 8, "split row"),
        (2, 40000, 2048, "split row"),
        (64, 128256, 50, "split row"),
    ],
)
def test_row_topk_regime(cuda, dtype, rows, vocab_size, k, regime):
    logits = random_logits(rows, vocab_size, dtype=DTYPES[dtype], device="cuda")
    choice = kernels.topk_choice(rows, vocab_size, k, logits.element_size(), 0)
    assert choice.regime == regime
    check(cuda, "log_softmax_topk", logits, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab_size", "k"),
    [(60, 7), (100, 8), (250, 5), (100, 20), (250, 32), (700, 20), (5003, 20), (5003, 300), (50257, 64), (50257, 2000)],
)
def test_row_topk_regimes_agree_bit_for_bit(cuda, dtype, vocab_size, k):
    """A row laid over the GPU in every way that its size allows."""
    rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
    logits = torch.stack(list(rows.values())).cuda()
    problem = problem_of("softmax_topk", logits, k)
    want = cuda("softmax_topk", logits, k)
    assert_topk(want, expected("softmax_topk", logits, k), logits, "softmax_topk", row_names=list(rows))
    few = choose(1, vocab_size, k, logits.element_size(), 132)
    many = choose(10**6, vocab_size, k, logits.element_size(), 132)
    some = choose(200, vocab_size, k, logits.element_size(), 132)
    choices = [many, some, *(few._replace(splits=splits) for splits in {1, 2, 3, few.splits} if splits <= few.splits)]
    choices.append(choose(1, vocab_size, k, logits.element_size(), 132, has_beams=True))
    choices += [choice for choice in alternatives(1, vocab_size, k, logits.element_size(), 132) if choice.lanes]
    for choice in choices:
        got = empty_like(want)
        start(kernels, problem, got, choice=choice)
        assert_same(got, want)


# Streams, threads and graphs.


@pytest.mark.parametrize(("rows", "vocab_size", "k"), [(4, 300, 5), *SPLIT], ids=str)
def test_row_topk_follows_the_current_stream(cuda, rows, vocab_size, k):
    """The logits appear on a side stream behind a long sleep: a launch on any other stream would read the old ones."""
    fresh = random_logits(rows, vocab_size, device="cuda")
    want = cuda("softmax_topk", fresh, k)
    logits = torch.zeros_like(fresh)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        logits.copy_(fresh)
        got = cuda("softmax_topk", logits, k)
        # And what follows on the stream sees the result.
        doubled = got.values * 2
    stream.synchronize()
    assert_same(got, want)
    assert torch.equal(doubled, want.values * 2)


def test_row_topk_does_not_wait_for_the_device(cuda):
    logits = random_logits(2, 128256, device="cuda")
    mask = random_mask(2, 128256, device="cuda")
    temperature = torch.ones(2, device="cuda")
    scores = torch.zeros(1, 2, device="cuda")

    def call() -> None:
        for backend in ("cuda", "reference"):
            fused_topk.softmax_topk(logits, 8, mask=mask, temperature=temperature, backend=backend)
            fused_topk.beam_topk(logits[None], scores, 8, mask=mask[None], backend=backend)

    call()
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * CYCLES)
    pending = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
        pending.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The sleep is still under way: nobody has waited for it.
    assert not pending.query()
    torch.cuda.synchronize()


def test_row_topk_on_several_streams_at_once(cuda):
    """A split row keeps counters between its blocks: every stream needs its own."""
    cases = [(random_logits(rows, v, device="cuda", seed=v), k) for rows, v, k in SPLIT]
    wants = [cuda("softmax_topk", logits, k) for logits, k in cases]
    torch.cuda.synchronize()
    results = []
    streams = [torch.cuda.Stream() for _ in range(6)]
    for turn in range(60):
        for number, stream in enumerate(streams):
            case = (turn + number) % len(cases)
            with torch.cuda.stream(stream):
                results.append((case, cuda("softmax_topk", *cases[case])))
    torch.cuda.synchronize()
    for case, got in results:
        assert_same(got, wants[case])


def test_row_topk_from_threads_with_their_own_streams(cuda):
    cases = [(random_logits(rows, v, device="cuda", seed=v), k) for rows, v, k in SPLIT]
    wants = [cuda("softmax_topk", logits, k) for logits, k in cases]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(30):
                case = (number + turn) % len(cases)
                got = cuda("softmax_topk", *cases[case])
                torch.cuda.current_stream().synchronize()
                assert_same(got, wants[case])

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, number) for number in range(6)]:
            future.result()


@pytest.mark.parametrize("backend_name", ["cuda", "reference"])
@pytest.mark.parametrize(("rows", "vocab_size", "k"), [(4, 300, 5), (500, 5003, 65), *SPLIT], ids=str)
def test_row_topk_graph(cuda, backend_name, rows, vocab_size, k):
    logits = random_logits(rows, vocab_size, device="cuda")
    graph, got = capture(lambda: fused_topk.softmax_topk(logits, k, backend=backend_name))
    for seed in range(4):
        logits.copy_(random_logits(rows, vocab_size, seed=seed))
        graph.replay()
        assert_topk(got, expected("softmax_topk", logits, k), logits, "softmax_topk")


def test_beam_topk_graph(cuda):
    logits, scores = random_logits(3, 4, 50257, device="cuda"), random_logits(3, 4, device="cuda")
    mask = random_mask(3, 4, 50257, device="cuda")
    graph, got = capture(lambda: fused_topk.beam_topk(logits, scores, 8, mask=mask))
    for seed in range(4):
        logits.copy_(random_logits(3, 4, 50257, seed=seed))
        scores.copy_(random_logits(3, 4, seed=seed + 100))
        graph.replay()
        assert_same(got, cuda("beam_topk", logits, scores, 8, mask=mask))


@pytest.mark.parametrize("entry", ["softmax_topk", "beam_topk"])
def test_two_graphs_replay_at_once(cuda, entry):
    """And eager calls on a third stream with them."""
    replays = 40
    logits = [random_logits(2, 3, 200003, device="cuda", seed=seed) for seed in range(3)]
    scores = torch.zeros(2, 3, device="cuda")

    def call(number: int) -> TopK:
        arguments = (scores, 20) if entry == "beam_topk" else (20,)
        return cuda(entry, logits[number], *arguments)

    wants = [call(number) for number in range(3)]
    captured = [capture(lambda number=number: call(number)) for number in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    eager, kept = [], [[], []]
    for _ in range(replays):
        for number, (graph, result) in enumerate(captured):
            with torch.cuda.stream(streams[number]):
                graph.replay()
                kept[number].append(TopK(*(x.clone() for x in result)))
        with torch.cuda.stream(streams[2]):
            eager.append(call(2))
    torch.cuda.synchronize()
    for number in range(2):
        for got in kept[number]:
            assert_same(got, wants[number])
    for got in eager:
        assert_same(got, wants[2])


def test_one_graph_of_several_calls_on_two_streams(cuda):
    """Branches of one captured graph run at the same time."""
    logits = [random_logits(2, 200003, device="cuda", seed=seed) for seed in range(2)]
    wants = [cuda("softmax_topk", x, 20) for x in logits]
    side = torch.cuda.Stream()

    def branches() -> list[TopK]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first = [cuda("softmax_topk", logits[0], 20) for _ in range(4)]
        second = [cuda("softmax_topk", logits[1], 20) for _ in range(4)]
        torch.cuda.current_stream().wait_stream(side)
        return first + second

    graph, results = capture(branches)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    for number, got in enumerate(results):
        assert_same(got, wants[number // 4])


# Memory.


def test_row_topk_does_not_read_what_others_left(cuda):
    """Memory of the allocator that is full of winning values, NaNs or counters that are not zero."""
    wants = [cuda("softmax_topk", random_logits(r, v, device="cuda"), k) for r, v, k in SPLIT]
    for leftover in (-1, 0, 1, 0x7F7FFFFF):
        for (rows, vocab_size, k), want in zip(SPLIT, wants, strict=True):
            logits = random_logits(rows, vocab_size, device="cuda")
            dirt = [
                torch.full((size,), leftover, dtype=torch.int32, device="cuda") for size in (2**8, 2**12, 2**18, 2**21)
            ]
            del dirt
            assert_same(cuda("softmax_topk", logits, k), want)


def test_row_topk_keeps_no_memory(cuda):
    """Repeated calls neither leak nor grow what they hold."""
    logits = random_logits(3, 128256, device="cuda")
    cuda("softmax_topk", logits, 20)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        cuda("softmax_topk", logits, 20)
    assert torch.cuda.memory_allocated() == before


def test_warm_up_leaves_no_waiting_to_the_first_call(cuda, tmp_path):
    """In a process of its own, which finds no kernel on disk."""
    code = f"""
        import torch, fused_topk
        from fused_topk.cuda_runtime import driver
        logits = torch.randn(2, 128256, device="cuda")
        assert fused_topk.warm_up(logits.shape, 8, dtypes=logits.dtype, mask=True) == 2
        driver._load = None
        torch.cuda.synchronize()
        torch.cuda._sleep({100 * CYCLES})
        pending = torch.cuda.Event()
        results = [fused_topk.softmax_topk(logits, 8, mask=mask) for mask in (None, torch.ones_like(logits, dtype=bool))]
        pending.record()
        # The sleep is still under way: nobody has waited for it.
        assert not pending.query()
        assert all(torch.equal(result.indices, logits.topk(8).indices) for result in results)
    """
    environment = {**os.environ, "FUSED_TOPK_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Sizes.


@pytest.mark.parametrize("k", [MAX_K - 1, MAX_K, MAX_K + 1, 30000])
def test_row_topk_around_the_native_limit(cuda, k):
    """Beyond it an automatic choice falls back with the same answer; an explicit one says what it cannot do."""
    logits = random_logits(2, 30000, dtype=torch.bfloat16, device="cuda")
    got = fused_topk.softmax_topk(logits, k)
    assert_topk(got, expected("softmax_topk", logits, k), logits, "softmax_topk")
    if k > MAX_K:
        with pytest.raises(ValueError, match=f"{MAX_K}.*{k}"):
            fused_topk.softmax_topk(logits, k, backend="cuda")
        with pytest.raises(ValueError, match=f"{MAX_K}.*{k}"):
            fused_topk.beam_topk(logits[None], torch.zeros(1, 2, device="cuda"), k, backend="cuda")


def test_row_topk_more_than_two_billion_elements(cuda):
    rows, vocab_size = 17_000, 128_256
    if gigabytes_free() < 16:
        pytest.skip("needs 16 GiB of GPU memory")
    logits = torch.empty(rows, vocab_size, dtype=torch.bfloat16, device="cuda").normal_()
    assert logits.numel() > 2**31
    got = cuda("log_softmax_topk", logits, 8)
    for part in (slice(0, 64), slice(16_700, 16_780), slice(-64, None)):
        want = expected("log_softmax_topk", logits[part], 8)
        assert_topk(TopK(*(x[part] for x in got)), want, logits[part], "log_softmax_topk")
    # Every row by its best token and its sum.
    best = torch.cat([part.amax(-1) for part in logits.split(1000)])
    assert torch.equal(best.float(), logits.gather(1, got.indices[:, :1]).squeeze(1).float())
    torch.testing.assert_close(got.values[:, 0] + got.logsumexp, best.float(), rtol=1e-5, atol=1e-5)


def test_row_topk_strides_of_more_than_two_billion_elements(cuda):
    """Few rows, far apart; and a bool mask that far apart too."""
    if gigabytes_free() < 24:
        pytest.skip("needs 24 GiB of GPU memory")
    stride, vocab_size = 1_500_000_001, 50_257
    buffer = torch.empty(2 * stride + vocab_size, dtype=torch.bfloat16, device="cuda")
    logits = buffer.as_strided((3, vocab_size), (stride, 1))
    logits.copy_(random_logits(3, vocab_size))
    check(cuda, "softmax_topk", logits, 8)
    flags = torch.empty(2 * stride + vocab_size, dtype=torch.bool, device="cuda")
    mask = flags.as_strided((3, vocab_size), (stride, 1))
    mask.copy_(random_mask(3, vocab_size))
    check(cuda, "softmax_topk", logits, 8, mask=mask)


@pytest.mark.parametrize("vocab_size", [2**24 + 1, 2**27 + 12345, 2**31 - 1])
def test_row_topk_longest_rows(cuda, vocab_size):
    if gigabytes_free() < 3 * vocab_size / 2**30 + 2:
        pytest.skip("needs more GPU memory")
    logits = torch.zeros(vocab_size, dtype=torch.bfloat16, device="cuda")
    logits[-1] = 2.0
    logits[vocab_size // 2] = 1.0
    got = cuda("log_softmax_topk", logits, 5)
    assert got.indices.tolist() == [vocab_size - 1, vocab_size // 2, 0, 1, 2]
    d = vocab_size - 2 + torch.e**1 + torch.e**2
    torch.testing.assert_close(
        got.logsumexp.double().cpu(), torch.tensor(d, dtype=torch.double).log(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("rows", [65_535, 65_536, 1_000_003])
def test_row_topk_many_rows(cuda, rows):
    """Beyond what the other dimensions of a grid allow."""
    logits = random_logits(rows, 40, device="cuda")
    check(cuda, "softmax_topk", logits, 3)


# Devices.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_row_topk_on_a_device_that_is_not_current(cuda):
    for rows, vocab_size, k in [(4, 300, 5), *SPLIT]:
        logits = random_logits(rows, vocab_size, device="cuda:1")
        assert torch.cuda.current_device() == 0
        got = check(cuda, "softmax_topk", logits, k)
        assert got.values.device == logits.device and torch.cuda.current_device() == 0
        assert_same(TopK(*(x.to("cuda:0") for x in got)), cuda("softmax_topk", logits.to("cuda:0"), k))
    with pytest.raises(ValueError, match="mask"):
        cuda("softmax_topk", logits, 2, mask=torch.ones(logits.shape[-1], dtype=torch.bool, device="cuda:0"))

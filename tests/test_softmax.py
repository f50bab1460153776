# SPDX-License-Identifier: Apache-2.0
"""softmax, log_softmax and logsumexp of full rows, against float64.

With u = 2^-24 and z = (x - m) / T, as in oracle.py: a log-probability may be off by u (7 |z| + 7 log V + 22), a
probability relatively by the same, logsumexp by u (5 |m / T| + 7 log V + 22). A result of 16 bits is rounded once more.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

import fused_topk
from choices import FULL_ROW_VARIANTS
from fused_topk.layout.full_row_choice import choose_full_row
from oracle import DTYPES, bits
from rows import adversarial_rows, also, layouts, random_logits, shifted
from test_cpu import INSTRUCTION_SETS, full_rows

VALUES = ("softmax", "log_softmax")
ENTRIES = (*VALUES, "logsumexp")
TORCH = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "logsumexp": torch.logsumexp}
U = 2.0**-24
# Where the CUDA kernels change hands, in elements of 4 bytes: a warp, 2 or 4 vectors a thread, a block's registers, its
# shared memory, that of a larger block, the whole GPU; and the blocks and parts of the CPU's.
EDGES = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 73728, 131072, 262144, 524288)


def expected(entry: str, logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """float64, by torch."""
    scale = temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    return TORCH[entry](logits.double() / scale, -1)


def check(backend, entry: str, logits: Tensor, *, row_names=None, **settings) -> Tensor:
    """Runs a function on a backend and compares the result with float64's; the vocabulary is last."""
    got = backend(entry, logits, **settings)
    temperature = (
        settings.get("temperature") or 1.0
        if not isinstance(settings.get("temperature"), Tensor)
        else settings["temperature"]
    )
    want = expected(entry, logits, temperature)
    scale = temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    assert got.shape == want.shape and got.device == logits.device and got.is_contiguous()
    log_v = math.log(logits.shape[-1])
    if entry == "logsumexp":
        assert got.dtype == torch.float32
        largest = logits.double().where(logits.isfinite(), 0.0).abs().amax(-1, keepdim=True)
        bound = (U * (5 * largest / scale + 7 * log_v + 22)).squeeze(-1)
    else:
        assert got.dtype == (settings.get("dtype") or logits.dtype)
        log_probs = expected("log_softmax", logits, temperature)
        # |z| <= |log-probability| + log V.
        bound = U * (7 * log_probs.abs() + 14 * log_v + 22)
        rounding = torch.finfo(got.dtype).eps / 2 if got.dtype != torch.float32 else 0.0
        if entry == "softmax":
            # The exponential is 0 below 2^-125 on the CPU, 2^-126 on a GPU; 16-bit results have fixed steps at their end.
            info = torch.finfo(got.dtype)
            fixed = max(info.smallest_normal * rounding, 2.0**-125)
            bound = (bound.clamp(max=1000) + rounding) * want + fixed
        else:
            bound = bound + rounding * want.abs()
    rounded = want.to(got.dtype).double()
    special = ~rounded.isfinite() | ~got.isfinite()
    same = (rounded == got) | (rounded.isnan() & got.isnan())
    wrong = torch.where(special, ~same, ~((got.double() - want).abs() <= bound))
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        name = f" ({row_names[place[0]]})" if row_names else ""
        raise AssertionError(
            f"{entry}: {int(wrong.sum())} wrong, first at {place}{name}: got {got[place].item()!r}, "
            f"want {want[place].item()!r}"
        )
    return got


@pytest.mark.sanitize
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("vocab_size", (1, 2, 7, 8, 31, 33, 100, 257, 1000, 4095, 5000))
def test_sizes(backend, entry, dtype, vocab_size):
    check(backend, entry, random_logits(3, vocab_size, dtype=dtype, device=backend.device))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("edge", [*EDGES[:-2], *also(*EDGES[-2:])])
def test_around_the_edges_of_the_regimes(native, edge, dtype):
    edge *= 4 // dtype.itemsize
    for vocab_size in (edge - 1, edge, edge + 4, edge + 1):
        logits = random_logits(2, vocab_size, dtype=dtype, device=native.device, seed=vocab_size)
        for entry in ENTRIES:
            check(native, entry, logits)


@pytest.mark.sanitize
@pytest.mark.parametrize("vocab_size", (300_000, *also(1_000_000, 1_000_003)))
def test_long_rows(native, vocab_size):
    """On an H200, eight owners of a million logits: three take a second row."""
    logits = random_logits(11, vocab_size, device=native.device)
    for entry in ENTRIES:
        check(native, entry, logits)


def test_single_vector(native):
    logits = random_logits(4_194_304, device=native.device) + 1e4
    for entry in ENTRIES:
        check(native, entry, logits)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("vocab_size", (40, 1001, 9000))
def test_adversarial_rows(backend, entry, dtype, vocab_size):
    rows = adversarial_rows(vocab_size, 5, dtype)
    logits = torch.stack(list(rows.values())).to(backend.device)
    check(backend, entry, logits, row_names=list(rows))
    check(backend, entry, logits, row_names=list(rows), temperature=0.37)


@pytest.mark.parametrize("vocab_size", (20_000, 50_001, 120_000, *also(270_000, 600_000)))
def test_adversarial_long_rows(native, vocab_size):
    rows = adversarial_rows(vocab_size, 5, torch.float32)
    logits = torch.stack(list(rows.values())).to(native.device)
    for entry in ENTRIES:
        check(native, entry, logits, row_names=list(rows))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("fp16", "bf16"))
@pytest.mark.parametrize("vocab_size", (100, 5001, 70_000))
def test_float32_of_16_bits(backend, values, dtype, vocab_size):
    logits = random_logits(3, vocab_size, dtype=dtype, device=backend.device)
    wide = check(backend, values, logits, dtype=torch.float32)
    narrow = backend(values, logits)
    # The same numbers, rounded to nearest even.
    assert torch.equal(bits(wide.to(dtype)), bits(narrow))


def test_temperature_that_is_not_positive(cuda):
    logits = random_logits(3, 700, device="cuda")
    for entry in ENTRIES:
        got = cuda(entry, logits, temperature=torch.tensor([0.0, 1.0, -2.0], device="cuda"))
        assert got[0].isnan().all() and got[2].isnan().all() and not got[1].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("vocab_size", (50, 1003, 5000))
def test_layouts(backend, dtype, vocab_size):
    logits = random_logits(5, vocab_size, dtype=dtype, device=backend.device)
    want = {entry: backend(entry, logits) for entry in ENTRIES}
    for name, view in layouts(logits):
        for entry in ENTRIES:
            assert torch.equal(bits(backend(entry, view)), bits(want[entry])), (name, entry)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("vocab_size", (100, 2051, 70_001, 150_001))
def test_every_start_address(native, dtype, vocab_size):
    logits = random_logits(2, vocab_size, dtype=dtype, device=native.device)
    want = {entry: native(entry, logits) for entry in ENTRIES}
    for start in range(16 // dtype.itemsize):
        for entry in ENTRIES:
            assert torch.equal(bits(native(entry, shifted(logits, start))), bits(want[entry])), (start, entry)


def test_leading_dimensions(backend):
    base = random_logits(2, 3, 4, 5, 64, device=backend.device)
    for logits in (
        base,
        base[1],
        base[:, 1:],
        base.transpose(0, 2),
        base.transpose(1, 3)[:, ::2],
        base[:1].expand(3, -1, -1, -1, -1),
    ):
        for entry in ENTRIES:
            check(backend, entry, logits)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_short_rows_side_by_side(cpu, dtype):
    """Several short rows share a vector unit: a row has the same bits beside any others, wherever and however it lies."""
    for vocab_size in (1, 5, 8, 16, 31, 64, 255, 256, 257):
        hostile = torch.stack(list(adversarial_rows(vocab_size, 1, dtype).values()))
        logits = torch.cat([hostile, random_logits(41, vocab_size, dtype=dtype)])
        strided = torch.empty(2 * len(logits), 2 * vocab_size, dtype=dtype)[::2, ::2].copy_(logits)
        row_temperature = torch.full((len(logits),), 1.0)
        different = torch.linspace(0.3, 3.0, len(logits))
        for entry in ENTRIES:
            together = bits(cpu(entry, logits))
            check(cpu, entry, logits)
            for count in (1, 2, 3, 4, 5):
                parts = torch.cat([bits(cpu(entry, part)) for part in logits.split(count)])
                assert torch.equal(parts, together), (vocab_size, entry, count)
            assert torch.equal(bits(cpu(entry, strided)), together)
            assert torch.equal(bits(cpu(entry, strided.T.contiguous().T)), together)
            assert torch.equal(bits(cpu(entry, logits, temperature=row_temperature)), together)
            alone = [cpu(entry, row, temperature=float(t)) for row, t in zip(logits, different)]
            assert torch.equal(bits(cpu(entry, logits, temperature=different)), bits(torch.stack(alone)))
            assert torch.equal(bits(cpu(entry, logits.expand(2, 3, *logits.shape))[1, 2]), together)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_instruction_sets_agree(cpu, name):
    # 16, 17, 256: rows of one vector of AVX-512, of more, and the last that is solved beside others.
    for dtype, vocab_size in itertools.product(DTYPES.values(), (1, 7, 16, 17, 250, 256, 257, 4999)):
        logits = torch.stack(list(adversarial_rows(vocab_size, 1, dtype).values()))
        for values in ENTRIES:
            of_result = torch.float32 if values == "logsumexp" else dtype
            check(lambda entry, x, of=of_result: full_rows(entry, x, of, name), values, logits)


# ---- Gradients, torch.library, graphs ----


@pytest.mark.parametrize("entry", ENTRIES)
def test_gradcheck(entry):
    logits = random_logits(3, 11).double().requires_grad_()
    temperature = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        return getattr(fused_topk, entry)(x, temperature=temperature)

    assert torch.autograd.gradcheck(run, logits)
    assert torch.autograd.gradgradcheck(run, logits)


@pytest.mark.parametrize("vocab_size", (500, 100_000, 400_000))
def test_cuda_graph(cuda, vocab_size):
    logits = random_logits(3, vocab_size, device="cuda")
    for entry in ENTRIES:
        cuda(entry, logits)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = cuda(entry, logits)
        for seed in (1, 2):
            logits.copy_(random_logits(3, vocab_size, seed=seed))
            graph.replay()
            assert torch.equal(captured, cuda(entry, logits))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_longer_than_the_gpu_holds(cuda, dtype):
    """Part of them is read twice. Wherever a row starts, it has the same result."""
    vocab_size = 200_000_000 // dtype.itemsize
    logits = random_logits(2, vocab_size, dtype=dtype, device="cuda")
    for entry in ENTRIES:
        got = check(cuda, entry, logits)
        for start in (1, 3):
            assert torch.equal(cuda(entry, shifted(logits, start)), got)


def test_an_owner_takes_row_after_row(cuda):
    """Rows that blocks all over the GPU own: more of them than there are owners, each the same as alone."""
    logits = random_logits(37, 300_001, device="cuda")
    for entry in ENTRIES:
        got = cuda(entry, logits)
        for row in (0, 16, 36):
            assert torch.equal(got[row], cuda(entry, logits[row : row + 1])[0])


def test_results_that_stay_in_the_cache(cuda):
    """Whether they do changes none of them."""
    logits = random_logits(600, 40_000, device="cuda")
    got = cuda("softmax", logits)
    assert torch.equal(got[:7], cuda("softmax", logits[:7]))


def test_streams_do_not_share_counters(cuda):
    logits = random_logits(4, 600_000, device="cuda")
    want = cuda("softmax", logits)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(cuda("softmax", logits))
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)


def test_offsets_beyond_32_bits(cuda):
    rows, vocab_size = 70_000, 32_768
    if torch.cuda.mem_get_info()[0] < 3 * rows * vocab_size * 2:
        pytest.skip("not enough memory")
    logits = torch.zeros(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    logits[-1] = random_logits(vocab_size, dtype=torch.bfloat16)
    got = cuda("softmax", logits)
    assert torch.equal(got[-1], cuda("softmax", logits[-1]))
    assert (got[0] == 2.0**-15).all()


# ---- The choice of kernel ----

H200_SHARED = 227 << 10


@pytest.mark.parametrize(
    ("vocab_size", "itemsize", "kernel", "blocks"),
    (
        (1, 4, "warp", 1), (512, 4, "warp", 1), (513, 4, "block", 1), (8192, 4, "block", 1), (8193, 4, "shared", 1),
        (32768, 4, "shared", 1), (65536, 4, "shared", 1), (73728, 4, "shared", 1), (73729, 4, "grid", 3),
        (131072, 4, "grid", 4), (1 << 20, 4, "grid", 32), (1 << 22, 4, "grid", 128), (264 * 32768, 4, "grid", 264),
        (264 * 32768 + 1, 4, "long", 132), (1024, 2, "warp", 1), (65536, 2, "shared", 1), (131072, 2, "shared", 1),
        (524289, 2, "grid", 9),
    ),
)  # fmt: skip
def test_choice(vocab_size, itemsize, kernel, blocks):
    choice = choose_full_row(vocab_size, itemsize, H200_SHARED, 132, 90)
    assert (choice.kernel, choice.blocks_per_row) == (kernel, blocks)


# Compute capability 7.0 has more than 64 KiB for a block, and as few warps as 7.5.
@pytest.mark.parametrize(
    ("capability", "shared"),
    ((70, 96 << 10), (75, 64 << 10), (89, 99 << 10), (80, 163 << 10), (90, 227 << 10)),
)
@pytest.mark.parametrize("multiprocessors", (1, 7, 132))
@pytest.mark.parametrize("itemsize", (2, 4))
def test_every_choice_holds_its_row(capability, shared, multiprocessors, itemsize):
    for vocab_size in (1, 9, 1000, 1025, 5000, 16384, 16385, 32768, 33000, 65536, 99999, 262144, 262145, 2**31 - 1):
        choice = choose_full_row(vocab_size, itemsize, shared, multiprocessors, capability)
        vectors = -(-vocab_size * itemsize // 16)
        threads = 32 if choice.kernel == "warp" else choice.threads
        of_row = (choice.vectors + choice.shared_vectors) * threads * choice.blocks_per_row
        assert choice.kernel == "long" or vectors <= of_row
        assert choice.shared_bytes + 1024 <= shared and choice.threads % 32 == 0
        assert choice.shared_vectors % 2 == 0 and (choice.kernel, choice.vectors) in FULL_ROW_VARIANTS
        # The blocks of a cooperative launch all run at the same time: "grid" is compiled for two on a multiprocessor,
        # before compute capability 8.0 for one.
        compiled_for = 2 if choice.kernel == "grid" and capability >= 80 else 1
        resident = min(compiled_for, (shared + 1024) // (choice.shared_bytes + 2048))
        for rows in (1, 5, 1000):
            blocks = choice.blocks(rows)
            assert not choice.is_cooperative or choice.blocks_per_row <= blocks <= resident * multiprocessors

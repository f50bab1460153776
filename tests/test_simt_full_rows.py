# SPDX-License-Identifier: Apache-2.0
"""The kernels of csrc/full_rows/softmax_rows.cu on the emulated machine: every read and write checked, under several schedules."""

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

import kernel_names
from fused_topk.backends import cuda
from fused_topk.layout.full_row_choice import FullRowChoice
from fused_topk.problem import FullRowProblem
from fused_topk.rows import LogitRows
from oracle import DTYPES, start_full_rows
from rows import INF, NAN, random_logits, shifted
from simt import sanitized
from simt.emulate import emulated, recorded
from simt.launch import SCHEDULES, Array
from test_softmax import check


def run(
    problem: FullRowProblem, choice: FullRowChoice, out_dtype: torch.dtype, readable: int | None = None, **how
) -> Tensor:
    """What the kernel of `choice` makes of CPU tensors, with all that the machine checks. readable: tokens of each row."""
    out = empty_result(problem, out_dtype)
    inputs = {**problem.rows._asdict(), "logits": problem.rows.logits[..., :readable]}
    arrays = [Array(name, x, "input") for name, x in inputs.items() if isinstance(x, Tensor) and x.numel()]
    with emulated([*arrays, Array("out", out, "output")], **how) as outcomes:
        launch(problem, choice, out)
    outcomes[0].check()
    return out


def laid_over(choice: FullRowChoice, **how):
    """The kernel of `choice` as a backend, for check(). how: as of run()."""

    def of_choice(
        entry: str, x: Tensor, *, temperature: float | Tensor = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        scale = {"row_temperature" if isinstance(temperature, Tensor) else "temperature": temperature}
        return run(FullRowProblem(LogitRows(x, **scale), entry), choice, dtype or x.dtype, **how)

    return of_choice


def empty_result(problem: FullRowProblem, out_dtype: torch.dtype) -> Tensor:
    """Memory for the result."""
    if problem.values == "logsumexp":
        return torch.empty(problem.rows.logits.shape[:-1])
    return torch.empty(problem.rows.logits.shape, dtype=out_dtype)


def launch(problem: FullRowProblem, choice: FullRowChoice, out: Tensor) -> None:
    """As the backend does, but for its choice."""
    with mock.patch.object(cuda, "cache_bytes", lambda device: 10_000):
        start_full_rows(cuda, problem, out, choice=choice)


def small_choice(kernel: str, vocab_size: int, itemsize: int, blocks: int = 1, warps: int = 2) -> FullRowChoice:
    """As choose_full_row's, with so few threads that short rows go through every branch."""
    vectors = -(-vocab_size * itemsize // 16)
    threads = 32 * warps
    if kernel == "warp":
        return FullRowChoice("warp", 128, 4)
    if kernel == "block":
        in_registers = 2 if vectors <= 2 * threads else 4
        return FullRowChoice("block", -(-vectors // (32 * in_registers)) * 32, in_registers)
    in_registers = 4
    share = -(-vectors // (32 * blocks)) * 32
    shared_vectors = -(-max(-(-share // threads) - in_registers, 0) // 2) * 2
    if kernel == "long":
        # Of a long row no more fits.
        return FullRowChoice(kernel, threads, in_registers, min(shared_vectors, 8), blocks, 2)
    return FullRowChoice(kernel, threads, in_registers, shared_vectors, blocks, 2 if kernel == "grid" else 0)


# (kernel, blocks, elements of 4 bytes; of 2 bytes there are twice as many)
SHAPES = [
    ("warp", 1, 37), ("warp", 1, 500), ("warp", 1, 512),
    ("block", 1, 36), ("block", 1, 1000), ("block", 1, 2049), ("block", 1, 3333), ("block", 1, 4096),
    ("shared", 1, 33), ("shared", 1, 1025), ("shared", 1, 4000),
    ("grid", 1, 40), ("grid", 2, 2048), ("grid", 3, 12288), ("grid", 3, 12001), ("grid", 2, 8190),
    ("long", 1, 40), ("long", 2, 2048), ("long", 3, 12289), ("long", 2, 12288), ("long", 1, 20001), ("long", 2, 40000),
]  # fmt: skip


STARTS = (0, 1, 3)


def results(dtype: torch.dtype) -> tuple[tuple[str, torch.dtype], ...]:
    """What is asked for, and in which dtype."""
    return ("softmax", dtype), ("log_softmax", torch.float32), ("logsumexp", torch.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("kernel", "blocks", "vocab_size"), SHAPES)
def test_kernels(kernel, blocks, vocab_size, dtype):
    vocab_size *= 4 // dtype.itemsize
    logits = random_logits(5, vocab_size, dtype=dtype)
    logits[1, 0] = NAN
    logits[2] = -INF
    logits[3, : vocab_size // 2] = -INF
    choice = small_choice(kernel, vocab_size, dtype.itemsize, blocks)
    turn = SHAPES.index((kernel, blocks, vocab_size * dtype.itemsize // 4))
    for number, start in enumerate(STARTS):
        backend = laid_over(choice, schedule=SCHEDULES[(turn + number) % len(SCHEDULES)], seed=turn)
        for values, out_dtype in results(dtype):
            check(backend, values, shifted(logits, start), temperature=0.7, dtype=out_dtype)


def a_case_of_each_kernel() -> dict[str, tuple]:
    """By the kernel's name, the arguments of run_sanitized for it: of what test_kernels runs."""
    found: dict[str, tuple] = {}
    for dtype, (kernel, blocks, size), start in itertools.product(DTYPES.values(), SHAPES, STARTS):
        for values, out_dtype in results(dtype):
            case = (kernel, blocks, size * 4 // dtype.itemsize, dtype, start, values, out_dtype)
            problem, choice = laid(*case)
            with recorded() as launched:
                launch(problem, choice, empty_result(problem, out_dtype))
            found.setdefault(launched[0], case)
    return found


def laid(kernel, blocks, vocab_size, dtype, start, values, out_dtype) -> tuple[FullRowProblem, FullRowChoice]:
    logits = shifted(random_logits(2, vocab_size, dtype=dtype), start)
    return FullRowProblem(LogitRows(logits, temperature=0.7), values), small_choice(
        kernel, vocab_size, dtype.itemsize, blocks
    )


def test_every_kernel_is_tested():
    """By test_kernels."""
    assert set(a_case_of_each_kernel()) == set(kernel_names.of_full_rows())


SHARDS = 4


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_kernel_once(shard):
    for case in list(a_case_of_each_kernel().values())[shard::SHARDS]:
        problem, choice = laid(*case)
        backend = laid_over(choice, schedule="random")
        check(backend, problem.values, problem.rows.logits, temperature=0.7, dtype=case[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", range(SHARDS))
def test_under_address_sanitizer(shard):
    """Every kernel, once."""
    done = sanitized.call("test_simt_full_rows", "run_sanitized", list(a_case_of_each_kernel().values())[shard::SHARDS])
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]


def run_sanitized(*case) -> None:
    problem, choice = laid(*case)
    run(problem, choice, case[-1], address_sanitizer=True, schedule="random")


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", (75, 90))
@pytest.mark.parametrize("kernel", ("warp", "block", "grid"))
def test_before_and_after_packed_maxima(kernel, architecture):
    for dtype in DTYPES.values():
        choice = small_choice(kernel, 450, dtype.itemsize)
        check(laid_over(choice, architecture=architecture), "softmax", random_logits(3, 450, dtype=dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", (0, 1))
@pytest.mark.parametrize(("kernel", "blocks"), (("shared", 1), ("grid", 2), ("long", 2)))
def test_without_copies_in_the_background(kernel, blocks, start):
    """Before compute capability 8.0. Two owners of three rows."""
    logits = shifted(random_logits(3, 7004), start)
    choice = small_choice(kernel, 7004, 4, blocks, warps=4)
    assert choice.shared_vectors
    for values in ("softmax", "logsumexp"):
        check(laid_over(choice, architecture=75, schedule="random"), values, logits)


def test_blocks_that_wait_for_each_other_all_run():
    """9 x 512 threads: more than the machine runs at a time, unless it is a cooperative launch."""
    choice = small_choice("grid", 3400, 4, 9, warps=16)._replace(owners=1)
    assert choice.blocks(1) * choice.threads > 4096
    check(laid_over(choice), "softmax", random_logits(1, 3400))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rows", "blocks", "owners"), ((1, 5, 1), (5, 2, 2), (5, 2, 3), (3, 4, 1)))
def test_blocks_that_share_rows(schedule, rows, blocks, owners):
    """A group of blocks takes row after row, and one of its blocks may be a row ahead of another."""
    logits = random_logits(rows, 3000)
    choice = small_choice("grid", 3000, 4, blocks, warps=1)._replace(owners=owners)
    for values in ("softmax", "logsumexp"):
        check(laid_over(choice, schedule=schedule, seed=7), values, logits)


@pytest.mark.parametrize("kernel", ["warp", "block", "shared", "grid", "long"])
def test_subnormal_temperatures(kernel):
    """Their inverse overflows, but 0 / T is 0: the best token has everything."""
    logits = (-torch.arange(500) / 2).expand(2, -1).contiguous()
    temperature = torch.tensor([1e-40, 1e-45])
    for values, best, others in (("softmax", 1, 0), ("log_softmax", 0, -1e35), ("logsumexp", 0, 0)):
        problem = FullRowProblem(LogitRows(logits, row_temperature=temperature), values)
        got = run(problem, small_choice(kernel, 500, 4), torch.float32).view(2, -1)
        assert (got[:, 0] == best).all() and (got[:, 1:] <= others).all()

# SPDX-License-Identifier: Apache-2.0
"""The native CPU kernel: every instruction set of this machine, its threads, and processes that fork."""

import ctypes
import inspect
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fused_topk
from fused_topk import TopK
from fused_topk.backends import cpu as native_cpu
from fused_topk.problem import FullRowProblem
from fused_topk.rows import LogitRows
from oracle import DTYPES, assert_same, assert_topk, bits, expected, problem_of, start, start_full_rows
from rows import INF, NAN, adversarial_rows, packed, random_logits, random_mask

if native_cpu.unavailable() is None:
    from fused_topk import _cpu

    INSTRUCTION_SETS = _cpu.instruction_sets()
else:
    # The tests that name them then fail or are skipped by the fixture `cpu`.
    INSTRUCTION_SETS = ["baseline"]


def empty(entry: str, logits: torch.Tensor, k: int) -> TopK:
    lead = logits.shape[:-1]
    dtype = logits.dtype if entry == "topk" else torch.float32
    return TopK(torch.empty(*lead, k, dtype=dtype), torch.empty(*lead, k, dtype=torch.int64), torch.empty(lead))


def run(entry: str, logits: torch.Tensor, k: int, instruction_set: str, **settings) -> TopK:
    out = empty(entry, logits, k)
    out.logsumexp.zero_()  # of topk() it is not written
    start(native_cpu, problem_of(entry, logits, k, **settings), out, instruction_set=instruction_set)
    return out


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (7, 3), (33, 33), (511, 8), (4097, 65), (9001, 300), (20011, 5)])
def test_cpu_instruction_sets_adversarial_rows(cpu, instruction_set, dtype, vocab_size, k):
    rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
    logits = torch.stack(list(rows.values()))
    for entry in ("softmax_topk", "log_softmax_topk", "topk"):
        got = run(entry, logits, k, instruction_set)
        assert_topk(got, expected(entry, logits, k), logits, entry, row_names=list(rows))


# Each width of the sorting network, k a power of two and not; rows that fill no group of elements, and the last routed.
ROUTERS = [
    (1, 1), (2, 2), (7, 3), (8, 2), (9, 8), (16, 1), (17, 6), (60, 4), (64, 8), (160, 6), (255, 5), (256, 8), (257, 8),
]  # fmt: skip


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_instruction_sets_routers(cpu, instruction_set, dtype):
    """Rows side by side in the lanes of vectors, each kind of row beside others."""
    for vocab_size, k in ROUTERS:
        rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
        logits = torch.stack(list(rows.values()))
        for entry, normalize in (
            ("softmax_topk", "allowed"),
            ("softmax_topk", "topk"),
            ("log_softmax_topk", "all"),
            ("log_softmax_topk", "topk"),
            ("topk", "allowed"),
        ):
            for temperature in (1.0, 0.3):
                if entry == "topk" and temperature != 1.0:
                    continue
                settings = {} if entry == "topk" else {"normalize": normalize, "temperature": temperature}
                got = run(entry, logits, k, instruction_set, **settings)
                want = expected(entry, logits, k, **settings)
                assert_topk(got, want, logits, entry, temperature=temperature, row_names=list(rows))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_cpu_routers_batch_changes_nothing(cpu, instruction_set):
    """A row has the same bits beside any others, wherever and however it lies."""
    for dtype in DTYPES.values():
        for vocab_size, k in ROUTERS:
            hostile = torch.stack(list(adversarial_rows(vocab_size, k, dtype).values()))
            logits = torch.cat([hostile, random_logits(40, vocab_size, dtype=dtype)])
            strided = torch.empty(2 * len(logits), 3 * vocab_size, dtype=dtype)[::2, ::3].copy_(logits)
            for entry in ("softmax_topk", "topk"):
                together = run(entry, logits, k, instruction_set)
                for count in (1, 3, 8, 9):
                    parts = [run(entry, part, k, instruction_set) for part in logits.split(count)]
                    assert_same(TopK(*map(torch.cat, zip(*parts, strict=True))), together)
                assert_same(run(entry, strided, k, instruction_set), together)
                expanded = run(entry, logits.expand(2, *logits.shape), k, instruction_set)
                assert_same(TopK(*(field[1] for field in expanded)), together)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_cpu_routers_row_temperatures(cpu, instruction_set):
    """A row's temperature has the same bits from a tensor and from a number, in runs of equal ones and alone."""
    each = torch.tensor([0.5, 0.5, 0.5, 1.0, 0.3, 0.3, 2.0, float("nan"), float("nan"), 1.0, 1.0, 1.0])
    for vocab_size, k in ROUTERS:
        for dtype in DTYPES.values():
            logits = random_logits(len(each), vocab_size, dtype=dtype)
            for temperature in (each, each.flip(0), each.repeat_interleave(2)[::2]):
                got = run("softmax_topk", logits, k, instruction_set, temperature=temperature)
                for row, t in enumerate(temperature.tolist()):
                    alone = run("softmax_topk", logits[row : row + 1], k, instruction_set, temperature=t)
                    assert_same(TopK(*(field[row : row + 1] for field in got)), alone)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_cpu_routers_masks(cpu, instruction_set):
    """A token that is not allowed has the same bits as a logit of -inf, whatever the layout of the mask."""
    for vocab_size, k in ROUTERS:
        for dtype in DTYPES.values():
            hostile = torch.stack(list(adversarial_rows(vocab_size, k, dtype).values()))
            logits = torch.cat([hostile, random_logits(20, vocab_size, dtype=dtype)])
            rows = len(logits)
            mask = random_mask(rows, vocab_size)
            mask[:3], mask[-1] = mask[0], False
            temperature = torch.linspace(0.3, 3.0, rows)
            strided = torch.empty(rows, 2 * vocab_size, dtype=torch.bool)[:, ::2].copy_(mask)
            hidden = logits.where(mask, -float("inf"))
            for entry, settings in (
                ("softmax_topk", {"normalize": "topk", "temperature": temperature}),
                ("log_softmax_topk", {}),
                ("topk", {}),
            ):
                want = run(entry, hidden, k, instruction_set, **settings)
                for given in (mask, strided, packed(mask)):
                    assert_same(run(entry, logits, k, instruction_set, mask=given, **settings), want)
                for of_all in (mask[0], packed(mask[0])):
                    one = run(entry, logits, k, instruction_set, mask=of_all, **settings)
                    assert_same(TopK(*(field[:3] for field in one)), TopK(*(field[:3] for field in want)))


def test_cpu_routers_of_tiny_probabilities(cpu):
    """Probabilities below those that the float32 exponential has."""
    logits = torch.tensor([[0.0, -86.8, -87.5, -95.0, -103.0, -104.5]])
    want = logits.double().softmax(-1)
    for instruction_set in INSTRUCTION_SETS:
        got = run("softmax_topk", logits, 6, instruction_set).values
        assert ((got.double() - want).abs() <= 2.0**-22 * want + 2.0**-149).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", ["allowed", "all", "topk"])
def test_cpu_instruction_sets_masks(cpu, instruction_set, dtype, normalize):
    for vocab_size, k in ((40, 9), (1003, 20), (20011, 700)):
        logits = random_logits(4, vocab_size, dtype=DTYPES[dtype])
        rows = torch.tensor([0.3, 1.0, 1.7, 20.0])
        for mask in (random_mask(4, vocab_size), packed(random_mask(4, vocab_size, share=0.05)), None):
            settings = {"mask": mask, "normalize": normalize, "temperature": rows}
            got = run("log_softmax_topk", logits, k, instruction_set, **settings)
            want = expected("log_softmax_topk", logits, k, **settings)
            assert_topk(got, want, logits, "log_softmax_topk", temperature=rows)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_cpu_instruction_sets_every_tail(cpu, instruction_set):
    """Every number of elements after the last whole vector, the best of them in the last place."""
    for dtype in DTYPES.values():
        for vocab_size in (*range(1, 140), *range(4090, 4104)):
            logits = random_logits(2, vocab_size, dtype=dtype)
            logits[0, -1] = 30.0
            k = min(vocab_size, 6)
            got = run("softmax_topk", logits, k, instruction_set)
            assert_topk(got, expected("softmax_topk", logits, k), logits, "softmax_topk")


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("vocab_size", [50257, 1 << 22])
def test_cpu_instruction_sets_error_bound(cpu, instruction_set, vocab_size):
    """The bound that csrc/cpu/rows.cpp derives, tighter than that of all backends which the other tests use."""
    unit, k = 2.0**-24, 50
    normal = random_logits(1, vocab_size)
    one_high = torch.full((1, vocab_size), -17.0).index_fill_(1, torch.tensor([vocab_size // 3]), 0.0)
    for logits in (
        normal,
        normal + 1e4,
        normal - 1e4,
        torch.rand(1, vocab_size) * 20,
        torch.zeros_like(normal),
        one_high,
    ):
        got = run("log_softmax_topk", logits, k, instruction_set)
        m = logits.double().max()
        log_d = (logits.double() - m).exp().sum().log()
        bound = (7.7 + math.log(vocab_size) - log_d) * unit
        for result, want in (
            (got.values, logits.gather(-1, got.indices).double() - m - log_d),
            (got.logsumexp, m + log_d),
        ):
            assert ((result.double() - want).abs() <= bound + unit * want.abs()).all()


def test_cpu_instruction_set_is_the_best(cpu):
    assert native_cpu.instruction_set() == INSTRUCTION_SETS[0]


def test_cpu_instruction_set_unknown(cpu):
    with pytest.raises(ValueError, match="mmx"):
        run("topk", random_logits(2, 10), 2, "mmx")


@pytest.mark.parametrize("number", [1, 2, 5, 64])
def test_cpu_threads_beyond_the_work(cpu, threads, number):
    """More threads than rows, than parts, than cores."""
    threads(number)
    for rows, vocab_size, k in ((1, 1, 1), (1, 5000, 5), (3, 200003, 40), (500, 64, 4)):
        logits = random_logits(rows, vocab_size)
        got = cpu("softmax_topk", logits, k)
        assert_topk(got, expected("softmax_topk", logits, k), logits, "softmax_topk")


def test_cpu_while_the_number_of_threads_changes(cpu, threads):
    logits = random_logits(2, 200003)
    want = cpu("softmax_topk", logits, 40)
    for number in (4, 1, 3, 2, 8, 1, 2) * 5:
        threads(number)
        assert_same(cpu("softmax_topk", logits, 40), want)


@pytest.mark.exhaustive
def test_cpu_threads_do_not_race(tmp_path):
    """tests/cpp/rows.cpp, in the C++ of this machine's baseline, under ThreadSanitizer."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = Path(__file__).parent
    sources = [path for path in (folder.parent / "csrc/cpu").glob("*.cpp") if path.name != "binding.cpp"]
    program = tmp_path / "rows"
    options = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", "-Wno-psabi", "-DFUSED_TOPK_SET=Baseline"]
    command = [compiler, *options, folder / "cpp/rows.cpp", *sources, "-o", program]
    built = subprocess.run(command, capture_output=True, text=True)
    if "libtsan" in built.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, "100"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cpu_shares_the_threads_of_torch(cpu):
    """Threads of its own would have to take the cores from torch's, which spin after each of its operations."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        pytest.skip("this torch has no GNU OpenMP")
    code = """
        import os, torch, fused_topk
        torch.set_num_threads(3)
        logits = torch.randn(4, 300000)
        logits.exp()
        before = len(os.listdir("/proc/self/task"))
        fused_topk.topk(logits, 8, backend="cpu")
        # One that is worth two threads leaves the team as it is, too.
        fused_topk.topk(logits[:1, :40000], 8, backend="cpu")
        print(before >= 3, len(os.listdir("/proc/self/task")) - before)
    """
    done = subprocess.run([sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "0"], done.stdout + done.stderr


def test_cpu_in_a_forked_process(cpu):
    """A child has none of its parent's threads: a pool that counts on them would wait for ever."""
    code = """
        import os, signal, torch, fused_topk
        torch.set_num_threads(4)
        logits = torch.randn(2, 300000)
        want = fused_topk.topk(logits, 8, backend="cpu")
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # So that it does not outlive a test that fails.
            got = fused_topk.topk(logits, 8, backend="cpu")
            os._exit(0 if got.indices.tolist() == want.indices.tolist() else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.exhaustive
def test_cpu_at_the_end_of_a_process(cpu):
    """Threads that still wait for work do not keep a process from ending, nor make it crash."""
    code = "import torch, fused_topk; fused_topk.topk(torch.randn(4, 300000), 8, backend='cpu')"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


class _Counting:
    """The extension, which counts the objects that it makes."""

    made = 0

    def __getattr__(self, name: str):
        if name in ("Topk", "FullRows"):
            self.made += 1
        return getattr(_cpu, name)


@pytest.mark.parametrize("entry", ["softmax_topk", "topk", "softmax"])
def test_cpu_plan_serves_masks_and_temperatures_at_any_address(cpu, entry, monkeypatch):
    counting = _Counting()
    monkeypatch.setattr(native_cpu, "native", counting)
    # No other test has rows of this length, so the plan is a new one.
    logits = random_logits(3, 7919)
    kept = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(3, 7919, generator=generator) < 0.7
        temperature = torch.rand(3, generator=generator) + 0.5
        kept += [mask, temperature]
        if entry == "softmax":
            got = cpu(entry, logits, temperature=temperature)
            torch.testing.assert_close(got, (logits / temperature[:, None]).softmax(-1))
            continue
        settings = {"mask": mask} if entry == "topk" else {"mask": mask, "temperature": temperature}
        want = getattr(fused_topk, entry)(logits, 5, backend="reference", **settings)
        got = cpu(entry, logits, 5, **settings)
        assert torch.equal(got.indices, want.indices)
        torch.testing.assert_close(got[::2], want[::2])
    assert counting.made == 1


# What is rounded to 16 bits: bit for bit what torch does.


HALVES = [torch.float16, torch.bfloat16]


def full_rows(values: str, logits: torch.Tensor, dtype: torch.dtype, instruction_set: str, **rows) -> torch.Tensor:
    out = torch.empty(logits.shape if values != "logsumexp" else logits.shape[:-1], dtype=dtype)
    problem = FullRowProblem(LogitRows(logits, **rows), values)
    start_full_rows(native_cpu, problem, out, instruction_set=instruction_set)
    return out


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ties_and_their_neighbours(cpu, dtype, instruction_set):
    """Next to a 0, logits so low that they add nothing to the sum are their own log-probabilities."""
    first = torch.tensor(88.0, dtype=dtype).view(torch.int16)
    kept = torch.arange(first.item(), torch.tensor(INF, dtype=dtype).view(torch.int16).item(), dtype=torch.int16)
    kept = kept.view(dtype).float()
    # Halfway to the next; beyond the greatest, too.
    ties = kept + torch.cat([kept.diff(), kept[-1:] - kept[-2:-1]]) / 2
    beyond = torch.tensor([65536.0, 1e5, 3e38, INF])
    row = torch.cat([kept, ties, ties.nextafter(torch.tensor(INF)), ties.nextafter(torch.tensor(0.0)), beyond])
    for length in (len(row), 1003, 45, 7):
        logits = -torch.cat([torch.zeros(1), row[-length:]]).unsqueeze(0)
        got = full_rows("log_softmax", logits, dtype, instruction_set)
        assert torch.equal(bits(got[0, 1:]), bits(logits[0, 1:].to(dtype)))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_small_numbers_and_none(cpu, dtype, instruction_set):
    """Down to the last that is not 0, and to 0; and a row of NaN."""
    rows = torch.rand(5, 20_001, generator=torch.Generator().manual_seed(0)) * (18 if dtype == torch.float16 else 90)
    rows[:, 0] = 20
    rows[1, 1] = NAN
    for length in (20_001, 1003, 45, 7):
        logits = rows[:, :length].contiguous()
        wide = full_rows("softmax", logits, torch.float32, instruction_set)
        narrow = full_rows("softmax", logits, dtype, instruction_set)
        torch.testing.assert_close(narrow, wide.to(dtype), rtol=0, atol=0, equal_nan=True)

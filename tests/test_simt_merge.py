# SPDX-License-Identifier: Apache-2.0
"""The kernel of csrc/topk/merge_states.cu on the emulated machine: every read and write checked, under several schedules."""

import pytest
import torch
from torch import Tensor

from fused_topk import TopK, TopKState, operators
from fused_topk.backends import reference
from fused_topk.problem import MergeProblem
from fused_topk.scale import Scale
from oracle import DTYPES, VALUES_OF, assert_topk, expected, problem_of, start
from rows import INF, NAN, adversarial_rows, random_logits, random_mask
from simt.cases import Case
from simt.emulate import emulated
from simt.launch import SCHEDULES, Array
from simt.row_topk import empty_result, row_topk
from test_merge import D_TOLERANCE, assert_same_state, split


def run(problem: MergeProblem, **how) -> TopK:
    """What the kernel makes of CPU tensors, with all that the machine checks."""
    rows, k = problem.logits.shape[1:-1], problem.k
    are_logits = problem.values in ("logits", "state")
    out = TopK(
        torch.empty(*rows, k, dtype=problem.logits.dtype if are_logits else torch.float32),
        torch.empty(*rows, k, dtype=torch.int64),
        torch.empty((2, *rows) if problem.values == "state" else rows),
    )
    inputs = {**problem._asdict(), **problem.scale._asdict()}
    for name in ("k", "scale", "temperature", "values", "normalize"):
        del inputs[name]
    arrays = [Array(name, x, "input") for name, x in inputs.items() if x is not None]
    arrays += [Array(name, x, "output") for name, x in out._asdict().items()]
    with emulated(arrays, **how) as outcomes:
        operators.merging.prepare_cuda(problem, torch.device("cuda", 0))(problem, out)
    outcomes[0].check()
    return out


def parts_of(logits: Tensor, cuts: list[int], width: int, temperature=1.0, normalize="allowed") -> tuple[Tensor, ...]:
    """(logits, indices, m, d, lengths) of the parts, with gaps between them, as a collective leaves them."""
    rows = logits.shape[0]
    pieces = [x for _, x in split(logits, cuts)]
    wide = torch.full((len(pieces), rows, 2 * width + 1), NAN, dtype=logits.dtype)[..., 1 : width + 1]
    tokens = torch.full((len(pieces), rows + 1, width), -1)[:, 1:]
    m, d = torch.zeros(2, len(pieces), rows, 3)[..., 1]
    for part, x in enumerate(pieces):
        held = min(width, x.shape[-1])
        problem = problem_of("log_softmax_topk", x, held, temperature=temperature, normalize=normalize)
        state = TopK(
            torch.empty(rows, held, dtype=x.dtype), torch.empty(rows, held, dtype=torch.int64), torch.empty(2, rows)
        )
        start(reference, problem._replace(values="state"), state)
        wide[part, :, :held], tokens[part, :, :held] = state.values, state.indices
        m[part], d[part] = state.logsumexp.unbind(0)
    lengths = torch.tensor([[x.shape[-1], 0] for x in pieces], dtype=torch.int32)[:, 0]
    return wide, tokens, m, d, lengths


# V, width of the lists, k, and where the tokens are cut: a warp a row and a block, on both sides of the limit; more parts than a
# warp has lanes; k beyond a list.
SIZES = {
    "one part": (300, 5, 5, []),
    "warp": (300, 6, 6, [7, 8, 150, 250]),
    "as many entries as a warp takes": (300, 16, 12, [150]),
    "two more": (300, 17, 17, [150]),
    "block": (300, 65, 65, [150]),
    "lists of one": (45, 1, 40, list(range(1, 45))),
    "all": (300, 300, 300, [4, 100]),
    "more entries than a block keeps": (400, 400, 400, [4, 100]),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", VALUES_OF)
@pytest.mark.parametrize("normalize", ["allowed", "topk"])
def test_merge_on_adversarial_rows(size, dtype, entry, normalize):
    vocab_size, width, k, cuts = SIZES[size]
    rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
    names = list(rows)[len(size) % 3 :: 3]
    logits = torch.stack([rows[name] for name in names])
    problem = MergeProblem(*parts_of(logits, cuts, width), k, Scale(), VALUES_OF[entry], normalize)
    settings = {} if entry == "topk" else {"normalize": normalize}
    assert_topk(run(problem), expected(entry, logits, k, **settings), logits, entry, row_names=names)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_state(size, dtype):
    vocab_size, width, k, cuts = SIZES[size]
    logits = torch.stack(list(adversarial_rows(vocab_size, k, DTYPES[dtype]).values())[::2])
    got = run(MergeProblem(*parts_of(logits, cuts, width), k, Scale(), "state", "allowed"))
    best, tokens, m, d, _ = parts_of(logits, [], k)
    want = TopKState(best[0], tokens[0], m[0], d[0])
    assert_same_state(TopKState(got.values, got.indices, *got.logsumexp.unbind(0)), want, D_TOLERANCE)


# V, k, whose rows, blocks a row: each kind of kernel that reads logits.
KERNELS = {
    "router rows": (100, 5, "few", 0), "short rows": (200, 20, "few", 0), "warp": (1024, 8, "few", 0),
    "8 warps": (2049, 5, "few", 0), "16 warps": (4097, 40, "few", 0), "splits": (9001, 50, "few", 3),
    "for many": (3001, 192, "few", 1), "windows": (50001, 33, "some", 0),
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("normalize", ["allowed", "all", "none"])
def test_state_of_logits(kernel, dtype, normalize):
    """topk_state() of every kind of kernel, with each use of a mask."""
    vocab_size, k, owner, splits = KERNELS[kernel]
    case = Case(vocab_size, k, dtype, rows="5", owner=owner, splits=splits)
    rows = adversarial_rows(vocab_size, k, DTYPES[dtype])
    names = ["normal", "offset_up", "negative_infinities", "all_negative_infinity", "one_positive_infinity", "one_nan"]
    logits = torch.stack([rows[name] for name in names])
    settings = {}
    if normalize != "none":
        settings = {"mask": random_mask(len(names), vocab_size, share=0.7), "normalize": normalize}
    problem = problem_of("log_softmax_topk", logits, k, temperature=0.7, **settings)._replace(values="state")
    got, outcome = row_topk(problem, case.choice())
    outcome.check()
    want = empty_result(problem)
    start(reference, problem, want)
    assert_same_state(
        TopKState(got.values, got.indices, *got.logsumexp),
        TopKState(want.values, want.indices, *want.logsumexp),
        D_TOLERANCE,
    )


@pytest.mark.parametrize("temperature", [0.5, "rows"], ids=str)
@pytest.mark.parametrize("size", ["warp", "block"])
def test_temperatures(temperature, size):
    """A temperature that is not positive makes NaN of a row."""
    vocab_size, width, k, cuts = SIZES[size]
    logits = random_logits(6, vocab_size)
    t = torch.linspace(0.3, 2.0, 6) if temperature == "rows" else temperature
    number, of_rows = (1.0, t) if temperature == "rows" else (t, None)
    problem = MergeProblem(*parts_of(logits, cuts, width, t), k, Scale(number, of_rows), "log_softmax", "allowed")
    want = expected("log_softmax_topk", logits, k, temperature=t)
    assert_topk(run(problem), want, logits, "log_softmax_topk", temperature=t)
    if temperature == "rows":
        got = run(problem._replace(scale=Scale(row_temperature=torch.tensor([1.0, 0.0, -1.0, NAN, 1.0, 1.0]))))
        is_nan = [False, True, True, True, False, False]
        assert got.logsumexp.isnan().tolist() == is_nan and got.values.isnan().all(-1).tolist() == is_nan


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", ["warp", "block"])
@pytest.mark.parametrize("architecture", [75, 90])
def test_schedules(schedule, size, architecture):
    """The chosen are read by threads that others wrote."""
    vocab_size, width, k, cuts = SIZES[size]
    logits = (random_logits(6, vocab_size) / 2).round()
    problem = MergeProblem(*parts_of(logits, cuts, width), k, Scale(), "softmax", "topk")
    want = expected("softmax_topk", logits, k, normalize="topk")
    for seed in range(3):
        got = run(problem, schedule=schedule, seed=seed, architecture=architecture)
        assert_topk(got, want, logits, "softmax_topk")


def test_layouts_that_are_copied():
    """Entries apart, rows at two strides, temperatures at a stride."""
    logits = random_logits(6, 300)
    wide, tokens, m, d, lengths = parts_of(logits, [100, 150], 9)
    want = expected("softmax_topk", logits, 9)
    apart = torch.full((*wide.shape, 2), NAN)[..., 0].copy_(wide)
    t = torch.ones(6, 2)[:, 0]
    for problem in (
        MergeProblem(apart, tokens, m, d, lengths, 9, Scale(), "softmax", "allowed"),
        MergeProblem(wide, tokens, m, d, lengths, 9, Scale(row_temperature=t), "softmax", "allowed"),
    ):
        assert_topk(run(problem), want, logits, "softmax_topk")
    crossed = [x.unflatten(1, (2, 3)).transpose(1, 2) for x in (wide, tokens, m, d)]
    got = run(MergeProblem(*crossed, lengths, 9, Scale(), "softmax", "allowed"))
    like = logits.unflatten(0, (2, 3)).transpose(0, 1)
    assert_topk(got, expected("softmax_topk", like, 9), like, "softmax_topk")


@pytest.mark.parametrize("begin", [2**24 - 3, 2**31 - 150, 2**40])
def test_tokens_beyond_32_bits(begin):
    """Ties across parts that lie in any order go to the smaller token."""
    logits = torch.full((2, 300), 1.0)
    wide, tokens, m, d, _ = parts_of(logits, [100, 150], 20)
    tokens = (tokens + torch.tensor([begin, begin + 100, begin + 150]).view(3, 1, 1))[[2, 0, 1]]
    got = run(MergeProblem(wide[[2, 0, 1]], tokens, m, d, None, 40, Scale(), "logits", "allowed"))
    assert torch.equal(got.indices, (begin + torch.arange(40)).expand(2, 40).where(torch.arange(40) < 20, got.indices))
    assert got.indices[:, 20:].tolist() == [[begin + 100 + i for i in range(20)]] * 2


def test_whatever_the_input():
    """No two entries have one place, even of equal tokens; missing ones are marked. Beside an entry that is none is a logit."""
    logits = torch.tensor([[[1.0, 1.0]], [[1.0, NAN]]])
    indices = torch.tensor([[[7, 8]], [[7, -1]]])
    ones = torch.ones(2, 1)
    got = run(MergeProblem(logits, indices, ones, ones, None, 4, Scale(), "logits", "allowed"))
    assert got.indices.tolist() == [[7, 7, 8, -1]] and got.values.tolist() == [[1.0, 1.0, 1.0, -INF]]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("  sync_row<WARPS>();\n  const bool are_logits", "race"),
        ("  sync_row<WARPS>();\n  const RowResult relative_to", "race"),
        ("  sync_row<WARPS>();\n  for (u32 i = thread", "race"),
    ],
)
@pytest.mark.parametrize("size", ["warp", "block"])
def test_a_missing_barrier_is_seen(line, kind, size):
    vocab_size, width, k, cuts = SIZES[size]
    problem = MergeProblem(*parts_of(random_logits(2, vocab_size), cuts, width), k, Scale(), "softmax", "topk")

    def edit(source: str) -> str:
        assert line in source
        return source.replace(line, line.replace("sync_row<WARPS>();", ""))

    with pytest.raises(AssertionError, match=kind):
        for seed in range(5):
            run(problem, edit=edit, schedule="random", seed=seed)

# SPDX-License-Identifier: Apache-2.0
"""What each process of a group checks (test_distributed.py): the result of its columns is that of the whole vocabulary."""

import itertools
import os
import random
from contextlib import contextmanager, suppress
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import fused_topk
import processes
from fused_topk import TopK, distributed
from fused_topk.distributed import collective
from fused_topk.distributed.packing import Header
from linear_heads import exact_head
from oracle import DTYPES, VALUES_OF, assert_same, assert_topk, expected
from rows import INF, adversarial_rows, random_logits

FOLDER = ""  # that all processes can write


def columns(x: Tensor, rank: int, size: int, cuts: list[int] | None = None) -> Tensor:
    """The process's share: unequal, unless `cuts` says where they begin."""
    vocab_size = x.shape[-1]
    if cuts is None:
        cuts = [vocab_size * (i * i + 3 * i) // (size * size + 3 * size) for i in range(1, size)]
    return x.tensor_split(cuts, -1)[rank]


@contextmanager
def counted():
    """The bytes that this process gives to each collective."""
    given = []

    def count(everywhere, own, group):
        given.append(own.nbytes)
        return gather(everywhere, own, group=group)

    gather = collective.all_gather_single
    with mock.patch.object(collective, "all_gather_single", count):
        yield given


def frame(size: int) -> int:
    """The bytes that a process gives for a buffer of `size` bytes, in a call that follows one of about the same."""
    return max(4096, 1 << (size - 1).bit_length())


def adversarial_rows_of_every_dtype(rank: int, size: int) -> None:
    for (entry, name), k in itertools.product(itertools.product(VALUES_OF, DTYPES), (1, 9, 120)):
        rows = adversarial_rows(257, k, DTYPES[name])
        logits = torch.stack(list(rows.values())).to("cuda" if dist.get_backend() == "nccl" else "cpu")
        got = getattr(distributed, entry)(columns(logits, rank, size), k)
        assert_topk(got, expected(entry, logits, k), logits, entry, row_names=list(rows))


def shapes_and_short_parts(rank: int, size: int) -> None:
    """Parts shorter than k, and parts without a column."""
    for shape in ((40,), (2, 3, 40), (0, 40)):
        logits = random_logits(*shape)
        for cuts in (None, [0] * (size - 1), [40] * (size - 1), list(range(1, size))):
            for k in (1, 12, 40):
                got = distributed.softmax_topk(columns(logits, rank, size, cuts), k)
                assert got.values.shape == (*shape[:-1], k) and got.logsumexp.shape == shape[:-1]
                if logits.numel():
                    assert_topk(got, expected("softmax_topk", logits, k), logits, "softmax_topk")
    double = random_logits(3, 40).double() / 3
    got = distributed.log_softmax_topk(columns(double, rank, size), 5)
    assert_topk(got, expected("log_softmax_topk", double, 5), double, "log_softmax_topk")
    raises(ValueError, "1 <= k <= 40", lambda: distributed.topk(columns(logits.new_ones(2, 40), rank, size), 41))


def one_collective_of_few_bytes(rank: int, size: int) -> None:
    """8 + 12 k bytes a row and 16 a call, and what rounds them up, in one collective where a call is as large as the last one."""
    logits = random_logits(7, 3000)
    own = columns(logits, rank, size)
    for k, dtype in ((1, torch.float32), (8, torch.float32), (50, torch.bfloat16), (33, torch.float16)):
        distributed.softmax_topk(own.to(dtype), k)
        with counted() as given:
            distributed.softmax_topk(own.to(dtype), k)
            distributed.log_softmax_topk(own.to(dtype), k, temperature=0.5)
            distributed.topk(own.to(dtype)[:, : 100 + rank], k)
        bytes_of_call = 16 + 7 * 8 + 7 * k * 8 + -(-7 * k * dtype.itemsize // 8) * 8
        assert given == [frame(bytes_of_call)] * 3
        # And what rounds the buffer up to whole words.
        assert bytes_of_call < 7 * (12 * k + 8) + 16 + 8
    with counted() as given:
        distributed.beam_topk(own.unflatten(0, (1, 7)), torch.zeros(1, 7), 8)
    assert len(given) == 1
    # One that is larger needs a second collective, once.
    distributed.topk(own, 8)
    with counted() as given:
        for _ in range(2):
            distributed.topk(own, 100)
    bytes_of_call = 16 + 7 * (8 + 12 * 100)
    assert given == [4096, bytes_of_call - 4096, frame(bytes_of_call)]


def raises(error: type[Exception], text: str, call) -> None:
    try:
        call()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__}")


def calls_that_come_to_differ_are_errors_everywhere(rank: int, size: int) -> None:
    """In whatever they differ, and whatever was asked for before. One collective tells, and the calls after it are right."""
    if size == 1:
        return
    logits = random_logits(5, 600)
    own = columns(logits, rank, size)
    head = exact_head((5,), 8, 600, torch.float32)
    weight = columns(head[1].t(), rank, size).t()
    tokens = torch.arange(15).view(5, 3)
    scores = torch.zeros(1, 5)
    calls = {
        "k": [lambda k=k: distributed.topk(own, k) for k in (1, 8, 9, 90, 500)],
        "rows": [lambda rows=rows: distributed.softmax_topk(own[:rows], 90) for rows in (1, 2, 5)],
        "dtype": [lambda dtype=dtype: distributed.topk(own.to(dtype), 8) for dtype in DTYPES.values()],
        "normalize": [lambda n=n: distributed.softmax_topk(own, 8, normalize=n) for n in ("allowed", "all", "topk")],
        "tokens": [
            lambda t=t: distributed.linear_token_logprobs(head[0], weight, t, k=8, start=0)
            for t in (tokens[:, 0], tokens[:, :2], tokens, tokens.repeat(1, 90))
        ],
        "draws": [
            lambda s=s: distributed.sample(own, seed=0, **s)
            for s in (
                {}, {"num_samples": 300}, {"kept": True}, {"top_k": 5}, {"top_k": 5, "top_p": 0.5},
                {"top_k": 5, "topk": 80}, {"top_k": 5, "logprobs": "kept"}, {"top_p": 0.9},
            )
        ],
        "function": [
            lambda: distributed.topk(own, 8),
            lambda: distributed.beam_topk(own.unsqueeze(0), scores, 7),
            lambda: distributed.linear_topk(head[0], weight, 9),
            lambda: distributed.sample(own, seed=0, top_p=0.9),
        ],
    }  # fmt: skip
    choice = random.Random(0)
    everything = [call for of_kind in calls.values() for call in of_kind]
    for of_kind in calls.values():
        for usual, other in itertools.permutations(of_kind, 2):
            # All processes agree on both, or on the last one only, or on some larger call.
            for before in choice.choice(([usual, other], [usual], [choice.choice(everything)])):
                before()
            odd = choice.randrange(size)
            with counted() as given:
                raises(ValueError, "must fit together on all processes", other if rank == odd else usual)
            assert len(given) == 1
    got = distributed.topk(own, 8)
    assert_topk(got, expected("topk", logits, 8), logits, "topk")


def agreement_as_on_a_gpu(rank: int, size: int) -> None:
    """Asked once a kind, and with the switch each time; a difference is an error everywhere."""
    if size == 1:
        return
    is_last = rank == size - 1
    device = torch.device("cpu")
    kinds = [Header.of(7, k, 5, torch.float32, "allowed") for k in (3, 4)]
    for _ in range(2):
        for header in kinds:
            with counted() as given:
                collective.agree(header, device, dist.group.WORLD)
            assert len(given) == (_ == 0)
    with mock.patch.dict(os.environ, FUSED_TOPK_CHECK_DISTRIBUTED="1"):
        raises(
            ValueError,
            f"rank {size - 1} has k=4",
            lambda: collective.agree(kinds[is_last], device, dist.group.WORLD),
        )


def arguments(rank: int, size: int) -> None:
    """What test_contract_errors.py cannot ask of one process and of every function alike."""
    logits = random_logits(2, 3, 20)
    nothing = "the vocabulary must have at least one token"
    raises(ValueError, nothing, lambda: distributed.softmax_topk(logits[..., :0], 1))
    raises(ValueError, nothing, lambda: distributed.sample(logits[..., :0], seed=0))
    raises(ValueError, nothing, lambda: distributed.sample(logits[..., :0], seed=0, top_k=2))
    assert distributed.sample(logits, seed=0, topk=np.int64(0)).topk is None
    raises(
        ValueError,
        "`group` must contain this process",
        lambda: distributed.topk(logits, 2, group=dist.GroupMember.NON_GROUP_MEMBER),
    )


def compiled(rank: int, size: int) -> None:
    logits, scores = random_logits(2, 3, 90), random_logits(2, 3)
    own = columns(logits, rank, size)

    def step(x):
        best = distributed.log_softmax_topk(x * 2, 5)
        of_beams = distributed.beam_topk(x, scores, 6)
        return (*best, *of_beams)

    want = (*fused_topk.log_softmax_topk(logits * 2, 5), *fused_topk.beam_topk(logits, scores, 6))
    graphs, found = [], []

    def count(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    for run in (step, torch.compile(step, fullgraph=True, backend=count)):
        x = own.clone().requires_grad_()
        got = run(x)
        for i in (1, 4):
            assert torch.equal(got[i], want[i])
        for i in (0, 2, 3, 5):
            torch.testing.assert_close(got[i], want[i])
        (got[0].square().sum() + got[2].sum() + got[5].sum()).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert len(graphs) == 1 and sum("all_gather" in name for name in names) == 2, names


def compiled_beams_of_few_tokens(rank: int, size: int) -> None:
    """The lists of the beams are longer than the vocabulary, whose size traced code does not know."""
    scores = torch.tensor([[0.0, -0.5, -0.25]])
    logits = random_logits(1, 3, 4)
    with_nan = logits.clone()
    with_nan[0, 1, 2] = torch.nan
    mask = torch.tensor([True, False, False, False]).expand(1, 3, 4)
    for x, allowed in ((logits, None), (with_nan, None), (logits, mask)):
        own = columns(x, rank, size)
        of_own = None if allowed is None else columns(allowed, rank, size)
        want = fused_topk.beam_topk(x, scores, 9, mask=allowed)
        torch._dynamo.reset()
        step = torch.compile(
            lambda x, mask: distributed.beam_topk(x, scores, 9, mask=mask), fullgraph=True, backend="eager"
        )
        got = step(own, of_own)
        assert torch.equal(got.indices, want.indices)
        torch.testing.assert_close(got.values, want.values, equal_nan=True)


def a_call_with_fake_tensors_spoils_no_later_one(rank: int, size: int) -> None:
    distributed.topk(columns(random_logits(2, 60), rank, size), 3)
    fake = torch._subclasses.fake_tensor
    with suppress(fake.DataDependentOutputException), fake.FakeTensorMode() as mode:
        distributed.topk(mode.from_tensor(torch.zeros(2, 17)), 3)
    logits = random_logits(2, 17 * size)
    assert torch.equal(distributed.topk(columns(logits, rank, size), 3).indices, logits.topk(3).indices)


def second_gradients_are_refused(rank: int, size: int) -> None:
    """They would lack what the other processes have."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    logits = random_logits(3, 30)
    for entry in ("softmax", "log_softmax", "logsumexp", "log_softmax_topk"):
        x = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        found = (
            fused_topk.log_softmax_topk(x, 3).values if entry == "log_softmax_topk" else getattr(fused_topk, entry)(x)
        )
        (first,) = torch.autograd.grad(found.full_tensor().square().sum(), x, create_graph=True)
        raises(RuntimeError, "once_differentiable", lambda: first.full_tensor().square().sum().backward())  # noqa: B023


def gradient_of_a_part_without_a_column(rank: int, size: int) -> None:
    """distributed_contract_checks.py has those of other parts."""
    x = columns(random_logits(3, 90), rank, size, [90] * (size - 1)).clone().requires_grad_()
    distributed.log_softmax_topk(x, 5).values.sum().backward()
    assert x.grad.shape == x.shape


def dtensors(rank: int, size: int) -> None:
    """Only states travel, and only where the vocabulary is sharded. distributed_contract_checks.py has the results."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    logits, scores = random_logits(5, 3, 43), random_logits(5, 3, seed=2)
    for placement in (Shard(2), Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(logits, mesh, [placement])
        with counted() as given:
            got = fused_topk.topk(x, 6), fused_topk.beam_topk(x, scores, 6)
        assert len(given) == (2 if placement == Shard(2) else 0)
        want = fused_topk.topk(logits, 6), fused_topk.beam_topk(logits, scores, 6)
        assert all(torch.equal(a.indices.full_tensor(), b.indices) for a, b in zip(got, want))
    out = tuple(fused_topk.softmax_topk(logits, 6))
    raises(TypeError, "`out` must be None", lambda: fused_topk.softmax_topk(x, 6, out=out))
    raises(ValueError, "1 <= k <= 43", lambda: fused_topk.softmax_topk(x, 44))


def full_rows_of_dtensors(rank: int, size: int) -> None:
    """Of special rows values stay where their logits are. distributed_contract_checks.py has gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    rows = adversarial_rows(43, 5, torch.float32)
    of_special = torch.stack(list(rows.values()))
    for placement, entry in itertools.product(
        (Shard(1), Shard(0), Replicate()), ("softmax", "log_softmax", "logsumexp")
    ):
        is_whole = entry == "logsumexp" and placement == Shard(1)
        run = getattr(fused_topk, entry)
        got = run(distribute_tensor(of_special, mesh, [placement]))
        assert list(got.placements) == [Replicate() if is_whole else placement]
        torch.testing.assert_close(got.full_tensor(), run(of_special), equal_nan=True, rtol=2e-6, atol=2e-6)
    half = distribute_tensor(random_logits(4, 43).bfloat16(), mesh, [Shard(1)])
    assert fused_topk.softmax(half).dtype == torch.bfloat16
    assert fused_topk.softmax(half, dtype=torch.float32).dtype == fused_topk.logsumexp(half).dtype == torch.float32
    raises(ValueError, "`dim` must be the last", lambda: fused_topk.softmax(half, 0))


def a_process_dies(rank: int, size: int) -> None:
    """The others get torch.distributed's error, and a new group of theirs works."""
    logits = random_logits(3, 90)
    distributed.topk(logits, 5)
    if rank == size - 1:
        os._exit(1)
    raises(RuntimeError, "", lambda: distributed.topk(logits, 5))
    dist.destroy_process_group()
    processes.join(FOLDER, "store_of_the_rest", rank, size - 1)
    got = distributed.softmax_topk(columns(logits, rank, size - 1), 5)
    assert_same(
        TopK(got.values * 0, got.indices, got.logsumexp * 0),
        TopK(*(x * scale for x, scale in zip(fused_topk.softmax_topk(logits, 5), (0, 1, 0)))),
    )
    assert got.values.max() < INF

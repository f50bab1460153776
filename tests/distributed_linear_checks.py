# SPDX-License-Identifier: Apache-2.0
"""What each process of a group checks of an LM head's rows that they have between them (test_distributed.py)."""

import functools
import itertools

import torch
import torch.distributed as dist

import fused_topk
from distributed_checks import columns, counted, frame, raises
from fused_topk import distributed
from fused_topk.layout import linear_pieces as layout
from linear_heads import ALL_DTYPES, ENTRIES, exact_head, exact_logits
from oracle import assert_topk, expected

FOLDER = ""


def own_rows(x, rank, size, cuts=None):
    """The process's share of a weight or a bias."""
    return columns(x.movedim(0, -1), rank, size, cuts).movedim(-1, 0)


def first_row(length: int, rank: int, size: int) -> int:
    return int(columns(torch.arange(length), rank, size)[:1].sum()) if rank else 0


def heads_of_every_dtype(rank: int, size: int) -> None:
    """By the native kernel of few rows, and by the library's product of many."""
    for (entry, whole), dtype, rows, k in itertools.product(ENTRIES.items(), ALL_DTYPES.values(), (3, 40), (1, 9)):
        hidden, weight, bias = exact_head((rows,), 20, 301, dtype)
        for with_bias in (None, bias):
            own = None if with_bias is None else own_rows(bias, rank, size)
            got = getattr(distributed, entry)(hidden, own_rows(weight, rank, size), k, own)
            logits = exact_logits(hidden, weight, with_bias)
            assert_topk(got, expected(whole, logits, k), logits, whole)


def autocast(rank: int, size: int) -> None:
    """Hidden states and heads of other dtypes, and their gradients, as for one process."""
    head = exact_head((5,), 20, 301, torch.float32)
    found = []
    for of in (fused_topk, distributed):
        learned = [x.clone().requires_grad_() for x in head]
        hidden, weight, bias = learned
        if of is distributed:
            weight, bias = own_rows(weight, rank, size), own_rows(bias, rank, size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            best = of.linear_topk(hidden, weight, 9, bias)
            mixed = of.linear_topk(hidden.detach().bfloat16(), weight, 9, bias)
            best.values.float().sum().backward()
        assert best.values.dtype == mixed.values.dtype == torch.bfloat16
        found.append((best, mixed, [x.grad for x in learned]))
    (want, _, grads), (got, mixed, own) = found
    for best in (got, mixed):
        assert torch.equal(best.values, want.values) and torch.equal(best.indices, want.indices)
    # The product of each part is rounded to 8 bits, and so is their sum: of 9 logits and probabilities that add up to 1, with
    # weights below 2.
    torch.testing.assert_close(own[0], grads[0], rtol=0, atol=2**-9 * 20 * (size + 1))
    for got, want in zip(own[1:], grads[1:]):
        assert got.dtype == torch.float32
        torch.testing.assert_close(own_rows(got, rank, size), own_rows(want, rank, size), rtol=2**-7, atol=2**-10)


def shares_without_a_row(rank: int, size: int) -> None:
    hidden, weight, _ = exact_head((4,), 20, 301, torch.float32)
    logits = exact_logits(hidden, weight)
    tokens = torch.tensor([0, 300, -100, 301])
    for cuts in ([0] * (size - 1), [301] * (size - 1), list(range(1, size))):
        own = own_rows(weight, rank, size, cuts)
        start = ([0, *cuts])[rank]
        for k in (1, 301):
            got = distributed.linear_token_logprobs(hidden, own, tokens, k=k, start=start)
            assert_topk(got.topk, expected("log_softmax_topk", logits, k), logits, "log_softmax_topk")
            want = logits.double().log_softmax(-1)
            torch.testing.assert_close(got.logprobs[:2], want[[0, 1], [0, 300]].float(), rtol=0, atol=2e-6)
            assert got.logprobs[2:].isnan().all() and got.ranks is None
            more = distributed.linear_token_logprobs(hidden, own, tokens, start=start, entropy=True, tail=True)
            torch.testing.assert_close(more.entropy, -(want.exp() * want).sum(-1).float(), rtol=2e-6, atol=2e-6)
    raises(ValueError, "1 <= k <= 301", lambda: distributed.linear_topk(hidden, own, 302))


def shares_without_a_row_have_the_same_gradient(rank: int, size: int) -> None:
    """Whatever the strides of the hidden states: a sum over processes goes by places in memory."""
    hidden = exact_head(5, 7, 30, torch.float32)[0].T.contiguous().T
    weight = exact_head(5, 7, 30, torch.float32)[1]
    found = []
    for of, rows in ((fused_topk, weight), (distributed, own_rows(weight, rank, size, [30] * (size - 1)))):
        x = hidden.clone().requires_grad_()
        assert not x.is_contiguous()
        of.linear_log_softmax_topk(x, rows, 3).values.sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def tokens_of_a_head(rank: int, size: int) -> None:
    """In the one collective, with the states. distributed_contract_checks.py has the results."""
    for rows, several in itertools.product((3, 40), (False, True)):
        hidden, weight, bias = exact_head((rows,), 20, 301, torch.float32, seed=rows)
        generator = torch.Generator().manual_seed(rows)
        tokens = torch.randint(-1, 301, (rows, 5) if several else (rows,), generator=generator)
        start = first_row(301, rank, size)
        own = own_rows(weight, rank, size), tokens, own_rows(bias, rank, size)
        call = functools.partial(distributed.linear_token_logprobs, hidden, *own)
        with counted() as given:
            got, plain = call(start=start, k=4), call(start=start)
        want = fused_topk.linear_token_logprobs(hidden, weight, tokens, bias, k=4)
        assert torch.equal(got.topk.indices, want.topk.indices) and plain.topk is None
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=2e-6, equal_nan=True)
        states = 16 + rows * 8 + rows * 4 * 8 + -(-rows * 4 * 4 // 8) * 8
        assert len(given) == 2 and given[0] == frame(states + -(-tokens.numel() * 4 // 8) * 8)
    if size > 1:
        told = "rank 0 has k=3, 40 rows of torch.float32 and normalize='allowed', targets or settings of draws number "
        raises(
            ValueError,
            told,
            lambda: call(k=3, start=start) if rank == 0 else distributed.linear_log_softmax_topk(hidden, own[0], 3),
        )


def a_bounded_part_of_the_logits(rank: int, size: int) -> None:
    """Pieces within a process: with many rows no process has all logits of its columns."""
    sizes = []
    pieces = layout.forward_pieces

    def forward_pieces(*arguments):
        found = pieces(*arguments)
        sizes.append(found.rows * found.tokens)
        return found

    layout.forward_pieces = forward_pieces
    try:
        rows, vocab_size = 2000, 20000 * size
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, 8, generator=generator)
        weight = torch.randn(20000, 8, generator=torch.Generator().manual_seed(rank))
        got = distributed.linear_topk(hidden, weight, 3)
    finally:
        layout.forward_pieces = pieces
    assert sizes and max(sizes) * 4 <= layout.SCRATCH_BYTES < rows * 20000 * 4
    everywhere = [torch.empty_like(weight) for _ in range(size)]
    dist.all_gather(everywhere, weight)
    logits = hidden[:5] @ torch.cat(everywhere).T
    assert logits.shape[1] == vocab_size
    assert torch.equal(got.indices[:5], logits.topk(3).indices)


def heads_under_torch_compile(rank: int, size: int) -> None:
    hidden, weight, _ = exact_head((4,), 20, 301, torch.float32)
    own = own_rows(weight, rank, size)
    compiled = torch.compile(lambda *x: distributed.linear_log_softmax_topk(*x, 6), fullgraph=True, backend="eager")
    got, want = compiled(hidden, own), distributed.linear_log_softmax_topk(hidden, own, 6)
    assert torch.equal(got.indices, want.indices)
    torch.testing.assert_close(got.values, want.values, rtol=0, atol=0)


def sharded_weights_are_told_where_to_go(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    hidden, weight, _ = exact_head((4,), 20, 301, torch.float32)
    sharded = distribute_tensor(weight, init_device_mesh("cpu", (size,)), [Shard(0)])
    raises(TypeError, "give weight.to_local() to the function", lambda: fused_topk.linear_topk(hidden, sharded, 3))
    raises(TypeError, "to fused_topk.distributed.sample", lambda: fused_topk.linear_sample(hidden, sharded))
    got = distributed.linear_topk(hidden, sharded.to_local(), 3)
    assert torch.equal(got.indices, fused_topk.linear_topk(hidden, weight, 3).indices)

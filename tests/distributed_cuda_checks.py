# SPDX-License-Identifier: Apache-2.0
"""What each process of a group checks, with a GPU of its own (test_distributed_cuda.py)."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fused_topk
import processes
from distributed_checks import adversarial_rows_of_every_dtype, columns  # noqa: F401 - the first is a check here, too
from distributed_linear_checks import first_row, own_rows
from exact_draws import SETTINGS, check_draws, kept_weights, rows_of, uniforms
from fused_topk import distributed
from linear_heads import exact_head
from rows import random_logits, random_mask

FOLDER = ""  # that all processes can write


def masks_and_temperatures(rank: int, size: int) -> None:
    logits = random_logits(6, 32000).cuda()
    mask = random_mask(6, 32000).cuda()
    temperature = torch.linspace(0.5, 2.0, 6, device="cuda")
    own, own_mask = columns(logits, rank, size), columns(mask, rank, size)
    for normalize in ("allowed", "all", "topk"):
        settings = {"temperature": temperature, "normalize": normalize}
        got = distributed.softmax_topk(own, 9, mask=own_mask, **settings)
        want = fused_topk.softmax_topk(logits, 9, mask=mask, **settings)
        assert torch.equal(got.indices, want.indices)
        torch.testing.assert_close(got.values, want.values, rtol=1e-5, atol=1e-7)


def beams(rank: int, size: int) -> None:
    logits, scores = random_logits(4, 3, 32000).cuda(), random_logits(4, 3).cuda()
    got = distributed.beam_topk(columns(logits, rank, size), scores, 6)
    want = fused_topk.beam_topk(logits, scores, 6)
    assert torch.equal(got.indices, want.indices)
    torch.testing.assert_close(got.values, want.values)


def heads_and_their_tokens(rank: int, size: int) -> None:
    hidden, weight, bias = exact_head((50,), 64, 32001, torch.float32, "cuda")
    tokens = torch.arange(50, device="cuda") * 600
    got = distributed.linear_token_logprobs(
        hidden,
        own_rows(weight, rank, size),
        tokens,
        own_rows(bias, rank, size),
        start=first_row(32001, rank, size),
        k=7,
    )
    want = fused_topk.linear_token_logprobs(hidden, weight, tokens, bias, k=7)
    assert torch.equal(got.topk.indices, want.topk.indices)
    torch.testing.assert_close(got.topk.values, want.topk.values)
    torch.testing.assert_close(got.logprobs, want.logprobs)


def a_step_of_training(rank: int, size: int) -> None:
    """The gradients of an LM head are those of the whole one, of the process's own rows."""
    hidden, weight, bias = exact_head((50,), 64, 32001, torch.float32, "cuda")
    tokens, start = torch.arange(50, device="cuda") * 600, first_row(32001, rank, size)

    def gradients(linear_token_logprobs, given, **more):
        learned = [x.clone().requires_grad_() for x in given]
        found = linear_token_logprobs(learned[0], learned[1], tokens, learned[2], entropy=True, tail=True, **more)
        loss = (found.logprobs + 3 * found.entropy + 5 * found.tail) @ torch.linspace(-1, 2, 50, device="cuda")
        return torch.autograd.grad(loss, learned)

    own = [hidden, own_rows(weight, rank, size), own_rows(bias, rank, size)]
    got = gradients(distributed.linear_token_logprobs, own, start=start)
    want = gradients(fused_topk.linear_token_logprobs, [hidden, weight, bias])
    for of_own, of_whole in zip(got, [want[0], *(own_rows(x, rank, size) for x in want[1:])]):
        torch.testing.assert_close(of_own, of_whole, rtol=2e-5, atol=2e-5)


def draws_of_exact_sums(rank: int, size: int) -> None:
    logits = rows_of(9001)
    seed = torch.arange(len(logits)) + 17
    for name in ("whole", "hot", "usual", "min_p", "top_p_of_almost_all"):
        own = columns(logits.cuda(), rank, size)
        got = distributed.sample(own, seed=seed.cuda(), num_samples=50, **SETTINGS[name])
        check_draws(got.tokens.cpu(), uniforms(seed, 50), kept_weights(logits, SETTINGS[name]))


def a_graph_is_captured_and_replayed(rank: int, size: int) -> None:
    logits = random_logits(5, 32000, seed=1).cuda()
    own = columns(logits, rank, size).contiguous()
    distributed.log_softmax_topk(own, 7)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = distributed.log_softmax_topk(own, 7)
    for seed in (2, 3):
        logits = random_logits(5, 32000, seed=seed).cuda()
        own.copy_(columns(logits, rank, size))
        graph.replay()
        want = fused_topk.log_softmax_topk(logits, 7)
        assert torch.equal(got.indices, want.indices)
        torch.testing.assert_close(got.values, want.values)


def compiled(rank: int, size: int) -> None:
    logits = random_logits(5, 32000).cuda()

    def step(x):
        return distributed.log_softmax_topk(x * 2, 5)

    got = torch.compile(step, fullgraph=True)(columns(logits, rank, size))
    want = fused_topk.log_softmax_topk(logits * 2, 5)
    assert torch.equal(got.indices, want.indices)
    torch.testing.assert_close(got.values, want.values)


def dtensors(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (size,))
    logits = random_logits(6, 1001).cuda()
    want = fused_topk.softmax_topk(logits, 5)
    for placement in (Shard(1), Shard(0), Replicate()):
        got = fused_topk.softmax_topk(distribute_tensor(logits, mesh, [placement]), 5)
        assert torch.equal(got.indices.full_tensor(), want.indices), placement
        torch.testing.assert_close(got.values.full_tensor(), want.values)


def heads_and_draws_in_a_graph(rank: int, size: int) -> None:
    hidden, weight, bias = exact_head((8,), 64, 32001, torch.float32, "cuda")
    own_weight, own_bias = own_rows(weight, rank, size), own_rows(bias, rank, size)
    seed = torch.arange(8, device="cuda")

    def step(hidden):
        best = distributed.linear_log_softmax_topk(hidden, own_weight, 7, own_bias)
        return best, distributed.sample(hidden @ own_weight.T + own_bias, seed=seed, num_samples=3)

    def check(found, hidden):
        logits = hidden @ weight.T + bias
        best, drawn = found
        want = fused_topk.log_softmax_topk(logits, 7)
        assert torch.equal(best.indices, want.indices)
        torch.testing.assert_close(best.values, want.values)
        assert torch.equal(drawn.tokens, fused_topk.sample(logits, seed=seed, num_samples=3).tokens)

    check(step(hidden), hidden)
    torch.cuda.synchronize()
    graph, read = torch.cuda.CUDAGraph(), hidden.clone()
    with torch.cuda.graph(graph):
        found = step(read)
    for shift in (1, 2):
        read.copy_(hidden.roll(shift, 0))
        graph.replay()
        check(found, read)
    compiled_step = torch.compile(step, fullgraph=True)
    check(compiled_step(hidden), hidden)


def calls_that_differ(rank: int, size: int) -> None:
    """Where every call compares, each process gets the error, and the group goes on."""
    logits = random_logits(4, 999).cuda()
    distributed.topk(logits, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_TOPK_CHECK_DISTRIBUTED", "1")
        with pytest.raises(ValueError, match=r"rank 1 has k=9"):
            distributed.topk(logits, 9 if rank == 1 else 5)
        distributed.topk(logits, 5)


def a_process_dies(rank: int, size: int) -> None:
    """The others get an error within the group's limit, and a new group of theirs works."""
    logits = random_logits(3, 90).cuda()
    group = dist.new_group(timeout=timedelta(seconds=10))
    distributed.topk(logits, 5, group=group)
    if rank == size - 1:
        os._exit(1)
    # The first call of its kind compares.
    with pytest.raises(RuntimeError, match="got no answer of some within 9 s"):
        distributed.topk(logits, 6, group=group)
    dist.distributed_c10d._abort_process_group()
    processes.join(FOLDER, "store_of_the_rest", rank, size - 1, backend="nccl")
    got = distributed.softmax_topk(columns(logits, rank, size - 1), 5)
    assert torch.equal(got.indices, fused_topk.softmax_topk(logits, 5).indices)

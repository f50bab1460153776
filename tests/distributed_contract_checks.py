# SPDX-License-Identifier: Apache-2.0
"""What each of four processes checks over all functions and arguments of contract.py (test_distributed.py)."""

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fused_topk
from contract import Case, GeneratorOf, V, arguments, calls, functions, parameters
from contract_results import LEARNED, assert_close, call, exact, gradients, with_gradients
from distributed_checks import raises
from fused_topk import distributed
from fused_topk.distributed import collective, sampling
from fused_topk.distributed.packing import Header

FOLDER = ""
_CUT = 32  # the tokens of a group's first process


def own_group(rank: int) -> Any:
    """One of the groups [0, 1] and [2, 3], which work at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[rank // 2]


def share_of(given: dict[str, Any], parameters_: list[str], first: bool) -> dict[str, Any]:
    """A process's part of a call: of what has the vocabulary, its tokens."""
    tokens, words = (slice(0, _CUT), slice(0, 1)) if first else (slice(_CUT, V), slice(1, None))
    found = dict(given)
    for x, y in given.items():
        if f"local_{x}" in parameters_:
            found[x] = y[..., tokens] if x == "logits" else y[tokens]
        elif x == "mask":
            found[x] = y[..., tokens if y.dtype == torch.bool else words]
        elif x == "lengths":
            found[x] = y.clamp(max=_CUT) if first else (y - _CUT).clamp(min=0)
        elif x == "generator" and not first:
            found[x] = GeneratorOf(y + 1)  # not asked for its numbers
        elif x == "start":
            found[x] = tokens.start
    return found


def groups_that_are_not_the_world(rank: int, size: int) -> None:
    """Results and gradients of each are those of one process."""
    group, first = own_group(rank), rank % 2 == 0
    # A window of 8 tokens does not hold what top_p keeps: the logits are then gathered.
    for name, window in [*((name, 1024) for name in functions("groups")), ("distributed.sample", 8)]:
        sampling._WINDOW = window
        taken = parameters(name)
        for told, given in calls(name, "groups", Case(seed=rank // 2)):
            given.pop("start", None)
            learned = [x for x in LEARNED if x in given]
            live = with_gradients(given, *learned)
            want = exact(name, live)
            own = with_gradients(share_of(given | {"start": 0} if "tokens" in given else given, taken, first), *learned)
            got = call(name, own | {"group": group})
            told = f"{name} {told}"
            assert_close(got, want, told)
            if wanted := gradients(want, live, *learned):
                own_part = share_of(dict(zip(learned, wanted, strict=True)), taken, first)
                assert_close(gradients(got, own, *learned), list(own_part.values()), f"{told}, gradient")


def a_group_agrees_by_itself(rank: int, size: int) -> None:
    """Groups that make other calls do not meet, and errors count ranks in the group. Traced calls stay in it, too."""
    group, place = own_group(rank), rank % 2
    cpu = torch.device("cpu")
    collective.agree(Header.of(7, 3 + rank // 2, 5, torch.float32, "allowed"), cpu, group)
    for call_of in (
        lambda: collective.agree(Header.of(7, 8 + place, 5, torch.float32, "allowed"), cpu, group),
        lambda: distributed.topk(torch.zeros(2, 40), 8 + place, group=group),
    ):
        raises(ValueError, "rank 0 has k=8, ", call_of)
        raises(ValueError, "; rank 1 has k=9, ", call_of)
    case = Case(seed=rank // 2)
    own = share_of({"logits": case.logits()}, ["local_logits"], place == 0)["logits"]
    traced = torch.compile(lambda x: distributed.log_softmax_topk(x, 5, group=group), fullgraph=True, backend="eager")
    live = own.clone().requires_grad_()
    best = traced(live)
    assert torch.equal(best.indices, fused_topk.topk(case.logits(), 5).indices)
    (found,) = torch.autograd.grad(best.logsumexp.sum(), live)
    torch.testing.assert_close(
        found, share_of({"logits": case.logits().softmax(-1)}, ["local_logits"], place == 0)["logits"]
    )


def dtensors_of_every_argument(rank: int, size: int) -> None:
    """On a mesh of 2 x 2: results, their places and gradients are those of plain logits. What a DTensor does not take is refused."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    places = [
        [Replicate(), Shard(2)], [Shard(2), Replicate()], [Shard(0), Shard(2)], [Shard(2), Shard(0)], [Shard(2), Shard(2)],
        [Shard(1), Replicate()], [Shard(0), Shard(1)], [Partial(), Shard(2)], [Partial(), Replicate()],
    ]  # fmt: skip
    turn = itertools.cycle(places)
    for name in functions("dtensors"):
        for told, given in calls(name, "dtensors", Case()):
            refused = {x: given[x] for x in ("lengths",) if x in given}
            if refused:
                x = distribute_tensor(given["logits"], mesh, places[0])
                for option in refused:
                    one = {a: b for a, b in given.items() if a not in refused} | {option: given[option], "logits": x}
                    raises(
                        TypeError,
                        f"`{option}` must be None where `logits` is a DTensor",
                        functools.partial(call, name, one),
                    )
                given = {a: b for a, b in given.items() if a not in refused}
                if told != "all":
                    continue
            want_of = with_gradients(given, "logits")
            want = exact(name, want_of)
            wanted = gradients(want, want_of, "logits")
            for place in places if told == "all" else [next(turn)]:
                plain = [Replicate() if p.is_partial() else p for p in place]
                x = distribute_tensor(given["logits"], mesh, plain)
                if place != plain:
                    x = DTensor.from_local(x.to_local() / 2, mesh, place, shape=x.shape, stride=x.stride())
                live = {
                    a: distribute_tensor(b, mesh, [Shard(0), Replicate()])
                    if isinstance(b, Tensor) and told == "all"
                    else b
                    for a, b in given.items()
                } | {"logits": x.requires_grad_()}
                got = call(name, live)
                at = f"{name} {told} at {place}"
                of_result = [
                    Replicate() if p == Shard(2) and name not in ("softmax", "log_softmax") else p for p in plain
                ]
                assert all(isinstance(y, DTensor) for y in got), at
                if place.count(Shard(2)) < 2 and (name != "beam_topk" or Shard(1) not in place):
                    assert all(list(y.placements) == of_result for y in got), at
                whole = [y.full_tensor() for y in got]
                assert_close(whole, want, at)
                (found,) = gradients(whole, live, "logits")
                if place == plain:
                    assert_close([found.full_tensor()], wanted, f"{at}, gradient")
        if "dim" in arguments(name, "dtensors"):
            x = distribute_tensor(Case().logits(), mesh, places[0])
            k = {"k": 2} if "k" in parameters(name) else {}
            raises(ValueError, "`dim` must be the last", functools.partial(call, name, {"logits": x, "dim": 0, **k}))

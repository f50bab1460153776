# SPDX-License-Identifier: Apache-2.0
"""The operators under torch.func: grad, jacrev, vmap, in any nesting.

What torch.library registers for autograd does not serve these transforms, so here each operator is an autograd.Function
with the same gradient. vmap needs no loop: what it maps over becomes one more leading dimension of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rows import ROWS_FIELDS, unflattened
from . import full_rows as full_rows  # the operators that these Functions call
from . import gradients, linear, merging, routing
from . import ranks as ranks
from . import row_topk as row_topk
from . import token_spread as token_spread
from .linear_pieces import Wanted


def _at_front(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The tensor with the dimension that vmap maps over in front. A tensor that vmap does not map over is expanded."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _mapped(info: Any, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> list[Any]:
    return [
        _at_front(argument, dim, info.batch_size) if isinstance(argument, Tensor) else argument
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]


def _take_turns(run: Callable[..., Any], info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
    """One call after the other. It serves vmap over an argument that all rows of a call share, such as a weight."""
    # For an argument that is a list, `dim` is a list, too.
    turns = [
        run(
            *(
                argument.select(dim, i) if isinstance(argument, Tensor) and dim is not None else argument
                for argument, dim in zip(arguments, in_dims, strict=True)
            )
        )
        for i in range(info.batch_size)
    ]
    found = tuple(map(torch.stack, zip(*turns, strict=True)))
    return found, (0,) * len(found)


def _map_rows(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    _, (_, values, *_) = unflattened(arguments)
    # Of logits there is no logsumexp, and what is empty is not mapped.
    return run(*_mapped(info, in_dims, arguments)), (0, 0, None if values == "logits" else _dim_of_normalizer(values))


def _dim_of_normalizer(values: str) -> int:
    """The mapped dimension of the logsumexp: the first, or in a state the one behind the dimension of m and d."""
    return int(values == "state")


def _map_one(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    return run(*_mapped(info, in_dims, arguments)), 0


def _map_two(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    return run(*_mapped(info, in_dims, arguments)), (0, 0)


def _map_beams(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Beam search has one batch dimension. The dimension that vmap maps over is folded into it."""
    folded = [x.flatten(0, 1) if isinstance(x, Tensor) else x for x in _mapped(info, in_dims, arguments)]
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in run(*folded)), (0, 0, 0)


def _map_heads(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Each mapped weight or bias is a head of its own."""
    weight, bias, targets = range(ROWS_FIELDS, ROWS_FIELDS + 3)
    if in_dims[weight] is not None or in_dims[bias] is not None:
        return _take_turns(run, info, in_dims, *arguments)
    mapped = _mapped(info, in_dims, arguments)
    mapped[weight], mapped[bias] = arguments[weight], arguments[bias]
    # An empty tensor in the place of a result that nobody asked for is not mapped.
    wanted = Wanted(*arguments[-len(Wanted._fields) :])
    has_targets, has_spread = arguments[targets] is not None, wanted.values != "state"
    is_mapped = (
        True,
        True,
        wanted.values not in ("logits", "state"),
        has_targets,
        wanted.ties is not None,
        wanted.keeps_state,
        wanted.entropy and has_spread,
        wanted.tail and has_spread,
        wanted.keeps_logits,
    )
    return run(*mapped), tuple(0 if x else None for x in is_mapped)


def _map_parts(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """The mapped dimension becomes the first dimension of the rows, behind the dimension of the parts."""
    mapped = _mapped(info, in_dims, arguments)
    # All rows have parts of the same lengths.
    if in_dims[4] is not None:
        raise ValueError("`part_lengths` must not be mapped over; the parts of all rows begin at the same tokens")
    mapped[:4] = [x.movedim(0, 1) for x in mapped[:4]]
    mapped[4] = arguments[4]
    return run(*mapped), (0, 0, _dim_of_normalizer(arguments[8]))


def _map_routers(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Each mapped bias is a router of its own."""
    bias = ROWS_FIELDS
    if in_dims[bias] is not None:
        return _take_turns(run, info, in_dims, *arguments)
    mapped = _mapped(info, in_dims, arguments)
    mapped[bias] = arguments[bias]
    return run(*mapped), (0, 0)


class _Function(torch.autograd.Function):
    """An operator that has no forward-mode derivative."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            "the functions of fused_topk must be differentiated in reverse mode, got forward mode, which torch.func.hessian and "
            "jacfwd use; use torch.func.jacrev, twice for a Hessian"
        )


def _function(
    name: str, map_over: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Any:
    """The Function of an operator. `map_over(run, info, in_dims, *arguments)`: what vmap does to a call of `run`."""
    operator = getattr(torch.ops.fused_topk, name).default

    def forward(*arguments: Any) -> Any:
        return operator(*arguments)

    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return map_over(made.apply, info, in_dims, *arguments)

    methods = {"forward": forward, "setup_context": setup_context, "backward": backward, "vmap": vmap}
    made: Any = type(name, (_Function,), {method: staticmethod(run) for method, run in methods.items()})
    # The operator itself gets the rule too, because gradients use it. Without one torch loops over the mapped dimension.
    torch.library.register_vmap(f"fused_topk::{name}", functools.partial(map_over, operator))
    return made


RowTopk = _function("row_topk", _map_rows, gradients.row_setup_context, gradients.row_backward)
BeamTopk = _function("beam_topk", _map_beams, gradients.beam_setup_context, gradients.beam_backward)
MergeParts = _function("merge_parts", _map_parts, merging.setup_context, merging.backward)
RouterChoice = _function("router_topk", _map_routers, routing.setup_context, routing.backward)
FullRowValues: Any = _function(
    "full_rows",
    _map_one,
    gradients.full_rows_setup_context,
    lambda ctx, gradient: gradients.full_rows_backward(ctx, gradient, FullRowValues.apply),
)
TargetRanks = _function(
    "target_ranks",
    _map_one,
    lambda ctx, inputs, output: ctx.mark_non_differentiable(output),
    lambda ctx, gradient: (None,) * (ROWS_FIELDS + 3),
)
TokenSpread = _function("token_spread", _map_two, token_spread.setup_context, token_spread.backward)
LinearTopk = _function(
    "linear_topk",
    _map_heads,
    linear.setup_context,
    lambda ctx, *gradients: linear.backward_by(LinearTopkBackward.apply, ctx, *gradients),
)
# There is no second gradient.
LinearTopkBackward: Any = _function(
    "linear_topk_backward", _take_turns, lambda ctx, inputs, output: None, linear.no_second_gradient
)

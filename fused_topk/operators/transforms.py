# SPDX-License-Identifier: Apache-2.0
"""The operators under torch.func: grad, jacrev, vmap, in any nesting.

What torch.library registers for autograd does not serve these transforms, so here each operator is an autograd.Function
with the same gradient. vmap needs no loop: what it maps over becomes one more leading dimension of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rows import ROWS_FIELDS, unflattened
from . import full_rows as full_rows  # the operators that these Functions call
from . import gradients, linear, merging, routing
from . import row_topk as row_topk


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


def _turn(i: int, in_dims: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The arguments of the i-th call of those that vmap makes one of."""
    # A list has a dimension for each of its elements.
    return [
        argument.select(dim, i) if isinstance(argument, Tensor) and dim is not None else argument
        for argument, dim in zip(arguments, in_dims, strict=True)
    ]


def _map_rows(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    _, (_, values, *_) = unflattened(arguments)
    return run(*_mapped(info, in_dims, arguments)), _dims_of_results(values)


def _dims_of_results(values: str) -> tuple[int, int, int]:
    """What vmap has mapped over, in the results. Of a state, m and d come first."""
    return 0, 0, int(values == "state")


def _map_one(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    return run(*_mapped(info, in_dims, arguments)), 0


def _map_beams(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Beam search has one batch dimension. The dimension that vmap maps over is folded into it."""
    folded = [x.flatten(0, 1) if isinstance(x, Tensor) else x for x in _mapped(info, in_dims, arguments)]
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in run(*folded)), (0, 0, 0)


def _map_heads(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Each mapped weight or bias is a head of its own, and they take their turns."""
    weight, bias, targets = range(ROWS_FIELDS, ROWS_FIELDS + 3)
    if in_dims[weight] is None and in_dims[bias] is None:
        mapped = _mapped(info, in_dims, arguments)
        mapped[weight], mapped[bias] = arguments[weight], arguments[bias]
        result = run(*mapped)
        # Empty tensors that stand for nothing are not mapped.
        has_targets, (has_ranks, keeps_state) = arguments[targets] is not None, arguments[-2:]
        is_mapped = (True, True, True, has_targets, has_ranks, keeps_state)
        return result, tuple(0 if x else None for x in is_mapped)
    turns = [run(*_turn(i, in_dims, arguments)) for i in range(info.batch_size)]
    return tuple(map(torch.stack, zip(*turns, strict=True))), (0,) * 6


class _Function(torch.autograd.Function):
    """An operator that has no forward-mode derivative."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            "the functions of fused_topk must be differentiated in reverse mode, got forward mode, which torch.func.hessian and "
            "jacfwd use; use torch.func.jacrev, twice for a Hessian"
        )


class RowTopk(_Function):
    """row_topk."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return tuple(torch.ops.fused_topk.row_topk.default(*arguments))

    setup_context = staticmethod(gradients.row_setup_context)
    backward = staticmethod(gradients.row_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return _map_rows(RowTopk.apply, info, in_dims, *arguments)


class BeamTopk(_Function):
    """beam_topk."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return tuple(torch.ops.fused_topk.beam_topk.default(*arguments))

    setup_context = staticmethod(gradients.beam_setup_context)
    backward = staticmethod(gradients.beam_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return _map_beams(BeamTopk.apply, info, in_dims, *arguments)


def _map_parts(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """What vmap maps over becomes the first dimension of the rows, which follows the one of the parts."""
    mapped = _mapped(info, in_dims, arguments)
    # The parts have lengths in common to all rows.
    if in_dims[4] is not None:
        raise ValueError("`lengths` must not be mapped over; the parts of all rows begin at the same tokens")
    mapped[:4] = [x.movedim(0, 1) for x in mapped[:4]]
    mapped[4] = arguments[4]
    return run(*mapped), _dims_of_results(arguments[8])


class MergeParts(_Function):
    """merge_parts."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return tuple(torch.ops.fused_topk.merge_parts.default(*arguments))

    setup_context = staticmethod(merging.setup_context)
    backward = staticmethod(merging.backward)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return _map_parts(MergeParts.apply, info, in_dims, *arguments)


class LinearTopk(_Function):
    """linear_topk."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return tuple(torch.ops.fused_topk.linear_topk.default(*arguments))

    setup_context = staticmethod(linear.setup_context)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return linear.backward_by(LinearTopkBackward.apply, ctx, *gradients)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return _map_heads(LinearTopk.apply, info, in_dims, *arguments)


class LinearTopkBackward(_Function):
    """linear_topk_backward, which vmap loops over."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.fused_topk.linear_topk_backward.default(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept: there is no second gradient."""

    backward = staticmethod(linear.no_second_gradient)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        turns = [LinearTopkBackward.apply(*_turn(i, in_dims, arguments)) for i in range(info.batch_size)]
        return tuple(map(torch.stack, zip(*turns, strict=True))), (0, 0, 0)


def _map_routers(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """Each mapped bias is a router of its own, and they take their turns."""
    bias = ROWS_FIELDS
    if in_dims[bias] is not None:
        turns = [run(*_turn(i, in_dims, arguments)) for i in range(info.batch_size)]
        return tuple(map(torch.stack, zip(*turns, strict=True))), (0, 0)
    mapped = _mapped(info, in_dims, arguments)
    mapped[bias] = arguments[bias]
    return run(*mapped), (0, 0)


class RouterChoice(_Function):
    """router_topk."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return tuple(torch.ops.fused_topk.router_topk.default(*arguments))

    setup_context = staticmethod(routing.setup_context)
    backward = staticmethod(routing.backward)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return _map_routers(RouterChoice.apply, info, in_dims, *arguments)


class FullRowValues(_Function):
    """full_rows."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.fused_topk.full_rows.default(*arguments)

    setup_context = staticmethod(gradients.full_rows_setup_context)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradients.full_rows_backward(ctx, gradient, FullRowValues.apply)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return _map_one(FullRowValues.apply, info, in_dims, *arguments)


class TargetRanks(_Function):
    """target_ranks."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.fused_topk.target_ranks.default(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None,) * (ROWS_FIELDS + 3)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return _map_one(TargetRanks.apply, info, in_dims, *arguments)


# The operators themselves get the rules too, because gradients use them. Without a rule torch loops over the mapped dimension.
if hasattr(torch.library, "register_vmap"):
    for _name, _map in (
        ("row_topk", _map_rows),
        ("beam_topk", _map_beams),
        ("merge_parts", _map_parts),
        ("full_rows", _map_one),
        ("router_topk", _map_routers),
    ):
        _operator = getattr(torch.ops.fused_topk, _name).default
        torch.library.register_vmap(
            f"fused_topk::{_name}",
            lambda info, in_dims, *arguments, _map=_map, _operator=_operator: _map(
                _operator, info, in_dims, *arguments
            ),
        )

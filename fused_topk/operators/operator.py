# SPDX-License-Identifier: Apache-2.0
"""The class of all operators: what torch.compile, fake tensors, autograd, vmap and CUDA graphs see of a function, and the
shortest way that serves a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .dispatch import is_seen_by_torch, transform_is_active, wants_gradient

library = torch.library.Library("fused_topk", "DEF")


class Operator:
    """A function with its fake, its gradient and its rule for vmap. It is called with the arguments of its schema."""

    def __init__(
        self,
        schema: str,
        run: Callable[..., Any],
        fake: Callable[..., Any] = lambda *arguments: None,
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        map_over: Callable[..., Any] | None = None,
    ) -> None:
        """run: computes the result. fake: the result for tensors without memory. setup_context, backward: the
        gradient, as those of torch.autograd.Function. `map_over(run, info, in_dims, *arguments)`: what vmap does to a call of `run`."""
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fused_topk::{name}", fake, lib=library)
        # Looked up once, not at every call.
        operator = getattr(torch.ops.fused_topk, name).default
        self._run = run
        # For a call that nothing of torch but autograd sees.
        self.with_gradient = run
        self._of_torch = self._transformed = operator
        if backward is not None:
            torch.library.register_autograd(f"fused_topk::{name}", backward, setup_context=setup_context, lib=library)
            self.with_gradient = _eager_function(name, run, setup_context, backward).apply
        if map_over is not None:
            if backward is None:
                setup_context, backward = _mark_as_constant, lambda ctx, gradient: (None,) * ctx.inputs
            self._transformed = _transformed_function(name, operator, setup_context, backward, map_over).apply

            # The operator itself gets the rule, too, because gradients use it. Without one torch loops over the mapped dimension.
            def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
                return map_over(operator, info, in_dims, *arguments)

            torch.library.register_vmap(f"fused_topk::{name}", vmap)

    def __call__(self, *arguments: Any) -> Any:
        if transform_is_active():
            return self._transformed(*arguments)
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if is_seen_by_torch(*tensors):
            return self._of_torch(*arguments)
        # An autograd.Function of our own: the whole call takes half the time that it takes with the gradient of the operator.
        return (self.with_gradient if wants_gradient(*tensors) else self._run)(*arguments)


def _eager_function(
    name: str, run: Callable[..., Any], setup_context: Callable[..., None] | None, backward: Callable[..., Any]
) -> Any:
    """The operator's gradient where nothing but autograd sees the call."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = run(*arguments)
        if setup_context is not None:
            setup_context(ctx, arguments, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


class _Transformed(torch.autograd.Function):
    """An operator under torch.func: grad, jacrev, vmap, in any nesting. What is registered with torch.library for autograd does
    not serve these transforms."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(
            "the functions of fused_topk must be differentiated in reverse mode, got forward mode, which torch.func.hessian and "
            "jacfwd use; use torch.func.jacrev, twice for a Hessian"
        )


def _transformed_function(
    name: str,
    operator: Callable[..., Any],
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any],
    map_over: Callable[..., Any],
) -> Any:
    def forward(*arguments: Any) -> Any:
        return operator(*arguments)

    def vmap(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
        return map_over(made.apply, info, in_dims, *arguments)

    setup_context = setup_context or (lambda ctx, inputs, output: None)
    methods = {"forward": forward, "setup_context": setup_context, "backward": backward, "vmap": vmap}
    made: Any = type(name, (_Transformed,), {method: staticmethod(run) for method, run in methods.items()})
    return made


def _mark_as_constant(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)
    ctx.inputs = len(inputs)


def mapped(info: Any, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with the dimension that vmap maps over in front. A tensor that vmap does not map over is expanded."""

    def at_front(argument: Any, dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        return argument.expand(info.batch_size, *argument.shape) if dim is None else argument.movedim(dim, 0)

    return list(map(at_front, arguments, in_dims))


def map_rows(run: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Any:
    """vmap needs no loop: what it maps over becomes one more leading dimension of the rows, and of each result."""
    found = run(*mapped(info, in_dims, arguments))
    return found, 0 if isinstance(found, Tensor) else (0,) * len(found)


def take_turns(run: Callable[..., Any], info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
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

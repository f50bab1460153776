# SPDX-License-Identifier: Apache-2.0
"""A model's layers as compiled code, for steps that are captured: one piece of code for all layers and all lengths.

A layer of a step has many small operations beside its products: norms, rotary embeddings, activations, sums. torch.compile makes few of
them. To compile a whole step takes a minute, since each layer is compiled by itself. So a twin for steps has layers that do not tell
which one they are: each is given a cache of itself alone, and the number 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, EncoderDecoderCache

from .compiled import Code, let_vary
from .facts import num_layers
from .twin import twin_of

Run = Callable[[nn.Module, list[Any], dict[str, Any]], Any]


def called(layer: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return layer(*args, **kwargs)


def apart(twin: Any, run: Run = called) -> Any:
    """A copy of a twin, with the same weights, whose layers do not tell which one they are, and are called by `run`. Raises ValueError
    where the model has no list of its layers."""
    copy = twin_of(twin, None)
    stacks = [*_stacks(copy, num_layers(twin.config))]
    if not stacks:
        raise ValueError("no list of layers")
    for stack in stacks:
        for number, layer in enumerate(stack):
            for module in layer.modules():
                if type(vars(module).get("layer_idx")) is int:
                    vars(module)["layer_idx"] = 0
            stack._modules[str(number)] = _Layer(layer, number, run)
    return copy


def compiled(code: Code) -> Run:
    """Calls layers as compiled code. Args: code: of :func:`called`."""

    def run(layer: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _let_vary((args, kwargs))
        return code.run((layer, args, kwargs))[0]

    return run


def _stacks(module: nn.Module, number: int) -> Iterator[nn.ModuleList]:
    """The lists of that many layers, but for lists within layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) == number:
            yield child
        else:
            yield from _stacks(child, number)


class _Layer(nn.Module):
    """Stands in the place of a layer."""

    def __init__(self, layer: nn.Module, number: int, run: Run) -> None:
        super().__init__()
        self.layer, self._number, self._run = layer, number, run

    def __getattr__(self, name: str) -> Any:
        # Models ask some layers for their kind of attention.
        of: Any = super().__getattr__("layer")
        return of if name == "layer" else getattr(of, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.layer, [*map(self._own, args)], {name: self._own(each) for name, each in kwargs.items()})

    def _own(self, argument: Any) -> Any:
        """The argument; in the place of a cache one of this layer alone."""
        if isinstance(argument, EncoderDecoderCache):
            return EncoderDecoderCache(*map(self._own, (argument.self_attention_cache, argument.cross_attention_cache)))
        return Cache(layers=[argument.layers[self._number]]) if isinstance(argument, Cache) else argument


def _let_vary(arguments: Any) -> None:
    """Makes the code of a layer serve other numbers of rows and places."""
    for each in tree_leaves(arguments):
        if isinstance(each, Tensor):
            # The heads of a mask do not vary, nor does the size of a hidden state.
            let_vary(each, (0, 2, 3) if each.dim() == 4 else tuple(range(each.dim() - 1)))
        elif isinstance(each, EncoderDecoderCache):
            _let_vary((each.self_attention_cache, each.cross_attention_cache))
        elif isinstance(each, Cache):
            layers: list[Any] = each.layers
            for layer in layers:
                for tensor, dims in layer.sizes_that_vary():
                    let_vary(tensor, dims)

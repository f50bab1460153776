# SPDX-License-Identifier: Apache-2.0
"""RMS norms of a twin, each computed by one operation of torch where that is equal to rounding.

A model's own norm takes six or more operations: a prototype's captured step of a 1B model took 3.0 ms with them, 2.5 without (H200, 8a486e8).
Which modules are such norms is found by what they compute, not by their names. A module that is not known to be one stays as it is.

On a CPU ours are quicker, too, but for a long prompt in bfloat16, so there is one rule for all devices. Llama's own norm / ours, us:
    4 x 64, 4 x 256, 32 x 2,048, 512 x 2,048    float32: 17.4 / 12.0, 18.0 / 12.8, 35.6 / 30.5, 2,184 / 2,163
                                                bfloat16: 18.7 / 14.0, 18.8 / 14.6, 58.3 / 50.4, 2,371 / 3,004
Gemma's take 1.00 to 1.08 times as long as ours. (Two threads of a shared EPYC, torch 2.13, 2026-11-28, medians of 7 x 200 calls in turns.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .reasons import raise_if_from_a_signal

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Sizes of inputs, in units of the root of epsilon and in units of 1. The first ones show epsilon.
_SMALL, _LARGE = (0.1, 1.0, 10.0), (1.0, 50.0, 1e4)
_BARE = vars(nn.Module())
_SIMPLE = (bool, int, float, str, type(None))


class _Norm(nn.Module):
    """Goes before a norm's own class. Reads the weight at each call, because it may be changed in place."""

    size: tuple[int]
    epsilon: float
    added: int  # to the weight: 1 in Gemma's norms

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight: Any = self._parameters["weight"]
        x = args[0] if len(args) == 1 and not kwargs else None
        # What has not been tried is left to the norm's own class: another dtype, or the second input of a gated norm.
        if not isinstance(x, Tensor) or x.dtype != weight.dtype or x.shape[-1:] != self.size:
            return super().forward(*args, **kwargs)
        if not self.added:
            return torch.rms_norm(x, self.size, weight, self.epsilon)
        # As Gemma does, this does not round the sum to 16 bits.
        return torch.rms_norm(x.float(), self.size, weight.float() + self.added, self.epsilon).to(x.dtype)


def take(twin: nn.Module) -> None:
    """Lets each RMS norm of a twin be computed by one operation, where that is equal to rounding.

    Each kind of norm is tried once a twin. What a class computes may change, and then the model gets another twin.
    """
    found: dict[tuple[Any, ...], type[nn.Module]] = {}
    for module in twin.modules():
        key = _key(module)
        if key is not None:
            if key not in found:
                found[key] = _class_for(module)
            module.__class__ = found[key]


def _key(module: nn.Module) -> tuple[Any, ...] | None:
    """All that a norm's result depends on, beside input and values of the weight; None if the module does not look like a norm."""
    state = vars(module)
    parameters = state.get("_parameters", {})
    weight = parameters.get("weight")
    if len(parameters) != 1 or type(weight) is not nn.Parameter or weight.dim() != 1 or weight.dtype not in _DTYPES:
        return None
    # Without buffers, submodules and hooks.
    is_bare = all(state.get(name) == _BARE[name] for name in _BARE if name not in ("_parameters", "training"))
    own = {name: value for name, value in state.items() if name == "training" or name not in _BARE}
    # A class that asks to be told of the classes made of it would notice ours.
    is_told = any("__init_subclass__" in vars(base) for base in type(module).__mro__[:-1])
    if is_told or not is_bare or not all(map(_is_simple, own.values())) or not _epsilon(module) > 0:
        return None
    return type(module), weight.dtype, weight.device, weight.shape, *sorted(own.items())


def _is_simple(value: Any) -> bool:
    return all(map(_is_simple, value)) if isinstance(value, tuple) else isinstance(value, _SIMPLE)


def _epsilon(module: nn.Module) -> float:
    found = (value for name, value in vars(module).items() if "eps" in name and isinstance(value, float))
    return next(found, 0.0)


def _class_for(module: Any) -> type[nn.Module]:
    """A class of the module's own kind that computes the same by one operation; the module's class if there is none."""
    own: type[nn.Module] = type(module)
    state = {"__module__": own.__module__, "size": tuple(module.weight.shape), "epsilon": _epsilon(module)}
    for added in (0, 1):
        try:
            kind = type(own.__name__, (_Norm, own), {**state, "added": added})
            with torch.no_grad():
                if all(_is_equal(module, kind, dtype) for dtype in {torch.float32, module.weight.dtype}):
                    return kind
        # Whatever a module raises here, it need not raise in the model.
        except Exception as error:
            raise_if_from_a_signal(error)
    return own


def _is_equal(module: Any, kind: Any, dtype: torch.dtype) -> bool:
    """Whether the class computes what the module does, with a weight and inputs of the dtype."""
    sizes = torch.tensor([*(each * kind.epsilon**0.5 for each in _SMALL), *_LARGE], device="cpu")
    # Numbers that nobody has to draw. The last ones are the weight.
    numbers = torch.arange((6 * len(sizes) + 1) * kind.size[0], dtype=torch.float32, device="cpu").mul(0.7).sin()
    x, weight = numbers[: -kind.size[0]].view(len(sizes), 6, *kind.size), numbers[-kind.size[0] :]
    x = x * sizes[:, None, None]
    x[:, 0], x[:, 1, ::2], x[:, 2, 0], x[:, 3, -1] = 0, 0, torch.inf, torch.nan
    x, weight = (each.to(module.weight.device, dtype) for each in (x, weight))
    tried: Any = object.__new__(type(module))
    tried.__dict__.update(vars(module), _parameters={"weight": nn.Parameter(weight, requires_grad=False)})
    before, given = dict(vars(tried)), x.clone()
    own = tried(given)
    if vars(tried) != before or not torch.equal(given.nan_to_num(), x.nan_to_num()):
        # It keeps something, or writes to its input.
        return False
    tried.__class__ = kind
    ours = tried(x)
    if own.shape != ours.shape or {own.dtype, ours.dtype} != {dtype}:
        return False
    apart = _rounding(dtype, kind.size[0])
    least = torch.finfo(dtype).smallest_normal
    return torch.allclose(ours.cpu().double(), own.cpu().double(), rtol=apart, atol=apart * least, equal_nan=True)


def _rounding(dtype: torch.dtype, size: int) -> float:
    """How far apart, relative to their size, two results are that differ by rounding.

    In float32 each of the two sums of squares, in an order of its own, is off by half an epsilon for each level of a tree, of which the
    root halves the effect; the root itself by up to two (CUDA's rsqrtf()), and three products by half of one each. To 16 bits a norm's own
    result may be rounded three times, and ours is rounded once: half an epsilon each.
    """
    of_float32 = (math.log2(size) / 2 + 2 * 2 + 2 * 1.5) * torch.finfo(torch.float32).eps
    return of_float32 if dtype == torch.float32 else of_float32 + 2 * torch.finfo(dtype).eps

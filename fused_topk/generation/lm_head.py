# SPDX-License-Identifier: Apache-2.0
"""A model's LM head: whether the logits are its product and nothing else, and whether it is spread over processes.

The product is recognised where the model calls it: `torch.nn.functional.linear` with the weight of the output embeddings. A
stand-in without memory takes its place. If the model then returns that very tensor as its logits, nothing lies behind the
product: no soft cap, no scale, no conversion. If it does not, the model runs once more, as it is, and later calls do not try
again. Other threads that run the model get its logits as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..arguments import check_head, check_hidden
from ..functional import autocast
from ..tracing import is_traced


class HeadInput(NamedTuple):
    """What a model's LM head gets, and the head, as they are multiplied."""

    hidden: Tensor  # [batch, length, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]

    def as_it_is(self) -> torch.autocast:
        """A block without autocast: what it does at the head has been done. Where the model is called it may be set otherwise."""
        return torch.autocast(self.hidden.device.type, enabled=False)


# Models whose logits are more than the product.
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def run_with_head(model: nn.Module, arguments: Mapping[str, Any]) -> HeadInput | Tensor:
    """Runs the model. Returns what its LM head gets where the logits are the head's product and nothing else; else its logits. Raises a
    TypeError if there are none."""
    weight = _weight_of_plain_head(model)
    if weight is not None:
        recognizer = _Recognizer(weight)
        try:
            with recognizer:
                logits: Tensor = _logits(model(**arguments), model)
        except RuntimeError:
            # To write to the stand-in raises. If the error is one of the model itself, it comes again below.
            if recognizer.found is None:
                raise
        else:
            if recognizer.found is None:
                return logits
            if logits is recognizer.stand_in and recognizer.version == _version(recognizer.found.hidden):
                found: HeadInput = recognizer.found
                return found
            del logits
        _refused.add(model)
    return _logits(model(**arguments), model)


def _version(tensor: Tensor) -> int:
    """How often the tensor has been written to; 0 where torch does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _logits(output: Any, model: nn.Module) -> Tensor:
    logits: Tensor | None = getattr(output, "logits", None)
    if logits is None:
        raise TypeError(
            f"`model` must have a language modelling head, got {type(model).__name__}; "
            "load it with a class for generation, such as AutoModelForCausalLM"
        )
    return logits


def _weight_of_plain_head(model: nn.Module) -> Tensor | None:
    """The weight of the model's LM head, if that is a plain linear layer without hooks and without a replaced forward()."""
    get: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    head = None if get is None or model in _refused else get()
    # A subclass may compute something else. So may a module with a forward() or a hook of its own, as accelerate gives it to
    # load weights when they are needed. In a compiled model nothing sees the product.
    if type(head) is not nn.Linear or "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks:
        return None
    if getattr(model, "_compiled_call_impl", None) is not None or is_traced():
        return None
    weight = head.weight
    is_plain = type(weight) is nn.Parameter and weight.device.type in ("cpu", "cuda")
    return weight if is_plain else None


class _Recognizer(TorchFunctionMode):
    """Takes the place of the product with `weight`, the first time."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight
        self.found: HeadInput | None = None
        self.stand_in: Tensor | None = None
        # The version of the hidden states, which a model may write to afterwards.
        self.version = 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_product = func is nn.functional.linear and not kwargs and len(args) == 3 and args[1] is self._weight
        if not is_product or self.found is not None:
            return func(*args, **(kwargs or {}))
        hidden, weight, bias = args
        try:
            check_hidden(hidden)
            hidden, weight, bias = autocast.as_multiplied(hidden, weight, bias)
            check_head(weight, bias, hidden)
        except (TypeError, ValueError):
            return func(*args)
        self.found, self.version = HeadInput(hidden, weight, bias), _version(hidden)
        # The stand-in requires a gradient where the product would: a model may ask, and compute something else then.
        factors = [hidden, weight] if bias is None else [hidden, weight, bias]
        is_learned = torch.is_grad_enabled() and any(factor.requires_grad for factor in factors)
        zero = hidden.detach().new_zeros(()).requires_grad_(is_learned)
        self.stand_in = zero.expand(*hidden.shape[:-1], weight.shape[0])
        return self.stand_in


def sharded_head_of(model: Any) -> nn.Module | None:
    """The model's LM head, if it is spread over processes; else None."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    get = getattr(model, "get_output_embeddings", None)
    head = None if get is None else get()
    weight = getattr(head, "weight", None)
    if type(weight) in (Tensor, nn.Parameter) or not isinstance(weight, Tensor):
        return None
    from torch.distributed.tensor import DTensor

    return head if isinstance(weight, DTensor) else None

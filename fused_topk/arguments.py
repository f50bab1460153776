# SPDX-License-Identifier: Apache-2.0
"""The checks of public arguments. row_arguments.py has those of the rows that a call reads. The checks of `out`, of tokens and
of states are beside the functions that take them. Each error names the argument, the rule, the wrong value and the remedy. The checks run
before anything is allocated or launched. They never read the contents of a CUDA tensor, so they never wait for a device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import backends
from .layout.router_launch import SCORINGS
from .operators.dispatch import transform_is_active
from .problem import result_dtype
from .rows import DTYPES, named
from .tracing import is_traced

# Up to this many numbers are compared in Python, more by a reduction. For 16 numbers both take about 2 µs.
_FEW_NUMBERS = 16
_NORMALIZE = ("allowed", "all", "topk")
_GROUP_SCORES = ("top2", "max")
INDEX_DTYPES = (torch.int64, torch.int32)


def check_tensor(name: str, value: Any) -> None:
    if is_distributed(value):
        raise TypeError(
            f"`{name}` must not be a DTensor, got one placed {value.placements}; pass .full_tensor(), or .to_local() where "
            "whole rows are local"
        )
    if not isinstance(value, Tensor):
        is_proxy = isinstance(value, torch.fx.Proxy)
        remedy = "use torch.compile or torch.export" if is_proxy else "convert it with torch.as_tensor"
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(value).__name__}; {remedy}")
    if value.is_nested or value.layout != torch.strided:
        got, remedy = f"layout {value.layout}", ".to_dense()"
        if value.is_nested:
            got, remedy = "a nested one", "torch.nested.to_padded_tensor(), or pass its parts, .unbind(), one by one"
        raise TypeError(f"`{name}` must be a dense tensor, got {got}; convert it with {remedy}")


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor. There are none before something imports torch.distributed.tensor."""
    # torch.compile copies sys.modules where it traces a look-up, and fails if an import changes it meanwhile.
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def check_logits(logits: Any, name: str = "logits") -> None:
    check_tensor(name, logits)
    if logits.dtype not in DTYPES:
        raise TypeError(f"`{name}` must be {named(DTYPES, 'or')}, got {logits.dtype}; convert them with .float()")
    if logits.dim() == 0:
        raise ValueError(
            f"`{name}` must have at least one dimension, the vocabulary, got a 0-d tensor; use .reshape(1)"
        )
    check_no_tangent(name, logits)


def check_no_tangent(name: str, tensor: Tensor) -> None:
    # The operators have no forward-mode derivative: without this check it would silently be zero. torch's private
    # _current_level is -1 outside of forward mode.
    may_be_dual = getattr(forward_ad, "_current_level", 0) >= 0
    if may_be_dual and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"`{name}` must not carry a forward-mode derivative, got a dual tensor; use reverse mode: .backward() or "
            "torch.autograd.grad"
        )


def check_no_transform(function: str) -> None:
    if transform_is_active():
        raise RuntimeError(
            f"`{function}` must not be called under a transform of torch.func, got one that is active; pass the rows as one tensor"
        )


def check_dim(dim: Any, dims: int) -> int:
    """The dimension as a non-negative number."""
    check_int("dim", dim)
    if not -dims <= dim < dims:
        raise ValueError(f"`dim` must satisfy {-dims} <= dim < {dims}, got dim={dim}; the vocabulary is usually dim=-1")
    return int(dim % dims)


def check_vocabulary(vocab_size: int, name: str = "logits") -> None:
    if vocab_size == 0:
        raise ValueError(
            f"`{name}` must have at least one entry along the vocabulary, got a dimension of size 0; leave the call out"
        )
    if vocab_size > 2**31 - 1:
        raise ValueError(
            f"`{name}` must have at most 2^31 - 1 entries along the vocabulary, got {vocab_size}; split the vocabulary"
        )


def check_int(name: str, value: Any) -> None:
    # torch.compile may pass a symbolic int. NumPy's integers are no subclass of int.
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, torch.SymInt, np.integer)):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}; use int({name})")


def check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            # NumPy's bool is called bool, too.
            got = "a bool of NumPy" if isinstance(flag, np.bool_) else type(flag).__name__
            raise TypeError(f"`{name}` must be a bool, got {got}; pass True or False")


def check_k(k: Any, most: int, what: str = "the vocabulary size", name: str = "k") -> None:
    check_int(name, k)
    if not 1 <= k <= most:
        remedy = "1 or more" if k < 1 else f"min({name}, {most})"
        raise ValueError(f"`{name}` must satisfy 1 <= {name} <= {most} ({what}), got {name}={k}; pass {remedy}")


def check_list(name: str, length: Any, most: int, what: str = "the vocabulary size") -> None:
    """Checks the length of a list of best tokens. 0: no list."""
    check_int(name, length)
    if length != 0:
        check_k(length, most, what, name)


def is_readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be checked. To read those of a CUDA tensor is to wait for the GPU. A traced tensor has no
    values, and a tensor under vmap stands for many."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not is_traced() and not transform_is_active()


def number_outside(tensor: Tensor, least: float, greatest: float, or_zero: bool = False) -> float | None:
    """The first number of a tensor whose values can be read that is outside of a range; NaN is. None if there is none. or_zero:
    whether 0 is allowed besides."""
    # Few numbers are compared sooner in Python than by a reduction.
    if tensor.numel() <= _FEW_NUMBERS:
        numbers = tensor.flatten().tolist()
        return next((x for x in numbers if not (least <= x <= greatest or (or_zero and x == 0))), None)
    # One reduction is quicker than two comparisons of whole tensors. aminmax() returns NaN if there is one.
    low, high = tensor.aminmax()
    if least <= low.item() and high.item() <= greatest:
        return None
    is_wrong = ~((tensor >= least) & (tensor <= greatest))
    if or_zero:
        is_wrong &= tensor != 0
    wrong = tensor[is_wrong]
    return wrong[0].item() if wrong.numel() else None


def check_whole_rows(name: str, value: Any, remedy: str) -> None:
    """Refuses an argument that is not taken beside DTensor logits, because no process may have whole rows."""
    if value is not None:
        raise TypeError(
            f"`{name}` must be None where `logits` is a DTensor, got {type(value).__name__}; {remedy}, or call the "
            "function on rows that are whole, such as .full_tensor()"
        )


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        listed, kind = ", ".join(map(repr, allowed)), ValueError if isinstance(value, str) else TypeError
        raise kind(f"`{name}` must be one of {listed}, got {value!r}; check the spelling")


def check_result_dtype(dtype: torch.dtype | None, logits: Tensor) -> torch.dtype:
    """The dtype of the result of full rows."""
    if dtype is None:
        return logits.dtype
    if not isinstance(dtype, torch.dtype) or dtype not in (logits.dtype, torch.float32):
        kind = ValueError if isinstance(dtype, torch.dtype) else TypeError
        raise kind(
            f"`dtype` must be torch.float32 or that of `logits`, {logits.dtype}, got {dtype}; convert the result with .to()"
        )
    return dtype


def check_normalize(normalize: Any) -> None:
    check_choice("normalize", normalize, _NORMALIZE)


def check_common_normalize(normalize: Any, function: str) -> None:
    """Refuses what is relative to the k chosen alone: beams, and tokens beside the k, need a common measure."""
    check_normalize(normalize)
    if normalize == "topk":
        raise ValueError(f"`normalize` must be 'allowed' or 'all' for {function}, got 'topk'; leave it out")


def check_backend(backend: Any) -> None:
    if backend is not None:
        check_choice("backend", backend, backends.NAMES)


def check_beam_scores(beam_scores: Any, logits: Tensor) -> None:
    if logits.dim() != 3 or logits.shape[1] == 0:
        raise ValueError(
            "`logits` must have the shape (batch, beams, vocabulary) for beam search, with at least one beam, got "
            f"{tuple(logits.shape)}; reshape them, for example with .unflatten(0, (-1, beams))"
        )
    check_tensor("beam_scores", beam_scores)
    if not beam_scores.is_floating_point():
        raise TypeError(f"`beam_scores` must be floating point, got {beam_scores.dtype}; convert them with .float()")
    check_no_tangent("beam_scores", beam_scores)
    check_same_device("beam_scores", beam_scores, logits)
    if beam_scores.shape != logits.shape[:2]:
        raise ValueError(
            f"`beam_scores` must have the shape {tuple(logits.shape[:2])} of the beams, got {tuple(beam_scores.shape)}; "
            "there is one score a beam"
        )


def check_start(start: Any) -> None:
    check_int("start", start)
    if not 0 <= start <= 2**62:
        raise ValueError(f"`start` must be the token at which the part begins, 0 to 2^62, got {start}; pass 0 or more")


def check_hidden(hidden: Any) -> None:
    check_tensor("hidden", hidden)
    if hidden.dtype not in DTYPES:
        raise TypeError(f"`hidden` must be {named(DTYPES, 'or')}, got {hidden.dtype}; convert it with .float()")
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(
            f"`hidden` must have the shape (..., H) with H >= 1, got {tuple(hidden.shape)}; the last dimension is the "
            "model's"
        )
    check_no_tangent("hidden", hidden)


def check_head(
    weight: Any,
    bias: Any,
    hidden: Tensor,
    is_part: bool = False,
    of_shards: str = "weight.to_local() to the function of this name in fused_topk.distributed",
) -> None:
    """Checks the weight and the bias of an LM head.

    is_part: whether they are a process's part of a head, `local_weight` and `local_bias`, which may have no token. of_shards: what
    the error says to pass in place of a sharded weight.
    """
    prefix = "local_" if is_part else ""
    weight_name, bias_name = f"{prefix}weight", f"{prefix}bias"
    if is_distributed(weight):
        raise TypeError(
            f"`{weight_name}` must not be a DTensor, got one placed {weight.placements}; for one that is sharded over its first "
            f"dimension give {of_shards}"
        )
    if isinstance(weight, torch.nn.Module):
        raise TypeError(
            f"`{weight_name}` must be a torch.Tensor, got {type(weight).__name__}; pass its parts .weight and .bias"
        )
    check_tensor(weight_name, weight)
    size = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != size:
        raise ValueError(
            f"`{weight_name}` must have the shape (V, {size}), got {tuple(weight.shape)}; it is that of torch.nn.Linear, one "
            "row a token"
        )
    for name, tensor in ((weight_name, weight), (bias_name, bias)):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.dtype is not hidden.dtype:
            raise TypeError(
                f"`{name}` must have the dtype {hidden.dtype} of `hidden`, got {tensor.dtype}; convert one of them"
            )
        check_same_device(name, tensor, hidden)
        check_no_tangent(name, tensor)
    if weight.shape[0] or not is_part:
        check_vocabulary(weight.shape[0], weight_name)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"`{bias_name}` must have the shape {tuple(weight.shape[:1])} of the vocabulary, got {tuple(bias.shape)}; it is that "
            "of torch.nn.Linear"
        )


def logits_of_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """A tensor with the shape, dtype and device of the logits that the head computes, but without their memory."""
    return hidden.detach()[..., :1].expand(*hidden.shape[:-1], weight.shape[0])


def check_same_device(name: str, tensor: Tensor, logits: Tensor) -> None:
    if tensor.device != logits.device:
        raise ValueError(
            f"`{name}` must be on {logits.device}, where the logits are, got {tensor.device}; use .to(...)"
        )


def check_router(experts: int, index_dtype: Any, request: tuple[Any, ...]) -> None:
    """Checks all arguments that are no tensors. request: the fields of :class:`RouterProblem` after the bias."""
    k, scoring, groups, topk_groups, group_score, renormalize, scale = request
    check_k(k, experts, "the number of experts")
    check_choice("scoring", scoring, tuple(SCORINGS))
    check_choice("group_score", group_score, _GROUP_SCORES)
    check_k(groups, experts, "the number of experts", "groups")
    if experts % groups:
        raise ValueError(
            f"`groups` must divide the number of experts, {experts}, got groups={groups}; use 1 for no groups"
        )
    check_k(topk_groups, groups, "the number of groups", "topk_groups")
    if topk_groups * (experts // groups) < k:
        raise ValueError(
            f"`topk_groups` groups must have at least k={k} experts, got topk_groups={topk_groups} with {experts // groups} "
            "experts each; keep more groups"
        )
    check_flags(renormalize=renormalize)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"`scale` must be a number, got {type(scale).__name__}; use float(scale)")
    if isinstance(scale, int) and abs(scale) > sys.float_info.max:
        raise ValueError(
            f"`scale` must be at most {sys.float_info.max:.3g}, got {str(scale)[:20]}...; scale the weights"
        )
    if not isinstance(index_dtype, torch.dtype) or index_dtype not in INDEX_DTYPES:
        raise TypeError(
            f"`index_dtype` must be torch.int64 or torch.int32, got {index_dtype}; convert the experts with .to()"
        )


def check_bias(bias: Any, logits: Tensor) -> Tensor | None:
    """The bias in the dtype of the scores, contiguous."""
    if bias is None:
        return None
    check_tensor("bias", bias)
    if not bias.is_floating_point():
        raise TypeError(f"`bias` must be a floating-point tensor, got {bias.dtype}; use .float()")
    check_same_device("bias", bias, logits)
    experts = logits.shape[-1]
    if bias.shape != (experts,):
        raise ValueError(
            f"`bias` must have shape ({experts},), one number an expert, got {tuple(bias.shape)}; use .squeeze() or .view(-1)"
        )
    checked: Tensor = bias.to(result_dtype(logits.dtype)).contiguous()
    return checked

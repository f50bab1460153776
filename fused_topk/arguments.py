# SPDX-License-Identifier: Apache-2.0
"""The checks of public arguments; those of `out`, targets and states are beside the functions that take them. Each error names
the argument, the rule, the wrong value and the remedy. The checks run before anything is allocated or launched. They never read the contents of a CUDA tensor, so they
never wait for a device.
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
from .operators.dispatch import need_dispatcher, transform_is_active
from .problem import result_dtype
from .rows import DTYPES, LogitRows
from .tracing import is_traced

_NORMALIZE = ("allowed", "all", "topk")
# The kernels scale by 1 / T in float32. The CPU's limits, csrc/cpu/row_state.h, for all.
LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 2.0**-120, 2.0**126
# A guess: with one number, a reduction takes nine times as long as reading it; with 64, twice.
_FEW_NUMBERS = 16
_LENGTHS = (torch.int32, torch.int64)


def check_tensor(name: str, value: Any) -> None:
    if isinstance(value, torch.fx.Proxy):
        raise TypeError(
            f"`{name}` must be a torch.Tensor, got a Proxy of torch.fx.symbolic_trace; use torch.export or torch.compile, "
            "or name the function in torch.fx.wrap"
        )
    if is_distributed(value):
        raise TypeError(
            f"`{name}` must not be a DTensor, got one placed {value.placements}; pass .full_tensor(), or .to_local() where "
            "whole rows are local"
        )
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(value).__name__}; convert it with torch.as_tensor")
    if value.is_nested:
        raise TypeError(
            f"`{name}` must be a dense tensor, got a nested one; pad it with torch.nested.to_padded_tensor(), or pass its "
            "parts, .unbind(), one by one"
        )
    if value.layout != torch.strided:
        raise TypeError(f"`{name}` must be a dense tensor, got layout {value.layout}; convert it with .to_dense()")


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor. There are none before something imports torch.distributed.tensor."""
    # torch.compile copies sys.modules where it traces a look-up, and fails if an import changes it meanwhile.
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def check_logits(logits: Any) -> None:
    check_tensor("logits", logits)
    if logits.dtype not in DTYPES:
        raise TypeError(
            f"`logits` must be float32, float16, bfloat16 or float64, got {logits.dtype}; convert them with .float()"
        )
    if logits.dim() == 0:
        raise ValueError("`logits` must have at least one dimension, the vocabulary, got a 0-d tensor; use .reshape(1)")
    _check_no_tangent("logits", logits)


def _check_no_tangent(name: str, tensor: Tensor) -> None:
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
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(
            f"`dim` must be an int, got {type(dim).__name__}; pass the position of the vocabulary dimension"
        )
    if not -dims <= dim < dims:
        raise ValueError(f"`dim` must satisfy {-dims} <= dim < {dims}, got dim={dim}; the vocabulary is usually dim=-1")
    return dim % dims


def check_vocabulary(vocab_size: int) -> None:
    if vocab_size == 0:
        raise ValueError(
            "`logits` must have at least one logit along the vocabulary, got a dimension of size 0; skip empty rows"
        )
    if vocab_size > 2**31 - 1:
        raise ValueError(
            f"`logits` must have at most 2^31 - 1 logits along the vocabulary, got {vocab_size}; split the row"
        )


def check_k(k: Any, most: int, what: str = "the vocabulary size", name: str = "k") -> None:
    # torch.compile may pass a symbolic k. NumPy's integers are no subclass of int.
    if isinstance(k, (bool, Tensor)) or not isinstance(k, (int, torch.SymInt, np.integer)):
        raise TypeError(f"`{name}` must be an int, got {type(k).__name__}; use int({name})")
    if not 1 <= k <= most:
        remedy = "1 or more" if k < 1 else f"min({name}, {most})"
        raise ValueError(f"`{name}` must satisfy 1 <= {name} <= {most} ({what}), got {name}={k}; pass {remedy}")


def check_rows(
    logits: Any,
    temperature: float | Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    dtype_of_draws: torch.dtype | None = None,
    may_be_empty: bool = False,
) -> LogitRows:
    """What a call reads, whatever is wanted of it. The vocabulary is last. dtype_of_draws: of the temperatures of rows that are
    drawn from, which may be 0. may_be_empty: without a token, as a process's share of a vocabulary may be."""
    check_logits(logits)
    # A comparison: torch.compile of torch 2.6 makes a constant of a size whose truth is asked.
    if not may_be_empty or logits.shape[-1] > 0:
        check_vocabulary(logits.shape[-1])
    if dtype_of_draws is None:
        number, row_temperature = check_temperature(temperature, logits, result_dtype(logits.dtype))
    else:
        limits = (LEAST_TEMPERATURE, GREATEST_TEMPERATURE)
        number, row_temperature = check_row_numbers(
            "temperature", temperature, logits, dtype_of_draws, limits, or_zero=True
        )
    return LogitRows(
        logits,
        temperature=number,
        row_temperature=row_temperature,
        mask=check_mask(mask, logits),
        lengths=check_lengths(lengths, logits),
    )


def plain_rows(
    logits: Any, temperature: Any = None, mask: Any = None, lengths: Any = None, out: Sequence[Any] = ()
) -> LogitRows | None:
    """The same as the user gives it, in a quick way: its layout can be the key of a plan, which has the other checks, and the
    call can do without torch's dispatcher. None if an argument may need more than that; check_rows() then decides. out: tensors
    that the call writes."""
    if type(logits) is not Tensor:
        return None
    if temperature is None and mask is None and lengths is None and not out:
        # The plainest call has a path of its own: for a short row, looking at the optional arguments would show.
        return None if need_dispatcher(logits) else tuple.__new__(LogitRows, (logits, 1.0, None, None, None))
    number, row_temperature = 1.0, None
    if type(temperature) is Tensor:
        row_temperature = temperature
        is_known = temperature.dtype is result_dtype(logits.dtype) and not temperature.requires_grad
        if not is_known or temperature.device != logits.device:
            return None
    elif type(temperature) is float or type(temperature) is int:
        if not LEAST_TEMPERATURE <= temperature <= GREATEST_TEMPERATURE:
            return None
        number = float(temperature)
    elif temperature is not None:
        return None
    if mask is not None and (type(mask) is not Tensor or mask.device != logits.device):
        return None
    if lengths is not None and (
        type(lengths) is not Tensor or lengths.device != logits.device or lengths.dtype not in _LENGTHS
    ):
        return None
    if need_dispatcher(logits, row_temperature, mask, lengths, *out) or logits.dim() == 0:
        return None
    if row_temperature is not None:
        check_row_temperature(row_temperature)
    if lengths is not None:
        check_row_lengths(lengths, logits.shape[-1])
    return tuple.__new__(LogitRows, (logits, number, row_temperature, mask, lengths))


def check_temperature(
    temperature: float | Tensor | None, logits: Tensor, dtype: torch.dtype
) -> tuple[float, Tensor | None]:
    """(the temperature of all rows, None), or (1.0, the temperature of each row with shape logits.shape[:-1])."""
    if temperature is None:
        return 1.0, None
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float, Tensor)):
        raise TypeError(f"`temperature` must be a number or a tensor, got {type(temperature).__name__}; use float(...)")
    if not isinstance(temperature, Tensor):
        if not LEAST_TEMPERATURE <= temperature <= GREATEST_TEMPERATURE:
            raise ValueError(
                f"`temperature` must be positive and finite in float32 ({LEAST_TEMPERATURE:.2g} to "
                f"{GREATEST_TEMPERATURE:.2g}), got {temperature}; for the best token use k=1"
            )
        return float(temperature), None
    check_tensor("temperature", temperature)
    if not temperature.is_floating_point():
        raise TypeError(f"`temperature` must be a floating-point tensor, got {temperature.dtype}; use .float()")
    _check_no_tangent("temperature", temperature)
    _check_is_one_a_row("temperature", temperature, logits)
    if temperature.requires_grad:
        raise ValueError("`temperature` must not require a gradient, got requires_grad=True; use .detach()")
    check_row_temperature(temperature)
    return 1.0, temperature.to(dtype).expand(logits.shape[:-1])


def is_readable(tensor: Tensor) -> bool:
    """Whether its values can be checked. Those of a CUDA tensor would be waited for, and under vmap a tensor stands for many."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not is_traced() and not transform_is_active()


def check_row_temperature(temperature: Tensor) -> None:
    if not is_readable(temperature):
        return
    # Few numbers are compared sooner in Python than by a reduction. A NaN fails every comparison.
    if temperature.numel() <= _FEW_NUMBERS:
        if all(LEAST_TEMPERATURE <= t <= GREATEST_TEMPERATURE for t in temperature.flatten().tolist()):
            return
    else:
        # One reduction is quicker than two comparisons of whole tensors. aminmax() returns NaN if there is one.
        least, greatest = temperature.aminmax()
        if least.item() >= LEAST_TEMPERATURE and greatest.item() <= GREATEST_TEMPERATURE:
            return
    ok = (temperature >= LEAST_TEMPERATURE) & (temperature <= GREATEST_TEMPERATURE)
    worst = temperature[~ok].reshape(-1)[0].item()
    raise ValueError(f"`temperature` must be positive and finite in every row, got {worst}; clamp it")


def check_row_numbers(
    name: str,
    value: Any,
    logits: Tensor,
    dtype: torch.dtype,
    limits: tuple[float, float],
    or_zero: bool = False,
) -> tuple[Any, Tensor | None]:
    """A parameter of sampling: (the number of all rows, None), or (0, that of each row, contiguous, flat and of `dtype`).
    limits: the least and the greatest value. or_zero: whether 0 is allowed besides."""
    least, greatest = limits
    kinds: tuple[Any, ...] = (int, float, np.number) if dtype.is_floating_point else (int, np.integer)
    if isinstance(value, bool) or not isinstance(value, (*kinds, Tensor)):
        a_number = "a number" if dtype.is_floating_point else "an int"
        raise TypeError(f"`{name}` must be {a_number} or a tensor, got {type(value).__name__}; convert it")
    rule = f"satisfy {least:.3g} <= {name} <= {greatest:.3g}{' or be 0' if or_zero else ''}"
    if not isinstance(value, Tensor):
        given: Any = value
        # Compared before it is converted: a float cannot hold every int.
        if not (least <= given <= greatest or (or_zero and given == 0)):
            raise ValueError(f"`{name}` must {rule}, got {value}; clamp it")
        return float(given) if dtype.is_floating_point else int(given), None
    check_tensor(name, value)
    if value.is_floating_point() != dtype.is_floating_point or value.dtype == torch.bool or value.is_complex():
        kind = "a floating-point" if dtype.is_floating_point else "an integer"
        raise TypeError(f"`{name}` must be {kind} tensor, got {value.dtype}; use .to({dtype})")
    _check_is_one_a_row(name, value, logits)
    numbers = value.detach().to(dtype)
    if is_readable(value) and value.numel():
        ok = (numbers >= least) & (numbers <= greatest)
        if or_zero:
            ok |= numbers == 0
        if not bool(ok.all()):
            raise ValueError(f"`{name}` must {rule} in every row, got {numbers[~ok][0].item()}; clamp it")
    return 0, numbers.expand(logits.shape[:-1]).reshape(-1).contiguous()


def check_mask(mask: Tensor | None, logits: Tensor) -> Tensor | None:
    """The mask broadcast to the logits' leading shape, without a copy."""
    if mask is None:
        return None
    check_tensor("mask", mask)
    if mask.dtype not in (torch.bool, torch.int32):
        remedy = "mask.bool()"
        if mask.is_floating_point():
            remedy = (
                "mask == 0 if it is added to logits (0 and -inf), mask.bool() if it has ones for the allowed tokens"
            )
        elif mask.dtype == torch.uint32:
            remedy = "mask.view(torch.int32)"
        raise TypeError(
            f"`mask` must be bool (one a token) or int32 (32 tokens a word), got {mask.dtype}; use {remedy}"
        )
    check_same_device("mask", mask, logits)
    *rows, vocab_size = logits.shape
    if mask.dtype == torch.bool:
        if not _broadcasts(mask.shape, logits.shape):
            raise ValueError(
                f"`mask` of bool must broadcast to the shape {tuple(logits.shape)} of `logits`, got {tuple(mask.shape)}; "
                "use True for the tokens that are allowed"
            )
        return mask.expand(logits.shape)
    words = (vocab_size + 31) // 32
    if mask.dim() == 0 or mask.shape[-1] != words or not _broadcasts(mask.shape[:-1], rows):
        raise ValueError(
            f"`mask` of int32 must broadcast to {(*rows, words)}, 32 tokens a word, got {tuple(mask.shape)}; "
            "bit j of word i stands for token 32 i + j"
        )
    return mask.expand(*rows, words)


def vocabulary_last(mask: Any, dim: int, dims: int) -> Any:
    """A bool mask has the logits' dimensions, so it moves with them, after leading dimensions of size 1 are added. A packed mask
    already has its words last."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() <= dims:
        return mask.reshape((1,) * (dims - mask.dim()) + mask.shape).movedim(dim, -1)
    return mask


def check_lengths(lengths: Tensor | None, logits: Tensor) -> Tensor | None:
    """The lengths broadcast to the logits' leading shape, without a copy."""
    if lengths is None:
        return None
    check_tensor("lengths", lengths)
    if lengths.dtype not in _LENGTHS:
        raise TypeError(f"`lengths` must be int32 or int64, got {lengths.dtype}; use .long()")
    _check_is_one_a_row("lengths", lengths, logits)
    check_row_lengths(lengths, logits.shape[-1])
    return lengths.expand(logits.shape[:-1])


def check_row_lengths(lengths: Tensor, vocab_size: int) -> None:
    if not is_readable(lengths):
        return
    if lengths.numel() <= _FEW_NUMBERS:
        numbers = lengths.flatten().tolist()
        least, greatest = min(numbers, default=0), max(numbers, default=0)
    else:
        least, greatest = (int(x) for x in lengths.aminmax())
    if least < 0 or greatest > vocab_size:
        raise ValueError(
            f"`lengths` must satisfy 0 <= length <= {vocab_size} (the vocabulary size) in every row, got "
            f"{least if least < 0 else greatest}; use .clamp(0, {vocab_size})"
        )


def check_whole_rows(name: str, value: Any, remedy: str) -> None:
    """For an argument that functions of logits do not take where no process has whole rows."""
    if value is not None:
        raise TypeError(
            f"`{name}` must be None where `logits` is a DTensor, got {type(value).__name__}; {remedy}, or call the "
            "function on rows that are whole, such as .full_tensor()"
        )


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(
            f"`{name}` must be a str, got {type(value).__name__}; pass one of {', '.join(map(repr, allowed))}"
        )
    if value not in allowed:
        listed = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}; check the spelling")


def check_result_dtype(dtype: torch.dtype | None, logits: Tensor) -> torch.dtype:
    """The dtype of full rows."""
    if dtype is None:
        return logits.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"`dtype` must be a torch.dtype, got {type(dtype).__name__}; pass torch.float32 or leave it out"
        )
    if dtype not in (logits.dtype, torch.float32):
        raise ValueError(
            f"`dtype` must be torch.float32 or that of `logits`, {logits.dtype}, got {dtype}; convert the result with .to()"
        )
    return dtype


def check_normalize(normalize: Any) -> None:
    check_choice("normalize", normalize, _NORMALIZE)


def check_normalize_of_beams(normalize: Any) -> None:
    check_normalize(normalize)
    if normalize == "topk":
        raise ValueError(
            "`normalize` must be 'allowed' or 'all' for beam_topk, got 'topk'; beams need a common measure"
        )


def check_backend(backend: Any) -> None:
    if backend is not None:
        check_choice("backend", backend, backends.NAMES)


def check_beams(logits: Tensor) -> None:
    if logits.dim() != 3:
        raise ValueError(
            f"`logits` must have the shape (batch, beams, vocabulary) for beam search, got {tuple(logits.shape)}; "
            "reshape them, for example with .unflatten(0, (-1, beams))"
        )
    if logits.shape[1] == 0:
        raise ValueError(f"`logits` must have at least one beam, got shape {tuple(logits.shape)}; leave the call out")


def check_beam_scores(beam_scores: Any, logits: Tensor) -> None:
    check_beams(logits)
    check_tensor("beam_scores", beam_scores)
    if not beam_scores.is_floating_point():
        raise TypeError(f"`beam_scores` must be floating point, got {beam_scores.dtype}; convert them with .float()")
    _check_no_tangent("beam_scores", beam_scores)
    check_same_device("beam_scores", beam_scores, logits)
    if beam_scores.shape != logits.shape[:2]:
        raise ValueError(
            f"`beam_scores` must have the shape {tuple(logits.shape[:2])} of the beams, got {tuple(beam_scores.shape)}; "
            "there is one score a beam"
        )


def check_start(start: Any) -> None:
    if isinstance(start, (bool, Tensor)) or not isinstance(start, (int, torch.SymInt, np.integer)):
        raise TypeError(f"`start` must be an int, got {type(start).__name__}; use int(start)")
    if not 0 <= start <= 2**62:
        raise ValueError(f"`start` must be the token at which the part begins, 0 to 2^62, got {start}; pass 0 or more")


def check_hidden(hidden: Any) -> None:
    check_tensor("hidden", hidden)
    if hidden.dtype not in DTYPES:
        raise TypeError(
            f"`hidden` must be float32, float16, bfloat16 or float64, got {hidden.dtype}; convert it with .float()"
        )
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(
            f"`hidden` must have the shape (..., H) with H >= 1, got {tuple(hidden.shape)}; the last dimension is the "
            "model's"
        )
    _check_no_tangent("hidden", hidden)


def check_head(
    weight: Any,
    bias: Any,
    hidden: Tensor,
    may_be_empty: bool = False,
    of_shards: str = "weight.to_local() to the function of this name in fused_topk.distributed",
) -> None:
    """Checks the weight and the bias of an LM head. `may_be_empty`: without a token, as a process's share of one may be.
    of_shards: what to give where it is sharded."""
    if is_distributed(weight):
        raise TypeError(
            f"`weight` must not be a DTensor, got one placed {weight.placements}; for one that is sharded over its first "
            f"dimension give {of_shards}"
        )
    check_tensor("weight", weight)
    size = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != size:
        raise ValueError(
            f"`weight` must have the shape (V, {size}), got {tuple(weight.shape)}; it is that of torch.nn.Linear, one row a "
            "token"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.dtype is not hidden.dtype:
            raise TypeError(
                f"`{name}` must have the dtype {hidden.dtype} of `hidden`, got {tensor.dtype}; convert one of them"
            )
        check_same_device(name, tensor, hidden)
        _check_no_tangent(name, tensor)
    if weight.shape[0] or not may_be_empty:
        if weight.shape[0] == 0:
            raise ValueError("`weight` must have at least one token, got a dimension of size 0; skip an empty head")
        check_vocabulary(weight.shape[0])
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"`bias` must have the shape {tuple(weight.shape[:1])} of the vocabulary, got {tuple(bias.shape)}; it is that of "
            "torch.nn.Linear"
        )


def logits_of_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """Of the logits' shape, on their device, without their memory."""
    return hidden.detach()[..., :1].expand(*hidden.shape[:-1], weight.shape[0])


def check_same_device(name: str, tensor: Tensor, logits: Tensor) -> None:
    if tensor.device != logits.device:
        raise ValueError(
            f"`{name}` must be on {logits.device}, the device of `logits`, got {tensor.device}; use .to(...)"
        )


def _check_is_one_a_row(name: str, tensor: Tensor, logits: Tensor) -> None:
    check_same_device(name, tensor, logits)
    rows = logits.shape[:-1]
    if not _broadcasts(tensor.shape, rows):
        raise ValueError(
            f"`{name}` must be one number a row, broadcastable to {tuple(rows)}, got shape {tuple(tensor.shape)}; "
            "drop its vocabulary dimension if it has one"
        )


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    offset = len(to) - len(shape)
    return offset >= 0 and all(s in (1, to[offset + i]) for i, s in enumerate(shape))

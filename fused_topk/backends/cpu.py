# SPDX-License-Identifier: Apache-2.0
"""The native CPU backend: the only module that knows the extension `fused_topk._cpu`, which csrc/cpu is built into."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import FullRowProblem, LinearProblem, MergeProblem, MergeTensors, Problem, Sample, SampleProblem, TopK
from .protocol import StartFullRows, StartMerge, StartTopk

_cpu: Any
try:
    _cpu = importlib.import_module("fused_topk._cpu")
    _import_error = ""
except ImportError as error:
    _cpu = None
    _import_error = str(error)

# The enumerations of csrc/cpu: vector_kernels.h, problem.h (masks), router_kernels.h (values, normalization), full_row_kernels.h.
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NO_MASK, _BOOL_MASK, _PACKED_MASK = 0, 1, 2
# Those that linear_kernels.cpp multiplies.
_MULTIPLIED = (torch.float32, torch.bfloat16)
_VALUE_KINDS = {"logits": 0, "softmax": 1, "log_softmax": 2, "state": 3}
_FULL_ROW_KINDS = {"softmax": 0, "log_softmax": 1, "logsumexp": 2}
_NORMALIZE_OVER = {"allowed": 0, "all": 1, "topk": 2}


def unavailable(device: torch.device | None = None) -> str | None:
    """None when the extension can be used, else why not and what to do."""
    if _cpu is None:
        return (
            f"the native CPU kernel is not built or does not load ({_import_error}); "
            "install the package with a C++17 compiler present: pip install --force-reinstall ."
        )
    return None


def supports(dtype: torch.dtype, k: int) -> bool:
    """Whether the kernel takes logits of this dtype; it takes any k."""
    return dtype in _DTYPES


def instruction_set() -> str:
    """The one that the kernel uses on this machine: "avx512", "avx2", or "baseline" for what every CPU of its kind has.

    Raises:
        RuntimeError: the extension cannot be used.
    """
    cause = unavailable()
    if cause is not None:
        raise RuntimeError(cause)
    return str(_cpu.instruction_set())


def prepare_topk(
    problem: Problem, device: torch.device, beam_scores: Tensor | None = None, instruction_set: str = ""
) -> StartTopk:
    """See :class:`protocol.Backend`. `instruction_set`: one of `_cpu.instruction_sets()` instead of the best, for tests."""
    logits, k, temperature, row_temperature, mask, values, normalize = problem
    # The raw logits have no temperature, and nothing is relative to a token that may not be chosen.
    is_raw = values == "logits"
    if is_raw:
        temperature, row_temperature, normalize = 1.0, None, "allowed"
    topk = _cpu.Topk(
        *_rows(logits, temperature, row_temperature),
        _NO_MASK if mask is None else _BOOL_MASK if mask.dtype is torch.bool else _PACKED_MASK,
        () if mask is None else mask.stride(),
        k,
        _VALUE_KINDS[values],
        _NORMALIZE_OVER[normalize],
        () if beam_scores is None else beam_scores.stride(),
        instruction_set,
    )
    return PreparedTopk(topk, is_raw)


class PreparedTopk(NamedTuple):
    """A :class:`protocol.StartTopk` that shows the request of the extension."""

    native: Any
    is_raw: bool

    def __call__(
        self,
        logits: Tensor,
        out: TopK,
        beam_scores: Tensor | None = None,
        mask: Tensor | None = None,
        row_temperature: Tensor | None = None,
    ) -> None:
        values, indices, logsumexp = out
        self.native(
            logits.data_ptr(),
            values.data_ptr(),
            indices.data_ptr(),
            logsumexp.data_ptr(),
            0 if beam_scores is None else beam_scores.data_ptr(),
            # A broadcast view begins where its tensor does.
            0 if mask is None else mask.data_ptr(),
            0 if row_temperature is None or self.is_raw else row_temperature.data_ptr(),
            torch.get_num_threads(),
        )


def prepare_merge(problem: MergeProblem, device: torch.device) -> StartMerge:
    """See :class:`protocol.Backend`."""
    temperatures, lengths = problem.row_temperature, problem.lengths
    merge = _cpu.Merge(
        _DTYPES[problem.logits.dtype],
        problem.logits.shape,
        problem.logits.stride(),
        problem.indices.stride(),
        problem.m.stride(),
        problem.d.stride(),
        0 if lengths is None else lengths.stride(0),
        problem.temperature,
        () if temperatures is None else temperatures.stride(),
        problem.k,
        _VALUE_KINDS[problem.values],
        problem.normalize == "topk",
    )
    num_threads = torch.get_num_threads

    def run(tensors: MergeTensors, out: TopK) -> None:
        merge(*map(_address, tensors), *map(_address, out), num_threads())

    return run


def multiplies(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether linear_topk() can read this LM head where it lies."""
    if weight.dtype not in _MULTIPLIED or not weight.numel() or weight.stride(-1) != 1:
        return False
    return all(x.data_ptr() % x.element_size() == 0 for x in (hidden, weight, bias) if x is not None)


def linear_topk(
    problem: LinearProblem, k: int, values: str, best: TopK, state: Tensor | None, instruction_set: str = ""
) -> None:
    """The k best of the logits that an LM head computes, without the logits. At most 32 rows (rows, H), without targets.

    best: contiguous tensors for the result. state: (rows, 2), for m and d; None if nobody wants them. `instruction_set`: as
    for :func:`prepare_topk`.
    """
    hidden, weight, bias, temperature, row_temperature, mask, _, normalize = problem
    if values == "logits":
        temperature, row_temperature, normalize = 1.0, None, "allowed"
    if values == "state":
        # The logits, with m and d at the temperature.
        values = "logits"
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    _cpu.linear_topk(
        _DTYPES[weight.dtype],
        hidden.shape[0],
        *weight.shape,
        hidden.data_ptr(),
        hidden.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else bias.stride(0),
        temperature,
        0 if row_temperature is None else row_temperature.data_ptr(),
        0 if row_temperature is None else row_temperature.stride(0),
        0 if mask is None else mask.data_ptr(),
        _NO_MASK if mask is None else _BOOL_MASK if mask.dtype is torch.bool else _PACKED_MASK,
        () if mask is None else mask.stride(),
        k,
        _VALUE_KINDS[values],
        _NORMALIZE_OVER[normalize],
        best.values.data_ptr(),
        best.indices.data_ptr(),
        best.logsumexp.data_ptr(),
        0 if state is None else state.data_ptr(),
        torch.get_num_threads(),
        instruction_set,
    )


def prepare_full_rows(
    problem: FullRowProblem, device: torch.device, dtype: torch.dtype, instruction_set: str = ""
) -> StartFullRows:
    """See :class:`protocol.Backend`. `instruction_set`: as for :func:`prepare_topk`."""
    full_rows = _cpu.FullRows(
        *_rows(problem.logits, problem.temperature, problem.row_temperature),
        _FULL_ROW_KINDS[problem.values],
        _DTYPES[dtype],
        instruction_set,
    )
    return PreparedFullRows(full_rows)


class PreparedFullRows(NamedTuple):
    """A :class:`protocol.StartFullRows` that shows the request of the extension."""

    native: Any

    def __call__(self, logits: Tensor, out: Tensor, row_temperature: Tensor | None = None) -> None:
        temperatures = 0 if row_temperature is None else row_temperature.data_ptr()
        self.native(logits.data_ptr(), out.data_ptr(), temperatures, torch.get_num_threads())


def short_calls(keys: Mapping[str, Any] | None) -> Any:
    """The extension's ShortCalls, or None where it is missing or torch is older than 2.10, whose tensors have no C interface.

    keys: by what it sees that torch must see a call; None if it cannot.
    """
    if _cpu is None or keys is None or not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return None
    try:
        have_changed = torch.autograd.graph.increment_version
        of_torch = (torch.empty, torch.empty_like, torch.get_num_threads, Tensor.is_inference, have_changed)
        return _cpu.ShortCalls(Tensor, TopK, *of_torch, *keys.values())
    except ValueError:  # another version of the interface
        return None


def sample(problem: SampleProblem, out: Sample, instruction_set: str = "") -> None:
    """See :class:`protocol.Backend`. `instruction_set`: as for :func:`prepare_topk`."""
    p = problem
    topk = (None,) * 3 if out.topk is None else out.topk
    _cpu.sample(
        p.logits.data_ptr(),
        _DTYPES[p.logits.dtype],
        p.logits.shape,
        p.logits.stride(),
        p.temperature,
        _address(p.row_temperature),
        p.top_k,
        _address(p.row_top_k),
        p.top_p,
        _address(p.row_top_p),
        p.min_p,
        _address(p.row_min_p),
        _address(p.mask),
        _NO_MASK if p.mask is None else _BOOL_MASK if p.mask.dtype is torch.bool else _PACKED_MASK,
        () if p.mask is None else p.mask.stride(),
        p.seed,
        _address(p.row_seed),
        p.counter,
        _address(p.row_counter),
        p.first_row,
        p.num_samples,
        p.logprobs,
        p.truncated,
        out.tokens.data_ptr(),
        out.log_probs.data_ptr(),
        *map(_address, topk),
        torch.get_num_threads(),
        instruction_set,
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rows(logits: Tensor, temperature: float, row_temperature: Tensor | None) -> tuple[Any, ...]:
    """The arguments that say how the rows lie: struct LogitRows of csrc/cpu/logit_rows.h, without its addresses."""
    return (
        _DTYPES[logits.dtype],
        logits.shape,
        logits.stride(),
        temperature,
        () if row_temperature is None else row_temperature.stride(),
    )

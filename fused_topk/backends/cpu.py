# SPDX-License-Identifier: Apache-2.0
"""The native CPU backend: the only module that knows the extension `fused_topk._cpu`, which csrc/cpu is built into."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ..layout.router_launch import SCORINGS
from ..problem import (
    FullRowProblem,
    LinearProblem,
    MergeProblem,
    RankProblem,
    RouterProblem,
    RouterTopK,
    Sample,
    SampleProblem,
    TokenSumsProblem,
    TopK,
    TopkProblem,
)
from ..rows import LogitRows
from ..scale import Scale
from .protocol import StartFullRows, StartMerge, StartRouter, StartSample, StartTopk

_cpu: Any
try:
    _cpu = importlib.import_module("fused_topk._cpu")
    _import_error = ""
except ImportError as error:
    _cpu = None
    _import_error = str(error)

# The enumerations of csrc/cpu: vector_kernels.h, logit_rows.h (masks), router_kernels.h (values, normalization), full_row_kernels.h.
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NO_MASK, _BOOL_MASK, _PACKED_MASK = 0, 1, 2
# The dtypes that linear_kernels.cpp multiplies.
_MULTIPLIED = (torch.float32, torch.bfloat16)
_VALUE_KINDS = {"logits": 0, "softmax": 1, "log_softmax": 2, "state": 3}
_FULL_ROW_KINDS = {"softmax": 0, "log_softmax": 1, "logsumexp": 2}
_NORMALIZE_OVER = {"allowed": 0, "all": 1, "topk": 2}
# Looked up once, not at every call.
_num_threads = torch.get_num_threads


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


def instruction_set() -> str | None:
    """The instruction set that the kernel uses on this machine: "avx512", "avx2", or "baseline" for what every CPU of its kind
    has. None: the extension cannot be used."""
    return None if _cpu is None else str(_cpu.instruction_sets()[0])


def prepare_topk(
    problem: TopkProblem, device: torch.device, beam_scores: Tensor | None = None, instruction_set: str = ""
) -> StartTopk:
    """See :class:`protocol.Backend`. `instruction_set`: one of `_cpu.instruction_sets()` instead of the best, for tests."""
    rows, k, values, normalize = problem
    topk = _cpu.Topk(
        _layout_of(rows, instruction_set),
        k,
        _VALUE_KINDS[values],
        _NORMALIZE_OVER[normalize],
        () if beam_scores is None else beam_scores.stride(),
    )

    def run(rows: LogitRows, out: TopK, beam_scores: Tensor | None = None) -> None:
        values, indices, logsumexp = out
        topk(
            _addresses_of(rows),
            values.data_ptr(),
            indices.data_ptr(),
            logsumexp.data_ptr(),
            0 if beam_scores is None else beam_scores.data_ptr(),
            _num_threads(),
        )

    return run


def prepare_merge(problem: MergeProblem, device: torch.device) -> StartMerge:
    """See :class:`protocol.Backend`."""
    merge = _cpu.Merge(
        _DTYPES[problem.logits.dtype],
        problem.logits.shape,
        problem.logits.stride(),
        problem.indices.stride(),
        problem.m.stride(),
        problem.d.stride(),
        0 if problem.part_lengths is None else problem.part_lengths.stride(0),
        *_layout_of_scale(problem.scale),
        problem.k,
        _VALUE_KINDS[problem.values],
        problem.normalize == "topk",
    )

    def run(problem: MergeProblem, out: TopK) -> None:
        merge(*map(_address, problem.tensors), *map(_address, out), _num_threads())

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
    rows, weight, bias, _, normalize = problem
    if values == "state":
        # The logits, with m and d at the temperature.
        values = "logits"
    hidden = rows.logits if rows.logits.stride(-1) == 1 else rows.logits.contiguous()
    # A tensor of the logits' shape stands for them, because they are never all in memory.
    rows = rows.with_logits(hidden.new_empty((1, 1)).expand(len(hidden), len(weight)))
    _cpu.linear_topk(
        _layout_of(rows, instruction_set),
        _addresses_of(rows),
        hidden.shape[1],
        hidden.data_ptr(),
        hidden.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        _address(bias),
        0 if bias is None else bias.stride(0),
        k,
        _VALUE_KINDS[values],
        _NORMALIZE_OVER[normalize],
        *map(_address, best),
        _address(state),
        _num_threads(),
    )


def prepare_full_rows(
    problem: FullRowProblem, device: torch.device, dtype: torch.dtype, instruction_set: str = ""
) -> StartFullRows:
    """See :class:`protocol.Backend`. `instruction_set`: as for :func:`prepare_topk`."""
    full_rows = _cpu.FullRows(
        _layout_of(problem.rows, instruction_set), _FULL_ROW_KINDS[problem.values], _DTYPES[dtype]
    )

    def run(rows: LogitRows, out: Tensor) -> None:
        full_rows(_addresses_of(rows), out.data_ptr(), _num_threads())

    return run


def prepare_router(problem: RouterProblem, device: torch.device, instruction_set: str = "") -> StartRouter:
    """See :class:`protocol.Backend`. `instruction_set`: as for :func:`prepare_topk`."""
    p = problem
    route = _cpu.Router(
        _layout_of(p.rows, instruction_set),
        p.k,
        SCORINGS[p.scoring],
        p.groups,
        p.topk_groups,
        p.group_score == "top2",
        p.renormalize,
        p.scale,
    )

    def run(rows: LogitRows, bias: Tensor | None, out: RouterTopK) -> None:
        weights, experts = out
        is_short = experts.dtype is torch.int32
        route(_addresses_of(rows), _address(bias), weights.data_ptr(), experts.data_ptr(), is_short, _num_threads())

    return run


def prepare_sample(problem: SampleProblem, device: torch.device, instruction_set: str = "") -> StartSample:
    """See :class:`protocol.Backend`. `instruction_set`: as for :func:`prepare_topk`."""
    layout = _layout_of(problem.rows, instruction_set)

    def run(problem: SampleProblem, out: Sample) -> None:
        p = problem
        _cpu.sample(
            layout,
            _addresses_of(p.rows),
            p.top_k,
            _address(p.row_top_k),
            p.top_p,
            _address(p.row_top_p),
            p.min_p,
            _address(p.row_min_p),
            p.seed,
            _address(p.row_seed),
            p.counter,
            _address(p.row_counter),
            p.first_row,
            _address(p.noise),
            p.num_samples,
            p.topk,
            p.truncated,
            out.tokens.data_ptr(),
            out.logprobs.data_ptr(),
            *map(_address, (None,) * 3 if out.topk is None else out.topk),
            *map(_address, (None,) * 2 if out.kept is None else out.kept),
            _num_threads(),
        )

    return run


def target_ranks(problem: RankProblem, out: Tensor, instruction_set: str = "") -> None:
    """See :class:`protocol.Backend`. `instruction_set`: as for :func:`prepare_topk`."""
    rows, targets, counts_ties = problem
    _cpu.target_ranks(
        _layout_of(rows, instruction_set),
        _addresses_of(rows),
        targets.data_ptr(),
        targets.shape[-1],
        counts_ties,
        out.data_ptr(),
        _num_threads(),
    )


def token_sums(problem: TokenSumsProblem, sums: Tensor, token_logits: Tensor, instruction_set: str = "") -> None:
    """See :class:`protocol.Backend`. `instruction_set`: as for :func:`prepare_topk`."""
    rows, tokens, normalize, has_tail = problem
    _cpu.token_sums(
        _layout_of(rows, instruction_set),
        _addresses_of(rows),
        tokens.data_ptr(),
        tokens.shape[-1],
        normalize == "all",
        has_tail,
        sums.data_ptr(),
        token_logits.data_ptr(),
        _num_threads(),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _layout_of(rows: LogitRows, instruction_set: str) -> Any:
    """How the rows lie: struct LogitRows of csrc/cpu/logit_rows.h, without its addresses."""
    logits, mask, lengths = rows.logits, rows.mask, rows.lengths
    return _cpu.logit_rows(
        _DTYPES[logits.dtype],
        logits.shape,
        logits.stride(),
        *_layout_of_scale(rows.scale()),
        _NO_MASK if mask is None else _BOOL_MASK if mask.dtype is torch.bool else _PACKED_MASK,
        () if mask is None else mask.stride(),
        lengths is not None and lengths.dtype is torch.int64,
        () if lengths is None else lengths.stride(),
        instruction_set,
    )


def _layout_of_scale(scale: Scale) -> tuple[float, tuple[int, ...]]:
    return scale.temperature, () if scale.row_temperature is None else scale.row_temperature.stride()


def _addresses_of(rows: LogitRows) -> tuple[int, ...]:
    """The addresses of struct LogitRows. A broadcast view begins where its tensor does."""
    logits, _, row_temperature, mask, lengths = rows
    return (
        logits.data_ptr(),
        0 if row_temperature is None else row_temperature.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
    )

# SPDX-License-Identifier: Apache-2.0
"""The native CPU backend: the only module that knows the extension `fused_topk._cpu`, which csrc/cpu is built into, and how
what all families read is given to it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..layout.kernel_arguments import address
from ..problem import LinearProblem, TopK
from ..rows import LogitRows
from ..scale import Scale

native: Any
try:
    native = importlib.import_module("fused_topk._cpu")
    _import_error = ""
except ImportError as error:
    native = None
    _import_error = str(error)

# The enumerations of csrc/cpu: vector_kernels.h, logit_rows.h (masks), router_kernels.h (values, normalization),
# full_row_kernels.h.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NO_MASK, _BOOL_MASK, _PACKED_MASK = 0, 1, 2
# The dtypes that linear_kernels.cpp multiplies.
_MULTIPLIED = (torch.float32, torch.bfloat16)
VALUE_KINDS = {"logits": 0, "softmax": 1, "log_softmax": 2, "state": 3}
FULL_ROW_KINDS = {"softmax": 0, "log_softmax": 1, "logsumexp": 2}
NORMALIZE_OVER = {"allowed": 0, "all": 1, "topk": 2}
# Looked up once, not at every call.
num_threads = torch.get_num_threads


def unavailable(device: torch.device | None = None) -> str | None:
    """None when the extension can be used, else why not and what to do."""
    if native is None:
        return (
            f"the native CPU kernel is not built or does not load ({_import_error}); "
            "install the package with a C++17 compiler present: pip install --force-reinstall ."
        )
    return None


def supports(dtype: torch.dtype, k: int) -> bool:
    """Whether the kernel takes logits of this dtype; it takes any k."""
    return dtype in DTYPES


def instruction_set() -> str | None:
    """The instruction set that the kernel uses on this machine: "avx512", "avx2", or "baseline" for what every CPU of its kind
    has. None: the extension cannot be used."""
    return None if native is None else str(native.instruction_sets()[0])


def multiplies(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether linear_topk() can read this LM head where it lies."""
    if weight.dtype not in _MULTIPLIED or not weight.numel() or weight.stride(-1) != 1:
        return False
    return have_whole_elements(hidden, weight, bias)


def have_whole_elements(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the addresses of tensors of one dtype are multiples of its size."""
    return not (hidden.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())) % weight.itemsize


def linear_topk(
    problem: LinearProblem, k: int, values: str, best: TopK, state: Tensor | None, instruction_set: str = ""
) -> None:
    """The k best of the logits that an LM head computes, without the logits. At most 32 rows (rows, H), without targets.

    best: contiguous tensors for the result. state: (rows, 2), for m and d; None if nobody wants them. `instruction_set`: as
    for row_topk.prepare_cpu().
    """
    rows, weight, bias, *_ = problem
    if rows.logits.stride(-1) != 1:
        rows = rows.with_logits(rows.logits.contiguous())
        problem = problem._replace(rows=rows)
    prepare_linear_topk(problem, k, values, instruction_set)(rows, best, weight, bias, state)


def prepare_linear_topk(problem: LinearProblem, k: int, values: str, instruction_set: str = "") -> Callable[..., None]:
    """Likewise for all calls with tensors of these layouts. The hidden states have adjacent elements."""
    rows, weight, bias, _, normalize = problem
    hidden = rows.logits
    # A tensor of the logits' shape stands for them, because they are never all in memory.
    layout = layout_of(rows.with_logits(hidden.new_empty((1, 1)).expand(len(hidden), len(weight))), instruction_set)
    depth, hidden_stride, weight_stride = hidden.shape[1], hidden.stride(0), weight.stride(0)
    bias_stride = 0 if bias is None else bias.stride(0)
    # "state": the logits, with m and d at the temperature.
    kind, over = VALUE_KINDS["logits" if values == "state" else values], NORMALIZE_OVER[normalize]

    def run(
        rows: LogitRows,
        out: TopK,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None = None,
        product: Tensor | None = None,
    ) -> None:
        values, indices, logsumexp = out
        native.linear_topk(
            layout,
            addresses_of(rows),
            depth,
            rows.logits.data_ptr(),
            hidden_stride,
            weight.data_ptr(),
            weight_stride,
            address(bias),
            bias_stride,
            k,
            kind,
            over,
            values.data_ptr(),
            indices.data_ptr(),
            logsumexp.data_ptr(),
            address(state),
            address(product),
            num_threads(),
        )

    return run


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All logits [rows, V] of an LM head that :func:`multiplies` says yes to, for at most 32 hidden states [rows, H]. Weights are read
    once: torch's product of 4 x 256 and 32,000 tokens takes 6 to 17 times as long (float32, two threads of an EPYC with AVX2)."""
    rows = LogitRows(hidden if hidden.stride(-1) == 1 else hidden.contiguous())
    product = hidden.new_empty(len(hidden), len(weight))
    run = prepare_linear_topk(LinearProblem(rows, weight, bias, None, "allowed"), 1, "logits")
    # Nothing else is written.
    run(rows, TopK(product, product, product), weight, bias, product=product)
    return product


def layout_of(rows: LogitRows, instruction_set: str = "") -> Any:
    """How the rows lie: struct LogitRows of csrc/cpu/logit_rows.h, without its addresses."""
    logits, mask, lengths = rows.logits, rows.mask, rows.lengths
    return native.logit_rows(
        DTYPES[logits.dtype],
        logits.shape,
        logits.stride(),
        *layout_of_scale(rows.scale()),
        _NO_MASK if mask is None else _BOOL_MASK if mask.dtype is torch.bool else _PACKED_MASK,
        () if mask is None else mask.stride(),
        lengths is not None and lengths.dtype is torch.int64,
        () if lengths is None else lengths.stride(),
        instruction_set,
    )


def layout_of_scale(scale: Scale) -> tuple[float, tuple[int, ...]]:
    return scale.temperature, () if scale.row_temperature is None else scale.row_temperature.stride()


def addresses_of(rows: LogitRows) -> tuple[int, ...]:
    """The addresses of struct LogitRows. A broadcast view begins where its tensor does."""
    logits, _, row_temperature, mask, lengths = rows
    return (
        logits.data_ptr(),
        0 if row_temperature is None else row_temperature.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
    )

# SPDX-License-Identifier: Apache-2.0
"""Compiles and loads a GPU's kernels before they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from .. import backends
from ..arguments import (
    check_choice,
    check_common_normalize,
    check_flags,
    check_int,
    check_k,
    check_normalize,
    check_vocabulary,
)
from ..cuda_runtime import driver
from ..gone import refuse
from ..layout import full_row_choice, launch, router_launch
from ..operators import full_rows, row_topk
from ..problem import TopkProblem
from ..rows import DTYPES, LogitRows, named

_TOPK_VALUES = {
    "softmax_topk": "softmax",
    "log_softmax_topk": "log_softmax",
    "topk": "logits",
    "beam_topk": "log_softmax",
    "topk_state": "state",
}
_MERGES = ("merge_states", "merge_topk")
_FUNCTIONS = (*_TOPK_VALUES, *_MERGES, "softmax", "log_softmax", "logsumexp", "sample", "token_logprobs", "router_topk")


def warm_up(
    shapes: Sequence[int] | Sequence[Sequence[int]],
    k: int | Sequence[int] = (),
    *,
    functions: str | Sequence[str] = "softmax_topk",
    dtypes: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
    mask: bool = False,
    lengths: bool = False,
    normalize: str = "allowed",
    ranks: bool = False,
    device: torch.device | str | int | None = None,
    **gone: NoReturn,
) -> int:
    """Compiles and loads the kernels of later calls, so that these calls neither compile nor wait for the GPU.

    >>> fused_topk.warm_up([(n, 128256) for n in (1, 8, 64)], k=[8, 50], mask=True)  # doctest: +SKIP

    Without it, the first call of a kernel on a GPU compiles the kernel for about a second, or reads it from disk if an
    earlier process has compiled it. Then it loads the kernel and waits for the GPU. Which kernel a call needs depends
    on all arguments below. Nothing is computed. Several threads may call it at the same time, for different GPUs.

    Args:
        shapes: one or several shapes of logits, as the functions take them, such as (rows, V). The kernels serve logits
            of these shapes that are contiguous or whose rows begin at multiples of 16 bytes.
        k: one or several k; not needed for full rows, routers and token_logprobs(). For sample() it is the `top_k` of the calls whose
            `top_k` is one number; calls with a tensor, or without top-k, are prepared in any case.
        functions: the names of one or several of the package's functions. For those of fused_topk.distributed name "topk_state",
            with the shapes of a process's columns, and "merge_topk". The functions of LM heads cannot be prepared: make one such
            call ahead.
        dtypes: one or several dtypes of the logits.
        mask: whether to prepare calls with a mask too.
        lengths: whether to prepare calls with lengths too. Those with a mask and lengths have the kernels of those with a mask.
        normalize: the `normalize` of the calls with a mask.
        ranks: whether token_logprobs() and sample() are asked for ranks.
        device: the GPU; by default torch's current one.

    Returns:
        The number of kernels that are ready. 0 if these calls use no CUDA kernel, as on a CPU; `python -m fused_topk
        info` says why.

    Raises:
        TypeError, ValueError: an argument that the functions would refuse.
        RuntimeError: a kernel does not compile.
    """
    if gone:
        refuse("warm_up", gone)
    names, of_dtypes, ks, of_shapes = _several(functions), _several(dtypes), _several(k), _shapes(shapes)
    for name in names:
        if isinstance(name, str) and name.startswith("linear_"):
            raise ValueError(f"`functions` must not be of LM heads, got {name!r}; make one such call ahead")
        check_choice("functions", name, _FUNCTIONS)
        if name in ("beam_topk", "token_logprobs"):
            check_common_normalize(normalize, name)
    for dtype in of_dtypes:
        if dtype not in DTYPES:
            raise TypeError(f"`dtypes` must be of {named(DTYPES, 'and')}, got {dtype!r}; pass those of the logits")
    for each in ks:
        check_int("k", each)
    check_normalize(normalize)
    check_flags(mask=mask, lengths=lengths, ranks=ranks)
    if "sample" in names and min(ks, default=0) < -1:
        raise ValueError(f"`k` must satisfy -1 <= k for sample, got k={min(ks)}; 0 or -1 is a call without top-k")
    gpu = _gpu(device)
    calls = _Calls(ks, mask, lengths, normalize, ranks, gpu)
    asked = [
        kernel
        for name, shape, dtype in product(names, of_shapes, of_dtypes)
        for kernel in calls.kernels(name, shape, dtype)
    ]
    kernels = dict.fromkeys(asked)
    for kernel in kernels:
        driver.function(gpu.index, kernel)
    return len(kernels)


class _Calls(NamedTuple):
    """The calls to prepare: all but their functions, shapes and dtypes."""

    ks: list[int]
    mask: bool
    lengths: bool
    normalize: str
    ranks: bool
    gpu: torch.device

    def kernels(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
        """The kernels that calls of one function need, for logits of one shape and dtype."""
        rows, vocab_size = torch.Size(shape[:-1]).numel(), shape[-1]
        if name in _TOPK_VALUES:
            yield from self._of_topk(name, shape, dtype)
        elif name == "router_topk":
            # One kernel for each scoring, whatever k is.
            if rows and backends.pick_router(self.gpu, dtype, vocab_size, 1, None) == "cuda":
                yield from (router_launch.kernel_name(dtype, vocab_size, scoring) for scoring in router_launch.SCORINGS)
        elif (not rows and name not in _MERGES) or backends.pick(self.gpu, dtype, 1, None) != "cuda":
            return
        elif name in _MERGES:
            # One kernel for few candidates and one for many, whatever the shape.
            yield from (launch.kernel(launch.MERGE, dtype, warps) for warps in launch.MERGE_WARPS)
        elif name == "sample":
            yield from self._of_draws((rows, vocab_size), dtype)
        elif name == "token_logprobs":
            # Its best token's, and those of its k best.
            yield from self._replace(ks=[1, *self.ks])._of_topk("log_softmax_topk", shape, dtype)
            if self.ranks:
                yield launch.kernel("ranks::target_ranks", dtype)
        else:
            yield full_rows.kernel_on(self.gpu.index, vocab_size, dtype)
            if self.lengths:
                choice = full_rows.choice_on(self.gpu.index, vocab_size, dtype.itemsize)
                yield full_row_choice.kernel_name(choice, dtype, dtype, is_aligned=False)

    def _of_topk(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
        has_beams = name == "beam_topk"
        if has_beams and len(shape) != 3:
            raise ValueError(f"`shapes` must be (batch, beams, V) for beam_topk, got {shape}; give its shapes apart")
        if not self.ks:
            raise ValueError(f"`k` must be given for {name}, got none; pass the k of the calls")
        scores = torch.empty(shape[:-1], device="meta") if has_beams else None
        for k, read in product(self.ks, self._rows(shape, dtype)):
            # The state of a row that is shorter than k keeps all its tokens.
            k = min(k, shape[-1]) if name == "topk_state" else k
            check_k(k, shape[-1] * (shape[1] if has_beams else 1))
            if 0 not in shape and backends.pick(self.gpu, dtype, k, None) == "cuda":
                # Calls of topk() have no `normalize`.
                normalize = "allowed" if name == "topk" else self.normalize
                problem = TopkProblem(read, k, _TOPK_VALUES[name], normalize)
                yield row_topk.kernel_on(problem, self.gpu.index, scores)

    def _of_draws(self, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[str]:
        """The kernels that draw, and those of the lists that they draw from."""
        yield from (launch.sample_kernel(dtype, *which) for which in product((True, False), repeat=2))
        for top_k, read in product([0, *self.ks], self._rows(shape, dtype)):
            length = launch.sample_list_length(shape[-1], top_k)
            yield row_topk.kernel_on(TopkProblem(read, length, "state", "allowed"), self.gpu.index)
        if self.ranks:
            yield launch.kernel("ranks::target_ranks", dtype)

    def _rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[LogitRows]:
        """Rows of that shape, without memory: plain rows, and those with a mask or with lengths that calls may have."""
        rows = [LogitRows(torch.empty(shape, dtype=dtype, device="meta"))]
        if self.mask:
            rows.append(rows[0]._replace(mask=torch.empty(shape, dtype=torch.bool, device="meta")))
        if self.lengths:
            rows.append(rows[0]._replace(lengths=torch.empty(shape[:-1], dtype=torch.int32, device="meta")))
        return rows


def _several(value: Any) -> list[Any]:
    """The elements of an iterable. Anything else, and a str, is the only element."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _shapes(shapes: Any) -> list[tuple[int, ...]]:
    """One or several shapes."""
    several = _several(shapes) if isinstance(shapes, Iterable) else [None]
    is_one = not any(isinstance(size, Iterable) for size in several)
    found = [tuple(shape) if isinstance(shape, Iterable) else (None,) for shape in ([several] if is_one else several)]
    if any(isinstance(size, bool) or not isinstance(size, (int, np.integer)) for shape in found for size in shape):
        raise TypeError(
            f"`shapes` must be one or several shapes of logits, got {shapes!r}; pass (rows, V) or a list of such shapes"
        )
    for shape in found:
        if not shape or min(shape) < 0:
            raise ValueError(
                f"`shapes` must have the vocabulary last, and sizes of 0 or more, got {shape}; pass shapes that logits have"
            )
        check_vocabulary(shape[-1], "shapes")
    return [tuple(map(int, shape)) for shape in found]


def _gpu(device: torch.device | str | int | None) -> torch.device:
    """The device, with an index if it is a GPU. By default the current GPU, or the CPU if there is no GPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f'`device` must name a device of torch, got {device!r}; pass a GPU, such as "cuda:0", or leave it out'
        ) from error
    if chosen.type != "cuda" or not torch.cuda.is_available():
        return chosen
    index, count = torch.cuda.current_device() if chosen.index is None else chosen.index, torch.cuda.device_count()
    if index >= count:
        raise ValueError(
            f"`device` must be a GPU that torch sees, which are {count}, got {chosen}; pass a smaller number"
        )
    return torch.device("cuda", index)

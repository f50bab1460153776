# SPDX-License-Identifier: Apache-2.0
"""Compiles and loads a GPU's kernels before they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from .. import backends
from ..arguments import check_choice, check_k, check_normalize, check_vocabulary
from ..backends import cuda
from ..cuda_runtime import driver
from ..layout import full_row_launch, launch, rank_launch, router_launch
from ..problem import TopkProblem
from ..rows import LogitRows

_TOPK_VALUES = {
    "softmax_topk": "softmax",
    "log_softmax_topk": "log_softmax",
    "topk": "logits",
    "beam_topk": "log_softmax",
    "topk_state": "state",
}
_MERGES = ("merge_states", "merge_topk")
_FUNCTIONS = (*_TOPK_VALUES, *_MERGES, "softmax", "log_softmax", "logsumexp", "sample", "router_topk")


def warm_up(
    shapes: Sequence[int] | Sequence[Sequence[int]],
    k: int | Sequence[int] = (),
    *,
    functions: str | Sequence[str] = "softmax_topk",
    dtypes: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
    masked: bool = False,
    ragged: bool = False,
    targets: bool = False,
    normalize: str = "allowed",
    device: torch.device | str | int | None = None,
) -> int:
    """Compiles and loads the kernels of later calls, so that these calls neither compile nor wait for the GPU.

    >>> fused_topk.warm_up([(n, 128256) for n in (1, 8, 64)], k=[8, 50], masked=True)  # doctest: +SKIP

    Without it, the first call of a kernel on a GPU compiles the kernel for about a second, or reads it from disk if an
    earlier process has compiled it. Then it loads the kernel and waits for the GPU. Which kernel a call needs depends
    on all arguments below. Nothing is computed. Several threads may call it at the same time, for different GPUs.

    Args:
        shapes: one or several shapes of logits, as the functions take them, such as (rows, V). The kernels serve logits
            of these shapes that are contiguous or whose rows begin at multiples of 16 bytes.
        k: one or several k; not needed for full rows and routers. For sample() the `top_k` of the calls that have one number for it;
            calls with a tensor, or without top-k, are served in any case.
        functions: the names of one or several of the package's functions. Those of fused_topk.distributed need "topk_state"
            of a process's columns, and "merge_topk".
        dtypes: one or several dtypes of the logits.
        masked: whether to prepare calls with a mask too.
        ragged: whether to prepare calls with lengths too. Those with a mask and lengths have the kernels of those with a mask.
        targets: whether to prepare calls with targets, and draws with ranks, too.
        normalize: the `normalize` of the calls with a mask.
        device: the GPU; by default torch's current one.

    Returns:
        The number of kernels that are ready. 0 if these calls use no CUDA kernel, as on a CPU; `python -m fused_topk
        info` says why.

    Raises:
        TypeError, ValueError: an argument that the functions would refuse.
        RuntimeError: a kernel does not compile.
    """
    names = [functions] if isinstance(functions, str) else list(functions)
    for name in names:
        check_choice("functions", name, _FUNCTIONS)
    check_normalize(normalize)
    of_dtypes = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
    ks = list(k) if isinstance(k, Sequence) else [k]
    gpu = _gpu(device)
    asked = [
        kernel
        for name, shape, dtype in product(names, _shapes(shapes), of_dtypes)
        for kernel in _kernels(name, shape, dtype, ks, masked, ragged, normalize, gpu)
    ]
    if targets:
        asked += _kernels_of_targets(names, _shapes(shapes), of_dtypes, masked, ragged, normalize, gpu)
    kernels = dict.fromkeys(asked)
    for kernel in kernels:
        driver.function(gpu.index, kernel)
    return len(kernels)


def _kernels(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    ks: list[int],
    masked: bool,
    ragged: bool,
    normalize: str,
    gpu: torch.device,
) -> Iterator[str]:
    """The kernels that calls of one function need, for logits of one shape and dtype."""
    rows = torch.Size(shape[:-1]).numel()
    if name in _MERGES:
        # One kernel for few candidates and one for many, whatever the shape.
        if backends.pick(gpu, dtype, 1, None) is cuda:
            yield from (launch.merge_kernel(dtype, warps) for warps in launch.MERGE_WARPS)
        return
    if name == "sample":
        if rows and backends.pick(gpu, dtype, 1, None) is cuda:
            yield from _sampling_kernels(rows, shape[-1], dtype, ks, masked, ragged, gpu)
        return
    if name == "router_topk":
        # One kernel for each scoring, whatever k is.
        if rows and backends.pick_router(gpu, dtype, shape[-1], 1, None) is cuda:
            yield from (router_launch.kernel_name(dtype, shape[-1], scoring) for scoring in router_launch.SCORINGS)
        return
    if name not in _TOPK_VALUES:
        if rows and backends.pick(gpu, dtype, 1, None) is cuda:
            yield cuda.full_row_kernel(shape[-1], dtype, gpu.index)
            if ragged:
                choice = cuda.full_row_choice(gpu.index, shape[-1], dtype.itemsize)
                yield full_row_launch.kernel_name(choice, dtype, dtype, is_aligned=False)
        return
    has_beams = name == "beam_topk"
    if has_beams and len(shape) != 3:
        raise ValueError(f"`shapes` must be (batch, beams, V) for beam_topk, got {shape}; give its shapes apart")
    if not ks:
        raise ValueError(f"`k` must be given for {name}, got none; pass the k of the calls")
    scores = torch.empty(shape[:-1], device="meta") if has_beams else None
    for k, read in product(ks, _rows(shape, dtype, masked, ragged)):
        # A state keeps what there is.
        k = min(k, shape[-1]) if name == "topk_state" else k
        check_k(k, shape[-1] * (shape[1] if has_beams else 1))
        if rows and backends.pick(gpu, dtype, k, None) is cuda:
            problem = TopkProblem(read, k, _TOPK_VALUES[name], normalize)
            yield cuda.topk_kernel(problem, gpu.index, scores)


def _kernels_of_targets(
    names: list[str],
    shapes: list[tuple[int, ...]],
    dtypes: list[torch.dtype],
    masked: bool,
    ragged: bool,
    normalize: str,
    gpu: torch.device,
) -> Iterator[str]:
    """The kernel that counts ranks, and what calls look for whose values are no log-probabilities of the row."""
    yield from (rank_launch.kernel_name(dtype) for dtype in dtypes if backends.pick(gpu, dtype, 1, None) is cuda)
    if normalize == "topk" or {"softmax_topk", "topk"}.intersection(names):
        over = "all" if normalize == "all" else "allowed"
        for shape, dtype in product(shapes, dtypes):
            yield from _kernels("log_softmax_topk", shape, dtype, [1], masked, ragged, over, gpu)


def _sampling_kernels(
    rows: int,
    vocab_size: int,
    dtype: torch.dtype,
    top_ks: list[int],
    masked: bool,
    ragged: bool,
    gpu: torch.device,
) -> Iterator[str]:
    """The kernels that draw, and those of the lists that they draw from."""
    yield from (launch.sample_kernel(dtype, is_whole) for is_whole in (True, False))
    for top_k, read in product([0, *top_ks], _rows((rows, vocab_size), dtype, masked, ragged)):
        length = launch.sample_list_length(vocab_size, top_k)
        problem = TopkProblem(read, length, "state", "allowed")
        yield cuda.topk_kernel(problem, gpu.index)


def _rows(shape: tuple[int, ...], dtype: torch.dtype, masked: bool, ragged: bool) -> list[LogitRows]:
    """Rows of that shape, without memory: plain ones, and those that calls may give besides."""
    rows = [LogitRows(torch.empty(shape, dtype=dtype, device="meta"))]
    if masked:
        rows.append(rows[0]._replace(mask=torch.empty(shape, dtype=torch.bool, device="meta")))
    if ragged:
        rows.append(rows[0]._replace(lengths=torch.empty(shape[:-1], dtype=torch.int32, device="meta")))
    return rows


def _shapes(shapes: Any) -> list[tuple[int, ...]]:
    several = [shapes] if all(isinstance(size, int) for size in shapes) else shapes
    for shape in several:
        if not shape:
            raise ValueError(
                "`shapes` must have the vocabulary as their last dimension, got an empty one; leave it out"
            )
        check_vocabulary(shape[-1])
    return [tuple(shape) for shape in several]


def _gpu(device: torch.device | str | int | None) -> torch.device:
    """The device, with an index if it is a GPU. By default the current GPU, or the CPU if there is no GPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return chosen

# SPDX-License-Identifier: Apache-2.0
"""Every variant of a kernel that a launch can ask for, as NVRTC wants it named: what is compiled and emulated."""

from itertools import product

import torch

from choices import FULL_ROW_VARIANTS
from fused_topk.layout import attention_launch, full_row_choice, launch, router_launch, topk_launch
from fused_topk.layout.full_row_choice import FullRowChoice
from fused_topk.layout.launch import FORMATS
from fused_topk.layout.topk_choice import VARIANTS, KernelChoice, Method, choose

READ_ROWS = "fused_topk::read_rows_kernel"
"""The benchmark's floor."""


def of_topk() -> list[str]:
    """softmax_topk.cu, short_rows.cu and router_rows.cu."""
    return [
        topk_launch.kernel_name(name, choice, method, is_aligned, mask_use)
        for dtype, name in FORMATS.items()
        for choice in (
            *dict.fromkeys(
                choose(1, vocab_size, k, dtype.itemsize, 1)._replace(lanes=32)
                for vocab_size in (64, 128, 256)
                for k in (8, 9)
            ),
            *(KernelChoice(*variant, 1, 1, 1) for variant in VARIANTS[dtype.itemsize]),
        )
        for is_aligned in (True, False)
        for mask_use in (0, 1, 2, 3)
        for method in methods(choice, dtype.itemsize, mask_use in (0, 3))
    ]


def methods(choice: KernelChoice, itemsize: int, is_unmasked: bool) -> list[Method]:
    has_many = choice.warps > 8
    has_windows = choice.warps > 1 and itemsize == 2 and is_unmasked
    return [Method.TILE_BY_TILE, *[Method.FOR_MANY] * has_many, *[Method.IN_WINDOWS] * has_windows]


def of_full_rows() -> list[str]:
    return [
        full_row_choice.kernel_name(FullRowChoice(kernel, 0, vectors), dtype, out_dtype, is_aligned)
        for dtype in FORMATS
        for out_dtype in dict.fromkeys((dtype, torch.float32))
        for kernel, vectors in FULL_ROW_VARIANTS
        for is_aligned in (True, False)
    ]


def of_routers() -> list[str]:
    names = [
        router_launch.kernel_name(dtype, experts, scoring)
        for dtype in FORMATS
        for experts in (128, 256, 512, router_launch.MOST_EXPERTS)
        for scoring in router_launch.SCORINGS
    ]
    return list(dict.fromkeys(names))


def small() -> list[str]:
    """Merges, pieces, gradients, draws and ranks."""
    return [
        name
        for dtype in FORMATS
        for name in (
            *(launch.kernel(launch.MERGE, dtype, warps) for warps in launch.MERGE_WARPS),
            *(launch.kernel("pieces::accumulate_piece", dtype, counts_ranks) for counts_ranks in (False, True)),
            launch.kernel("gradients::logit_gradient", dtype),
            *(launch.sample_kernel(dtype, *which) for which in product((True, False), repeat=2)),
            launch.kernel("ranks::target_ranks", dtype),
            launch.kernel("tokens::token_sums", dtype),
        )
    ]


def of_attention() -> list[str]:
    """step_attention.cu, for GPUs whose tensor cores multiply pairs of either format."""
    return [
        attention_launch.kernel_name(dtype, dim) for dtype in attention_launch.DTYPES for dim in attention_launch.DIMS
    ]

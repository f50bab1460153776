# SPDX-License-Identifier: Apache-2.0
"""Choices of kernels that could be made: those for top-k of some rows, of which the package's comes first, and what one for full rows can name."""

from fused_topk.layout.topk_choice import MAX_K, VARIANTS, KernelChoice, choose

MOST_K = {1: 64, 8: 256, 16: MAX_K}  # by warps: half of what Candidates of csrc/topk/candidates.cuh has room for
_SHORT_ROWS_K = 9  # from which on rows are none for router_rows.cu

FULL_ROW_VARIANTS = (("warp", 4), ("block", 2), ("block", 4), ("shared", 4), ("grid", 4), ("long", 4))
"""What a choice for full rows can name: a kernel and a thread's vectors in registers."""


def of_topk(rows: int, vocab_size: int, k: int, itemsize: int, multiprocessors: int) -> list[KernelChoice]:
    """For top-k. The arguments are those of choose()."""
    chosen = choose(rows, vocab_size, k, itemsize, multiprocessors)
    found, parts = [chosen], chosen.parts
    if chosen.lanes:
        found.append(choose(rows, vocab_size, max(k, _SHORT_ROWS_K), itemsize, multiprocessors))
    for warps, vectors in VARIANTS[itemsize]:
        if k > MOST_K[warps]:
            continue
        most = -(-parts // warps) if warps > 8 else 1
        for splits in sorted({1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32, most}):
            if splits <= most and (splits == 1 or rows * splits <= 16 * multiprocessors):
                found.append(KernelChoice(warps, vectors, splits, parts, chosen.tiles_per_part))
    return list(dict.fromkeys(found))

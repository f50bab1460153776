# SPDX-License-Identifier: Apache-2.0
"""Every choice of kernel that could be made for some rows: the one that the package makes comes first."""

from __future__ import annotations

from fused_topk.layout.full_row_choice import GRID_THREADS, WARP_ROWS, FullRowChoice, Machine, choose_full_row
from fused_topk.layout.topk_choice import MAX_K, VARIANTS, KernelChoice, choose

_WARP = 32
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


def of_full_rows(
    vocab_size: int, itemsize: int, shared_per_block: int, multiprocessors: int, capability: int
) -> list[FullRowChoice]:
    """For full rows. The arguments are those of choose_full_row()."""
    machine = Machine(shared_per_block, multiprocessors, capability)
    vectors = -(-vocab_size * itemsize // 16)
    found = [choose_full_row(vocab_size, itemsize, *machine)]
    for kernel, in_registers in FULL_ROW_VARIANTS:
        if kernel == "warp":
            if vectors <= in_registers * _WARP:
                found.append(FullRowChoice(kernel, _WARP * WARP_ROWS, in_registers))
        elif kernel == "block":
            for threads in (64, 128, 256, 512, 1024):
                # No thread without a vector.
                if (threads - _WARP) * in_registers < vectors <= threads * in_registers:
                    found.append(FullRowChoice(kernel, threads, in_registers))
        elif kernel == "long":
            if vectors > 16 * _WARP * multiprocessors:
                found.append(machine.long(vectors))
        else:
            cuts = [(threads, 1) for threads in (256, 512, 1024)]
            if kernel == "grid":
                blocks = {-(-vectors // (count * GRID_THREADS)) for count in (8, 12, 16)}
                cuts = [(GRID_THREADS, count) for count in sorted({*blocks, multiprocessors, 2 * multiprocessors})]
            for threads, count in cuts:
                choice = machine.cut(kernel, vectors, threads, count)
                if choice and vectors > (choice.threads - _WARP) * count:
                    found.append(choice)
    return list(dict.fromkeys(found))

# SPDX-License-Identifier: Apache-2.0
"""Rows of logits that have broken top-k or softmax kernels, and the ways in which a tensor can lie in memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle import bits

INF, NAN = float("inf"), float("nan")


def also(*more: Any) -> list[Any]:
    """These values of a parameter, for the exhaustive tier."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.exhaustive) for each in more
    ]


def random_logits(*shape: int, dtype: torch.dtype = torch.float32, device="cpu", seed: int = 0) -> Tensor:
    """Normal logits of the spread that a language model has; the narrow types make many ties of them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 4).to(dtype).to(device)


def random_bits(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern is as likely as any other: NaNs with payloads, infinities, denormals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**32, shape, generator=generator).to(bits(torch.empty(0, dtype=dtype)).dtype).view(dtype)


def random_mask(*shape: int, share: float = 0.5, device="cpu", seed: int = 0) -> Tensor:
    """A bool mask that allows about the given share of the tokens."""
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share).to(device)


def packed(mask: Tensor) -> Tensor:
    """A bool mask as the int32 words of grammar libraries, the bits beyond the vocabulary all set."""
    vocab_size = mask.shape[-1]
    padding = mask.new_ones(*mask.shape[:-1], -vocab_size % 32)
    words = torch.cat([mask, padding], -1).unflatten(-1, (-1, 32)).long()
    weights = 2 ** torch.arange(32, device=mask.device)
    # 2^32 - 1 has no place in an int32; going through int64 keeps the low 32 bits.
    return (words * weights).sum(-1).to(torch.int32)


def adversarial_rows(vocab_size: int, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """One row of each kind; `k` is where the ties, and the ends of the finite logits, are put."""
    random = torch.Generator().manual_seed(vocab_size * 31 + k)
    normal = torch.randn(vocab_size, generator=random)
    low = normal - 100
    order = torch.randperm(vocab_size, generator=random)
    ramp = torch.arange(vocab_size) / vocab_size
    signs = torch.randint(0, 2, (vocab_size,), generator=random) * 2 - 1

    def placed(base: Tensor, values: Tensor | list[float], start: int = 0) -> Tensor:
        """`base` with the values at random places, from the start-th of the shuffled ones on."""
        values = torch.as_tensor(values, dtype=base.dtype)[: max(vocab_size - start, 0)]
        row = base.clone()
        row[order[start : start + len(values)]] = values
        return row

    def ties_across(rank: int, ties: int) -> Tensor:
        """The first `rank` ranks are distinct, the next `ties` equal, and the k-th place is meant to be among them."""
        row = placed(low, torch.full((ties,), 1.0), start=max(rank, 0))
        return placed(row, 2.0 + torch.arange(max(rank, 0)) / 8) if rank > 0 else row

    def everywhere(value: float) -> Tensor:
        return torch.full((vocab_size,), value, dtype=torch.float64)

    def at(position: int, value: float, base: Tensor = normal) -> Tensor:
        row = base.clone()
        row[position] = value
        return row

    rows = {
        "normal": normal,
        "all_equal": torch.full((vocab_size,), 1.5),
        "two_ties_across_k": ties_across(k - 1, 2),
        "ties_from_half_of_k": ties_across(k // 2, k + 3),
        "many_ties_across_k": ties_across(k - 1, max(vocab_size // 2, 2)),
        "few_levels": torch.randint(0, 3, (vocab_size,), generator=random).float(),
        "ascending": ramp,
        "descending": -ramp,
        "steep_ascending": ramp * 100,
        "steep_descending": -ramp * 100,
        "maximum_first": at(0, 50.0),
        "maximum_last": at(-1, 50.0),
        "best_k_last": torch.cat([low, normal + 20])[k:][:vocab_size] if vocab_size > k else normal,
        "outlier": at(int(order[0]), 30000.0),
        "negative_outlier": at(int(order[0]), -30000.0),
        "zeros_of_both_signs": signs * 0.0,
        "zeros_above_negatives": placed(low, (signs * 0.0)[: k + 2]),
        "denormals": normal.clamp(-4, 4) * torch.finfo(dtype).smallest_normal / 8,
        "denormals_and_zeros": placed(signs * 0.0, normal[:k] * torch.finfo(dtype).smallest_normal / 8),
        "offset_up": normal + 1e4,
        "offset_down": normal - 1e4,
        "peaked": normal * 50,
        "flat": normal * 1e-3,
        "one_positive_infinity": at(int(order[0]), INF),
        "positive_infinities": placed(normal, [INF] * (k + 1)),
        "negative_infinities": placed(normal, [-INF] * max(vocab_size // 2, 1)),
        "one_finite": at(int(order[0]), 1.0, torch.full((vocab_size,), -INF)),
        "last_finite": at(-1, 1.0, torch.full((vocab_size,), -INF)),
        "fewer_finite_than_k": placed(torch.full((vocab_size,), -INF), normal[: max(k // 2, 1)]),
        "all_negative_infinity": torch.full((vocab_size,), -INF),
        "all_positive_infinity": torch.full((vocab_size,), INF),
        "lowest_and_negative_infinity": placed(
            torch.full((vocab_size,), -INF), [torch.finfo(dtype).min] * (k // 2 + 1)
        ),
        # Fewer than k reach a key near the greatest, and the next lies near the least of all keys.
        "infinities_of_both_signs": placed(everywhere(-INF), [INF] * max(k // 2, 1)),
        "finite_between_infinities": placed(
            placed(everywhere(-INF), normal[: k - k // 4], start=k // 6), [INF] * max(k // 6, 1)
        ),
        "greatest_and_negative_infinity": placed(everywhere(-INF), [torch.finfo(dtype).max] * max(k // 2, 1)),
        "infinities_above_lowest": placed(everywhere(torch.finfo(dtype).min), [INF] * max(k // 2, 1)),
        "one_nan": at(int(order[0]), NAN),
        "nan_first": at(0, NAN),
        "nan_last": at(-1, NAN),
        "nans": placed(normal, [NAN] * (k + 1)),
        "all_nan": torch.full((vocab_size,), NAN),
        "nan_and_infinities": placed(normal, [NAN, INF, -INF, NAN, INF]),
        "nan_among_negative_infinities": placed(torch.full((vocab_size,), -INF), [NAN, NAN]),
    }
    rows = {name: row.to(dtype) for name, row in rows.items()}
    # The sign and the payload of a NaN survive no conversion of type: these rows are made of bits.
    signed_nans = rows["nans"].clone()
    rows["nans_of_both_signs"] = torch.where(signed_nans.isnan() & (signs > 0), -signed_nans, signed_nans)
    chaos = random_bits(vocab_size, dtype=dtype, seed=vocab_size + k)
    rows["random_bits"] = chaos
    rows["random_finite_bits"] = chaos.where(chaos.isfinite(), torch.zeros((), dtype=dtype))
    rows["nans_with_payloads"] = chaos.where(chaos.isnan(), rows["normal"])
    # Each tile of the CUDA kernels beats all before it, its best in no order.
    tiles = [tile[torch.randperm(len(tile), generator=random)] for tile in ramp.split(1024)]
    rows["ascending_by_tiles"] = torch.cat(tiles).to(dtype)
    return rows


def extreme_row(vocab_size: int, counts: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """One value, and at random places one or two others, each as often as one of `counts` says, or once more or less; of a third
    of the rows some logits are normal."""
    random = torch.Generator().manual_seed(seed)

    def drawn(choices: list) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=random))]

    values = [INF, -INF, NAN, torch.finfo(dtype).max, torch.finfo(dtype).min, -1e4, -1e9, 0.0, -0.0]
    row = torch.full((vocab_size,), drawn(values))
    order = torch.randperm(vocab_size, generator=random)
    for turn in range(drawn([1, 1, 2])):
        places = order[: max(drawn(counts) + drawn([-1, 0, 1]), 1)]
        order = order[len(places) :]
        row[places] = torch.randn(len(places), generator=random) if turn and drawn([0, 1, 1]) else drawn(values)
    return row.to(dtype)


def layouts(logits: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views that are equal to the (rows, V) logits and lie in memory in different ways."""
    rows, vocab_size = logits.shape
    for name, view in _LAYOUTS.items():
        view = view(logits)
        assert torch.equal(bits(view), bits(logits))
        yield name, view


def _padded(padding: int) -> Callable[[Tensor], Tensor]:
    def view(logits: Tensor) -> Tensor:
        wide = logits.new_full((logits.shape[0], logits.shape[1] + padding), NAN)
        wide[:, : logits.shape[1]] = logits
        return wide[:, : logits.shape[1]]

    return view


def _last_stride_two(logits: Tensor) -> Tensor:
    wide = logits.new_full((*logits.shape, 2), NAN)
    wide[..., 0] = logits
    return wide[..., 0]


def _every_other_row(logits: Tensor) -> Tensor:
    tall = logits.new_full((logits.shape[0], 2, logits.shape[1]), NAN)
    tall[:, 0] = logits
    return tall[:, 0]


_LAYOUTS = {
    "contiguous": lambda logits: logits,
    "row_stride_plus_1": _padded(1),
    "row_stride_plus_7": _padded(7),
    "row_stride_plus_64": _padded(64),
    "every_other_row": _every_other_row,
    "column_major": lambda logits: logits.t().contiguous().t(),
    "last_stride_2": _last_stride_two,
}


def shifted(logits: Tensor, elements: int) -> Tensor:
    """An equal tensor that starts `elements` elements after a 256-byte boundary, NaN before and after it."""
    buffer = logits.new_full((logits.numel() + 512,), NAN)
    start = (-buffer.data_ptr() // buffer.element_size()) % (256 // buffer.element_size()) + elements
    view = buffer[start : start + logits.numel()].view(logits.shape)
    view.copy_(logits)
    return view

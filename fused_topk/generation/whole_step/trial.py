# SPDX-License-Identifier: Apache-2.0
"""Whether a model computes with a shared prompt what it computes by itself: it is tried, once, on a few tokens.

So models need not be listed. One with attention or state of its own, with inputs that depend on the place in the text in
ways that are not known here, or with arguments of attention that are not, shows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .decoder import Decoder, Prompt, positions_of

# The first text begins with padding; beams cross in each step.
_IS_TEXT = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
_CHOSEN = [[0, 0, 0], [2, 0, 1], [1, 1, 2]]


def reason_against(twin: Any, stock: Any) -> str | None:
    """Why the model cannot be served; None where it can.

    Args:
        twin: the model with our attention.
        stock: the same with its own.
    """
    name = type(stock).__name__
    try:
        with torch.no_grad():
            return _reason(twin, stock, name)
    # Whatever a model raises here, it does not raise by itself: generate() goes on without this.
    except Exception as error:
        return f"{name} with a shared prompt raises {type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def _reason(twin: Any, stock: Any, name: str) -> str | None:
    device = next(stock.parameters()).device
    vocab_size = stock.config.get_text_config(decoder=True).vocab_size
    is_text = torch.tensor(_IS_TEXT, device=device).bool()
    batch, length = is_text.shape
    beams, room = len(_CHOSEN[0]), len(_CHOSEN)
    ids = (torch.arange(batch * length, device=device) * 7 + 3).view(batch, length) % vocab_size
    decoder = Decoder(twin, batch, length + 1, beams, room, device)
    decoder.read_prompt(Prompt(ids, is_text, positions_of(is_text), {}))
    reason = _reason_of_layers(twin.config.get_text_config(decoder=True), decoder, name)
    if reason is not None:
        return reason

    parents = torch.zeros(batch, beams, room + 1, dtype=torch.int64, device=device)
    texts = ids.repeat_interleave(beams, 0).view(batch, beams, length)
    for step, chosen in enumerate(_CHOSEN):
        chosen_from = torch.tensor(chosen, device=device)
        parents = parents[:, chosen_from]
        parents[:, :, step] = chosen_from
        tokens = (torch.arange(batch * beams, device=device).view(batch, beams) * 5 + step + 1) % vocab_size
        texts = torch.cat([texts[:, chosen_from], tokens[..., None]], -1)
        found = decoder.read(tokens, parents, torch.tensor([step], device=device), room)

    mask = torch.cat([is_text, is_text.new_ones(batch, room)], 1).repeat_interleave(beams, 0)
    expected = stock(
        input_ids=texts.flatten(0, 1), attention_mask=mask.long(), position_ids=positions_of(mask), use_cache=False
    ).logits[:, -1]
    return None if _are_close(found, expected) else f"{name} computes something else with a shared prompt"


def _reason_of_layers(config: Any, decoder: Decoder, name: str) -> str | None:
    calls = decoder.calls
    if len(calls) != config.num_hidden_layers or len({call.groups for call in calls}) > 1:
        return f"{name} has attention of its own, in some layers"
    windows = [call.window for call in calls if call.window is not None]
    if len(set(windows)) > 1:
        return f"{name} has windows of several sizes"
    kinds = getattr(config, "layer_types", None) or []
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        return f"{name} has layers of other kinds than full and sliding attention"
    # Texts are shorter here than any window: that it is a window can only be asked.
    if kinds and kinds.count("sliding_attention") != len(windows):
        return f"{name} has windows that its attention does not say"
    return None


def _are_close(found: Tensor, expected: Tensor) -> bool:
    """Half of the digits: sums are ordered otherwise, which no model carries further; another mask is far off.

    NaN and infinite values are no matter of attention.
    """
    bound = torch.finfo(expected.dtype).eps ** 0.5
    found, expected = found.float().nan_to_num(0, 0, 0), expected.float().nan_to_num(0, 0, 0)
    return bool((found - expected).abs().mean() <= bound * expected.std())

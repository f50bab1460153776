# SPDX-License-Identifier: Apache-2.0
"""Whether a model computes the same with a shared prompt as by itself. Each model is tried once, on a few tokens.

So there is no list of models. The trial finds models with attention or state of their own, with inputs that depend in an unknown
way on the place in the text, and with unknown arguments of attention.

All functions but :func:`reason_against` and :func:`reason_against_parts` take a twin that :func:`reason_against` has no reason against.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from . import graphs, layers
from .cache import WITH_KEYS, state_layers
from .decoder import Decoder, Prompt, Source, positions_of, source_inputs
from .facts import arguments_of, cache_argument, num_layers, vocab_size_of
from .given_cache import past_of
from .head import Head, head_of
from .reasons import raise_if_from_a_signal, said_by
from .row_form import RowDecoder, decoder_of

Result = TypeVar("Result")

# The first text begins with padding; beams cross in each step.
_IS_TEXT = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
_CHOSEN = [[0, 0, 0], [2, 0, 1], [1, 1, 2]]
# The second source has padding behind it.
_IS_SOURCE = [[1, 1, 1, 1], [1, 1, 0, 0]]


def reason_against(twin: Any, stock: Any, is_static: bool = True) -> str | None:
    """Why the model cannot be served in the form of its twin; None where it can.

    Args:
        twin: the model's twin, with our attention or with the model's own: see :mod:`row_form`.
        stock: another twin, with the model's own attention.
        is_static: whether to try steps that are kept, which have places for more tokens than there are.
    """
    name, form = type(stock).__name__, "a shared prompt" if decoder_of(twin) is Decoder else "a row for each beam"
    found = _tried(_reason, twin, stock, name, form, is_static)
    return f"{name} with {form} raises {said_by(found)}" if isinstance(found, Exception) else found


def _tried(function: Callable[..., Result], *args: Any) -> Result | Exception:
    """What a function gives without gradients, or the exception that it raises.

    Whatever a model raises here, it need not raise in transformers' loop, where the call then runs.
    """
    try:
        with torch.no_grad():
            return function(*args)
    except Exception as error:
        raise_if_from_a_signal(error)
        return error


def reason_against_layers(twin: Any, stock: Any) -> str | None:
    """Why the layers of a model do not compute the same if they do not tell which one they are; None where they do."""
    try:
        return reason_against(layers.apart(twin), stock)
    except ValueError as error:
        return f"{type(stock).__name__} has {error}"


def reason_against_parts(local: Any, model: Any) -> str | None:
    """Why a tensor-parallel model's modules cannot compute with plain tensors; None where they can. Runs collectives. `local` is the
    model's twin with the forms of :mod:`tensor_parallel`, and the model's own attention."""
    with torch.no_grad():
        inputs = _few_inputs(local)
        found, expected = (each(**inputs, use_cache=False).logits[:, -1] for each in (local, model))
    return None if _are_close(found, expected) else f"{type(model).__name__} computes something else in each process"


def head(twin: Any) -> Head | None:
    """The model's LM head, where it is a product and nothing else."""
    found = _tried(lambda: head_of(twin, _few_inputs(twin)))
    # A model that raises without its head keeps the head.
    return None if isinstance(found, Exception) else found


def _few_inputs(twin: Any) -> dict[str, Any]:
    device = next(twin.parameters()).device
    ids = _some_tokens(twin.config, torch.arange(4, device=device) * 7 + 3).view(2, 2)
    if not twin.config.is_encoder_decoder:
        return {"input_ids": ids}
    return {"decoder_input_ids": ids, **source_inputs(_source(twin).hidden, None)}


class _Unread(Tensor):
    """A tensor that raises if any operation reads it."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a tensor that is read")


def reads_mask(twin: Any) -> bool:
    """Whether the model reads `attention_mask` after its encoder has run. False for a model without an encoder."""
    if not twin.config.is_encoder_decoder:
        return False
    mask = torch.ones(2, len(_IS_SOURCE[0])).as_subclass(_Unread)
    found = _tried(lambda: twin(**_few_inputs(twin), attention_mask=mask, use_cache=False))
    # The model has read the mask, whatever it makes of the exception.
    return isinstance(found, Exception)


def steps_read(twin: Any, name: str) -> bool:
    """Whether a step of text reads a further tensor of that name, in a model without an encoder."""
    decoder, step = _after_few_tokens(twin, False)
    unread = torch.ones(2, 1).as_subclass(_Unread)
    found = _tried(decoder.read_by, functools.partial(twin, **{name: unread}), *step)
    # The model has read the tensor, whatever it makes of the exception.
    return isinstance(found, Exception)


def reason_against_capture(twin: Any, agreed: Callable[[str | None], str | None]) -> str | None:
    """Why a step of the model cannot be captured, as where it asks the device for a number; None where it can.

    Args:
        agreed: what the processes of a tensor-parallel model make of a reason. Each try runs collectives, so all try again, or none.
    """

    def capture() -> None:
        decoder, step = _after_few_tokens(twin, True)
        graphs.Graph(graphs.Bound(decoder.read, step), step[0].device, None)

    def reason() -> str | None:
        error = _tried(capture)
        return agreed(
            None if error is None else f"a step of a {type(twin).__name__} cannot be captured: {said_by(error)}"
        )

    # Twice, because another thread may have broken the first capture.
    return reason() and reason()


def _after_few_tokens(twin: Any, is_kept: bool) -> tuple[Decoder, tuple[Tensor, None, Tensor, int]]:
    """A decoder that has read a prompt, and the arguments with which it reads a next token."""
    source = _source(twin) if twin.config.is_encoder_decoder else None
    ids: Tensor = _few_inputs(twin)["input_ids" if source is None else "decoder_input_ids"]
    is_text = torch.ones_like(ids, dtype=torch.bool)
    places = None if source is None else source.hidden.shape[1]
    decoder = decoder_of(twin)(twin, len(ids), ids.shape[1], 1, ids.device, places, is_kept)
    decoder.open(2)
    decoder.read_prompt(Prompt(ids, ids, is_text, positions_of(is_text), {}, ids.shape[1] + 2, source))
    return decoder, (ids[:, :1], None, ids.new_zeros(1), 1)


def _reason(twin: Any, stock: Any, name: str, form: str, is_static: bool) -> str | None:
    make = decoder_of(twin)
    device = next(stock.parameters()).device
    source = _source(stock) if stock.config.is_encoder_decoder else None
    ids, is_text = _texts(stock.config, device)
    (batch, length), beams, room = ids.shape, len(_CHOSEN[0]), len(_CHOSEN)
    # One place more than is needed, unless the source has no mask.
    places = None if source is None else source.hidden.shape[1] + (source.is_text is not None)
    is_exact = make is RowDecoder and (source is not None or not is_static)
    decoder = make(twin, batch, length + (not is_exact), beams, device, places, is_static)
    decoder.open(room + 1)
    decoder.read_prompt(Prompt(ids, ids, is_text, positions_of(is_text), {}, length + room + 1, source))
    reason = _reason_of_rows(twin.config, name) if make is RowDecoder else _reason_of_layers(twin.config, decoder, name)
    if reason is not None:
        return reason

    parents = torch.zeros(batch, beams, room + 1, dtype=torch.int64, device=device)
    texts = ids.repeat_interleave(beams, 0).view(batch, beams, length)
    for step, chosen in enumerate(_CHOSEN):
        chosen_from = torch.tensor(chosen, device=device)
        parents = parents[:, chosen_from]
        parents[:, :, step] = chosen_from
        counted = torch.arange(batch * beams, device=device).view(batch, beams)
        tokens = _some_tokens(stock.config, counted * 5 + step + 1)
        texts = torch.cat([texts[:, chosen_from], tokens[..., None]], -1)
        found = decoder.read(tokens, parents, torch.tensor([step], device=device), room if is_static else step + 1)

    mask = torch.cat([is_text, is_text.new_ones(batch, room)], 1).repeat_interleave(beams, 0)
    texts = texts.flatten(0, 1)
    inputs: dict[str, Any]
    if source is None:
        inputs = {"input_ids": texts, "attention_mask": mask.long(), "position_ids": positions_of(mask)}
    else:
        is_source = None if source.is_text is None else source.is_text.long().repeat_interleave(beams, 0)
        inputs = {"decoder_input_ids": texts, **source_inputs(source.hidden.repeat_interleave(beams, 0), is_source)}
    expected = stock(**inputs, use_cache=False).logits[:, -1]
    return None if _are_close(found, expected) else f"{name} computes something else with {form}"


def reason_against_past(twin: Any, stock: Any) -> str | None:
    """Why no prompt can follow a cache that transformers has filled; None where one can. For a model without an encoder."""
    name = type(stock).__name__
    found = _tried(lambda: all(_goes_on(twin, stock, past) for past in (3, 4)))
    if isinstance(found, Exception):
        return f"{name} after a given cache raises {said_by(found)}"
    return None if found else f"{name} computes something else after a given cache"


def _goes_on(twin: Any, stock: Any, past: int) -> bool:
    """Whether the twin computes the same as the model after the model has read the first `past` tokens."""
    ids, is_text = _texts(stock.config, next(stock.parameters()).device)
    (batch, length), positions = ids.shape, positions_of(is_text)
    inputs = {"input_ids": ids, "attention_mask": is_text.long(), "position_ids": positions}
    if "position_ids" not in arguments_of(stock.forward):
        del inputs["position_ids"]
    expected = stock(**inputs, use_cache=False).logits[:, -1]
    cache = DynamicCache(config=stock.config.get_text_config(decoder=True))
    stock(**{name: each[:, :past] for name, each in inputs.items()}, **{cache_argument(stock): cache}, use_cache=True)
    # One place more than is needed.
    decoder = decoder_of(twin)(twin, batch, length + 1, 1, is_text.device)
    decoder.open(1)
    read = past_of(cache, batch, 1, next(stock.parameters()))
    found = decoder.read_prompt(Prompt(ids, ids[:, past:], is_text, positions[:, past:], {}, length + 1, past=read))
    return _are_close(found, expected)


def _texts(config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two texts, and where they are text. Models with an encoder take no padding before a text."""
    is_text = torch.tensor(_IS_TEXT, device=device).bool() | config.is_encoder_decoder
    return _some_tokens(config, torch.arange(is_text.numel(), device=device) * 7 + 3).view_as(is_text), is_text


def _some_tokens(config: Any, numbers: Tensor) -> Tensor:
    """Tokens made of the numbers. None of them is padding, because some models count positions without padding."""
    ids = numbers % vocab_size_of(config)
    padding = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return ids if padding is None else ids.where(ids != padding, (ids + 1) % vocab_size_of(config))


def _source(stock: Any) -> Source:
    """A source in the shape of an encoder's output. Any numbers will do."""
    weight = next(stock.parameters())
    is_text = torch.tensor(_IS_SOURCE, device=weight.device).bool()
    # A model that is made of two has a configuration for its encoder.
    encoder = getattr(stock.config, "encoder", None) or stock.config.get_text_config(decoder=True)
    # The configuration of a model with images has the hidden size in its part for text.
    size = encoder.hidden_size if hasattr(encoder, "hidden_size") else encoder.get_text_config().hidden_size
    shape = (*is_text.shape, size)
    hidden = torch.arange(math.prod(shape), dtype=torch.float32, device=weight.device).view(shape).sin()
    return Source(hidden.to(stock.dtype), is_text if stock.main_input_name == "input_ids" else None)


def _reason_of_rows(config: Any, name: str) -> str | None:
    config = config.get_text_config(decoder=True)
    layers: list[Any] = DynamicCache(config=config).layers
    kinds = {*(getattr(config, "layer_types", None) or [])}
    # With other kinds of layers the cache of generate() forgets what lies before a window, or has a state.
    is_full = kinds <= {"full_attention"} and all(type(layer) is DynamicLayer for layer in layers)
    return None if is_full else f"{name} has layers of other kinds than full attention"


def _reason_of_layers(config: Any, decoder: Decoder, name: str) -> str | None:
    calls, states = decoder.calls, state_layers(config)
    # A layer of an encoder-decoder calls attention twice: to the text, and to the source.
    expected = num_layers(config) * (2 if config.is_encoder_decoder else 1)
    config = config.get_text_config(decoder=True)
    layers: list[Any] = DynamicCache(config=config).layers
    kinds = getattr(config, "layer_types", None) or []
    if states:
        # Some layers may have neither a state nor keys. Their layers of the cache are never written to.
        expected = sum(isinstance(layer, DynamicLayer) for layer in layers)
        kinds = [kind for kind, layer in zip(kinds, layers, strict=True) if isinstance(layer, DynamicLayer)]
    if len(calls) != expected or len({call.groups for call in calls}) > 1:
        return f"{name} has attention of its own, in some layers"
    windows = [call.window for call in calls if call.window is not None]
    if len(set(windows)) > 1:
        return f"{name} has windows of several sizes"
    if not set(kinds) <= WITH_KEYS:
        return f"{name} has layers of other kinds than full and sliding attention"
    # The texts of a trial are shorter than any window, so results do not show a window. Attention is told of it. If it is not, the
    # cache of generate() may still forget what lies before a window.
    forgetting = [layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)]
    number = kinds.count("sliding_attention") if kinds else len(forgetting)
    if number != len(windows) or set(forgetting) != set(windows):
        return f"{name} has windows that its attention does not say"
    return None


def _are_close(found: Tensor, expected: Tensor) -> bool:
    """Whether half of the digits are equal. Another order of sums changes less than that, and a wrong mask far more.

    NaN and infinite values do not count: they do not come from attention.
    """
    bound = torch.finfo(expected.dtype).eps ** 0.5
    found, expected = found.float().nan_to_num(0, 0, 0), expected.float().nan_to_num(0, 0, 0)
    return bool((found - expected).abs().mean() <= bound * expected.std())

# SPDX-License-Identifier: Apache-2.0
"""Decides whether a call can be served, and holds the loop that generate() runs through custom_generate."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..calls import OWN, after_forward
from ..choice import warping
from ..edits.plan import Plan, reason_against
from ..lm_head import sharded_head_of
from ..statistics import count_not_compiled
from ..tensor_parallel import local_forms
from . import attention, attribute, given_cache, parallel, reasons, trial
from .beams import Rules
from .criteria import Criteria
from .decoder import Decoder, Prompt, Source, has_table, num_positions, positions_of, vocab_size_of
from .head import Head
from .kept import Store, Way
from .preparation import prepared
from .reasons import Asked, Declined, decline_for, said_by
from .rows import RowDecoder, decoder_of
from .search import Search
from .streaming import Once
from .twin import Snapshot, text_config, twin_of


class _Ready(NamedTuple):
    """What is known of a model: its twin, or why it has none."""

    twin: Any
    reason: str | None
    of: Snapshot
    store: Store
    head: Head | None
    # Whether steps may have places for more tokens than there are, as those that are kept have.
    is_static: bool
    # Whether the decoder looks at the mask of what its encoder has read. Where that is no text, the mask's shape is not known.
    reads_mask: bool
    # Tensors that steps of text do not look at, as far as it has been tried.
    unread: set[str]
    # Why no prompt of it can follow what a given cache has; None where one can.
    reason_against_past: Callable[[], str | None] = lambda: None


# Attributes of a model that say nothing about what it computes, or that this package puts there.
_SKIPPED = OWN | {"generation_config"}
# More are no length that anybody writes.
_MOST_PLACES = 2**20
# What an encoder gives of which a decoder reads the first at most.
_OF_ENCODER = frozenset({"last_hidden_state", "pooler_output", "hidden_states", "attentions"})

_ready: attribute.OfModels[_Ready] = attribute.OfModels()
_lock = threading.RLock()


def drop(model: Any) -> None:
    """Forgets the model's twin."""
    with _lock:
        _ready.pop(model)


def release(model: Any) -> None:
    """Drops what is kept of a tensor-parallel model's steps, as nobody asks for more of them."""
    with _lock:
        ready = _ready.get(model)
        if ready is not None:
            ready.store.release()


def ready_for(model: Any) -> _Ready:
    """The model's twin and what is kept of it, with a trial where the model is not as it was.

    Raises:
        Declined: the model cannot be served.
    """
    with _lock:
        ready = _ready.get(model)
        if ready is None or not ready.of.is_of(model):
            ready = _ready[model] = _made_ready(model)
    decline_for(ready.reason)
    return ready


def known_reason(model: Any) -> str | None:
    """Why no call of the model is served, as far as is known without a trial; None where some may be."""
    with _lock:
        ready = _ready.get(model)
        known = None if ready is None or not ready.of.is_of(model) else ready.reason or _of_default(ready)
    return known or reasons.of_model(model) or reasons.of_default(model)


def _is_ready(model: Any) -> bool:
    """Whether it is known without a trial."""
    with _lock:
        ready = _ready.get(model)
        return ready is not None and ready.of.is_of(model)


def _of_default(ready: _Ready) -> str | None:
    """Why a model's steps are no quicker than transformers' loop by default; None where they are."""
    is_row = ready.twin is not None and decoder_of(ready.twin) is RowDecoder
    # On a CPU it copies as much as a reorder does: T5 of 4 layers, 2 x 4 beams took 1.07 times the stock time, Falcon 0.94 times.
    on_cpu = is_row and next(ready.twin.parameters()).device.type == "cpu"
    return "a row for each beam on a CPU" if on_cpu else None


def _state_of(module: Any) -> dict[str, Any]:
    """The attributes of a module that are not this package's."""
    state = {name: value for name, value in vars(module).items() if name not in OWN}
    hooks = OrderedDict((key, hook) for key, hook in state["_forward_hooks"].items() if hook is not after_forward)
    return {**state, "_forward_hooks": hooks}


def _made_ready(model: Any) -> _Ready:
    snapshot = Snapshot(model, _SKIPPED)
    is_spread = sharded_head_of(model) is not None
    try:
        stock = _twin_of(model, None, is_steady=False)
    # Of a configuration that cannot be copied.
    except Exception as error:
        return _not_ready(_twin_raises(model, error), snapshot)
    if is_spread:
        reason = parallel.agreed(trial.reason_against_parts(stock, model), stock)
        if reason is not None:
            return _not_ready(reason, snapshot)
    is_static, is_taken = True, False
    try:
        twin = _twin_of(model, attention.name_for(text_config(model.config)._attn_implementation))
        is_taken = decoder_of(twin) is Decoder
        reason = trial.reason_against(twin, stock) if is_taken else f"{type(model).__name__} takes no other attention"
    # Of a model that takes no other attention.
    except Exception as error:
        reason = _twin_raises(model, error)
    if is_spread:
        reason = parallel.agreed(reason, stock)
        if reason is not None:
            return _not_ready(reason, snapshot)
    if reason is not None:
        # In the other form.
        twin = _twin_of(model, None)
        of_rows = trial.reason_against(twin, stock, is_static=False)
        if of_rows is not None:
            # The first says what a model has of its own.
            return _not_ready(reason if is_taken else of_rows, snapshot)
        # Of a model that cannot have a static cache, transformers says so.
        is_static = bool(getattr(model, "_can_compile_fullgraph", False)) and not trial.reason_against(twin, stock)
    # Few calls are given a cache.
    of_past = functools.cache(functools.partial(trial.reason_against_past, twin, stock))
    return _Ready(twin, None, snapshot, Store(), trial.head(twin), is_static, trial.reads_mask(twin), set(), of_past)


def _twin_of(model: Any, attention: str | None, is_steady: bool = True) -> Any:
    """See twin.twin_of. Of a tensor-parallel model the twin has this process's parts."""
    twin = twin_of(model, attention, _state_of, is_steady)
    local_forms.take_parts(model, twin)
    return twin


def _not_ready(reason: str, snapshot: Snapshot) -> _Ready:
    return _Ready(None, reason, snapshot, Store(), None, False, True, set())


def _twin_raises(model: Any, error: Exception) -> str:
    return f"a twin of a {type(model).__name__} raises {said_by(error)}"


class Loop:
    """What generate() runs, through `custom_generate=`.

    Args:
        whole_step: how steps are to run: True, "compiled" or "eager". None: as is quicker than transformers' loop from the
            first call on, else not at all.
        is_sampling: whether calls that sample are to be served, too.
        streamer: gets the new tokens; None for none.
        is_cache_given: whether the user has a cache that is to hold what is read.

    Raises:
        Declined: the call is to run on the fused path.
    """

    def __init__(
        self,
        whole_step: bool | str | None,
        is_sampling: bool,
        streamer: Once | None = None,
        is_cache_given: bool = False,
    ) -> None:
        self._whole_step = whole_step
        self._is_sampling = is_sampling
        self._streamer = streamer
        self._is_cache_given = is_cache_given

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Any:
        decline_for(
            reasons.of_model(model)
            or reasons.of_config(generation_config, self._is_sampling)
            or reasons.of_inputs(inputs, model.config.is_encoder_decoder)
            or (None if self._streamer is None else reasons.of_streaming(generation_config))
            or reasons.of_asked(Asked.by(generation_config), self._is_sampling)
        )
        criteria = Criteria(stopping_criteria)
        plan = Plan(list(logits_processor), bool(generation_config.do_sample))
        decline_for(
            reason_against(logits_processor)
            or criteria.reason
            or plan.reason
            or (plan.reason_of_beams if generation_config.num_beams > 1 else None)
        )
        together = parallel.Together.of(model, functools.partial(drop, model))
        if together is not None:
            decline_for(parallel.reason_against(plan, criteria, inputs))
            decline_for(reasons.of_default(model) if self._whole_step is None else None)
            if not _is_ready(model):
                together.ask("a trial")
        ready = ready_for(model)
        decline_for(_of_default(ready) if self._whole_step is None else None)
        way = Way.on(input_ids.device, self._whole_step)
        if together is not None and way is not None and way.is_compiled:
            count_not_compiled("a tensor-parallel model")
            way = Way(False, True) if way.is_captured else None
        search = _search(ready, self._streamer, way, input_ids, plan, criteria, generation_config, inputs)
        if self._is_cache_given or generation_config.return_dict_in_generate:
            cache = given_cache.cache_of(inputs)
            if cache is None and inputs.get("use_cache"):
                # transformers 5.0 leaves it to the model to make one.
                cache = given_cache.new_for(model.config)
            decline_for(None if cache is None else given_cache.reason_against(cache, model.config))
            search = search._replace(cache=cache)
        if self._whole_step is None and way is not None:
            # On a GPU one operation after another takes longer than transformers' loop.
            decline_for("steps that cannot be kept" if search.way is None else None)
            search = search._replace(only_kept=True)
        if together is not None:
            together.ask(search.told())
            search = search._replace(group=together.group)
        return search.run()


def _search(
    ready: _Ready,
    streamer: Once | None,
    way: Way | None,
    ids: Tensor,
    plan: Plan,
    criteria: Criteria,
    config: GenerationConfig,
    inputs: dict[str, Any],
) -> Search:
    twin = ready.twin
    if not ready.is_static:
        way = None
    beams = config.num_beams
    ends = _tokens(config.eos_token_id)
    if beams > 1 and criteria.max_length > config.max_length:
        raise Declined("a MaxLengthCriteria beyond max_length, with beams")
    if beams > 1 and config.eos_token_id is not None and not ends:
        # transformers' beam search raises.
        raise Declined("an empty eos_token_id, with beams")
    # The criterion decides when texts end. With beams max_length decides of their scores.
    longest = config.max_length if beams > 1 else criteria.max_length
    rules = Rules(beams, longest - ids.shape[1], ends, config.length_penalty, config.early_stopping)
    if longest > _MOST_PLACES:
        # A criterion or a limit that stands for none. A step has room for all that may be written.
        raise Declined(f"texts of up to {longest} tokens")
    if rules.room < 1 or len(ids) % beams:
        raise Declined("no room for a new token")
    if set(criteria.ends) != set(ends):
        raise Declined("end tokens of the stopping criteria and of the configuration differ")
    if rules.kept > beams * vocab_size_of(twin.config):
        raise Declined("more continuations than there are")
    with_source = "encoder_outputs" in inputs
    if with_source:
        prompt = _prompt_with_source(ready, ids, beams, longest, inputs)
    elif reasons.prepares_itself(twin) or reasons.unknown_inputs(inputs, False):
        prompt = _prepared_prompt(ready, ids, beams, longest, inputs)
    else:
        prompt = _prompt(ready, ids, beams, longest, config, inputs)
    # With what a given cache has.
    most = prompt.is_text.shape[1] + rules.room
    steady = reasons.steady_length(twin.config)
    if steady is not None and most > steady:
        raise Declined(f"texts of more than {steady} tokens, where rotary embeddings change")
    positions = num_positions(twin.config)
    if positions is not None and most > positions:
        if has_table(twin, positions):
            # A compiled or captured step reads behind its end in another way than single operations do.
            raise Declined(f"texts of more than the {positions} positions of a {type(twin).__name__}")
        if with_source:
            # Some models let their positions grow, which only single operations can.
            way = None
    is_listed = not config.do_sample or warping.list_length(plan.filters, vocab_size_of(twin.config)) is not None
    # The kernel that draws from the vocabulary itself knows no beams.
    if not is_listed and (beams > 1 or warping.parameters(plan.filters) is None):
        raise Declined("sampling from the whole vocabulary")
    padding = _padding(config, ends)
    if padding is not None and not 0 <= padding < vocab_size_of(twin.config) and beams == 1 < len(ids):
        # In stock generate() the model reads it, and raises, once a text has ended before the others.
        raise Declined("a pad_token_id that is no token")
    return Search(twin, prompt, rules, plan, criteria, config, padding, ready.store, way, ready.head, streamer)


def _prompt(
    ready: _Ready, ids: Tensor, beams: int, longest: int, config: GenerationConfig, inputs: dict[str, Any]
) -> Prompt:
    """One row of a sequence, of those that generate() has made for its beams."""
    rows, ids = len(ids), ids[::beams]
    embeddings, mask = inputs.get("inputs_embeds"), inputs.get("attention_mask")
    read = ids if embeddings is None else embeddings[::beams]
    past = _past(ready, rows, beams, inputs)
    before = 0 if past is None else past.length
    # Without padding later versions drop the mask, and keep its length.
    of_mask = getattr(config, "_mask_length", read.shape[1]) if mask is None else mask.shape[1]
    unread = given_cache.num_unread(read.shape[1], of_mask, before, embeddings is None and reasons.TAKES_NEW_TOKENS)
    read = read[:, -unread:]
    shape = len(read), before + unread
    is_text = _is_text(None if mask is None else mask[::beams], shape, ids.device)
    positions = inputs.get("position_ids")
    if positions is None:
        # As versions of transformers count them that leave it to each step: a cache that is returned has keys of padding, too.
        positions = positions_of(is_text).where(is_text, 1)
    elif positions.shape != (rows, shape[1]):
        raise Declined("position_ids of another shape")
    else:
        positions = positions[::beams]
    kept = inputs.get("logits_to_keep")
    extra = {} if kept is None else {"logits_to_keep": kept}
    return Prompt(ids, read, is_text, positions[:, -unread:], extra, longest, past=past)


def _past(ready: _Ready, rows: int, beams: int, inputs: dict[str, Any]) -> given_cache.Past | None:
    cache = given_cache.cache_of(inputs)
    if not _is_used(cache):
        return None
    decline_for(given_cache.reason_against(cache, ready.twin.config) or ready.reason_against_past())
    return given_cache.past_of(cache, rows, beams, next(ready.twin.parameters()))


def _is_used(cache: Any) -> bool:
    return cache is not None and bool(cache.get_seq_length())


def _is_text(mask: Tensor | None, shape: Sequence[int], device: torch.device) -> Tensor:
    is_text = torch.ones(*shape, dtype=torch.bool, device=device) if mask is None else mask.bool()
    if is_text.shape != torch.Size(shape) or not bool(is_text[:, -1].all()):
        raise Declined("an attention mask that is not of left padding")
    return is_text


def _prepared_prompt(ready: _Ready, ids: Tensor, beams: int, longest: int, inputs: dict[str, Any]) -> Prompt:
    """The prompt of a model that prepares more than its tokens, as of images."""
    original = reasons.original_length(ready.twin.config)
    if original is not None and longest > original and reasons.prepares_itself(ready.twin):
        # Phi-3 drops its cache there.
        raise Declined(f"a preparation of its own for texts of more than {original} tokens")
    if inputs.get("inputs_embeds") is not None:
        raise Declined("inputs_embeds before a preparation of the model's own")
    if _is_used(given_cache.cache_of(inputs)):
        raise Declined("a cache that has been used, before a preparation of the model's own")
    is_text = _is_text(inputs.get("attention_mask"), ids.shape, ids.device)
    asked = prepared(ready.twin, ids, is_text, inputs)
    for name in sorted(asked.further - ready.unread):
        if trial.steps_read(ready.twin, name):
            raise Declined(f"steps with {name}")
        ready.unread.add(name)
    positions = asked.last_positions
    if positions is None:
        positions = positions_of(is_text)
        if "position_ids" in inspect.signature(ready.twin.forward).parameters:
            raise Declined("steps without positions")
    is_text, ids = is_text[::beams], ids[::beams]
    return Prompt(ids, ids, is_text, positions[..., ::beams, -1:], {}, longest, inputs=asked.inputs)


def _prompt_with_source(ready: _Ready, ids: Tensor, beams: int, longest: int, inputs: dict[str, Any]) -> Prompt:
    """The prompt of an encoder-decoder, whose encoder generate() has run."""
    if _is_used(given_cache.cache_of(inputs)):
        raise Declined("a cache of an encoder-decoder that has been used")
    outputs, mask = inputs["encoder_outputs"], inputs.get("attention_mask")
    # The trial has none of these, which some decoders ask for.
    further = sorted(set(outputs) - _OF_ENCODER) if isinstance(outputs, Mapping) else []
    if further:
        raise Declined(f"encoder_outputs with {further[0]}")
    hidden = outputs[0]
    of_prompt = inputs.get("decoder_attention_mask")
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(hidden) != len(ids):
        raise Declined("encoder_outputs of other rows")
    if of_prompt is not None and not bool(of_prompt.all()):
        raise Declined("decoder_attention_mask with padding")
    takes_mask = ready.twin.main_input_name == "input_ids"
    if not takes_mask and ready.reads_mask and mask is not None and not bool(mask.all()):
        raise Declined(f"padding of {ready.twin.main_input_name}")
    # Some models view a source in another shape.
    hidden = hidden[::beams].contiguous()
    if takes_mask and mask is not None and mask.shape != (len(ids), hidden.shape[1]):
        raise Declined("an attention mask of another shape")
    is_source = None
    if takes_mask:
        is_source = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask[::beams].bool()
        # Attention to nothing is the mean over all places in some implementations, and the places of a step are rounded up.
        if not bool(is_source.any(1).all()):
            raise Declined("a source of padding alone")
    ids = ids[::beams]
    is_text = torch.ones_like(ids, dtype=torch.bool)
    positions = inputs.get("decoder_position_ids")
    positions = positions_of(is_text) if positions is None else positions[::beams]
    if positions.shape != ids.shape:
        raise Declined("decoder_position_ids of another shape")
    is_exact = decoder_of(ready.twin) is RowDecoder
    return Prompt(ids, ids, is_text, positions, {}, longest, Source(hidden, is_source), is_exact)


def _tokens(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(torch.as_tensor(value).flatten().tolist())


def _padding(config: GenerationConfig, ends: tuple[int, ...]) -> int | None:
    """What stands after the end of a text, as transformers has it.

    With beams that is the first end token where padding is token 0, which reads as none there.
    """
    if not ends:
        return None
    pad = _tokens(config.pad_token_id)
    if config.num_beams > 1:
        return pad[0] if pad and pad[0] else ends[0]
    return pad[0] if pad else ends[0]

# SPDX-License-Identifier: Apache-2.0
"""Decides whether a call can be served, and holds the loop that generate() runs through custom_generate."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .. import tensor_parallel
from ..lm_head import sharded_head_of
from ..statistics import count_reason, count_stock
from . import attention, attribute, given_cache, graphs, norms, parallel, prompts, reasons, traces, trial
from .beams import Rules
from .cache import state_layers
from .choosing import Choices, TopKRecord
from .criteria import Criteria
from .decoder import Decoder, Prompt
from .facts import has_table, num_positions, vocab_size_of
from .plan import Plan, reason_against
from .prompts import Ready
from .reasons import Declined, decline_for, raise_if_from_a_signal, said_by
from .row_form import decoder_of
from .search import Search
from .shape import Way
from .store import Store
from .twin import Snapshot, text_config, twin_of

# No text is longer than this. A greater limit stands for no limit.
_MOST_PLACES = 2**20

_ready = attribute.OfModels()
_lock = threading.RLock()


def drop(model: Any) -> None:
    """Forgets the model's twin."""
    with _lock:
        _ready.pop(model)


def release(model: Any) -> None:
    """Drops the steps that are kept of a tensor-parallel model, once it is no longer enabled."""
    with _lock:
        ready = _ready.get(model)
        if ready is not None:
            ready.store.release()


def ready_for(model: Any) -> Ready:
    """The model's twin and the steps that are kept. Tries the model first if it is new or has changed, and raises Declined if it cannot
    be served."""
    with _lock:
        ready = _known(model)
        if ready is None:
            ready = _ready[model] = _made_ready(model)
    decline_for(ready.reason)
    return ready


def _known(model: Any) -> Ready | None:
    """What is kept of the model as it is now; None for nothing."""
    ready: Ready | None = _ready.get(model)
    return ready if ready is not None and ready.of.is_of(model) else None


def checked(model: Any) -> Ready | None:
    """What is known of a model whose calls may be served; None where a trial comes first. Raises Declined where no call is served."""
    with _lock:
        ready = _known(model)
    if ready is not None:
        decline_for(ready.reason)
    decline_for(reasons.of_model(model))
    return ready


def _made_ready(model: Any) -> Ready:
    snapshot = Snapshot(model, _ready.forgetting(model))
    try:
        with traces.no_traces(model) as watching:
            try:
                return _tried(model, snapshot, watching)
            except Declined as declined:
                return _not_ready(str(declined), snapshot)
    except traces.LeavesTraces as found:
        # What a pass has kept changes with each pass, so it does not say whether the model has changed.
        return _not_ready(f"{found}, in a {type(model).__name__}", traces.SameModules(model))


def _tried(model: Any, snapshot: Snapshot, watching: traces.Traces) -> Ready:
    """The model's twin. Raises Declined where the model cannot be served."""
    is_spread = sharded_head_of(model) is not None
    try:
        stock = _twin_of(model, None, watching, is_stock=True)
    # Whatever it is: for example, a configuration cannot be copied.
    except Exception as error:
        raise_if_from_a_signal(error)
        raise Declined(_twin_raises(model, error)) from error
    if is_spread:
        decline_for(parallel.agreed(trial.reason_against_parts(stock, model), stock))
    is_taken = False
    try:
        own = text_config(model.config)._attn_implementation
        twin = _twin_of(model, attention.PLAIN if own == "sdpa" else attention.CAPPED, watching)
        is_taken = decoder_of(twin) is Decoder
        reason = trial.reason_against(twin, stock) if is_taken else f"{type(model).__name__} takes no other attention"
    # Whatever it is: for example, the model takes no other attention.
    except Exception as error:
        raise_if_from_a_signal(error)
        reason = _twin_raises(model, error)
    if is_spread:
        decline_for(parallel.agreed(reason, stock))
    # Each step changes the states. A step that is kept may run twice, and would change them twice.
    is_static = not state_layers(model.config)
    if reason is not None:
        # Then the model is tried in the other form.
        twin = _twin_of(model, None, watching)
        of_rows = trial.reason_against(twin, stock, is_static=False)
        # If the model takes our attention, the first reason says more about the model.
        decline_for(of_rows and (reason if is_taken else of_rows))
        # transformers says which models cannot have a static cache.
        is_static = bool(getattr(model, "_can_compile_fullgraph", False)) and not trial.reason_against(twin, stock)
    of_capture = None
    if is_static and graphs.is_cuda(next(twin.parameters()).device):
        # It may differ between the processes of a tensor-parallel model, which must make the same steps.
        of_capture = trial.reason_against_capture(twin, lambda x: parallel.agreed(x, stock) if is_spread else x)
    is_static = is_static and of_capture is None
    # Tried only when it is asked for: few calls are given a cache.
    of_past = functools.cache(functools.partial(trial.reason_against_past, twin, stock))
    of_layers = functools.cache(functools.partial(trial.reason_against_layers, twin, stock))
    head, reads_mask = trial.head(twin), trial.reads_mask(twin)
    return Ready(twin, None, snapshot, Store(), head, is_static, reads_mask, set(), of_past, of_layers, of_capture)


def _twin_of(model: Any, attention: str | None, watching: traces.Traces, is_stock: bool = False) -> Any:
    """See twin.twin_of. The twin of a tensor-parallel model has this process's parts of the weights. One that others are compared with,
    `is_stock`, has the model's own norms and rotary embeddings."""
    twin = twin_of(model, attention, is_steady=not is_stock)
    tensor_parallel.take_parts(model, twin)
    if not is_stock:
        norms.take(twin)
    watching.watch(twin)
    return twin


def _not_ready(reason: str, snapshot: Snapshot | traces.SameModules) -> Ready:
    return Ready(None, reason, snapshot, Store(), None, False, True, set())


def _twin_raises(model: Any, error: Exception) -> str:
    return f"a twin of a {type(model).__name__} raises {said_by(error)}"


@dataclass(frozen=True)
class Loop:
    """What generate() runs, through `custom_generate=`: whole steps, or where these do not serve the call transformers' own loop.

    Args:
        ready: what :func:`checked` has given for the model.
        is_cache_given: whether the user has given a cache, which is to hold what the call reads.
        topk: gets the best tokens of each step; None where nobody asks for them.
    """

    model: Any
    ready: Ready | None
    compile: bool
    streamer: Any
    is_cache_given: bool
    topk: TopKRecord | None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Any:
        together = parallel.Together.of(model, functools.partial(drop, model))
        given = (model, input_ids, logits_processor, stopping_criteria, generation_config)
        try:
            return self._made_search(given, inputs, together).run()
        except Declined as declined:
            reason = str(declined)
        if self.topk is not None:
            self.topk.steps.clear()
        if together is not None:
            together.refuse()
        name = reasons.loop_of(generation_config)
        if name is None:
            raise Declined(reason)
        # As generate() itself goes on. So nothing that it has prepared is prepared again, such as an encoder's output.
        count_reason(reason)
        extra = {} if self.streamer is None else {"streamer": self.streamer}
        result = getattr(model, name)(*given[1:], **extra, **inputs)
        count_stock(getattr(result, "sequences", result).shape[1] - input_ids.shape[1])
        return result

    def _made_search(
        self, given: tuple[Any, ...], inputs: dict[str, Any], together: parallel.Together | None
    ) -> Search:
        """The call, ready to run. Raises Declined where it is not served. `given` are the other arguments of :meth:`__call__`."""
        model, input_ids, logits_processor, stopping_criteria, generation_config = given
        # The model's generate() may have called that of a part.
        ready = self.ready if model is self.model else checked(model)
        decline_for(reasons.of_config(generation_config) or reasons.of_inputs(inputs, model.config.is_encoder_decoder))
        decline_for(reason_against(logits_processor))
        criteria = Criteria(stopping_criteria)
        decline_for(criteria.reason)
        plan = Plan(logits_processor, bool(generation_config.do_sample) and generation_config.num_beams == 1)
        if together is not None:
            decline_for(parallel.reason_against(plan, criteria, inputs))
            if ready is None:
                together.ask("a trial")
        if ready is None:
            ready = ready_for(model)
        if together is not None and self.compile:
            count_reason("compile=True with a tensor-parallel model, whose steps are not compiled")
        way = Way.on(input_ids.device, self.compile and together is None)
        if way is not None and all(way) and ready.is_static:
            of_layers = ready.reason_against_layers()
            if of_layers is not None:
                count_reason(of_layers)
                way = Way(False, True)
        rules = _rules(ready.twin, input_ids, criteria, generation_config)
        prompt = _prompt(ready, input_ids, rules, generation_config, inputs)
        grows = _lets_positions_grow(ready.twin, prompt, rules)
        if grows or not ready.is_static:
            way = None
        # On a GPU one operation after another takes longer than transformers' loop.
        only_kept = graphs.is_cuda(input_ids.device)
        if only_kept and way is None:
            raise Declined(ready.of_capture or "steps that cannot be kept")
        cache = self._cache(model, input_ids, generation_config, inputs)
        group = None if together is None else together.group
        padding = _padding(ready.twin, input_ids, rules, generation_config)
        choices = Choices(rules, plan, criteria, generation_config, group, self.topk)
        search = Search(ready, prompt, choices, padding, way, self.streamer, cache, only_kept)
        if together is not None:
            together.ask(search.told())
            together.is_over = True
        return search

    def _cache(self, model: Any, ids: Tensor, config: GenerationConfig, inputs: dict[str, Any]) -> Any:
        """The cache that is to hold what the call reads; None where the user does not ask for one."""
        if not self.is_cache_given and not config.return_dict_in_generate:
            return None
        cache = given_cache.cache_of(inputs)
        if cache is None and inputs.get("use_cache"):
            # In transformers 5.0 the model makes a cache, which may be of a type of its own.
            if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
                raise Declined("a cache of the model's own")
            cache = given_cache.new_for(model.config)
        decline_for(None if cache is None else given_cache.reason_against(cache, model.config))
        # On a GPU steps may run after the end, and change the states.
        if ids.is_cuda and state_layers(model.config):
            raise Declined("the cache of a model with states")
        return cache


def _rules(twin: Any, ids: Tensor, criteria: Criteria, config: GenerationConfig) -> Rules:
    beams, ends = config.num_beams, _tokens(config.eos_token_id)
    if beams > 1 and criteria.max_length > config.max_length:
        raise Declined("a MaxLengthCriteria beyond max_length, with beams")
    if beams > 1 and config.eos_token_id is not None and not ends:
        # transformers' beam search raises.
        raise Declined("an empty eos_token_id, with beams")
    # The criterion decides when texts end. With beams max_length decides about their scores.
    longest = config.max_length if beams > 1 else criteria.max_length
    rules = Rules(beams, longest - ids.shape[1], ends, config.length_penalty, config.early_stopping)
    if longest > _MOST_PLACES:
        # A step that is kept may need room for all of them.
        raise Declined(f"texts of up to {longest} tokens")
    if rules.room < 1 or len(ids) % beams:
        raise Declined("no room for a new token")
    if criteria.ends != set(ends):
        raise Declined("end tokens of the stopping criteria and of the configuration differ")
    if rules.kept > beams * vocab_size_of(twin.config):
        raise Declined("more continuations to keep than there are")
    return rules


def _prompt(ready: Ready, ids: Tensor, rules: Rules, config: GenerationConfig, inputs: dict[str, Any]) -> Prompt:
    beams, longest, positions = rules.beams, ids.shape[1] + rules.room, inputs.get("position_ids")
    if "encoder_outputs" in inputs:
        return prompts.with_source(ready, ids, beams, longest, inputs)
    # In some versions of transformers positions have several numbers, as those of images do, for text alone, too.
    has_axes = isinstance(positions, Tensor) and positions.dim() > 2
    if has_axes or reasons.prepares_itself(ready.twin) or reasons.unknown_inputs(inputs, False):
        return prompts.prepared_by_model(ready, ids, beams, longest, inputs)
    return prompts.of_text(ready, ids, beams, longest, config, inputs)


def _lets_positions_grow(twin: Any, prompt: Prompt, rules: Rules) -> bool:
    """Whether the call may need more positions than the model has, for which only single operations can make its table grow. Raises
    Declined where the texts may become too long."""
    # The prompt includes the tokens of a given cache.
    most = prompt.is_text.shape[1] + rules.room
    steady = reasons.steady_length(twin.config)
    if steady is not None and most > steady:
        raise Declined(f"texts of more than {steady} tokens, where rotary embeddings change")
    positions = num_positions(twin.config)
    if positions is None or most <= positions:
        return False
    if has_table(twin, positions):
        # Beyond the end of the table a compiled or captured step reads something else than single operations do.
        raise Declined(f"texts of more than the {positions} positions of a {type(twin).__name__}")
    return prompt.source is not None


def _tokens(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(torch.as_tensor(value).flatten().tolist())


def _padding(twin: Any, ids: Tensor, rules: Rules, config: GenerationConfig) -> int | None:
    """The token after the end of a text, as transformers has it; None where texts go on until all have ended."""
    if not rules.ends:
        return None
    pad = _tokens(config.pad_token_id)
    if rules.beams > 1:
        # transformers takes a padding token 0 for none.
        return pad[0] if pad and pad[0] else rules.ends[0]
    padding = pad[0] if pad else rules.ends[0]
    if len(ids) > 1 and not 0 <= padding < vocab_size_of(twin.config):
        # In stock generate() the model reads it once a text has ended before the others, and raises.
        raise Declined("a pad_token_id that is no token")
    return padding

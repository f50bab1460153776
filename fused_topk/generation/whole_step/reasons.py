# SPDX-License-Identifier: Apache-2.0
"""Why a call cannot run in whole steps. Each function gives a reason, or None if it knows none."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import tensor_parallel
from ..lm_head import sharded_head_of
from .facts import arguments_of, vocab_size_of

_VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


class Declined(Exception):
    """The call is to run in transformers' loop, for the reason in the message."""


def decline_for(reason: str | None) -> None:
    if reason is not None:
        raise Declined(reason)


def said_by(error: BaseException) -> str:
    """What an exception says, in one line. If torch.compile has wrapped an exception, what that one says."""
    while isinstance(cause := getattr(error, "inner_exception", None), BaseException):
        error = cause
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


def raise_if_from_a_signal(error: BaseException) -> None:
    """Raises the exception again if a signal handler of the user's has raised it, in the middle of whatever ran then."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    causes: list[BaseException | None] = [error]
    while causes:
        cause = causes.pop()
        if cause is None:
            continue
        # torch.compile wraps what is raised while it compiles.
        causes += [cause.__cause__, getattr(cause, "inner_exception", None)]
        traceback = cause.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code in handlers:
                raise cause
            traceback = traceback.tb_next


# Arguments of generate(), beside its inputs, that change how a call runs.
_ARGUMENTS = ("custom_generate", "assistant_model", "cache_params")
# Those that make it run in another mode than greedy search, sampling, beam search and beam sampling.
_OF_OTHER_MODES = (
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "num_beam_groups",
)
# The four modes, and the method by which transformers runs each.
_LOOPS = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.BEAM_SEARCH: "_beam_search",
    GenerationMode.BEAM_SAMPLE: "_beam_search",
}
# The inputs that a loop may hand to a decoder alone, and to an encoder-decoder.
_INPUTS = {
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    "past_key_values",
    "cache",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
_INPUTS_WITH_SOURCE = (_INPUTS - {"inputs_embeds", "position_ids"}) | {
    "encoder_outputs",
    "decoder_attention_mask",
    "decoder_position_ids",
}
# The arguments that forward() must have.
_TAKEN = {"input_ids", "attention_mask"}
_TAKEN_WITH_SOURCE = {"decoder_input_ids", "decoder_attention_mask", "encoder_outputs", "attention_mask"}
# Kinds of rotary embeddings that do not depend on the length of the text, and kinds that do not up to some length.
_ROTARY = {"default", "linear", "llama3", "yarn", "proportional"}
_STEADY_ROTARY = {"dynamic", "longrope"}
# generate(), its loops, and the methods of a model that they call, in any version of transformers.
_METHODS = (
    "generate",
    "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
    "_sample",
    "_beam_search",
    "_prefill",
    "_optimize_model_for_decode",
    "_get_initial_cache_position",
    "_cache_dependant_input_preparation",
    "_has_unfinished_sequences",
    "_flatten_beam_dim",
    "_unflatten_beam_dim",
    "_gather_beams",
    "_get_top_k_continuations",
    "_get_running_beams_for_next_iteration",
    "_update_finished_beams",
    "_check_early_stop_heuristic",
    "_beam_search_has_unfinished_sequences",
    "_reorder_cache",
)
# A model without an encoder may have these methods of its own: they are called to see what they give (:mod:`prompts`).
_PREPARING = frozenset({"prepare_inputs_for_generation", "_update_model_kwargs_for_generation"})
# As they are when this package is imported: the class may be patched later.
_STOCK_METHODS = {name: getattr(GenerationMixin, name, None) for name in _METHODS}
# Models with methods of their own that do the same as those of transformers. Whisper's generate() calls transformers' for each
# piece of sound. It prepares inputs of its own only after padding, which is declined. Phi-3's preparation drops the cache at some
# length, after which the same keys are computed again, except with rotary embeddings of kind longrope: these are declined.
_KNOWN_METHODS: tuple[str, ...] = ("transformers.models.whisper.",)
if _VERSION >= (5, 24):
    # Before, Phi-3 goes on with another text where it drops its cache.
    _KNOWN_METHODS += ("transformers.models.phi3.", "transformers.models.phimoe.")
# Whether a call with a cache may be given the new tokens alone. Earlier versions do not all allow it.
TAKES_NEW_TOKENS = _VERSION >= (5, 17)
# Whether generate() calls a given cache `cache`, and warns of `past_key_values`.
HAS_CACHE_ARGUMENT = _VERSION >= (5, 24)
# Whether beam sampling goes on with the best of the tokens drawn, or, in earlier versions, with those drawn first.
SORTS_DRAWN_BEAMS = _VERSION >= (5, 24)
# The methods by which models write to transformers' caches, as they are when this package is imported.
_UPDATES = [
    (kind, method, getattr(kind, method))
    for kind in (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)
    for method in ("update", "lazy_initialization")
    if hasattr(kind, method)
]
_FOLDER = Path(transformers.__file__).parent
_SECOND = "second_expert_policy"
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Prompts times beams times tokens of the vocabulary. Times of whole steps over stock, greedy, Llama of 4 layers of 64, 256 and 768,
# float32, one thread of a shared EPYC (family 25), 2026-11-27, medians of 11 calls of 32 tokens in turns:
#     1 x 1,000: 1.05, 1.06, 0.99    4 x 8,000: 1.04, 0.90, 0.93    2 x 32,000: 1.01, 0.55, 0.74    8 x 32,000: 0.69, 0.70, 0.82
#     1 x 32,000: 1.04, 0.90, 1.04   8 x 8,000: 0.99, 0.82, 0.94    4 x 32,000: 0.76, 0.72, 0.79
# Sampling took 0.18 to 0.99 times the stock time at all of them, two beams 0.44 to 1.04 times.
FEW_LOGITS = 60_000
# In models of fewer weights than this whole steps save little else. Llama of 2 layers of 32 and Whisper of 32, one thread of a shared Xeon,
# 2026-11-28: with 2 beams they took 1.08 to 1.12 times the stock time up to 8,000 logits a step, 1.04 at 32,000 and 0.98 at 64,000;
# sampling 1.02 to 1.05 times up to 2,000, 0.91 at 8,000.
_FEW_WEIGHTS = 1_000_000
_FEW_SAMPLED = 1 / 15  # of FEW_LOGITS
OF_FEW_LOGITS = "few logits on a CPU"
_HOOKS_OF_ALL = ("_global_forward_hooks", "_global_forward_pre_hooks")


def of_arguments(
    model: Any, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], asked: Asked
) -> str | None:
    """Why these arguments of generate() are not served; None if they are. `generate` is the model's method, or the function that
    the user has put in its place."""
    # After the inputs and the configuration, arguments are known by name only.
    if len(args) > 2:
        return "generate() with three positional arguments or more"
    for name in _ARGUMENTS:
        if kwargs.get(name) is not None:
            return name
    for name in _OF_OTHER_MODES:
        given = (kwargs.get(name), *(getattr(each, name, None) for each in asked.configs))
        # A number of groups, which is 1 by default.
        if any(each is not None and each != 1 for each in given):
            return f"another mode of generate(), {name}"
    if kwargs.get("streamer") is not None and asked.num_beams > 1:
        return "a streamer with beams"
    if kwargs.get("synced_gpus"):
        return "synced_gpus"
    if not _takes_a_loop(generate):
        return "a generate() that takes no custom_generate"
    return None if _is_known(type(model).generate, "generate") else f"generate() of {type(model).__name__}"


def _takes_a_loop(generate: Callable[..., Any]) -> bool:
    try:
        # The parameters of a wrapper itself, which may take less than what it wraps.
        takes = inspect.signature(generate, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(each.name == "custom_generate" or each.kind is each.VAR_KEYWORD for each in takes)


def of_model(model: Any) -> str | None:
    """Why the model as it is now is not served; None if it is."""
    name = type(model).__name__
    for method in _METHODS:
        found = getattr(type(model), method, None)
        is_of_a_model = str(getattr(found, "__module__", "")).startswith("transformers.models.")
        is_asked = method in _PREPARING and not model.config.is_encoder_decoder and is_of_a_model
        if not is_asked and not _is_known(found, method):
            return f"{method}() of {name}"
        # The generate() of the model is a method of this package. A function of the user's in its place runs before this.
        if method != "generate" and method in vars(model) and not _is_own(model, method):
            return f"{method}() of a {name} that has been replaced"
    if sharded_head_of(model) is not None:
        if model.config.is_encoder_decoder or prepares_itself(model):
            return "a tensor-parallel model that is more than a decoder of text"
        decline = tensor_parallel.reason_against(model)
        if decline is not None:
            return decline
    if getattr(model, "hf_quantizer", None) is not None:
        return "a quantized model"
    needed = _TAKEN_WITH_SOURCE if model.config.is_encoder_decoder else _TAKEN
    if model.main_input_name != "input_ids":
        # A model that does not read text need not know of padding.
        needed = needed - {"attention_mask"}
    missing = sorted(needed - arguments_of(model.forward))
    if missing:
        return f"{name} takes no {missing[0]}"
    return _of_modules(model) or _of_config(model.config) or _of_attention(model.config) or _of_caches()


def _of_attention(config: Any) -> str | None:
    # Our attention stands for that of transformers. A function of the user's may do anything, and may count its calls.
    for each in (config, config.get_text_config(decoder=True)):
        name = getattr(each, "_attn_implementation", None)
        function = ALL_ATTENTION_FUNCTIONS.get(name) if isinstance(name, str) else None
        # The code of transformers itself, whatever name it has been given.
        code = getattr(function, "__code__", None)
        if function is not None and (code is None or not Path(code.co_filename).is_relative_to(_FOLDER)):
            return f"attention of your own, {name}"
    return None


def _of_caches() -> str | None:
    # Users put functions of their own in the place of these, to see keys and values or to change them.
    for kind, method, stock in _UPDATES:
        if getattr(kind, method, None) is not stock:
            return f"{kind.__name__}.{method}() that has been replaced"
    return None


def prepares_itself(model: Any) -> bool:
    """Whether a model that is served prepares its inputs by methods that are not known."""
    return not all(_is_known(getattr(type(model), method, None), method) for method in _PREPARING)


def _is_known(found: Any, method: str) -> bool:
    """Whether a class's method is that of transformers, or one that does the same."""
    of = str(getattr(found, "__module__", "transformers."))
    if method == "generate":
        # A wrapper around the generate() of all models is no harm: it calls the original one, which runs our loop.
        is_handed_on = of.startswith("transformers.models.") and _calls_stock_generate(found)
        return found is GenerationMixin.generate or is_handed_on or of.startswith(_KNOWN_METHODS)
    return (found is _STOCK_METHODS[method] and of.startswith("transformers.")) or of.startswith(_KNOWN_METHODS)


def _calls_stock_generate(found: Any) -> bool:
    """Whether a class's generate() calls that of its base class, and hands on the arguments that it does not know."""
    function = inspect.unwrap(found)
    code = getattr(function, "__code__", None)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    # A method that uses super() has `__class__` among its free variables.
    return "__class__" in code.co_freevars and "generate" in code.co_names


def _of_modules(model: nn.Module) -> str | None:
    if any(getattr(nn.modules.module, name, None) for name in _HOOKS_OF_ALL):
        return "a forward hook of all modules"
    devices = set()
    is_spread = sharded_head_of(model) is not None
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            return "a ScriptModule"
        state = vars(module)
        if state.get("_compiled_call_impl") is not None:
            return "a compiled model"
        is_replaced = "forward" in state and not _is_own(module, "forward") and not _is_trls(module)
        if is_replaced and not tensor_parallel.has_known_forward(module):
            return f"forward() of a {type(module).__name__} that has been replaced"
        hooks = (*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values())
        if not all(str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks):
            return f"a forward hook of a {type(module).__name__}"
        for weight in state["_parameters"].values():
            if weight is None:
                continue
            if type(weight) is not nn.Parameter and not (is_spread and hasattr(weight, "placements")):
                return f"weights that are a {type(weight).__name__}"
            devices.add(weight.device)
    if len(devices) != 1:
        return "weights on several devices" if devices else "no weights"
    kind = next(iter(devices)).type
    return None if kind in ("cpu", "cuda") else f"weights on {kind}"


def _is_trls(module: nn.Module) -> bool:
    """Whether the module's forward() is that of TRL's trainers, which runs the class's own one unless it is asked for a loss."""
    found = vars(module)["forward"]
    function: Any = getattr(found, "__func__", None)
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != "_fused_forward" or Path(code.co_filename).parts[-3:-1] != ("trl", "trainer"):
        return False
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__, strict=True)}
    runs = held.get("original_forward")
    is_own = getattr(runs, "__self__", None) is module and getattr(runs, "__func__", None) is type(module).forward
    return is_own and found.__self__ is module and function.__kwdefaults__.get("fused_lm_head") is False


def _is_own(module: nn.Module, method: str) -> bool:
    """Whether the module's attribute is just the method of its class. Some versions of transformers leave such attributes behind."""
    found = vars(module)[method]
    of = getattr(found, "__self__", None), getattr(found, "__func__", None)
    return of[0] is module and of[1] is getattr(type(module), method, None)


def _of_config(config: Any) -> str | None:
    config = config.get_text_config(decoder=True)
    if getattr(config, "attention_chunk_size", None) is not None:
        return "attention in chunks"
    if getattr(config, "moe_eval_capacity_token_fraction", 1.0) < 1 or getattr(config, _SECOND, "all") != "all":
        # Which tokens experts have room for depends on the other rows, or on chance.
        return "experts that leave out tokens"
    for name in ("rope_scaling", "rope_parameters"):
        parameters = getattr(config, name, None)
        # Where kinds differ among layers it is not known up to which length they are steady.
        kinds = _rotary_kinds(parameters) - _ROTARY - ({_own_kind(parameters)} & _STEADY_ROTARY)
        if kinds:
            return f"rotary embeddings of kind {sorted(kinds)[0]}"
    return None


def steady_length(config: Any) -> int | None:
    """Up to how many tokens of a text rotary embeddings do not change; None where they never change."""
    config = config.get_text_config(decoder=True)
    of_rotary = [getattr(config, name, None) for name in ("rope_scaling", "rope_parameters")]
    if not {_own_kind(each) for each in of_rotary} & _STEADY_ROTARY:
        return None
    found = [getattr(config, name, None) for name in ("max_position_embeddings", _ORIGINAL_LENGTH)]
    found += [each.get(_ORIGINAL_LENGTH) for each in of_rotary if isinstance(each, Mapping)]
    return min((int(each) for each in found if each is not None), default=0)


def original_length(config: Any) -> int | None:
    """At how many tokens a model's own preparation may read the text anew; None where the configuration does not say."""
    found = getattr(config.get_text_config(decoder=True), _ORIGINAL_LENGTH, None)
    return None if found is None else int(found)


def _own_kind(parameters: Any) -> Any:
    return parameters.get("rope_type", parameters.get("type")) if isinstance(parameters, Mapping) else None


def _rotary_kinds(parameters: Any) -> set[str]:
    """The kinds of rotary embedding of a configuration, which may have one for each kind of layer."""
    if not isinstance(parameters, Mapping):
        return set()
    nested = (_rotary_kinds(each) for each in parameters.values())
    return {str(_own_kind(parameters))} - {"None"} | {kind for kinds in nested for kind in kinds}


def loop_of(config: GenerationConfig) -> str | None:
    """The name of the method by which transformers runs a call with this configuration; None for other modes than the four."""
    return _LOOPS.get(config.get_generation_mode())


def of_config(config: GenerationConfig) -> str | None:
    """Why a call with this configuration, as a loop gets it, is not served; None if it is."""
    if loop_of(config) is None:
        return f"generation mode {config.get_generation_mode().value}"
    for name in ("cache_implementation", "prefill_chunk_size", "stop_strings"):
        if getattr(config, name, None) is not None:
            return name
    for name in ("output_attentions", "output_hidden_states", "low_memory", "token_healing", "is_assistant"):
        if getattr(config, name, None):
            return name
    return None if config.use_cache else "use_cache=False"


class Asked(NamedTuple):
    """What is known of a call before generate() prepares it, and decides how it runs."""

    do_sample: bool
    num_beams: int
    prompts: int | None  # how many; None where that is not known
    length: int | None = None  # of the prompts of a decoder of text; None where that is not known
    configs: tuple[Any, ...] = ()  # that of the call, which may be None, and that of the model


def reads_few_logits(model: Any, asked: Asked) -> bool:
    """Whether stock is as quick on a CPU: in greedy search from few logits in each step, with beams or draws also of few weights."""
    if asked.prompts is None or sharded_head_of(model) is not None:
        return False
    try:
        vocab_size = vocab_size_of(model.config)
    # Any model may come here: its configuration may have no part for text, several parts, or no vocabulary size.
    except (AttributeError, ValueError, TypeError):
        return False
    is_drawn = asked.do_sample and asked.num_beams == 1
    if asked.prompts * asked.num_beams * vocab_size >= FEW_LOGITS * (_FEW_SAMPLED if is_drawn else 1):
        return False
    weights = [*model.parameters()]
    if not weights or weights[0].device.type != "cpu":
        return False
    is_greedy = not asked.do_sample and asked.num_beams == 1
    return is_greedy or sum(weight.numel() for weight in weights) < _FEW_WEIGHTS


def unknown_inputs(inputs: Mapping[str, Any], has_source: bool) -> list[str]:
    """The names of the unknown inputs that a loop hands to the model."""
    known = _INPUTS_WITH_SOURCE if has_source else _INPUTS
    return [name for name, value in inputs.items() if name not in known and value is not None]


def of_inputs(inputs: Mapping[str, Any], has_source: bool) -> str | None:
    """Why the inputs that a loop hands to the model are not served; None if they are. A model without an encoder may get more inputs: it
    is asked what it makes of them."""
    unknown = unknown_inputs(inputs, has_source)
    if has_source and unknown:
        return f"model input {unknown[0]}"
    try:
        for name in ("cache", "past_key_values"):
            if inputs.get(name) is not None:
                inputs[name].get_seq_length()
    # A cache of states alone has no length, and raises.
    except ValueError:
        return "a cache without keys"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast"
    return None

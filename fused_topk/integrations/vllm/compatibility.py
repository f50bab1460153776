# SPDX-License-Identifier: Apache-2.0
"""Whether the installed vLLM is one that was tested. Any other version runs as it is."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

SERIES = ("0.32",)
SAMPLER = "vllm.v1.sample.sampler"
FILTERING = "vllm.v1.sample.ops.topk_topp_sampler"
PROCESSORS = "vllm.v1.sample.logits_processor.builtin"
BATCH = "vllm.v1.worker.gpu_input_batch"
RUNNER = "vllm.v1.worker.gpu_model_runner"
WORKER = "vllm.v1.worker.worker_base"

# The parameters of the functions that are replaced or called, and the fields of the objects that are read or made, as they are in
# the tested versions.
_PARAMETERS = {
    f"{SAMPLER}:Sampler.__init__": "self logprobs_mode use_fp64_gumbel",
    f"{SAMPLER}:Sampler.forward": "self logits sampling_metadata predict_bonus_token logprobs_mode_override",
    f"{SAMPLER}:Sampler.sample": "self logits sampling_metadata logprobs_mode_override",
    f"{SAMPLER}:Sampler.apply_logits_processors": "self logits sampling_metadata predict_bonus_token",
    f"{SAMPLER}:Sampler.apply_temperature": "logits temp all_random",
    f"{SAMPLER}:Sampler.compute_logprobs": "logits",
    f"{SAMPLER}:Sampler.gather_logprobs": "logprobs num_logprobs token_ids",
    f"{SAMPLER}:Sampler.gather_specific_token_logprobs": "self logprobs logprob_token_ids sampled",
    f"{FILTERING}:TopKTopPSampler.__init__": "self logprobs_mode use_fp64_gumbel",
    f"{FILTERING}:apply_top_k_top_p": "logits k p",
    f"{PROCESSORS}:MinPLogitsProcessor.apply": "self logits",
    f"{BATCH}:InputBatch._make_sampling_metadata": "self",
    f"{RUNNER}:GPUModelRunner._get_prompt_logprobs_dict": "self hidden_states num_scheduled_tokens",
}
_FIELDS = {
    f"{SAMPLER}:SamplingMetadata": "temperature all_greedy all_random top_p top_k generators max_num_logprobs no_penalties "
    "prompt_token_ids frequency_penalties presence_penalties repetition_penalties output_token_ids allowed_token_ids_mask "
    "bad_words_token_ids logitsprocs logprob_token_ids spec_token_ids thinking_budget_state_holder",
    f"{SAMPLER}:SamplerOutput": "sampled_token_ids logprobs_tensors",
    f"{SAMPLER}:LogprobsTensors": "logprob_token_ids logprobs selected_token_ranks cu_num_generated_tokens "
    "cu_num_generated_tokens_tensor",
}


def unknown_version(version: str) -> str | None:
    """What is wrong with a version of vLLM; None for one of a tested series."""
    return None if ".".join(version.split(".")[:2]) in SERIES else f"only {', '.join(SERIES)} is tested"


def difference() -> str | None:
    """The first difference between the sampler and the tested one; None if there is none. It imports vLLM's modules."""
    for name, expected in _PARAMETERS.items():
        found = found_at(name)
        if found is None:
            return f"{name} is missing"
        parameters = " ".join(inspect.signature(found).parameters)
        if parameters != expected:
            return f"{name} has the parameters {parameters}; {expected} are known"
    for name, expected in _FIELDS.items():
        found = found_at(name)
        fields = " ".join(_fields(found))
        if fields != expected:
            return f"{name} has the fields {fields}; {expected} are known"
    return None


def found_at(name: str) -> Any:
    """What stands at "module:qualified.name"; None if there is nothing."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _fields(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(getattr(kind, "_fields", ()))

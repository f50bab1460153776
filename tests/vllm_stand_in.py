"""A stand-in for the part of vLLM that the integration knows: the same names, parameters and fields, and what they compute, in a few lines."""

import dataclasses
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fused_topk.integrations import vllm
from fused_topk.integrations.vllm import compatibility, patches

VERSION = "0.32.0"


class LogprobsTensors(NamedTuple):
    logprob_token_ids: Tensor
    logprobs: Tensor
    selected_token_ranks: Tensor
    cu_num_generated_tokens: Any = None
    cu_num_generated_tokens_tensor: Any = None


@dataclasses.dataclass
class SamplerOutput:
    sampled_token_ids: Tensor
    logprobs_tensors: LogprobsTensors | None


@dataclasses.dataclass
class LogitsProcessors:
    argmax_invariant: list[Any] = dataclasses.field(default_factory=list)
    non_argmax_invariant: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class SamplingMetadata:
    temperature: Tensor | None = None
    all_greedy: bool = False
    all_random: bool = True
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    generators: dict[int, torch.Generator] = dataclasses.field(default_factory=dict)
    max_num_logprobs: int | None = None
    no_penalties: bool = True
    prompt_token_ids: Tensor | None = None
    frequency_penalties: Tensor | None = None
    presence_penalties: Tensor | None = None
    repetition_penalties: Tensor | None = None
    output_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    allowed_token_ids_mask: Tensor | None = None
    bad_words_token_ids: dict[int, list[list[int]]] = dataclasses.field(default_factory=dict)
    logitsprocs: LogitsProcessors = dataclasses.field(default_factory=LogitsProcessors)
    logprob_token_ids: dict[int, list[int]] | None = None
    spec_token_ids: list[list[int]] | None = None
    thinking_budget_state_holder: Any = None


class MinPLogitsProcessor:
    def __init__(self, min_p: list[float]) -> None:
        self.min_p = torch.tensor(min_p)[:, None]
        self.min_p_count = sum(each > 0 for each in min_p)

    def apply(self, logits: Tensor) -> Tensor:
        probabilities = logits.softmax(-1)
        return logits.masked_fill_(probabilities < probabilities.amax(-1, keepdim=True) * self.min_p, -torch.inf)


class LogitBiasLogitsProcessor:
    def __init__(self, biases: dict[int, dict[int, float]]) -> None:
        self.biases = biases

    def apply(self, logits: Tensor) -> Tensor:
        for row, of_row in self.biases.items():
            for token, bias in of_row.items():
                logits[row, token] += bias
        return logits


class MinTokensLogitsProcessor:
    min_toks = ()


class TopKTopPSampler(nn.Module):
    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__()


def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    in_order, order = logits.sort(dim=-1, descending=True, stable=True)
    if k is not None:
        in_order = in_order.masked_fill(in_order < in_order.gather(1, k.long()[:, None] - 1), -torch.inf)
    if p is not None:
        probabilities = in_order.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        in_order = in_order.masked_fill((before >= p[:, None]) & (p < 1)[:, None], -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, in_order)


class Sampler(nn.Module):
    """Draws of its own are token 0: a test sees whether they are stock."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__()
        self.topk_topp_sampler = TopKTopPSampler(logprobs_mode, use_fp64_gumbel)
        self.logprobs_mode = logprobs_mode
        self.use_fp64_gumbel = use_fp64_gumbel

    def forward(self, logits, sampling_metadata, predict_bonus_token=False, logprobs_mode_override=None):
        return SamplerOutput(torch.zeros(len(logits), 1, dtype=torch.int32), None)

    def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
        raise AssertionError

    def apply_logits_processors(self, logits, sampling_metadata, predict_bonus_token):
        if sampling_metadata.allowed_token_ids_mask is not None:
            logits.masked_fill_(sampling_metadata.allowed_token_ids_mask, -torch.inf)
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            logits = processor.apply(logits)
        return logits

    @staticmethod
    def apply_temperature(logits, temp, all_random):
        return logits.div_(temp.where(temp >= 1e-5, 1)[:, None])

    @staticmethod
    def compute_logprobs(logits):
        return logits.log_softmax(-1)

    @staticmethod
    def gather_logprobs(logprobs, num_logprobs, token_ids):
        best = logprobs.topk(num_logprobs)
        own = logprobs.gather(1, token_ids[:, None])
        tokens = torch.cat((token_ids[:, None], best.indices), 1)
        return LogprobsTensors(tokens.int(), torch.cat((own, best.values), 1), (logprobs >= own).sum(1))

    def gather_specific_token_logprobs(self, logprobs, logprob_token_ids, sampled):
        longest = max(map(len, logprob_token_ids.values()))
        named = [logprob_token_ids.get(row, []) for row in range(len(logprobs))]
        tokens = torch.tensor([[int(own), *each] + [0] * (longest - len(each)) for own, each in zip(sampled, named)])
        is_named = torch.tensor([[True] * (1 + len(each)) + [False] * (longest - len(each)) for each in named])
        ranks = (logprobs >= logprobs.gather(1, sampled[:, None])).sum(1)
        return LogprobsTensors(tokens.int(), logprobs.gather(1, tokens).where(is_named, -torch.inf), ranks)


class InputBatch:
    def __init__(self, metadata: SamplingMetadata, outputs: list[list[int]]) -> None:
        self.metadata = metadata
        self.req_output_token_ids = outputs

    def _make_sampling_metadata(self):
        return dataclasses.replace(self.metadata)


class GPUModelRunner:
    def __init__(self, logits: Tensor, targets: Tensor, count: int, logprobs_mode: str = "raw_logprobs") -> None:
        self.sampler = Sampler(logprobs_mode)
        self.model_config = types.SimpleNamespace(logprobs_mode=logprobs_mode)
        self.num_prompt_logprobs = {"request": count}
        self.of_prompt = logits, targets

    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        logits, targets = self.of_prompt
        scores = self.sampler.compute_logprobs(logits)
        return {
            name: self.sampler.gather_logprobs(scores, count, targets)
            for name, count in self.num_prompt_logprobs.items()
        }


class WorkerBase:
    pass


_MODULES: dict[str, tuple[Any, ...]] = {
    compatibility.SAMPLER: (Sampler, SamplingMetadata, SamplerOutput, LogprobsTensors),
    compatibility.FILTERING: (TopKTopPSampler, apply_top_k_top_p),
    compatibility.PROCESSORS: (MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor),
    compatibility.BATCH: (InputBatch,),
    compatibility.RUNNER: (GPUModelRunner,),
    compatibility.WORKER: (WorkerBase,),
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """vLLM is installed, as it seems; nothing is enabled yet."""
    package = types.ModuleType("vllm")
    package.__version__ = VERSION
    monkeypatch.setitem(sys.modules, "vllm", package)
    for name, content in _MODULES.items():
        module = types.ModuleType(name)
        for each in content:
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("FUSED_TOPK_VLLM", raising=False)
    vllm.stats(reset=True)
    yield package
    vllm.disable()
    vllm.stats(reset=True)
    assert not patches._replaced

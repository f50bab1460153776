"""vLLM's sampler with this package in it, against a stand-in for vLLM."""

import dataclasses
import logging
import os
import subprocess
import sys

import pytest
import torch

import fused_topk
from fused_topk.integrations import vllm
from fused_topk.integrations.vllm import compatibility
from vllm_stand_in import (
    VERSION,
    GPUModelRunner,
    InputBatch,
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    Sampler,
    SamplingMetadata,
    WorkerBase,
    apply_top_k_top_p,
    stand_in,  # noqa: F401
)

VOCAB = 300


def logits_of(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows with equal logits here and there."""
    torch.manual_seed(rows)
    logits = torch.randn(rows, VOCAB) * 3
    logits[:, 200:] = logits[:, :100]
    return logits.to(dtype)


def requests(rows: int, **given) -> SamplingMetadata:
    return SamplingMetadata(**{"temperature": torch.ones(rows), **given})


def seeded(metadata: SamplingMetadata, seeds: dict[int, int], outputs: list[list[int]]) -> SamplingMetadata:
    """As vLLM's batch makes it, once it is enabled."""
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
    return InputBatch(dataclasses.replace(metadata, generators=generators), outputs)._make_sampling_metadata()


def is_stock(logits: torch.Tensor, metadata: SamplingMetadata, sampler: Sampler | None = None, **kwargs) -> bool:
    before = vllm.stats()
    (sampler or Sampler())(logits, metadata, **kwargs)
    after = vllm.stats()
    assert (after.fused + after.argmax + after.stock) - (before.fused + before.argmax + before.stock) == 1
    return after.stock > before.stock


def processed_logprobs(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """In vLLM's order: what changes logits, temperature, min-p, top-k, top-p. In float64."""
    logits = Sampler().apply_logits_processors(logits.double().clone(), metadata, False)
    if not metadata.all_greedy:
        logits = Sampler.apply_temperature(logits, metadata.temperature, True)
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, metadata.top_k, metadata.top_p)
    return logits.log_softmax(-1)


def check_report(found, scores: torch.Tensor, count: int) -> None:
    """Against the scores float64 (R, V) that are to be reported."""
    tokens = found.sampled_token_ids.long()
    assert found.sampled_token_ids.dtype == torch.int32
    report = found.logprobs_tensors
    assert report.logprob_token_ids.dtype == torch.int32
    assert report.logprob_token_ids.shape == report.logprobs.shape == (len(scores), 1 + count)
    assert torch.equal(report.logprob_token_ids[:, :1].long(), tokens)
    torch.testing.assert_close(
        report.logprobs.double(), scores.gather(1, report.logprob_token_ids.long()), atol=1e-5, rtol=0
    )
    best = report.logprobs[:, 1:].double()
    torch.testing.assert_close(best, scores.topk(count).values, atol=1e-5, rtol=0)
    assert torch.equal(report.selected_token_ranks, (scores >= scores.gather(1, tokens)).sum(1))


def test_without_the_variable_the_plugin_imports_nothing_of_vllm():
    program = """
import os, sys
class NoVllm:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "vllm", name
sys.meta_path.insert(0, NoVllm())
from fused_topk.integrations.vllm import plugin, stats
plugin()
os.environ["FUSED_TOPK_VLLM"] = "0"
plugin()
print(stats().stock)
"""
    environment = {name: value for name, value in os.environ.items() if name != "FUSED_TOPK_VLLM"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr


def test_the_plugin_is_vllms_entry_point(stand_in, monkeypatch):  # noqa: F811
    from importlib.metadata import entry_points

    (entry,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "fused_topk"]
    monkeypatch.setenv("FUSED_TOPK_VLLM", "1")
    entry.load()()
    assert not is_stock(logits_of(2), requests(2))


def test_enable_and_disable(stand_in, caplog):  # noqa: F811
    sampler, stock = Sampler(), Sampler.forward
    with caplog.at_level(logging.INFO, logger="vllm.fused_topk"):
        assert vllm.enable() and vllm.enable()
    (line,) = caplog.messages
    assert fused_topk.__version__ in line and VERSION in line
    assert os.environ["FUSED_TOPK_VLLM"] == "1"
    metadata = requests(2)
    assert not is_stock(logits_of(2), metadata, sampler)
    assert WorkerBase().fused_topk_stats() == vllm.stats()._asdict()
    vllm.disable()
    assert "FUSED_TOPK_VLLM" not in os.environ
    assert Sampler.forward is stock and not hasattr(WorkerBase, "fused_topk_stats")
    assert not sampler(logits_of(2), metadata).sampled_token_ids.any()


def test_a_front_end_imports_no_model_runner(stand_in, monkeypatch):  # noqa: F811
    runner = sys.modules[compatibility.RUNNER]
    monkeypatch.delitem(sys.modules, compatibility.RUNNER)
    stock = Sampler.forward
    assert vllm.enable()
    assert Sampler.forward is stock
    # A runner has made a sampler: it is there.
    monkeypatch.setitem(sys.modules, compatibility.RUNNER, runner)
    assert not is_stock(logits_of(2), requests(2), Sampler())


@pytest.mark.parametrize("version", ["0.31.1", "0.33.0", "1.0.dev1"])
def test_another_version_runs_as_it_is(stand_in, caplog, version):  # noqa: F811
    stand_in.__version__ = version
    stock = Sampler.__init__
    assert not vllm.enable()
    (line,) = caplog.messages
    assert version in line and fused_topk.__version__ in line and compatibility.SERIES[0] in line
    assert Sampler.__init__ is stock and "FUSED_TOPK_VLLM" not in os.environ


@pytest.mark.parametrize("changed", ["parameters", "fields", "missing"])
def test_another_sampler_runs_as_it_is(stand_in, monkeypatch, caplog, changed):  # noqa: F811
    if changed == "parameters":
        monkeypatch.setattr(Sampler, "sample", lambda self, logits, metadata: None)
    elif changed == "fields":
        monkeypatch.setattr(
            sys.modules[compatibility.SAMPLER], "SamplerOutput", dataclasses.make_dataclass("SamplerOutput", ["more"])
        )
    else:
        monkeypatch.delattr(sys.modules[compatibility.FILTERING], "apply_top_k_top_p")
    stock = Sampler.forward
    assert not vllm.enable()
    (line,) = caplog.messages
    assert VERSION in line and fused_topk.__version__ in line
    assert Sampler.forward is stock


def test_what_is_not_served_runs_as_it_is(stand_in, caplog):  # noqa: F811
    vllm.enable()
    logits = logits_of(2)

    class Other(Sampler):
        pass

    class Custom:
        def apply(self, logits):
            return logits

    assert is_stock(logits, requests(2), Other())
    assert is_stock(logits, requests(2), predict_bonus_token=True)
    assert is_stock(logits, requests(2), logprobs_mode_override="raw_logits")
    assert is_stock(logits, requests(2), Sampler(use_fp64_gumbel=True))
    assert is_stock(logits, requests(2), Sampler("processed_logits"))
    assert is_stock(logits.double(), requests(2))
    assert is_stock(logits, requests(2, logitsprocs=LogitsProcessors([Custom()])))
    # Nobody knows how many tokens the request has.
    assert is_stock(logits, requests(2, generators={1: torch.Generator().manual_seed(1)}))
    assert len(vllm.stats().reasons) == 7 and sum(vllm.stats().reasons.values()) == 8
    # Each reason is told once.
    assert is_stock(logits, requests(2), Other())
    assert len([line for line in caplog.messages if "own operations" in line]) == 7


def test_greedy_requests_alone_are_left_to_argmax(stand_in):  # noqa: F811
    vllm.enable()
    assert not is_stock(logits_of(2), requests(2, temperature=None, all_greedy=True, all_random=False))
    assert vllm.stats().argmax == 1 and vllm.stats().fused == 0


def test_parameters_of_each_request(stand_in):  # noqa: F811
    """Each row draws from its own distribution, however they are mixed."""
    vllm.enable()
    logits = logits_of(4)
    given = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0]),
        "top_k": torch.tensor([VOCAB, 3, VOCAB, 40], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 1.0, 0.6, 0.9]),
        "all_random": False,
    }
    metadata = requests(4, **given)
    expected = processed_logprobs(logits, metadata).exp()
    expected[0] = torch.nn.functional.one_hot(logits[0].argmax(), VOCAB)
    draws = 4000
    sampler = Sampler()
    drawn = torch.cat([sampler(logits, metadata).sampled_token_ids for _ in range(draws)], 1).long()
    counts = torch.zeros(4, VOCAB, dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())
    assert not (counts[expected == 0] > 0).any()
    deviation = (draws * expected * (1 - expected)).sqrt()
    # Six deviations, and one draw: 1200 numbers of which none should lie outside.
    assert ((counts - draws * expected).abs() <= 6 * deviation + 1).all()


def test_min_p_comes_before_top_p(stand_in):  # noqa: F811
    """The order matters: without the tail that min-p removes, top-p keeps fewer."""
    vllm.enable()
    # Three tokens of 0.2, and 40 of 0.01 that min-p removes: 2 of the 3 are two thirds of what is left.
    logits = torch.cat((torch.full((1, 3), 0.2), torch.full((1, 40), 0.01)), 1).log()
    metadata = requests(1, top_p=torch.tensor([0.6]), logitsprocs=LogitsProcessors([MinPLogitsProcessor([0.5])]))
    drawn = {int(Sampler()(logits, metadata).sampled_token_ids) for _ in range(100)}
    assert drawn == {0, 1}


SETTINGS = {
    "greedy": {"temperature": None, "all_greedy": True, "all_random": False},
    "random": {},
    "mixed": {"temperature": torch.tensor([0.0, 0.7, 1.5]), "all_random": False,
        "top_k": torch.tensor([VOCAB, 4, VOCAB], dtype=torch.int32), "top_p": torch.tensor([1.0, 1.0, 0.5])},
    "min_p": {"logitsprocs": LogitsProcessors([MinPLogitsProcessor([0.0, 0.1, 0.9])])},
    "min_p_and_top_p": {"temperature": torch.tensor([0.5, 0.0, 2.0]), "top_p": torch.tensor([0.9, 1.0, 0.8]),
        "logitsprocs": LogitsProcessors([MinPLogitsProcessor([0.3, 0.0, 0.01])])},
    "allowed": {"allowed_token_ids_mask": torch.arange(VOCAB).expand(3, -1) % 3 > 0, "top_k": torch.tensor([5, 5, 5])},
    "biased": {"logitsprocs": LogitsProcessors([], [LogitBiasLogitsProcessor({1: {7: 30.0, 8: -5.0}})])},
}  # fmt: skip


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("count", [0, 1, 5, VOCAB])
@pytest.mark.parametrize("setting", SETTINGS)
def test_reported_log_probabilities(stand_in, setting, count, mode):  # noqa: F811
    vllm.enable()
    logits = logits_of(3)
    metadata = requests(3, max_num_logprobs=count, **SETTINGS[setting])
    scores = logits.double().log_softmax(-1) if mode == "raw_logprobs" else processed_logprobs(logits, metadata)
    for _ in range(3):
        check_report(Sampler(mode)(logits.clone(), metadata), scores, count)
    assert vllm.stats().fused == 3


def test_a_processed_rank_counts_only_what_is_kept(stand_in):  # noqa: F811
    """Of four equal tokens top-p keeps three."""
    vllm.enable()
    logits = torch.zeros(1, 4)
    metadata = requests(1, top_p=torch.tensor([0.6]), max_num_logprobs=1)
    found = Sampler("processed_logprobs")(logits.clone(), metadata)
    check_report(found, processed_logprobs(logits, metadata), 1)
    assert int(found.logprobs_tensors.selected_token_ranks) == 3


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_reported_tokens_by_name(stand_in, setting, mode):  # noqa: F811
    vllm.enable()
    logits = logits_of(3)
    # vLLM prefers these where a step wants both.
    metadata = requests(3, logprob_token_ids={0: [4, 9], 2: [7, 1, 8]}, max_num_logprobs=2, **SETTINGS[setting])
    scores = logits.double().log_softmax(-1) if mode == "raw_logprobs" else processed_logprobs(logits, metadata)
    found = Sampler(mode)(logits.clone(), metadata)
    own = found.sampled_token_ids[:, 0].long()
    expected = Sampler().gather_specific_token_logprobs(scores, metadata.logprob_token_ids, own)
    report = found.logprobs_tensors
    assert torch.equal(report.logprob_token_ids, expected.logprob_token_ids)
    torch.testing.assert_close(report.logprobs.double(), expected.logprobs, atol=1e-5, rtol=0)
    assert torch.equal(report.selected_token_ranks, expected.selected_token_ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(stand_in, dtype):  # noqa: F811
    """Of which raw log-probabilities are those before a bias in float32."""
    vllm.enable()
    logits = logits_of(3, dtype)
    for setting in ("random", "biased"):
        metadata = requests(3, max_num_logprobs=2, **SETTINGS[setting])
        check_report(Sampler()(logits, metadata), logits.double().log_softmax(-1), 2)


def test_a_seed_draws_the_same_in_any_batch(stand_in):  # noqa: F811
    vllm.enable()
    logits = logits_of(4)
    sampler = Sampler()
    alone = []
    for length in range(20):
        metadata = seeded(requests(1), {0: 77}, [[5] * length])
        alone.append(int(sampler(logits[2:3].clone(), metadata).sampled_token_ids))
    assert len(set(alone)) > 5
    # In a batch, whose other requests differ; while vLLM schedules ahead, tokens that are not known yet are -1.
    outputs = [[], [1, 2], [], []]
    temperature = torch.tensor([0.0, 2.0, 1.0, 0.3])
    together = []
    metadata = seeded(requests(4, temperature=temperature, max_num_logprobs=1), {2: 77, 1: -3}, outputs)
    for _ in range(20):
        together.append(int(sampler(logits.clone(), metadata).sampled_token_ids[2]))
        outputs[2].append(-1)
    assert together == alone


def test_requests_without_a_seed_draw_as_vllm_is_seeded(stand_in):  # noqa: F811
    """Its workers, which are seeded alike, draw the same; and no two steps do."""
    vllm.enable()
    logits = torch.zeros(64, VOCAB)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        metadata = seeded(requests(64), {5: 1}, [[]] * 64)
        runs.append([Sampler()(logits, metadata).sampled_token_ids[:, 0] for _ in range(2)])
    assert all(map(torch.equal, *runs))
    first, second = runs[0]
    is_same = first == second
    assert is_same[5] and is_same.sum() < 8 and len(set(first.tolist())) > 40


@pytest.mark.parametrize("count", [0, 3])
def test_log_probabilities_of_prompts(stand_in, count):  # noqa: F811
    logits, targets = logits_of(6), torch.tensor([3, 250, 0, 7, 9, 299])
    expected = GPUModelRunner(logits.double(), targets, count)._get_prompt_logprobs_dict(None, {})["request"]
    vllm.enable()
    runner = GPUModelRunner(logits, targets, count)
    found = runner._get_prompt_logprobs_dict(None, {})["request"]
    torch.testing.assert_close(found.logprobs.double(), expected.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        logits.gather(1, found.logprob_token_ids.long()), logits.gather(1, expected.logprob_token_ids.long())
    )
    assert torch.equal(found.logprob_token_ids[:, 0].long(), targets)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
    assert vllm.stats().prompts == 1 and type(runner.sampler) is Sampler
    other = GPUModelRunner(logits, targets, count, "raw_logits")
    stock = other._get_prompt_logprobs_dict(None, {})["request"]
    torch.testing.assert_close(stock.logprobs.double(), expected.logprobs, atol=1e-5, rtol=0)
    assert vllm.stats().stock == 1


def test_an_unneeded_step_changes_nothing(stand_in):  # noqa: F811
    """What a step does not change stays as the model gave it: the logits, if no operation of vLLM's is due."""
    vllm.enable()
    logits = logits_of(3)
    before = logits.clone()
    Sampler()(logits, requests(3, max_num_logprobs=2, top_p=torch.full((3,), 0.9)))
    assert torch.equal(logits, before)

# SPDX-License-Identifier: Apache-2.0
"""The benchmark: its statistics, its tables, its judge of answers, and a run on the CPU."""

from __future__ import annotations

import json
import math

import pytest
import torch

import fused_topk
from benchmark import check, compare, inputs, report, runner, suites, timing
from benchmark.peers import PEERS, beam_scores
from benchmark.suites import Case, Target
from fused_topk import TopK
from fused_topk.layout.topk_choice import choose

CPU = torch.device("cpu")
SETTINGS = runner.Settings(CPU, "reference", peers=("torch",), quick=True)


def test_summarize_gives_median_and_tenths():
    assert timing.summarize([float(i) for i in range(101)]) == timing.Timing(50.0, 10.0, 90.0, 101)


@pytest.mark.parametrize("one_call_us", [0.01, 1.0, 90.0, 6000.0])
@pytest.mark.parametrize("rotation", [1, 3, 700])
def test_calls_per_sample_is_whole_turns_of_the_rotation(one_call_us, rotation):
    calls = timing.calls_per_sample(one_call_us, 2000.0, rotation, at_least=8)
    assert calls % rotation == 0
    assert 8 <= calls <= 200 + rotation


def test_rotation_exceeds_three_times_the_cache():
    assert inputs.rotation_count(1 << 20, 50 << 20, 1 << 40) * (1 << 20) > 3 * (50 << 20)
    assert inputs.rotation_count(1 << 30, 50 << 20, 1 << 40) == 1


def test_rotation_is_bounded_by_memory_and_by_number():
    assert inputs.rotation_count(1 << 20, 50 << 20, 60 << 20) == 20
    assert inputs.rotation_count(1 << 30, 50 << 20, 1 << 20) == 1
    assert inputs.rotation_count(4, 50 << 20, 1 << 40) == 4096


def test_interleaved_rounds_take_every_function_in_turn():
    taken = []
    functions = {name: lambda name=name: taken.append(name) for name in ("a", "b")}
    times = timing.time_interleaved(functions, timing.Effort(replays=1, replay_us=1, rounds=3, round_us=1e-3))
    assert list(times) == ["a", "b"]
    assert [timing_.samples for timing_ in times.values()] == [3, 3]
    # One warm-up and one estimate each, then there and back.
    assert taken == ["a", "a", "b", "b", "a", "b", "b", "a", "a", "b"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_calls_every_input_and_times_the_gpu():
    rotated = list(torch.zeros((300, 4, 1024), device="cuda").unbind(0))
    called = []

    def count(x):
        called.append(x.data_ptr())
        return x.add_(1)

    measured = timing.time_graph(count, rotated, timing.QUICK)
    assert set(called) == {x.data_ptr() for x in rotated}
    assert 0.1 < measured.p10 <= measured.median <= measured.p90 < 1000
    # Two calls outside the graph; then one a replay, three of them to warm up.
    torch.cuda.synchronize()
    assert rotated[1].unique().tolist() == [3 + timing.QUICK.replays]


@pytest.mark.parametrize("name", suites.SUITES)
def test_suite_holds_valid_and_distinct_cases(name):
    cases = suites.SUITES[name]
    assert cases
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        # k = 0: softmax of whole rows.
        has_whole_rows, has_topk = name in ("softmax", "cpu"), name != "softmax"
        assert (not has_whole_rows) <= case.k <= has_topk * case.vocab * max(case.beams, 1)
        assert case.dtype in inputs.DTYPES
        assert case.distribution in suites.DISTRIBUTIONS


def test_distributions_are_timed_after_the_normal_one_they_are_held_against():
    seen = set()
    for case in suites.SUITES["distributions"]:
        shape = case[:4]
        if case.distribution == "normal":
            seen.add(shape)
        else:
            assert shape in seen
            assert case.target == Target(2.5, "normal")


def test_unaligned_rows_are_timed_after_the_aligned_ones_they_are_held_against():
    cases = suites.SUITES["unaligned"]
    for aligned, unaligned in zip(cases[::2], cases[1::2], strict=True):
        assert unaligned._replace(vocab=unaligned.aligned_vocab, target=None) == aligned
        assert aligned.vocab * inputs.DTYPES[aligned.dtype].itemsize % 128 == 0
        assert unaligned.vocab * inputs.DTYPES[unaligned.dtype].itemsize % 16 != 0
        assert unaligned.target == Target(1.08, "aligned")


def test_distributions_are_timed_of_every_kernel_that_an_h200_chooses():
    """Of aligned rows without a mask: each regime, and each way to make candidates of its tiles."""

    def used(cases):
        for case in cases:
            itemsize = suites.ITEM_BYTES[case.dtype]
            choice = choose(case.rows, case.vocab, case.k, itemsize, 132)
            yield choice.regime, choice.warps, choice.method(case.k, itemsize, True), choice.lead > 0

    timed = set(used(suites.SUITES["distributions"]))
    assert timed >= {
        used_here for name in ("decode", "paper", "routing", "k") for used_here in used(suites.SUITES[name])
    }


def test_target_is_relative_to_what_was_measured():
    assert Target(1.15, "read").limit({"read": 100.0}) == pytest.approx(115.0)
    assert Target(1, "rows", plus=2).limit({"rows": 10.0}) == 12.0
    assert suites.micros(9.5).limit({}) == 9.5
    assert Target(1, "torch").limit({"read": 1.0}) is None


def test_hot_target_stands_in_for_the_cold_one():
    case = Case(64, 128256, 8, "bf16", suites.micros(10), hot=suites.micros(9))
    assert case.target_for("cold") == suites.micros(10)
    assert case.target_for("hot") == suites.micros(9)
    assert case._replace(hot=None).target_for("hot") == suites.micros(10)


def test_select_filters():
    chosen = suites.select(["decode", "paper"], rows=[64], vocab=[128256], k=[8], dtype=["bf16"])
    assert [(suite, case.label) for suite, case in chosen] == [("decode", "64 x 128256 bf16 k=8")]
    assert len(suites.select(["decode"])) == len(suites.SUITES["decode"])
    assert suites.select(["decode"], rows=[5]) == []


def test_bytes_moved_counts_logits_once_and_results_once():
    assert Case(2, 100, 5, "bf16").bytes_moved == 2 * 100 * 2 + 2 * 5 * 12 + 2 * 4
    assert Case(2, 100, 5, "fp32", beams=3).bytes_moved == 6 * 100 * 4 + 2 * 5 * 12 + 6 * 4


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("distribution", suites.DISTRIBUTIONS)
def test_inputs_follow_their_distribution(distribution, dtype):
    made = inputs.make_inputs(Case(2, 4001, 8, dtype, distribution=distribution), CPU, 3)
    assert [tuple(logits.shape) for logits in made] == [(2, 4001)] * 3
    for logits in made:
        assert logits.dtype == inputs.DTYPES[dtype]
        assert logits.is_contiguous()
        assert (logits.data_ptr() - made[0].data_ptr()) % 512 == 0
        assert not logits.isnan().any()
        steps = logits.diff(dim=-1)
        if distribution == "equal":
            assert (logits == logits[0, 0]).all()
        elif distribution == "ascending":
            assert (steps >= 0).all() and (logits[:, -1] > logits[:, 0]).all()
        elif distribution == "descending":
            assert (steps <= 0).all() and (logits[:, -1] < logits[:, 0]).all()
        elif distribution == "sparse":
            assert 0.85 < logits.isneginf().float().mean() < 0.95
        elif distribution == "peaked":
            assert (logits.float().softmax(-1).topk(8).values.sum(-1) > 0.3).all()
        else:
            assert abs(logits.float().std().item() - 2) < 0.1
            assert len(logits.unique()) > 500
    if distribution != "equal":
        assert not torch.equal(made[0], made[1])


def answer(logits, k):
    return fused_topk.log_softmax_topk(logits, k, backend="reference")


@pytest.mark.parametrize("distribution", suites.DISTRIBUTIONS)
@pytest.mark.parametrize("k", [1, 8, 300])
def test_check_accepts_the_right_answer(distribution, k):
    (logits,) = inputs.make_inputs(Case(3, 300, k, "bf16", distribution=distribution), CPU, 1)
    assert check.log_softmax_topk_error(logits, k, answer(logits, k)) is None


def _swap_ties(got):
    got.indices[1, :2] = got.indices[1, :2].flip(0)


def _take_a_later_tie(got):
    got.indices[1, 3] = 8


def _repeat_a_token(got):
    got.indices[1, 1] = got.indices[1, 0]


def _leave_the_row(got):
    got.indices[1, 3] = 9


def _shift_logsumexp(got):
    got.logsumexp[1] += 1e-4


def _shift_a_value(got):
    got.values[1, 3] -= 1e-4


def _lose_a_value(got):
    got.values[1, 3] = math.nan


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (_swap_ties, "row 1: not in order"),
        (_take_a_later_tie, "row 1: 7 tokens rank at or before the last of the 4"),
        (_repeat_a_token, "row 1: not in order"),
        (_leave_the_row, "out of range"),
        (_shift_logsumexp, "element 1 is"),
        (_shift_a_value, "element 7 is"),
        (_lose_a_value, "element 7 is nan"),
    ],
)
def test_check_rejects_a_wrong_answer(spoil, complaint):
    # Row 1: two tokens tie at the top, four at the last place of k = 4.
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 7, 8], [5.0, 0, 5, 4, 1, 1, 1, 0, 1]])
    got = answer(logits, 4)
    assert got.indices[1].tolist() == [0, 2, 3, 4]
    spoil(got)
    assert complaint in check.log_softmax_topk_error(logits, 4, got)


def test_check_rejects_the_wrong_form():
    logits = torch.randn(3, 50)
    got = answer(logits, 4)
    assert "indices must be" in check.log_softmax_topk_error(logits, 4, got._replace(indices=got.indices.int()))
    assert "values must be" in check.log_softmax_topk_error(logits, 4, got._replace(values=got.values[:, :3]))


def test_check_looks_at_every_chunk(monkeypatch):
    monkeypatch.setattr(check, "_CHUNK", 100)
    logits = torch.randn(9, 50)
    got = answer(logits, 4)
    assert check.log_softmax_topk_error(logits, 4, got) is None
    got.indices[7] = got.indices[7].flip(0)
    assert "row 7: not in order" in check.log_softmax_topk_error(logits, 4, got)


def test_check_judges_beams():
    case = Case(2, 500, 6, "bf16", beams=3)
    (logits,) = inputs.make_inputs(case, CPU, 1)
    scores = beam_scores(case, CPU)
    got = fused_topk.beam_topk(logits, scores, 6, backend="reference")
    assert check.beam_topk_error(logits, scores, 6, got) is None
    for spoilt in (
        got._replace(indices=got.indices + 1),
        got._replace(indices=got.indices + 1500),
        got._replace(values=got.values + 1e-4),
        got._replace(logsumexp=got.logsumexp + 1e-4),
    ):
        assert check.beam_topk_error(logits, scores, 6, spoilt)


def test_check_of_beams_sees_a_tie_broken_the_wrong_way():
    logits = torch.zeros(1, 2, 5)
    scores = torch.tensor([[0.0, -5.0]])
    got = fused_topk.beam_topk(logits, scores, 3, backend="reference")
    assert got.indices.tolist() == [[0, 1, 2]]
    assert check.beam_topk_error(logits, scores, 3, got) is None
    wrong = got._replace(indices=torch.tensor([[0, 1, 3]]))
    assert "beam 0" in check.beam_topk_error(logits, scores, 3, wrong)


def test_run_times_ours_the_read_and_the_peers():
    ((result,),) = runner.run([("paper", Case(10, 1000, 5, "fp32", Target(2, "torch")))], SETTINGS)
    assert result.failure is None
    assert set(result.times) == {"read", "fused", "torch"}
    assert result.target_us == pytest.approx(2 * result.times["torch"].median)
    assert result.ratio("torch") == pytest.approx(result.fused.median / result.times["torch"].median)
    assert result.meets_target == (result.fused.median <= result.target_us)
    assert result.gigabytes_per_second == pytest.approx(result.case.bytes_moved / result.fused.median / 1000)


def test_run_times_beams_against_their_rows():
    ((result,),) = runner.run([("beams", Case(2, 500, 4, "bf16", suites.Target(1, "rows", 2), beams=2))], SETTINGS)
    assert result.failure is None
    assert result.target_us == pytest.approx(result.times["rows"].median + 2)


@pytest.mark.parametrize("router", suites.ROUTERS)
def test_run_times_routers_against_the_operations_of_models(router):
    """And sees another expert, and another weight."""
    case = Case(5, 64, 4, "fp32", Target(1000, "torch"), router=router)
    ((result,),) = runner.run([("routers", case)], SETTINGS)
    assert result.failure is None and {"read", "fused", "torch"} <= set(result.times) and result.target_us
    assert case.bytes_moved == 5 * 64 * 4 + 5 * 4 * 12 and case.label == f"5 x 64 fp32 k=4 {router}"
    (logits,) = inputs.make_inputs(case, CPU, 1)
    got = runner.fused_function(case, SETTINGS)(logits)
    of_torch = PEERS["torch"].make(case, CPU)(logits)
    assert torch.equal(of_torch[1].sort(-1).values, got.experts.sort(-1).values)
    torch.testing.assert_close(of_torch[0].sort(-1).values, got.weights.sort(-1).values)
    for wrong in (got._replace(experts=got.experts.flip(-1)), got._replace(weights=got.weights * 1.001)):
        assert runner.answer_error(case, lambda _, wrong=wrong: wrong, [logits], CPU).startswith("wrong answer")


@pytest.mark.parametrize("sampling", suites.SAMPLING)
def test_run_times_draws_against_the_top_k_and_the_chain_of_warpers(sampling):
    pytest.importorskip("transformers")
    case = Case(3, 2000, 50, "fp32", Target(1.5, "rows"), sampling=sampling)
    settings = runner.Settings(CPU, "reference", ("torch", "transformers", "flashinfer"), quick=True)
    ((result,),) = runner.run([("sampling", case)], settings)
    assert result.failure is None
    assert set(result.times) == {"read", "fused", "rows", "torch", "transformers"}
    assert result.target_us == pytest.approx(1.5 * result.times["rows"].median)
    assert case.bytes_moved == 3 * 2000 * 4 + 3 * 12 and case.label == f"3 x 2000 fp32 sample {sampling}"
    assert PEERS["transformers"].make(case._replace(sampling=""), CPU) is None


def test_run_times_rows_with_lengths():
    case = Case(4, 3000, 50, "fp32", is_ragged=True)
    ((result,),) = runner.run([("ragged", case)], SETTINGS)
    assert result.failure is None and case.label == "4 x 3000 fp32 k=50 ragged"
    (logits,) = inputs.make_inputs(case, CPU, 1)
    assert logits.isfinite().sum() == inputs.lengths_of(case, CPU).sum()
    assert case.bytes_moved == 2 * 3000 * 4 + 4 * (50 * 12 + 4)


def test_peers_draw_from_what_the_filters_keep():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 3
    for sampling, parameters in suites.SAMPLING.items():
        case = Case(4, 300, 50, "fp32", sampling=sampling)
        got = fused_topk.sample(logits.repeat(2000, 1), logprobs="kept", **parameters)
        for name in ("torch", "transformers"):
            drawn = PEERS[name].make(case, CPU)(logits.repeat(2000, 1))
            counts = [tokens.view(2000, 4)[:, 0].bincount(minlength=300) / 2000 for tokens in (got.tokens, drawn)]
            assert bool((counts[0] - counts[1]).abs().max() < 0.08)


def test_check_of_draws_sees_what_is_wrong():
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(0))
    expected = fused_topk.sample(logits, seed=0)
    assert check.sample_error(logits, expected, expected) is None
    others = expected._replace(tokens=(expected.tokens + 1) % 60)
    assert "5 of 5 rows" in check.sample_error(logits, others, expected)
    assert "out of range" in check.sample_error(logits, expected._replace(tokens=expected.tokens + 60), expected)
    assert "log-prob" in check.sample_error(logits, expected._replace(logprobs=expected.logprobs + 1e-3), expected)
    assert "shape" in check.sample_error(logits, expected._replace(tokens=expected.tokens[:, 0]), expected)


def test_run_holds_a_distribution_against_normal_logits():
    normal = Case(4, 500, 5, "fp32")
    equal = normal._replace(distribution="equal", target=Target(2.5, "normal"))
    (first,), (second,) = runner.run([("distributions", normal), ("distributions", equal)], SETTINGS)
    assert first.target_us is None
    assert second.target_us == pytest.approx(2.5 * first.fused.median)


def test_run_holds_unaligned_rows_against_aligned_ones():
    aligned = Case(4, 512, 5, "fp32")
    unaligned = aligned._replace(vocab=501, target=Target(1.08, "aligned"))
    (first,), (second,) = runner.run([("unaligned", aligned), ("unaligned", unaligned)], SETTINGS)
    assert first.target_us is None
    assert second.target_us == pytest.approx(1.08 * first.fused.median)
    ((alone,),) = runner.run([("unaligned", unaligned)], SETTINGS)
    assert alone.target_us is None


def test_run_gives_no_time_to_a_wrong_answer(monkeypatch):
    right = fused_topk.log_softmax_topk

    def wrong(logits, k, **kwargs):
        got = right(logits, k, **kwargs)
        return TopK(got.values, got.indices.flip(-1), got.logsumexp)

    monkeypatch.setattr(fused_topk, "log_softmax_topk", wrong)
    ((result,),) = runner.run([("paper", Case(10, 1000, 5, "fp32"))], SETTINGS)
    assert result.failure.startswith("wrong answer: row 0: not in order")
    assert result.times == {}


def test_run_reports_an_error_and_goes_on(monkeypatch):
    right = fused_topk.log_softmax_topk

    def broken(logits, k, **kwargs):
        if k == 5:
            raise RuntimeError("no such kernel\nat line 3")
        return right(logits, k, **kwargs)

    monkeypatch.setattr(fused_topk, "log_softmax_topk", broken)
    (first,), (second,) = runner.run([("k", Case(4, 500, k, "fp32")) for k in (5, 6)], SETTINGS)
    assert first.failure == "RuntimeError: no such kernel"
    assert second.failure is None


def test_peer_that_is_not_here_is_noted():
    settings = runner.Settings(CPU, "reference", peers=("flashinfer", "cupy"), quick=True)
    ((result,),) = runner.run([("paper", Case(4, 500, 5, "fp32"))], settings)
    assert set(result.notes) == {"flashinfer", "cupy"}
    assert set(result.times) == {"read", "fused"}


def test_torch_peer_computes_what_we_do():
    for case in (Case(3, 500, 5, "bf16"), Case(3, 500, 5, "bf16", beams=2)):
        (logits,) = inputs.make_inputs(case, CPU, 1)
        ours = runner.fused_function(case, SETTINGS)(logits)
        theirs = PEERS["torch"].make(case, CPU)(logits)
        torch.testing.assert_close(ours.values, theirs.values)


def test_softmax_cases_are_timed_against_a_copy():
    case = Case(3, 500, 0, "bf16", suites.copy(1000))
    ((result,),) = runner.run([("softmax", case)], SETTINGS)
    assert result.failure is None
    assert set(result.times) == {"copy", "fused", "torch"}
    assert result.target_us == pytest.approx(1000 * result.times["copy"].median)
    assert case.bytes_moved == 2 * 3 * 500 * 2
    assert case.label == "3 x 500 bf16 softmax"


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_softmax_check_sees_a_wrong_element(dtype):
    (logits,) = inputs.make_inputs(Case(4, 300, 0, dtype), CPU, 1)
    right = logits.double().softmax(-1).to(logits.dtype)
    assert check.softmax_error(logits, right) is None
    at = int(logits[2].argmax())
    for wrong_value in (right[2, at] * 1.02, math.nan, 0.0):
        wrong = right.clone()
        wrong[2, at] = wrong_value
        assert f"element {at} of row 2" in check.softmax_error(logits, wrong)
    assert "must be" in check.softmax_error(logits, right[:2])


def test_host_times_cover_ours_and_torch():
    assert set(runner.host_times(SETTINGS)) == {"fused", "torch"}


@pytest.fixture(scope="module")
def run_document():
    cases = [("k", Case(4, 500, k, "fp32", Target(100, "torch"))) for k in (5, 8)]
    machine = {"cpu": {"model": "a CPU", "threads": 2}, "gpus": []}
    results = [result for finished in runner.run(cases, SETTINGS) for result in finished]
    return report.document(results, SETTINGS, machine, timing.Timing(1.4, 1.3, 1.5, 5), {})


def test_document_survives_json(run_document, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run_document))
    assert report.load(path) == run_document
    path.write_text(json.dumps({**run_document, "format": 0}))
    with pytest.raises(ValueError, match="format"):
        report.load(path)


def with_times(run, *times):
    entries = [
        {**entry, "times": {"fused": dict(zip(("median", "p10", "p90"), fused))}}
        for entry, fused in zip(run["results"], times)
    ]
    return {**run, "results": entries}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ((50.0, 48.0, 52.0), "faster"),
        ((150.0, 140.0, 160.0), "slower"),
        ((103.0, 98.0, 112.0), ""),  # within the spread
        ((101.0, 100.9, 101.1), ""),  # too small to mean anything
    ],
)
def test_compare_flags_changes_beyond_the_spread(run_document, new, verdict):
    tight = verdict == "" and new[0] == 101.0
    old = with_times(run_document, (100.0, 99.9, 100.1) if tight else (100.0, 95.0, 105.0))
    (change,) = compare.changes(old, with_times(run_document, new))
    assert change.verdict == verdict
    assert change.relative == pytest.approx(new[0] / 100.0 - 1)


def test_compare_takes_the_shapes_of_both_runs(run_document):
    old = {**run_document, "results": run_document["results"][:1]}
    assert [change.shape for change in compare.changes(old, run_document)] == ["4 x 500 fp32 k=5"]


def test_three_digits():
    assert [report.three_digits(us) for us in (1.416, 18.52, 666.7, 5998.2, None)] == [
        "1.42",
        "18.5",
        "667",
        "5,998",
        "-",
    ]


def test_plot_draws_every_result(run_document, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmark.plot import plot

    plot(run_document, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    plot(run_document, tmp_path / "run.svg")
    assert (tmp_path / "run.svg").stat().st_size > 1000
    plot({**run_document, "results": []}, tmp_path / "empty.png")


def test_plot_has_a_panel_a_suite_and_a_line_a_shape(run_document, tmp_path, monkeypatch):
    """Shapes that differ by the cache or the distribution alone share one."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from benchmark.plot import plot

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.extend(figure.axes))
    (first, second) = run_document["results"]
    like = [("many", f"{rows} x 500 fp32 k=5", "cold", "normal") for rows in range(40)]
    like += [("few", "7 x 500 fp32 k=5", cache, "normal") for cache in ("cold", "hot")]
    like += [
        ("distributions", "7 x 500 fp32 k=5" + ("" if name == "normal" else f" {name}"), "cold", name)
        for name in suites.DISTRIBUTIONS
    ]
    results = [{**first, **dict(zip(("suite", "shape", "cache", "distribution"), values))} for values in like]
    results[-1]["times"] = {"fused": {**first["times"]["fused"], "median": 2 * first["times"]["fused"]["median"]}}
    plot({**run_document, "results": [*results, {**second, "times": {}}]}, tmp_path / "run.png")
    assert [(axes.get_title("left"), len(axes.get_yticks())) for axes in drawn] == [
        ("many", 40),
        ("few", 1),
        ("distributions", 1),
    ]
    relative = {line.get_label(): line.get_xdata()[0] for line in drawn[-1].lines}
    assert relative["equal"] == 1 and relative["sparse"] == 2

# SPDX-License-Identifier: Apache-2.0
"""The benchmark: its statistics, its table of suites, its judge of answers, its files, and a run on the CPU."""

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_topk
from benchmark import cases, check, inputs, ours, report, results, rivals, runner, suites, timing
from benchmark.cases import Case
from benchmark.results import OURS, PREDICTED, Origin, Record
from fused_topk import TopK
from fused_topk.backends import cpu
from fused_topk.layout.topk_choice import choose

CPU = torch.device("cpu")
ORIGIN = Origin("a CPU, 2 threads", "torch 2.13", "2026-11-28", "8e6619c24a15")
SETTINGS = runner.Settings(CPU, ORIGIN, bandwidth=10_000.0, quick=True)
TOPK = suites.SUITES["decode"]
needs_native = pytest.mark.skipif(bool(cpu.unavailable()), reason="no native CPU kernel")


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


def test_every_way_takes_samples_in_turn():
    taken = []
    samplers = {name: lambda name=name: taken.append(name) or float(len(taken)) for name in ("a", "b")}
    times = timing.in_turns(samplers, 3)
    assert taken == ["a", "b", "b", "a", "a", "b"]
    assert times["a"].median == 4 and times["b"].median == 3


def test_summarize_gives_median_and_tenths():
    assert timing.summarize([float(i) for i in range(101)]) == timing.Timing(50.0, 10.0, 90.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_calls_every_input_and_times_the_gpu():
    rotated = list(torch.zeros((300, 4, 1024), device="cuda").unbind(0))
    called = []

    def count(x):
        called.append(x.data_ptr())
        return x.add_(1)

    sample = timing.sampler(count, rotated, timing.QUICK.sample_us)
    assert set(called) == {x.data_ptr() for x in rotated}
    assert 0.1 < sample() < 1000
    # A replay that is not timed, and one that is.
    torch.cuda.synchronize()
    assert rotated[1].unique().tolist() == [2]


@pytest.mark.parametrize("name", suites.SUITES)
def test_suite_holds_valid_and_distinct_cases(name):
    suite = suites.SUITES[name]
    assert suite.cases
    assert len({(case.label, case.data) for case in suite.cases}) == len(suite.cases)
    assert next(iter(suite.others)) in rivals.FLOORS
    for case in suite.cases:
        assert 0 <= case.k <= case.vocab * max(case.beams, 1)
        assert case.dtype in inputs.DTYPES and case.data in cases.DATA
        assert case.kind in ("", "ragged", *cases.SAMPLING, *cases.ROUTERS)


def test_distributions_are_timed_of_every_kernel_that_an_h200_chooses():
    """Of aligned rows without a mask: each regime, and each way to make candidates of its tiles."""

    def used(of_suite):
        for case in of_suite:
            choice = choose(case.rows, case.vocab, case.k, case.itemsize, 132)
            yield choice.regime, choice.warps, choice.method(case.k, case.itemsize, True), choice.lead > 0

    timed = set(used(cases.DISTRIBUTIONS))
    assert timed >= {
        kernel for of in (cases.DECODE, cases.PAPER, cases.ROUTING, cases.GROWING_K) for kernel in used(of)
    }


def test_unaligned_rows_stand_before_the_same_with_aligned_ones():
    for unaligned, aligned in zip(cases.UNALIGNED[::2], cases.UNALIGNED[1::2], strict=True):
        assert unaligned._replace(vocab=aligned.vocab) == aligned
        assert aligned.vocab * aligned.itemsize % 128 == 0 and unaligned.vocab * unaligned.itemsize % 16 != 0
        assert 0 < aligned.vocab - unaligned.vocab < 64


def test_bytes_are_those_of_logits_and_results_once():
    assert suites.read(Case(2, 100, 5, "bf16")) == 2 * 100 * 2 + 2 * 5 * 12 + 2 * 4
    assert suites.read(Case(2, 100, 5, "fp32", beams=3)) == 6 * 100 * 4 + 2 * 5 * 12 + 6 * 4
    assert suites.read(Case(4, 3000, 50, "fp32", "ragged")) == 2 * 3000 * 4 + 4 * (50 * 12 + 4)
    assert suites.drawn(Case(3, 2000, 0, "fp32", "whole")) == 3 * 2000 * 4 + 3 * 12
    assert suites.routed(Case(5, 64, 4, "fp32", "mixtral")) == 5 * 64 * 4 + 5 * 4 * 12
    assert suites.copied(Case(3, 500, 0, "bf16")) == 2 * 3 * 500 * 2
    assert suites.head(Case(2, 100, 5, "bf16", depth=8)) == 100 * 8 * 2 + 2 * 8 * 2 + 2 * (5 * 12 + 4)


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("distribution", cases.DATA)
def test_inputs_follow_their_distribution(distribution, dtype):
    made = inputs.make_inputs(Case(2, 4001, 8, dtype, data=distribution), CPU, 3)
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


def answer(case, logits):
    return fused_topk.log_softmax_topk(logits, case.k, backend="reference")


@pytest.mark.parametrize("data", cases.DATA)
@pytest.mark.parametrize("k", [1, 8, 300])
def test_check_accepts_the_right_answer(data, k):
    case = Case(3, 300, k, "bf16", data=data)
    (logits,) = inputs.make_inputs(case, CPU, 1)
    assert check.topk(case, logits, answer(case, logits)) is None


@pytest.mark.parametrize(
    ("field", "change", "complaint"),
    [
        ("indices", lambda x: [2, 0, 3, 4], "row 1: not in order"),
        ("indices", lambda x: [0, 2, 3, 8], "row 1: 7 tokens rank at or before the last of the 4"),
        ("indices", lambda x: [0, 0, 3, 4], "row 1: not in order"),
        ("indices", lambda x: [0, 2, 3, 9], "out of range"),
        ("logsumexp", lambda x: x + 1e-4, "element 1 is"),
        ("values", lambda x: [*x[:3], x[3] - 1e-4], "element 7 is"),
        ("values", lambda x: [*x[:3], math.nan], "element 7 is nan"),
    ],
    ids=["swapped_ties", "a_later_tie", "a_token_twice", "beyond_the_row", "logsumexp", "value", "nan"],
)
def test_check_rejects_a_wrong_answer(field, change, complaint):
    # Row 1: two tokens tie at the top, four at the last place of k = 4.
    case = Case(2, 9, 4, "fp32")
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 7, 8], [5.0, 0, 5, 4, 1, 1, 1, 0, 1]])
    got = answer(case, logits)
    assert got.indices[1].tolist() == [0, 2, 3, 4]
    spoilt = getattr(got, field)
    spoilt[1] = torch.as_tensor(change(spoilt[1]))
    assert complaint in check.topk(case, logits, got)


def test_check_rejects_the_wrong_form():
    case, logits = Case(3, 50, 4, "fp32"), torch.randn(3, 50)
    got = answer(case, logits)
    assert "indices must be" in check.topk(case, logits, got._replace(indices=got.indices.int()))
    assert "values must be" in check.topk(case, logits, got._replace(values=got.values[:, :3]))
    assert "no TopK" in check.topk(case, logits, got.values)


def test_check_looks_at_every_chunk(monkeypatch):
    monkeypatch.setattr(check, "_CHUNK", 100)
    case, logits = Case(9, 50, 4, "fp32"), torch.randn(9, 50)
    got = answer(case, logits)
    assert check.topk(case, logits, got) is None
    got.indices[7] = got.indices[7].flip(0)
    assert "row 7: not in order" in check.topk(case, logits, got)


def test_check_judges_beams():
    case = Case(2, 500, 6, "bf16", beams=3)
    (logits,) = inputs.make_inputs(case, CPU, 1)
    scores = inputs.beam_scores(case, CPU)
    got = fused_topk.beam_topk(logits, scores, 6, backend="reference")
    assert check.beams(case, logits, got) is None
    for spoilt in (
        got._replace(indices=got.indices + 1),
        got._replace(indices=got.indices + 1500),
        got._replace(values=got.values + 1e-4),
        got._replace(logsumexp=got.logsumexp + 1e-4),
    ):
        assert check.beams(case, logits, spoilt)


def test_check_of_beams_sees_a_tie_broken_the_wrong_way(monkeypatch):
    case, logits = Case(1, 5, 3, "fp32", beams=2), torch.zeros(1, 2, 5)
    scores = torch.tensor([[0.0, -5.0]])
    monkeypatch.setattr(check, "beam_scores", lambda *_: scores)
    got = fused_topk.beam_topk(logits, scores, 3, backend="reference")
    assert got.indices.tolist() == [[0, 1, 2]]
    assert check.beams(case, logits, got) is None
    wrong = got._replace(indices=torch.tensor([[0, 1, 3]]))
    assert "beam 0" in check.beams(case, logits, wrong)


def test_check_of_draws_sees_what_is_wrong():
    case, logits = Case(5, 60, 0, "fp32", "whole"), torch.randn(5, 60, generator=torch.Generator().manual_seed(0))
    right = ours.draw(case, CPU, "reference")(logits)
    assert check.draws(case, logits, right) is None
    assert "5 of 5 rows" in check.draws(case, logits, right._replace(tokens=(right.tokens + 1) % 60))
    assert "out of range" in check.draws(case, logits, right._replace(tokens=right.tokens + 60))
    assert "log-prob" in check.draws(case, logits, right._replace(logprobs=right.logprobs + 1e-3))
    assert "shape" in check.draws(case, logits, right._replace(tokens=right.tokens[:, 0]))


@pytest.mark.parametrize("router", cases.ROUTERS)
def test_check_of_routers_sees_another_expert_and_another_weight(router):
    case = Case(5, 64, 4, "fp32", router)
    (logits,) = inputs.make_inputs(case, CPU, 1)
    right = ours.route(case, CPU, "reference")(logits)
    assert check.routers(case, logits, right) is None
    assert "other experts" in check.routers(case, logits, right._replace(experts=right.experts.flip(-1)))
    assert "weights" in check.routers(case, logits, right._replace(weights=right.weights * 1.001))
    # And the rival chooses the same ones.
    weights, experts = rivals.torch_route(case, CPU)(logits)
    assert torch.equal(experts.sort(-1).values, right.experts.sort(-1).values)
    torch.testing.assert_close(weights.sort(-1).values, right.weights.sort(-1).values)


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_check_of_softmax_sees_a_wrong_element(dtype):
    case = Case(4, 300, 0, dtype)
    (logits,) = inputs.make_inputs(case, CPU, 1)
    right = logits.double().softmax(-1).to(logits.dtype)
    assert check.softmax(case, logits, right) is None
    at = int(logits[2].argmax())
    for wrong_value in (right[2, at] * 1.02, math.nan, 0.0):
        wrong = right.clone()
        wrong[2, at] = wrong_value
        assert f"element {at} of row 2" in check.softmax(case, logits, wrong)
    assert "must be" in check.softmax(case, logits, right[:2])


def test_check_of_training_sees_a_wrong_loss_and_a_wrong_gradient():
    case = Case(200, 90, 0, "fp32", depth=16)
    (hidden,) = inputs.make_inputs(case, CPU, 1)
    loss, gradient = ours.train(case, CPU)(hidden)
    assert check.training(case, hidden, (loss, gradient)) is None
    assert "loss" in check.training(case, hidden, (loss * 1.01, gradient))
    assert "gradient" in check.training(case, hidden, (loss, gradient.flip(0)))
    for other in (rivals.torch_train, rivals.LOSSES["kept logits"]):
        assert check.training(case, hidden, other(case, CPU)(hidden)) is None
    with_entropy = [
        rivals.LOSSES[way](case, CPU)(hidden) for way in ("torch entropy", "entropy", "entropy, kept logits")
    ]
    torch.testing.assert_close(with_entropy[1:], with_entropy[:1] * 2)
    assert check.training(case, hidden, with_entropy[0])


def found_of(name, case, **more):
    suite = suites.SUITES[name]
    (found,) = runner.run([(name, suite, case)], runner.Settings(**{**vars(SETTINGS), **more}))
    return found


@needs_native
@pytest.mark.parametrize(
    ("name", "case", "ways"),
    [
        ("decode", Case(10, 1000, 5, "fp32"), {"read", "torch"}),
        ("decode", Case(4, 3000, 50, "fp32", "ragged"), {"read", "torch"}),
        ("beams", Case(2, 500, 4, "bf16", beams=2), {"read", "top-k alone", "torch"}),
        ("softmax", Case(3, 500, 0, "bf16"), {"copy", "torch"}),
        ("draws", Case(3, 2000, 0, "fp32", "top-k top-p"), {"read", "top-k alone", "torch", "transformers"}),
        ("routers", Case(5, 64, 4, "fp32", "deepseek-v3"), {"read", "torch"}),
        ("cpu heads", Case(5, 300, 4, "fp32", depth=16), {"product", "product, our top-k", "torch"}),
        ("training", Case(50, 300, 0, "fp32", depth=16), set(rivals.LOSSES) - {"liger"}),
    ],
    ids=lambda value: value.label if isinstance(value, Case) else "",
)
def test_run_checks_and_times_ours_the_floor_and_rivals(name, case, ways):
    pytest.importorskip("transformers")
    found = found_of(name, case)
    assert found.failure is None
    assert {record.way for record in found.records} == ways | {OURS, PREDICTED}
    assert {(record.case, record.measure, record.unit) for record in found.records} == {(case.label, "time", "µs")}
    us = {record.way: record.value for record in found.records}
    assert us[PREDICTED] == suites.SUITES[name].bytes(case) / SETTINGS.bandwidth and min(us.values()) > 0


@needs_native
def test_run_names_the_data_and_takes_the_rivals_that_are_asked_for():
    found = found_of("decode", Case(4, 500, 5, "fp32", data="equal"), rivals=["none"])
    assert {record.way for record in found.records} == {OURS, "read", PREDICTED}
    assert {record.measure for record in found.records} == {"time, equal"}
    found = found_of("large k", Case(4, 500, 5, "fp32"), rivals=["flashinfer"])
    assert found.notes == {"flashinfer": "runs on GPUs only"}


@needs_native
def test_run_gives_no_time_to_a_wrong_answer_and_goes_on(monkeypatch):
    right = fused_topk.log_softmax_topk

    def wrong(logits, k, **kwargs):
        got = right(logits, k, **kwargs)
        if k == 7:
            raise RuntimeError("no such kernel\nat line 3")
        return TopK(got.values, got.indices.flip(-1), got.logsumexp) if k == 5 else got

    monkeypatch.setattr(fused_topk, "log_softmax_topk", wrong)
    work = [("k", TOPK, Case(4, 500, k, "fp32")) for k in (5, 7, 6)]
    first, second, third = runner.run(work, SETTINGS)
    assert first.failure.startswith("wrong answer: row 0: not in order") and first.records == []
    assert second.failure == "RuntimeError: no such kernel" and second.records == []
    assert third.failure is None and third.records


def test_a_rival_that_raises_gets_a_note():
    def raises(logits):
        raise RuntimeError("out of memory")

    notes = {}
    times = runner.time_ways({OURS: torch.clone, "torch": raises}, [torch.zeros(9)], timing.QUICK, notes)
    assert set(times) == {OURS} and notes == {"torch": "RuntimeError: out of memory"}
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.time_ways({OURS: raises}, [torch.zeros(9)], timing.QUICK, {})


def test_rivals_draw_from_what_the_filters_keep():
    pytest.importorskip("transformers")
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 3
    for kind, parameters in cases.SAMPLING.items():
        case = Case(4, 300, 0, "fp32", kind)
        got = fused_topk.sample(logits.repeat(2000, 1), logprobs="kept", **parameters)
        for make in (rivals.torch_draw, rivals.transformers_draw):
            drawn = make(case, CPU)(logits.repeat(2000, 1))
            counts = [tokens.view(2000, 4)[:, 0].bincount(minlength=300) / 2000 for tokens in (got.tokens, drawn)]
            assert bool((counts[0] - counts[1]).abs().max() < 0.08)


def test_torch_rivals_compute_what_we_do():
    for case, make, rival in (
        (Case(3, 500, 5, "bf16"), ours.topk, rivals.torch_topk),
        (Case(3, 500, 5, "bf16", beams=2), ours.beams, rivals.torch_beams),
    ):
        (logits,) = inputs.make_inputs(case, CPU, 1)
        torch.testing.assert_close(make(case, CPU)(logits).values, rival(case, CPU)(logits).values)


def test_packages_of_rivals_are_called_as_they_document(monkeypatch):
    """By stand-ins: vLLM writes into tensors that it is given, FlashInfer of DeepSeek's router too, Liger takes the weight first."""

    def topk_softmax(weights, experts, order, logits, renormalize):
        found = logits.softmax(-1).topk(weights.shape[-1])
        weights.copy_(found.values / found.values.sum(-1, keepdim=True))
        experts.copy_(found.indices)

    def fused_topk_deepseek(scores, bias, n_group, topk_group, topk, routed_scaling_factor, topk_values, topk_indices):
        assert (n_group, topk_group, topk, routed_scaling_factor) == (8, 4, 4, 2.5)

    class LigerFusedLinearCrossEntropyLoss:
        def __call__(self, weight, hidden, tokens):
            return torch.nn.functional.cross_entropy(hidden @ weight.T, tokens)

    monkeypatch.setitem(sys.modules, "vllm._custom_ops", SimpleNamespace(topk_softmax=topk_softmax))
    fused_moe = SimpleNamespace(fused_topk_deepseek=fused_topk_deepseek)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", fused_moe)
    liger = SimpleNamespace(LigerFusedLinearCrossEntropyLoss=LigerFusedLinearCrossEntropyLoss)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    case = Case(5, 64, 4, "fp32", "mixtral")
    (logits,) = inputs.make_inputs(case, CPU, 1)
    weights, experts = rivals.vllm_route(case, CPU)(logits)
    right = ours.route(case, CPU)(logits)
    assert torch.equal(experts.long(), right.experts)
    torch.testing.assert_close(weights, right.weights)
    rivals.flashinfer_route(case._replace(kind="deepseek-v3"), CPU)(logits)
    assert rivals.vllm_route(case._replace(kind="deepseek-v3"), CPU) is rivals.flashinfer_route(case, CPU) is None
    case = Case(50, 90, 0, "fp32", depth=16)
    (hidden,) = inputs.make_inputs(case, CPU, 1)
    assert check.training(case, hidden, rivals.liger_train(case, CPU)(hidden)) is None


def record(value, p10=None, p90=None, way=OURS, case="4 x 500 fp32 k=5", suite="k", measure="time"):
    return Record(suite, case, measure, way, value, "µs", p10, p90, ORIGIN)


def test_records_survive_their_file(tmp_path):
    path = tmp_path / "new" / "run.csv"
    written = [record(1.2345, 1.0, 2.0), record(1234.5, way="torch")]
    results.write(path, written)
    assert results.read(path) == written
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="with the columns suite, case"):
        results.read(path)


def test_origin_has_the_machine_and_the_commit():
    origin = results.origin_on(CPU)
    assert "threads" in origin.machine and f"torch {torch.__version__}" in origin.versions
    assert len(origin.date) == 10
    if (Path(fused_topk.__file__).parents[1] / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{12}\+?", origin.commit)


def test_of_a_shape_in_two_suites_the_first_time_counts():
    both = results.grid([record(1.0), record(2.0, suite="decode"), record(3.0, way="torch")])
    assert {way: r.value for way, r in both["4 x 500 fp32 k=5", "time"].items()} == {OURS: 1.0, "torch": 3.0}


def test_a_suite_of_a_run_takes_the_place_of_the_old_one():
    old = [record(1.0, measure="cold"), record(2.0, suite="draws")]
    run = [record(3.0, measure="cold"), record(4.0, measure="hot"), record(5.0, measure="cold", way=PREDICTED)]
    new = record(6.0, suite="beams", measure="hot")
    assert results.merged(old, [*run, new]) == [old[1], run[0], new]


def test_losses_are_those_to_rivals():
    ways = {OURS: 5.0, "torch": 4.0, "read": 1.0, PREDICTED: 1.0, "top-k alone": 2.0, "flashinfer": 6.0}
    found = report.losses([record(value, way=way) for way, value in ways.items()])
    assert found == [("4 x 500 fp32 k=5", "time", "torch", 4.0, 5.0)]


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ((50.0, 48.0, 52.0), "faster"),
        ((150.0, 140.0, 160.0), "slower"),
        ((103.0, 98.0, 112.0), ""),  # within the spread
        ((101.0, 100.9, 101.1), ""),  # too small to mean anything
        ((50.0, None, None), ""),  # no spread is known
    ],
)
def test_compare_flags_changes_beyond_the_spread(new, verdict):
    old = record(100.0, 99.9, 100.1) if new[0] == 101.0 else record(100.0, 95.0, 105.0)
    others = [record(1.0, case="of one run"), record(1.0, way="torch")]
    (change,) = report.changes([old, others[1]], [record(*new), *others])
    assert change == ("4 x 500 fp32 k=5", "time", 100.0, new[0], verdict)


def test_three_digits():
    numbers = {1.416: "1.42", 18.52: "18.5", 666.7: "667", 5998.2: "5,998", None: "-"}
    assert {number: results.three_digits(number) for number in numbers} == numbers


def test_plot_has_a_panel_a_suite_and_a_line_a_shape(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from benchmark.plot import plot

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: drawn.extend(figure.axes) or save(figure, *a, **k))
    records = [record(float(i + 1), case=f"{i} x 8") for i in range(3)] + [record(9.0, way="torch", case="0 x 8")]
    records += [record(1.0, suite="draws", measure=m) for m in ("cold", "cold, peaked", "hot")]
    plot(records, tmp_path / "new" / "run.png")
    assert (tmp_path / "new" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert [(axes.get_title("left"), len(axes.get_yticks())) for axes in drawn] == [("k", 3), ("draws", 1)]
    plot([], tmp_path / "empty.svg")

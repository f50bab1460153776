# SPDX-License-Identifier: Apache-2.0
"""The main demo in small: a model of a few steps' training, decoded by stock and in whole steps on the CPU."""

import importlib
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import fused_topk
from fused_topk.cuda_runtime import driver

for _package in ("transformers", "tokenizers", "typer", "rich", "tqdm", "matplotlib"):
    pytest.importorskip(_package, reason=f"the demos need {_package}: pip install 'fused_topk[demo]'")

_DEMOS = Path(__file__).parents[1] / "demos"
if not _DEMOS.is_dir():
    pytest.skip("the demos are only in a checkout", allow_module_level=True)
sys.path.insert(0, str(_DEMOS))

decoding_latency = importlib.import_module("decoding_latency")
causal_models = importlib.import_module("causal_models")
distillation = importlib.import_module("distillation")
translation = importlib.import_module("translation")
repeats = importlib.import_module("repeats")
semantic_ids = importlib.import_module("semantic_ids")
tiny_language_model = importlib.import_module("tiny_language_model")
whole_calls = importlib.import_module("whole_calls")
results = importlib.import_module("benchmark.results")

transformers = importlib.import_module("transformers")
traced_only = importlib.import_module("whole_steps").traced_only
pytestmark = pytest.mark.usefixtures("traced")
CPU = torch.device("cpu")
RECIPE = tiny_language_model.Recipe(
    vocab_size=600, text_bytes=60_000, hidden_size=32, layers=1, sequences=2, sequence_length=16, noise_tokens=32,
    steps=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """The folder of a tiny trained model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        folder, is_new = tiny_language_model.folder_of_trained(RECIPE, CPU)
        assert is_new
        assert tiny_language_model.folder_of_trained(RECIPE, CPU) == (folder, False)
    return folder


def run_demo(*arguments):
    from typer.testing import CliRunner

    return CliRunner().invoke(decoding_latency.app, [*map(str, arguments)])


@pytest.mark.exhaustive
def test_demo_decodes_plots_and_writes_its_numbers(tiny_model, tmp_path):
    plot, numbers = tmp_path / "new folder" / "plot.png", tmp_path / "numbers.csv"
    options = ("--new-tokens", 6, "--beams", 3, "--batch", 3, "--prompt", "import ", "--prompt", "def", "--rounds", 2)
    result = run_demo("--model", tiny_model, "--device", "cpu", *options, "--output", plot, "--csv", numbers)
    assert result.exit_code == 0, result.output
    assert result.output.count("Passed") == 3 and "FAILED" not in result.output
    assert "ran otherwise" not in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    records = results.read(numbers)
    assert {record.case for record in records} == {"beam search", "greedy", "sampling"}
    assert {"stock", "whole step", "whole step, compiled"} <= {record.way for record in records}
    assert {(record.measure, record.unit) for record in records} == {
        ("step", "ms"),
        ("first token", "ms"),
        ("first call", "s"),
    }


@pytest.mark.exhaustive
def test_demo_with_a_peer(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2", reason="needs CTranslate2: pip install ctranslate2")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    options = ("--new-tokens", 6, "--batch", 2, "--rounds", 1, "--output", tmp_path / "plot.png")
    result = run_demo("--model", tiny_model, "--device", "cpu", *options, "--peer", "ctranslate2")
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"│ CTranslate2 +│", result.output)) == 2
    # The converted models are not left behind.
    assert not list(temporary.glob("ctranslate2*"))


@pytest.fixture
def gpu_without_cupy(monkeypatch):
    """torch sees a GPU, and nobody has installed CuPy."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy", None)
    driver._cupy_problem.cache_clear()
    yield
    driver._cupy_problem.cache_clear()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("gpu_without_cupy")
def test_demo_on_a_gpu_machine_without_cupy_takes_the_cpu(tiny_model, tmp_path):
    """README.md's first command brings no CuPy."""
    options = ("--new-tokens", 6, "--beams", 3, "--batch", 2, "--rounds", 1, "--output", tmp_path / "plot.png")
    result = run_demo("--model", tiny_model, *options)
    assert result.exit_code == 0, result.output
    assert result.output.count("Passed") == 3
    said = " ".join(result.output.split())
    assert re.search(r"Kernels: the CPU's \(\w+\)\. The GPU's do not work here: CuPy .*pip install 'cupy-cuda1", said)


@pytest.mark.usefixtures("gpu_without_cupy")
def test_demo_says_at_once_that_a_device_has_no_kernels(tiny_model):
    result = run_demo("--model", tiny_model, "--device", "cuda")
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "--device must have kernels, got 'cuda:0': CuPy cannot be imported" in said


@pytest.mark.exhaustive
def test_demo_notices_wrong_results(tiny_model, monkeypatch, tmp_path):
    from fused_topk.generation.whole_step import draws

    right = draws.noise
    monkeypatch.setattr(draws, "noise", lambda *args: 1 / right(*args))
    options = ("--new-tokens", 6, "--batch", 2, "--rounds", 1, "--output", tmp_path / "plot.png")
    result = run_demo("--model", tiny_model, "--device", "cpu", *options)
    assert result.exit_code == 1
    # A search draws nothing.
    assert result.output.count("Passed") == 2 and result.output.count("FAILED") == 1


def test_interrupted_training_leaves_nothing_in_the_cache(monkeypatch, tmp_path):
    def interrupted(recipe, sources, device, folder):
        (folder / "config.json").write_text("{", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiny_language_model, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_language_model.folder_of_trained(RECIPE, CPU)
    assert list((tmp_path / "fused_topk" / "demos").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such-model"], "`--model` must be a causal LM on this disk"),
        (["--shape", "llama-9000b"], "`--shape` must be of llama-1b"),
        (["--model", "a", "--shape", "tiny-4x4"], "leave --model, --prompt and --peer out"),
        (["--beams", "0"], "--beams"),
        (["--rounds", "0"], "--rounds"),
        (["--new-tokens", "1"], "--new-tokens"),
        (["--device", "abacus"], "--device must be cuda, cuda:N or cpu, got 'abacus'"),
        (["--dtype", "int8"], "`--dtype` must be one of float32"),
        (["--output", "plot.jpg"], "`--output` must end in .png, got 'plot.jpg'"),
        (["--peer", "ctranslate2"], "run: pip install ctranslate2"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_demo_says_what_is_wrong_with_an_option(arguments, message, monkeypatch):
    monkeypatch.setattr(decoding_latency, "find_spec", lambda name: None)
    result = run_demo(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_demo_refuses_more_tokens_than_the_model_has_positions(tiny_model):
    result = run_demo("--model", tiny_model, "--device", "cpu", "--new-tokens", 5000)
    assert result.exit_code == 2
    assert "must fit into the model's 1024 positions" in result.output


def test_translation_knows_its_numbers():
    assert translation.english(21) == ["twenty", "one"]
    german = {1: "eins", 21: "einundzwanzig", 941: "neunhunderteinundvierzig", 7062: "siebentausendzweiundsechzig"}
    assert {number: "".join(translation.german(number)) for number in german} == german
    assert all(
        set(translation.english(n) + translation.german(n)) <= set(translation.PIECE_OF) for n in range(1, 10_000)
    )


def test_translation_and_its_options(capsys, threads):
    threads(1)
    translation.main(["twenty one", "nine hundred"], model="", target="", beams=3, steps=2)
    shown = capsys.readouterr().out
    assert "twenty one: " in shown and "nine hundred: " in shown and "calls that ran as stock: none" in shown
    with pytest.raises(Exception, match="number words such as 'forty', got 'million'"):
        translation.main(["one million"], model="", target="", beams=3, steps=2)


def test_whole_calls_end_with_the_cause_if_stock_generate_fails():
    def fails(new_tokens):
        raise ValueError("the model's own error")

    with pytest.raises(ValueError, match="the model's own error"):
        whole_calls.measure({whole_calls.STOCK: fails, whole_calls.WHOLE: torch.ones}, 2, 1, CPU)


@pytest.mark.exhaustive
def test_semantic_ids_are_items_and_the_best_ones(capsys, monkeypatch, threads):
    threads(1)
    # As many beams as items: no step leaves one out, whatever the model has learned.
    semantic_ids.main(items=64, beams=64, steps=2, repeats=1)
    shown = capsys.readouterr().out
    assert shown.count("512 of 512 results are items") == 2 and "the search gives 80 of 80." in shown
    monkeypatch.setattr(semantic_ids, "best_by_scoring_all", lambda model, texts, items: items[:10].expand(8, -1, -1))
    with pytest.raises(semantic_ids.typer.Exit):
        semantic_ids.main(items=64, beams=64, steps=2, repeats=1)
    assert "Wrong" in capsys.readouterr().out


def test_distillation_stores_little_and_teaches(tiny_model, capsys, monkeypatch, threads):
    threads(1)
    teacher = causal_models.from_disk(str(tiny_model), CPU, torch.float32)
    monkeypatch.setattr(distillation, "tiny", lambda *_: teacher)
    # After a few steps of training it has no opinions yet.
    with torch.no_grad():
        teacher.model.lm_head.weight.mul_(30)
    distillation.main(k=20, steps=30, num_texts=16, training_steps=1)
    lines = capsys.readouterr().out.splitlines()
    divergence = {line[:28].strip(): float(line[28:48]) for line in lines[-4:]}
    assert abs(divergence["teacher"]) < 1e-5
    assert divergence["student, from the best 20"] < divergence["student, untrained"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_texts": 10**7}, r"--num-texts must be at most [0-9]+, the texts that there are, got 10000000"),
        ({"k": 601}, r"--k must be at most 600, the tokens of the teacher, got 601"),
    ],
)
def test_distillation_says_what_is_too_much(tiny_model, monkeypatch, options, text):
    monkeypatch.setattr(distillation, "tiny", lambda *_: causal_models.from_disk(str(tiny_model), CPU, torch.float32))
    monkeypatch.setattr(distillation, "lessons_of", lambda *_: pytest.fail("the work has begun"))
    with pytest.raises(distillation.typer.BadParameter, match=text):
        distillation.main(**{"k": 20, "steps": 1, "num_texts": 2, "training_steps": 1, **options})


@pytest.mark.parametrize(
    ("demo", "option", "value"),
    [
        (distillation, "--k", 0), (distillation, "--num-texts", 0), (distillation, "--steps", -1),
        (distillation, "--training-steps", 0), (translation, "--beams", 0), (translation, "--steps", -1),
        (translation, "--model", "nowhere"), (semantic_ids, "--steps", -1), (semantic_ids, "--repeats", 0),
        # A beam for each result.
        (semantic_ids, "--beams", 5),
    ],
)  # fmt: skip
def test_short_demos_refuse_numbers_that_are_too_small(demo, option, value):
    """And a model that is not on this disk."""
    from typer.testing import CliRunner

    app = demo.typer.Typer()
    app.command()(demo.main)
    result = CliRunner().invoke(app, [option, str(value)])
    assert result.exit_code == 2 and option in result.output, result.output


def test_distillation_losses_are_those_of_the_definition():
    theirs, ours = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0)).double()
    expected = torch.nn.functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="none"
    )
    torch.testing.assert_close(distillation.from_all(ours, theirs), expected.sum(-1).mean())
    # With all but one token listed, the others as one are that token.
    best = fused_topk.topk(theirs, 39).indices
    of_both = [distillation.events(fused_topk.token_logprobs(x, best, tail=True)) for x in (ours, theirs)]
    torch.testing.assert_close(distillation.divergence(*of_both), expected.sum(-1).mean(), rtol=1e-9, atol=0)


@pytest.mark.exhaustive
def test_demo_of_true_shapes(monkeypatch, tmp_path, threads):
    threads(1)
    small = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    sampled = {"do_sample": True, "top_k": 50}
    shapes = {"beams": causal_models.Shape(small, 2, 3, 4), "drawn": causal_models.Shape(small, 2, 1, 4, 32, sampled)}
    monkeypatch.setattr(decoding_latency, "SHAPES", shapes)
    options = ("--rounds", 1, "--output", tmp_path / "plot.png", "--csv", tmp_path / "cost.csv")
    result = run_demo("--shape", "all", "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    assert "ran otherwise" not in result.output and result.output.count("100%") == 8
    records = results.read(tmp_path / "cost.csv")
    assert {record.case for record in records} == {"beams", "drawn"}
    # A step is a difference of two calls, which on a busy machine may be negative.
    assert all(record.value > 0 for record in records if record.measure != "step")


def test_true_shapes_have_the_sizes_that_their_names_say():
    sizes = {"llama-1b": 1.24e9, "llama-8b": 8.0e9, "nllb-600m": 0.6e9, "t5-base": 0.22e9, "qwen-0.5b": 0.49e9}
    for name, size in sizes.items():
        config = next(shape.config for key, shape in causal_models.SHAPES.items() if key.startswith(name))
        model = causal_models.with_random_weights(config, torch.device("meta"), torch.float32)
        assert model.num_parameters() == pytest.approx(size, rel=0.04), name


@pytest.mark.exhaustive
def test_repeats_counts_calls_that_write_the_first_ones_texts(capsys, monkeypatch):
    options = {"shape": "tiny-4x4", "calls": 3, "new_tokens": 3, "device": "cpu"}
    repeats.main(**options, float64=True)
    lines = capsys.readouterr().out.splitlines()
    assert sum("3 of 3 calls wrote" in line for line in lines) == 9
    # What bfloat16 rounds.
    below = [float(line.split(": ")[1].split()[0]) for line in lines if "below float64's best" in line]
    assert len(below) == 3 and all(0 <= gap < 0.01 for gap in below) and below[0] == below[1]
    # Without a seed of their own the drawn texts differ, but the others do not.
    monkeypatch.setattr(repeats.torch, "manual_seed", lambda seed: None)
    repeats.main(**options)
    lines = capsys.readouterr().out.splitlines()
    assert [": 3 of 3" in line for line in lines] == [True] * 6 + [False] * 3
    with pytest.raises(repeats.typer.BadParameter, match=r"`--shape` must be of .* got 'large'"):
        repeats.main(shape="large")

# SPDX-License-Identifier: Apache-2.0
"""The main demo in small: a model of a few steps' training, decoded stock and fused on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

for _package in ("transformers", "tokenizers", "typer", "rich", "tqdm", "matplotlib"):
    pytest.importorskip(_package, reason=f"the demos need {_package}: pip install 'fused_topk[demo]'")

_DEMOS = Path(__file__).parents[1] / "demos"
if not _DEMOS.is_dir():
    pytest.skip("the demos are only in a checkout", allow_module_level=True)
sys.path.insert(0, str(_DEMOS))

decoding_latency = importlib.import_module("decoding_latency")
tiny_language_model = importlib.import_module("tiny_language_model")

CPU = torch.device("cpu")
RECIPE = tiny_language_model.Recipe(
    vocab_size=600,
    text_bytes=60_000,
    hidden_size=32,
    layers=1,
    sequences=2,
    sequence_length=16,
    noise_tokens=32,
    steps=3,
)


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


def test_demo_decodes_plots_and_writes_its_numbers(tiny_model, tmp_path):
    plot, numbers = tmp_path / "new folder" / "plot.png", tmp_path / "numbers.json"
    options = ("--new-tokens", 6, "--beams", 3, "--batch", 3, "--prompt", "import ", "--prompt", "def", "--rounds", 2)
    result = run_demo("--model", tiny_model, "--device", "cpu", *options, "--output", plot, "--json", numbers)
    assert result.exit_code == 0, result.output
    assert result.output.count("Passed") == 3 and "FAILED" not in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert [mode["mode"] for mode in found["modes"]] == ["beam search", "greedy", "sampling"]
    for mode in found["modes"]:
        assert mode["is_right"] and mode["fallbacks"] == {}
        # Two rounds of six steps, without the first of each.
        assert {way: len(each["steps"]) for way, each in mode["ways"].items()} == {"stock": 10, "fused": 10}


def test_demo_notices_wrong_results(tiny_model, monkeypatch, tmp_path):
    from fused_topk.generation import selection

    right = selection.best

    def worst(rows, edits, k, are_log_probs):
        return right(rows._replace(logits=-rows.logits), edits, k, are_log_probs)

    monkeypatch.setattr(selection, "best", worst)
    options = ("--new-tokens", 6, "--batch", 2, "--rounds", 1, "--output", tmp_path / "plot.png")
    result = run_demo("--model", tiny_model, "--device", "cpu", *options)
    assert result.exit_code == 1
    # Beam search does not use it.
    assert result.output.count("Passed") == 1 and result.output.count("FAILED") == 2


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
        (["--random-weights", "llama-9000b"], "`--random-weights` must be one of llama-1b"),
        (["--model", "a", "--random-weights", "gpt2"], "exclude each other"),
        (["--random-weights", "gpt2", "--prompt", "Hello"], "`--prompt` needs a tokenizer"),
        (["--beams", "0"], "`--beams` must be at least 1, got 0"),
        (["--rounds", "0"], "`--rounds` must be at least 1, got 0"),
        (["--new-tokens", "1"], "`--new-tokens` must be at least 3, got 1"),
        (["--batch", "1", "--prompt", "a", "--prompt", "b"], "`--batch` must be at least the number of prompts (2)"),
        (["--device", "abacus"], "`--device` must name a device of torch, got 'abacus'"),
        (["--dtype", "int8"], "`--dtype` must be one of float32"),
        (["--output", "plot.jpg"], "`--output` must end in .png, got 'plot.jpg'"),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) else "",
)
def test_demo_says_what_is_wrong_with_an_option(arguments, message):
    result = run_demo(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_demo_refuses_more_tokens_than_the_model_has_positions(tiny_model):
    result = run_demo("--model", tiny_model, "--device", "cpu", "--new-tokens", 5000)
    assert result.exit_code == 2
    assert "must fit into the model's 1024 positions" in result.output

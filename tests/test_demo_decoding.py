# SPDX-License-Identifier: Apache-2.0
"""The main demo in small: a model of a few steps' training, decoded with both selections on the CPU."""

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

beam_search = importlib.import_module("beam_search")
comparison = importlib.import_module("selection_comparison")
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
    options = ("--new-tokens", 6, "--beams", 3, "--batch", 3, "--prompt", "import ", "--prompt", "def")
    result = run_demo("--model", tiny_model, "--device", "cpu", *options, "--output", plot, "--json", numbers)
    assert result.exit_code == 0, result.output
    assert "Passed" in result.output and "Speed-up" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert found["agreement"]["identical"] + found["agreement"]["tied"] + found["agreement"]["torch_worse"] == 2 * 6 * 3
    assert found["agreement"]["wrong"] == 0
    assert len(found["steps"]) == 2 * 5


def test_interrupted_training_leaves_nothing_in_the_cache(monkeypatch, tmp_path):
    def interrupted(recipe, sources, device, folder):
        (folder / "config.json").write_text("{", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiny_language_model, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny_language_model.folder_of_trained(RECIPE, CPU)
    assert list((tmp_path / "fused_topk" / "demos").iterdir()) == []


@pytest.mark.parametrize("select", ["select_with_torch", "select_fused"])
@pytest.mark.parametrize(("architecture", "seed"), [("LlamaConfig", 0), ("GPT2Config", 3)], ids=["llama", "gpt2"])
def test_beam_search_agrees_with_transformers_generate(architecture, seed, select):
    import transformers

    # Seeds with which some hypotheses end early, and prompts of three lengths.
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    if architecture == "LlamaConfig":
        small |= {"intermediate_size": 64, "num_key_value_heads": 2}
    small |= {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 5, "initializer_range": 0.3}
    config = getattr(transformers, architecture)(**small)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompts = torch.randint(6, 97, (3, 7))
    mask = torch.ones_like(prompts)
    mask[1, :3] = mask[2, :1] = 0
    prompts = prompts * mask

    found = beam_search.beam_search(
        model, prompts, mask, beams=4, new_tokens=12, end_token=5, select=getattr(beam_search, select)
    )
    # early_stopping="never": transformers' other rules stop before the best hypotheses are certain.
    expected = model.generate(
        prompts,
        attention_mask=mask,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        do_sample=False,
        early_stopping="never",
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert (found.lengths < 12).any()
    torch.testing.assert_close(found.scores.flatten(), expected.sequences_scores, rtol=0, atol=1e-5)
    # The two fill up differently behind the end token.
    for ours, length, theirs in zip(
        found.tokens.flatten(0, 1), found.lengths.flatten(), expected.sequences[:, 7:], strict=True
    ):
        assert ours[:length].tolist() == theirs[:length].tolist()


def test_comparison_tells_ties_from_wrong_choices():
    logits = torch.tensor([[[3.0, 2.0, 2.0, 0.0]]])
    scores = torch.zeros(1, 1)

    def compared(picked):
        """What the comparison finds where the fused selection picks these tokens, and reports their true worth."""
        worth = torch.log_softmax(logits, -1)[0][:, picked]
        selections = {"torch": beam_search.select_with_torch, "fused": lambda *_: (worth, torch.tensor([picked]))}
        both = comparison.Comparison(selections, "fused", CPU)
        both(logits, scores, 3)
        return both.agreement()

    in_torch_order = beam_search.select_with_torch(logits, scores, 3)[1][0].tolist()
    first, second, third = in_torch_order
    assert compared(in_torch_order).identical == 1
    assert compared([first, third, second]).tied == 1
    # A worse token, a repeated one, and an order that is wrong.
    for picked in ([0, 1, 3], [0, 1, 1], [1, 0, 2]):
        assert compared(picked).wrong == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such-model"], "`--model` must be a causal LM on this disk"),
        (["--random-weights", "llama-9000b"], "`--random-weights` must be one of llama-1b"),
        (["--model", "a", "--random-weights", "gpt2"], "exclude each other"),
        (["--random-weights", "gpt2", "--prompt", "Hello"], "`--prompt` needs a tokenizer"),
        (["--beams", "0"], "`--beams` must be at least 1, got 0"),
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

# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer with the method of docs/training.md: the same texts, losses and gradients as TRL's own, to rounding.

Not collected by pytest: trl_trainer.sh runs it, in an environment that has TRL.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from fused_topk.generation import text_token_logprobs

STEPS, VOCAB = 5, 96
PAGE = Path(__file__).parents[1] / "docs" / "training.md"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.3, **shape, **tokens))


def word_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *(f"w{i}" for i in range(len(special), VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=special[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


def trainer_of_the_page() -> Any:
    """The class that docs/training.md shows."""
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "text_token_logprobs": text_token_logprobs}
    exec(code, names)
    return names["FusedGRPOTrainer"]


class Gradients(TrainerCallback):
    """The gradients of each step, before they change the weights."""

    def __init__(self) -> None:
        self.of_steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        self.of_steps.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})


def trained(trainer: Any, folder: Path, **options: Any) -> tuple[list[str], list[dict[str, float]], Gradients]:
    """What some steps of training write and log, and their gradients."""
    texts: list[str] = []
    gradients = Gradients()

    def reward(completions, **_):
        texts.extend(completions)
        return [float(len(each)) for each in completions]

    made = trainer(
        model=llama(),
        args=trl.GRPOConfig(
            output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=8, learning_rate=1e-3, logging_steps=1, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, bf16=False, seed=3, **options,
        ),
        processing_class=word_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w8", "w9 w10", "w11 w4 w5 w6"]}),
        reward_funcs=reward,
        callbacks=[gradients],
    )  # fmt: skip
    made.train()
    logs = [{name: step[name] for name in ("loss", "grad_norm", "entropy")} for step in made.state.log_history[:STEPS]]
    return texts, logs, gradients


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "num_iterations": 2, "loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}],
    ids=["plain", "each text twice", "the half of high entropy"],
)
def test_losses_and_gradients(tmp_path, options):
    texts, logs, want = trained(trl.GRPOTrainer, tmp_path / "theirs", **options)
    found_texts, found_logs, got = trained(trainer_of_the_page(), tmp_path / "ours", **options)
    assert found_texts == texts
    assert len(logs) == len(want.of_steps) == len(got.of_steps) == STEPS
    # The weights that the steps leave drift apart by their rounding.
    for found, step in zip(found_logs, logs, strict=True):
        for name, value in step.items():
            assert found[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    for found, step in zip(got.of_steps, want.of_steps, strict=True):
        assert found.keys() == step.keys()
        for name, gradient in step.items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=2e-4 * largest + 1e-7, msg=name)
    assert any(float(x.abs().max()) > 1e-3 for x in want.of_steps[0].values())

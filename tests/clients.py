# SPDX-License-Identifier: Apache-2.0
"""Libraries that call generate() of transformers, each in whole steps and as stock, with the same texts. `tests/clients.sh` runs it, in an
environment that has them.

Every test says how many tokens whole steps write, and why stock writes the others. Models are tiny and have random weights. Greedy
search of so few logits is served because tests/conftest.py lowers FEW_LOGITS.
"""

import copy
import re
from pathlib import Path

import peft
import pytest
import smolagents
import torch
import trl
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    pipeline,
)

from fused_topk.generation import disable, enable, fused_decoding, stats, text_token_logprobs

torch.set_num_threads(1)

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
VOCAB = 300
PAD, BOS, EOS, UNKNOWN = range(4)
NEW = 12
# The text of each message, and nothing between them.
TEMPLATE = "{% for each in messages %}{{ each['content'] }} {% endfor %}"
MODES = {"greedy": {}, "beams": {"num_beams": 3}, "sampling": {"do_sample": True, "top_p": 0.9}}
EACH_MODE = pytest.mark.parametrize("mode", MODES)


def llama(seed: int = 0) -> LlamaForCausalLM:
    """Weights large enough that the next token is neither certain nor uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, pad_token_id=PAD, bos_token_id=BOS,
        eos_token_id=EOS,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def word_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *(f"w{i}" for i in range(len(special), VOCAB))]
    # transformers' criterion for stop strings looks how a tokenizer puts this before a word.
    words[-1] = "abcdef"
    words = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", chat_template=TEMPLATE, model_max_length=512, **names
    )


def both_ways(model, call) -> tuple:
    """What the call gives, which is the same both ways, and the tokens of the second one."""
    expected = call()
    stats(reset=True)
    with fused_decoding(model):
        found = call()
    counted = stats(reset=True)
    assert found == expected
    return found, counted


def num_different(found: dict) -> int:
    return len({str(each) for each in found.values()})


# TRL


def trained(trainer, config, is_enabled: bool, folder, callbacks=(), **options):
    """What two steps of training write and log, and the weights after them."""
    model, texts = llama(), []
    kept = model.generate
    arguments = config(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        max_completion_length=NEW,
        # Large enough that the second step writes other texts than the first one's weights would.
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **{"bf16": False} | options,
    )

    def length(completions, **_):
        texts.extend(completions)
        return [float(len(each)) for each in completions]

    is_rewarded = trainer is not trl.DistillationTrainer
    made = trainer(
        model=model,
        args=arguments,
        processing_class=word_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7", "w8", "w9 w10", "w11 w4 w5 w6"]}),
        callbacks=[*callbacks],
        **({"reward_funcs": length} if is_rewarded else {"teacher_model": llama(seed=1)}),
    )
    assert made.model is model and model.generate == kept
    stats(reset=True)
    if is_enabled:
        enable(model)
    made.train()
    disable(model)
    # Without what depends on the time.
    logs = [
        {name: each for name, each in step.items() if "time" not in name and "_per_second" not in name}
        for step in made.state.log_history
    ]
    return texts, logs, model.state_dict(), stats(reset=True)


def assert_same_training(trainer, config, folder, **options) -> tuple:
    *expected, _ = trained(trainer, config, False, folder, **options)
    *found, counted = trained(trainer, config, True, folder, **options)
    assert found[:2] == expected[:2]
    for name, weight in expected[2].items():
        assert torch.equal(found[2][name], weight), name
    assert not torch.equal(found[2]["lm_head.weight"], llama().lm_head.weight)
    return found[0], counted


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trl_with_rewards(name, tmp_path):
    """Completions of each step, losses, gradients' norms and weights."""
    trainer, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    texts, counted = assert_same_training(trainer, config, tmp_path, num_generations=4, beta=0.0)
    assert len(set(texts)) == len(texts) == 8
    # These trainers put a forward() of their own in the model, which runs the model's own one where texts are written.
    assert counted == (2 * NEW, 0, {})


def test_trl_with_a_teacher(tmp_path):
    """The student writes in training mode, with weights that have changed since its last text."""
    _, counted = assert_same_training(trl.DistillationTrainer, trl.DistillationConfig, tmp_path)
    assert counted == (2 * NEW, 0, {})


class Gradients(TrainerCallback):
    """The gradients of each step, before they change the weights."""

    def __init__(self) -> None:
        self.of_steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        self.of_steps.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "num_iterations": 2, "loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}],
    ids=["plain", "each text twice", "the half of high entropy"],
)
def test_trl_with_the_method_of_the_documentation(options, tmp_path):
    """The trainer of docs/training.md has the texts, losses and gradients of TRL's own, to rounding."""
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = {"torch": torch, "text_token_logprobs": text_token_logprobs}
    exec(code, names)
    found = []
    for trainer in (trl.GRPOTrainer, names["FusedGRPOTrainer"]):
        of_steps = Gradients()
        texts, logs, *_ = trained(trainer, trl.GRPOConfig, False, tmp_path, [of_steps], num_generations=4, **options)
        found.append((texts, logs[: len(of_steps.of_steps)], of_steps.of_steps))
    (texts, logs, gradients), (own_texts, own_logs, own_gradients) = found
    assert own_texts == texts and len(logs) == 2
    # The weights that the steps leave drift apart by their rounding.
    for own, step in zip(own_logs, logs, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert own[name] == pytest.approx(step[name], rel=2e-4, abs=2e-5), name
    for own, step in zip(own_gradients, gradients, strict=True):
        assert own.keys() == step.keys()
        for name, gradient in step.items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(own[name], gradient, rtol=0, atol=2e-4 * largest + 1e-7, msg=name)
    assert any(float(x.abs().max()) > 1e-3 for x in gradients[0].values())


# PEFT

PARTS = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "lora": (peft.LoraConfig, {"r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": PARTS}),
    "lora of the head": (peft.LoraConfig,
        {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "head of its own": (peft.LoraConfig,
        {"r": 4, "lora_alpha": 16, "target_modules": PARTS, "modules_to_save": ["lm_head"]}),
    "dora": (peft.LoraConfig, {"r": 4, "use_dora": True, "target_modules": PARTS}),
}  # fmt: skip


def adapter(name: str) -> peft.PeftConfig:
    kind, options = ADAPTERS[name]
    return kind(task_type="CAUSAL_LM", init_lora_weights=False, **copy.deepcopy(options))


def texts_of(model, mode: str, **more) -> list:
    torch.manual_seed(7)
    inputs = word_tokenizer()(["w5 w6 w7", "w8"], padding=True, return_tensors="pt", return_token_type_ids=False)
    return model.generate(**inputs, max_new_tokens=NEW, **MODES[mode], **more).tolist()


@EACH_MODE
@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_adapters(name, mode):
    """One model whose adapters are changed, left out, and merged, within one block."""
    model = peft.get_peft_model(llama(), adapter(name), adapter_name="one")
    model.add_adapter("two", adapter(name))
    model.eval()

    def call():
        found = {}
        for active in ("one", "two"):
            model.set_adapter(active)
            found[active] = texts_of(model, mode)
        with model.disable_adapter():
            found["none"] = texts_of(model, mode)
        model.merge_adapter()
        found["two, merged"] = texts_of(model, mode)
        model.unmerge_adapter()
        found["two, unmerged"] = texts_of(model, mode)
        model.set_adapter("one")
        found["one again"] = texts_of(model, mode)
        return found

    found, counted = both_ways(model, call)
    assert num_different(found) == 3
    assert found["one"] == found["one again"] and found["two"] == found["two, merged"] == found["two, unmerged"]
    assert counted == (6 * NEW, 0, {})


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_peft_with_an_adapter_for_each_text(mode):
    model = peft.get_peft_model(llama(), adapter("lora"), adapter_name="one").eval()
    _, counted = both_ways(model, lambda: texts_of(model, mode, adapter_names=["one", "__base__"]))
    # PEFT tells its layers whose text is in which row by hooks.
    assert counted == (0, NEW, {"a forward hook of a Linear": 1})


@EACH_MODE
@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_peft_of_prompts(kind, mode):
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    _, counted = both_ways(model, lambda: texts_of(model, mode))
    # PEFT puts the learned prompt before the text in a preparation of its own.
    reason = "prepare_inputs_for_generation() of a LlamaForCausalLM that has been replaced"
    assert counted == (0, NEW, {reason: 1})


# lm-eval

PROMPTS = ["w5 w6 w7", "w8", "w9 w10", "w11 w4 w5 w6", "w7 w7"]


def evaluated(model) -> HFLM:
    return HFLM(pretrained=model, tokenizer=word_tokenizer(), batch_size=2, device="cpu", max_length=64)


def answers(evaluator: HFLM, **options) -> list[str]:
    torch.manual_seed(7)
    arguments = {"max_gen_toks": NEW, **options}
    requests = [Instance("generate_until", {}, (prompt, dict(arguments)), i) for i, prompt in enumerate(PROMPTS)]
    return evaluator.generate_until(requests, disable_tqdm=True)


def piece(text: str) -> str:
    """Two words, to stop there."""
    return " ".join(text.split()[4:6])


@EACH_MODE
def test_lm_eval(mode):
    """For each stop sequence there is a criterion that keeps what it has seen. It ends a batch once all texts have that sequence."""
    model = llama()
    evaluator, options = evaluated(model), MODES[mode] | ({"temperature": 0.8} if mode == "sampling" else {})
    whole_texts, counted = both_ways(model, lambda: answers(evaluator, **options))
    # Five texts in batches of two.
    assert counted == (3 * NEW, 0, {})
    # The shortest prompt is the last one, in a batch by itself.
    last = PROMPTS.index("w8")
    stops = [piece(whole_texts[0]), piece(whole_texts[last])]
    texts, counted = both_ways(model, lambda: answers(evaluator, until=stops, **options))
    assert texts[last].split() == whole_texts[last].split()[:4]
    # The criterion reads as many rows as there are texts, and so one of three beams, which is not the best one at first.
    assert counted == (2 * NEW + (7 if mode == "beams" else 6), 0, {})


# Pipelines of transformers


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2, "return_full_text": False},
    ],
    ids=str,
)
def test_text_generation(options):
    model = llama()
    write = pipeline("text-generation", model=model, tokenizer=word_tokenizer())

    def call():
        torch.manual_seed(7)
        return write(PROMPTS, batch_size=2, max_new_tokens=NEW, **{"do_sample": False} | options)

    found, counted = both_ways(model, call)
    assert len(found) == len(PROMPTS)
    assert counted == (3 * NEW, 0, {})


# smolagents


@pytest.fixture
def agents_model(tmp_path) -> smolagents.TransformersModel:
    llama().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    model = smolagents.TransformersModel(str(tmp_path), max_new_tokens=NEW)
    # Where generate() fails in its thread, a stream would be waited for without end.
    model.streamer.timeout = 60
    return model


MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "w5 w6 w7"}]}]


@EACH_MODE
def test_smolagents(agents_model, mode):
    """Its criterion gathers the text, one call after another."""

    def call(**more):
        torch.manual_seed(7)
        found = agents_model.generate(MESSAGES, **MODES[mode], **more)
        return found.content, found.token_usage.output_tokens

    (text, _), counted = both_ways(agents_model.model, call)
    assert counted == (NEW, 0, {})
    stop = text.split()[5]
    (_, length), counted = both_ways(agents_model.model, lambda: call(stop_sequences=[stop]))
    # Of several beams it reads the first one, whatever text that has.
    assert length == 6 or mode == "beams"
    assert counted == (length, 0, {})


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_smolagents_streaming(agents_model, mode):
    """From a thread that has entered no block."""

    def call(**more):
        torch.manual_seed(7)
        return [each.content for each in agents_model.generate_stream(MESSAGES, **MODES[mode], **more)]

    parts, counted = both_ways(agents_model.model, call)
    assert counted == (NEW, 0, {})
    _, counted = both_ways(agents_model.model, lambda: call(stop_sequences=[parts[5].strip()]))
    assert counted == (6, 0, {})

# SPDX-License-Identifier: Apache-2.0
"""Libraries that call generate() of transformers, each in whole steps and as stock, with the same texts. `tests/clients.sh` runs it, in an
environment that has them.

Every test says how many tokens whole steps write, and why stock writes the others. Models are tiny and have random weights. Greedy
search of so few logits is served because tests/conftest.py lowers FEW_LOGITS.
"""

import copy
import re
from pathlib import Path

import numpy as np
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
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
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


@EACH_MODE
def test_peft_of_a_model_that_is_enabled(mode):
    """A model gets adapters, a mixture of them, and loses them, while it is enabled."""

    def call(is_enabled):
        base, found = llama(), {}
        if is_enabled:
            enable(base)
        found["plain"] = texts_of(base, mode)
        model = peft.get_peft_model(base, adapter("lora"), adapter_name="one").eval()
        found["one"] = texts_of(model, mode)
        model.add_adapter("two", adapter("lora"))
        model.base_model.set_adapter(["one", "two"])
        found["one and two"] = texts_of(model.eval(), mode)
        model.add_weighted_adapter(["one", "two"], [0.5, 0.2], "mixed", combination_type="linear")
        model.set_adapter("mixed")
        found["mixed"] = texts_of(model.eval(), mode)
        found["unloaded"] = texts_of(model.unload(), mode)
        disable(base)
        return found

    expected = call(False)
    stats(reset=True)
    found = call(True)
    assert found == expected
    assert num_different(found) == 4 and found["plain"] == found["unloaded"]
    assert stats(reset=True) == (5 * NEW, 0, {})


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


def test_lm_eval_in_mixed_precision():
    model = llama()
    evaluator = HFLM(
        pretrained=model, tokenizer=word_tokenizer(), batch_size=2, device="cpu", max_length=64,
        mixed_precision_dtype="bfloat16",
    )  # fmt: skip
    _, counted = both_ways(model, lambda: answers(evaluator))
    assert counted == (0, 3 * NEW, {"autocast": 3})


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


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END, START, NO_TIMESTAMPS = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"
LANGUAGES, TASKS = ["<|en|>", "<|de|>"], ["<|translate|>", "<|transcribe|>"]
SPECIAL = [END, START, *LANGUAGES, *TASKS, "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", NO_TIMESTAMPS]
# Of a piece of sound of one second, the last of all tokens.
TIMESTAMPS = [f"<|{i * 0.02:.2f}|>" for i in range(51)]
ID_OF = {token: i for i, token in enumerate((*BYTES, *SPECIAL, *TIMESTAMPS))}
RATE = 16_000


def whisper() -> WhisperForConditionalGeneration:
    """It hears one second at a time."""
    torch.manual_seed(0)
    sizes = {
        f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in (("layers", 2), ("attention_heads", 4))
    }
    config = WhisperConfig(
        vocab_size=len(ID_OF),
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=64,
        init_std=0.3,
        decoder_start_token_id=ID_OF[START],
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), ID_OF[END]),
        **sizes,
    )
    model = WhisperForConditionalGeneration(config).eval()
    # With the embedding of the tokens that are read a token would choose itself.
    head = torch.nn.Linear(config.d_model, config.vocab_size, bias=False)
    torch.nn.init.normal_(head.weight, std=0.5)
    model.set_output_embeddings(head)
    options = model.generation_config
    options.no_timestamps_token_id, options.max_initial_timestamp_index = ID_OF[NO_TIMESTAMPS], 25
    options.is_multilingual, options.lang_to_id = True, {each: ID_OF[each] for each in LANGUAGES}
    options.task_to_id = {each.strip("<|>"): ID_OF[each] for each in TASKS}
    options.prev_sot_token_id = ID_OF["<|startofprev|>"]
    options.alignment_heads = [[0, 0], [1, 1]]
    options.max_length = 40
    options.begin_suppress_tokens, options.suppress_tokens = [ID_OF[END]], [ID_OF["<|startoflm|>"]]
    return model


def recognizer(model):
    tokenizer = WhisperTokenizer(vocab={each: ID_OF[each] for each in BYTES}, merges=[], pad_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(TIMESTAMPS)
    assert tokenizer.get_vocab() == ID_OF
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1, sampling_rate=RATE)
    return pipeline("automatic-speech-recognition", model=model, tokenizer=tokenizer, feature_extractor=extractor)


def noise(seconds: float) -> np.ndarray:
    """It grows louder."""
    length = int(seconds * RATE)
    drawn = np.random.default_rng(0).normal(size=length).astype(np.float32)
    return drawn * np.linspace(0.1, 1, length, dtype=np.float32)


# As users of long sounds set them: each piece is read again with draws where its text is improbable or repeats itself.
FALLBACK = {
    "num_beams": 1, "temperature": (0.0, 0.4, 0.8), "compression_ratio_threshold": 1.35, "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6, "condition_on_prev_tokens": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        # The pipeline's own five beams.
        {"return_timestamps": True},
        {"return_timestamps": True, "return_language": True, "generate_kwargs": {"num_beams": 1}},
        {"return_timestamps": True, "generate_kwargs": {"language": "de", "task": "translate", "num_beams": 1}},
        {"return_timestamps": True, "generate_kwargs": FALLBACK},
        # The pipeline itself cuts the sound, and reads pieces in batches.
        {"chunk_length_s": 1},
        {"chunk_length_s": 1, "batch_size": 2, "return_timestamps": True, "generate_kwargs": {"num_beams": 1}},
    ],
    ids=str,
)
def test_speech_recognition_of_a_long_sound(options):
    model = whisper()
    hear, sound = recognizer(model), noise(3.3)

    def call():
        torch.manual_seed(7)
        return hear(sound.copy(), **options)

    found, counted = both_ways(model, call)
    assert found["text"] and ("return_timestamps" not in options or len(found["chunks"]) > 1)
    # As many as random weights write.
    assert counted.whole > 100 and counted[1:] == (0, {})


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

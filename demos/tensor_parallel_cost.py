# SPDX-License-Identifier: Apache-2.0
"""generate() of a tensor-parallel Llama: stock and in whole steps, in turns.

    torchrun --nproc-per-node 2 demos/tensor_parallel_cost.py > cost.json     # GPUs: 8 layers of Llama 8B's sizes, under two minutes
    torchrun --nproc-per-node 2 demos/tensor_parallel_cost.py --tiny          # CPUs: shows that it runs

Weights are random. The first process writes them to a folder, and all processes read them. Rank 0 prints one JSON object. If a case
raises, the object has the error, and stderr the traceback. No call may take longer than a minute.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fused_topk
from fused_topk.generation import disable, enable, stats

SIZES = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
TINY = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
CASES = {"greedy 8": (8, 1), "beams 8 x 4": (8, 4)}
STOCK, WHOLE = "stock", "whole step"
# A minute for a collective, and three for all, in seconds.
LIMIT, LONGEST = timedelta(seconds=60), 180


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the weights: 5.6 GB; by default one that is temporary")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2")
    started = time.perf_counter()
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    is_cuda = torch.cuda.is_available() and not options.tiny
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=LIMIT, device_id=device if is_cuda else None)
    found: dict[str, Any] = {"about": _about(device), "options": {**vars(options), "folder": None}, "cases": {}}
    code = 0
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        folders = [own]
        dist.broadcast_object_list(folders, 0)
        model = _model(folders[0], options, device)
        _tell(f"loaded after {time.perf_counter() - started:.0f} s")
        for name, (batch, beams) in CASES.items():
            try:
                found["cases"][name] = _measured(model, options, device, batch, beams)
                _tell(f"{name} after {time.perf_counter() - started:.0f} s: {json.dumps(found['cases'][name])}")
            # The other processes fail with it, or wait for no longer than a minute.
            except Exception:
                traceback.print_exc()
                found["cases"][name] = {"raises": traceback.format_exc().splitlines()[-1]}
                code = 1
                break
        if dist.get_rank() == 0:
            print(json.dumps(found, indent=1), flush=True)
        # Nobody reads the folder any more.
        if not code:
            dist.barrier()
    sys.stderr.flush()
    # Without the clean-up of a group that may have lost a process.
    os._exit(code)


def _tell(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def _about(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "processes": dist.get_world_size(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fused_topk": fused_topk.__version__,
    }


def _model(folder: str, options: argparse.Namespace, device: torch.device) -> Any:
    path = Path(folder, "model")
    if dist.get_rank() == 0:
        config = LlamaConfig(
            **(TINY if options.tiny else SIZES),
            num_key_value_heads=8,
            num_hidden_layers=options.layers,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        torch.set_default_dtype(_dtype(device))
        with torch.device(device):
            whole = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        whole.save_pretrained(path)
        del whole
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(path, dtype=_dtype(device), **_plan()).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _plan() -> dict[str, Any]:
    """What from_pretrained() takes for a tensor-parallel model."""
    try:
        return {"distributed_config": transformers.distributed.DistributedConfig(tp_plan="auto")}
    # Of earlier versions.
    except TypeError:
        return {"tp_plan": "auto"}


def _measured(model: Any, options: argparse.Namespace, device: torch.device, batch: int, beams: int) -> dict[str, Any]:
    ids = torch.randint(5, model.config.vocab_size, (batch, options.prompt), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    mask = torch.ones_like(ids)

    def generate(new_tokens: int) -> tuple[float, Tensor]:
        _wait(device)
        dist.barrier()
        started = time.perf_counter()
        tokens = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, num_beams=beams, do_sample=False, use_cache=True
        )
        _wait(device)
        return time.perf_counter() - started, tokens

    ways = STOCK, WHOLE
    times: dict[str, dict[str, list[float]]] = {way: {"first": [], "call": [], "token": []} for way in ways}
    counted: dict[str, str] = {}
    sequences: dict[str, Tensor] = {}
    for _ in range(options.turns):
        for way in ways:
            if way == WHOLE:
                enable(model)
            stats(reset=True)
            # With all that is loaded, tried and captured.
            times[way]["first"].append(generate(options.new_tokens)[0])
            for _ in range(2):
                seconds, sequences[way] = generate(options.new_tokens)
                times[way]["call"].append(seconds)
                times[way]["token"].append(generate(1)[0])
            counted[way] = repr(stats(reset=True))
            disable(model)
    result = {}
    for way, of_way in times.items():
        call, token = (statistics.median(of_way[name]) for name in ("call", "token"))
        result[way] = {
            "first_call_s": round(max(of_way["first"]), 3),
            "call_ms": round(1e3 * call, 2),
            "first_token_ms": round(1e3 * token, 2),
            "step_ms": round(1e3 * (call - token) / (options.new_tokens - 1), 3),
            "share_of_same_tokens": round(float((sequences[way] == sequences[STOCK]).float().mean()), 4),
            "calls_ms": [round(1e3 * each, 1) for each in of_way["call"]],
            "stats": counted[way],
        }
    result["stock step / whole step"] = round(result[STOCK]["step_ms"] / result[WHOLE]["step_ms"], 2)
    return result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())

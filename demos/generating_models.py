# SPDX-License-Identifier: Apache-2.0
"""Which of transformers' generating classes run in whole steps, in which form, and whether their texts are those of stock generate().

    python demos/generating_models.py > table.md

Each class that reads text alone, with a small configuration and random weights in float32, generates greedily and with beams. A class
with which this script makes no model that stock generate() runs is counted apart. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import inspect
import signal
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.whole_step import entry, rows

# Whatever of these a configuration takes.
SMALL = {
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "max_position_embeddings": 96,
    "n_positions": 96,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    "is_decoder": True,
    "use_cache": True,
}
# Of a class, with all models that it may make.
_SECONDS = 40
# A larger configuration than that is one whose sizes have other names.
_MOST_WEIGHTS = 20_000_000


class Row(NamedTuple):
    name: str
    way: str
    equal: str


class _TooLong(BaseException):
    pass


def model_of(kind: type) -> Any:
    """A small model of the class."""
    config_class: Any = kind.config_class  # type: ignore[attr-defined]
    plain = config_class()
    decoder = plain.get_text_config(decoder=True)
    taken = set(vars(plain)) | {*getattr(plain, "attribute_map", {})} | {*inspect.signature(config_class).parameters}
    options = {name: value for name, value in SMALL.items() if name in taken}
    if getattr(decoder, "num_key_value_heads", 1) is None:
        options.pop("num_key_value_heads", None)
    if plain.is_encoder_decoder:
        options.pop("is_decoder", None)
    config = config_class(**options)
    with torch.device("meta"):
        if sum(weight.numel() for weight in kind(config).parameters()) > _MOST_WEIGHTS:
            raise ValueError("a large model")
    torch.manual_seed(0)
    model = kind(config).eval()
    for weight in model.parameters():
        # Biases are zero at first, and logits of some heads are equal then.
        if weight.dim() == 1:
            weight.data += torch.randn_like(weight) * 0.1
    return model


def row_of(kind: type) -> Row:
    """Runs a class."""
    signal.alarm(_SECONDS)
    try:
        try:
            model = model_of(kind)
            ids = torch.randint(8, 97, (2, 6), generator=torch.Generator().manual_seed(1))
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            options = [
                {**inputs, "num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 8, "do_sample": False}
                for beams in (1, 3)
            ]
            stock = [model.generate(**each) for each in options]
        except (Exception, _TooLong) as error:
            return Row(kind.__name__, "none", f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}")
        before = stats()
        with fused_decoding(model, whole_step="eager"):
            found = [model.generate(**each) for each in options]
        after = stats()
        new = [name for name, number in after.not_whole.items() if number != before.not_whole.get(name)]
        is_equal = all(torch.equal(one, other) for one, other in zip(stock, found, strict=True))
        if new:
            return Row(kind.__name__, f"old path: {new[0]}", str(is_equal))
        form = rows.decoder_of(entry.ready_for(model).twin).__name__
        way = "a row for each beam" if form == "RowDecoder" else "shared prompt"
        return Row(kind.__name__, way, str(is_equal))
    except _TooLong:
        return Row(kind.__name__, "none", "too long")
    finally:
        signal.alarm(0)


def kinds() -> list[type]:
    """The generating classes that read text alone."""
    names: set[str] = set()
    for table in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ):
        names |= {each for value in table.values() for each in ([value] if isinstance(value, str) else value)}
    found = [getattr(transformers, name, None) for name in sorted(names)]
    return [kind for kind in found if kind is not None and hasattr(kind, "generate")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes; all by default")
    names = parser.parse_args().names
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGALRM, _raise_too_long)
    print("| class | whole steps | equal to stock |\n| --- | --- | --- |", flush=True)
    made = []
    for kind in kinds():
        if names and kind.__name__ not in names:
            continue
        row = row_of(kind)
        made.append(row)
        print(f"| {row.name} | {row.way} | {row.equal} |", flush=True)
    run = [row for row in made if row.way != "none"]
    served = [row for row in run if not row.way.startswith("old path")]
    differ = [row.name for row in run if row.equal != "True"]
    print(f"\n{len(made)} classes, {len(run)} that this script runs, {len(served)} served; differ: {differ}")


def _raise_too_long(*_: Any) -> None:
    raise _TooLong


if __name__ == "__main__":
    main()

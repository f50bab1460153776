# SPDX-License-Identifier: Apache-2.0
"""Which of transformers' generating classes run in whole steps, in which form, and whether their texts are those of stock generate().

    python demos/generating_models.py > table.md

Each class that writes text gets a small configuration and random weights in float32, and generates greedily and with beams. It
reads text, and an image in it if this script knows how to make one. Among equal scores stock operations take the smaller index, too.
A class is counted apart if this script can make no model of it that stock generate() runs. Takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import inspect
import re
import signal
import sys
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

from fused_topk.generation import fused_decoding, stats
from fused_topk.generation.whole_step import entry, reasons, row_form
from whole_calls import SmallerIndexFirst

# The token that stands where an image is.
IMAGE = 95
# Small values for the fields of configurations. Each configuration gets the fields that it has.
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
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index", "audio_token_id", "audio_token_index"), 94),
    **dict.fromkeys(("vision_start_token_id", "boi_token_index", "boi_token_id"), 93),
    **dict.fromkeys(("vision_end_token_id", "eoi_token_index", "eoi_token_id"), 92),
}
# The same for the part that reads images.
SMALL_VISION = {
    **SMALL,
    "image_size": 16,
    "patch_size": 4,
    "depth": 2,
    "num_heads": 4,
    "num_key_value_heads": 4,
    "out_hidden_size": 32,
    "mlp_ratio": 2.0,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "window_size": 16,
    "projection_dim": 32,
    "vision_use_head": False,
}
# The same for a configuration that has parts.
SMALL_WHOLE = {
    **SMALL,
    "projection_dim": 32,
    "image_seq_length": 16,
    "mm_tokens_per_image": 4,
    "downsample_factor": 2,
    "scale_factor": 2,
    "downsample_ratio": 0.5,
    "spatial_merge_size": 2,
}
# Values that some families need besides. VARIANTS are tried in turn until stock generate() runs.
_LATENT = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_key_value_heads": 4,
    "index_n_heads": 2,
    "index_topk": 64,
}
_KINDS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_types": [[["global", "local"], 1]],
    "sliding_window": 8,
    "activation_sparsity_pattern": [0.0, 0.0],
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 97,
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "global_head_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "altup_num_inputs"), 2),
    "n_shared_experts": 1,
    "languages": ["en_XX"],
    "default_language": "en_XX",
}
# Attention in some of four layers.
_HYBRID = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer"), 4),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "full_attention_interval", "layer_group_size"), 2),
    **dict.fromkeys(("attn_layer_offset", "num_dense_layers", "n_group", "topk_group"), 1),
    "attn_layer_indices": [1],
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "mamba_expand"), 2),
    "shared_expert_intermediate_size": 32,
    "partial_rotary_factor": 1.0,
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    _LATENT,
    {**_LATENT, "qk_rope_head_dim": 4},
    _KINDS,
    _HYBRID,
    {**_HYBRID, **_LATENT, "layer_types": ["linear_attention", "full_attention"] * 2},
    {**_HYBRID, "layer_types": ["conv", "full_attention"] * 2},
)
# The time limit of a class, with all its variants.
_SECONDS = 100
# With more weights than this, a configuration has sizes of other names.
_MOST_WEIGHTS = 20_000_000


class Row(NamedTuple):
    name: str
    reads: str
    way: str
    equal: str


class _TooLong(BaseException):
    pass


def config_of(kind: type, plain: Any, small: dict[str, Any], variant: dict[str, Any]) -> Any:
    """A small configuration of the same type as `plain`, its parts small too, for models of the class `kind`."""
    decoder = plain.get_text_config(decoder=True)
    taken = set(vars(plain)) | {*getattr(plain, "attribute_map", {})} | {*inspect.signature(type(plain)).parameters}
    options = {name: value for name, value in small.items() if name in taken}
    if "mlp_ratio" in options:
        # Some configurations take only whole numbers here, others only fractions.
        options["mlp_ratio"] = type(plain.mlp_ratio)(options["mlp_ratio"])
    if getattr(decoder, "num_key_value_heads", 1) is None:
        options.pop("num_key_value_heads", None)
    if small is not SMALL_VISION:
        options |= {name: value for name, value in variant.items() if name in taken}
    if plain.is_encoder_decoder:
        options.pop("is_decoder", None)
    for name in getattr(plain, "sub_configs", {}):
        part = getattr(plain, name, None)
        if part is not None:
            is_text = part is decoder or "text" in name or (plain.is_encoder_decoder and not reads_images_alone(kind))
            small_part = SMALL if is_text or name == "decoder" else SMALL_VISION
            options[name] = config_of(kind, part, small_part, variant)
            if plain.is_encoder_decoder and name in ("encoder", "decoder"):
                options[name].is_decoder = options[name].add_cross_attention = name == "decoder"
            if is_text and has_axes(kind, part):
                rotary = options[name].rope_parameters
                sections = [2, 1, 1] if rotary.get("partial_rotary_factor", 1.0) == 1.0 else [2, 0, 0]
                options[name].rope_parameters = {**rotary, "mrope_section": sections}
    return type(plain)(**options)


def reads_images_alone(kind: type) -> bool:
    return getattr(kind, "main_input_name", "input_ids") == "pixel_values"


def has_axes(kind: type, part: Any) -> bool:
    """Whether rotary positions have several axes, as places in an image do, which share a head's numbers."""
    modules = kind.__module__, type(part).__module__.replace("configuration", "modeling")
    return any("mrope_section" in inspect.getsource(sys.modules[name]) for name in modules if name in sys.modules)


def model_of(kind: type, variant: dict[str, Any]) -> Any:
    """A small model of the class, with one of VARIANTS."""
    plain = kind.config_class()  # type: ignore[attr-defined]
    small = SMALL if plain.get_text_config(decoder=True) is plain else SMALL_WHOLE
    config = config_of(kind, plain, small, variant)
    with torch.device("meta"):
        if sum(weight.numel() for weight in kind(config).parameters()) > _MOST_WEIGHTS:
            raise ValueError("a large model")
    torch.manual_seed(0)
    model = kind(config).eval()
    if config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        # T5's configuration does not say it, only its checkpoints do.
        model.generation_config.decoder_start_token_id = SMALL["decoder_start_token_id"]
    for weight in model.parameters():
        # Weights that the class does not initialise hold what was in memory. Where all biases are zero, some heads' logits are equal.
        if not bool(weight.isfinite().all()) or not bool(weight.any()):
            weight.data = torch.randn_like(weight) * 0.1
        if weight.dim() == 1:
            weight.data += torch.randn_like(weight) * 0.1
    return model


def images_for(model: Any, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Inputs with an image in each text, of each form that some model takes."""
    batch, generator = len(ids), torch.Generator().manual_seed(2)
    square = {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    grid = {
        "pixel_values": torch.randn(batch * 16, 96, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
    }
    sizes = {**square, "image_sizes": torch.tensor([[16, 16]] * batch)}
    crops = {"pixel_values": square["pixel_values"].unsqueeze(1)}
    crops_sizes = {**crops, "image_sizes": sizes["image_sizes"]}
    found = []
    arguments = inspect.signature(model.forward).parameters
    for images in (square, grid, sizes, crops, crops_sizes):
        if set(images) <= set(arguments):
            # How many tokens an image takes depends on the model. These numbers are common.
            for places in (4, 16, 1, 8, 17, 20, 12, 24, 64):
                image = torch.tensor([93, *[IMAGE] * places, 92]).expand(batch, -1)
                of_text = torch.cat([ids[:, :2], image, ids[:, 2:]], 1)
                inputs = {"input_ids": of_text, "attention_mask": torch.ones_like(of_text), **images}
                for name in ("token_type_ids", "mm_token_type_ids"):
                    if name in arguments:
                        inputs[name] = (of_text == IMAGE).long()
                found.append(inputs)
    return found


def inputs_of(model: Any) -> dict[str, Any]:
    """Two texts, with an image each where the model takes them in a form that is known here."""
    ids = torch.randint(8, 90, (2, 6), generator=torch.Generator().manual_seed(1))
    if model.main_input_name == "pixel_values" and model.config.is_encoder_decoder:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    if "pixel_values" in inspect.signature(model.forward).parameters:
        for inputs in images_for(model, ids):
            try:
                blank = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
                with torch.no_grad():
                    read = model(**inputs).logits
                    if bool((read != model(**blank).logits).any()):
                        return inputs
            except Exception:
                continue
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run_by_stock(kind: type) -> tuple[Any, list[dict[str, Any]], list[torch.Tensor]]:
    """A model of the class, calls of generate(), and what stock gives. Raises what the first variant raised if none runs."""
    first: Exception | None = None
    for variant in VARIANTS:
        try:
            model = model_of(kind, variant)
            inputs = inputs_of(model)
            calls = [
                {**inputs, "num_beams": beams, "num_return_sequences": beams, "max_new_tokens": 8, "do_sample": False}
                for beams in (1, 3)
            ]
            with SmallerIndexFirst():
                return model, calls, [model.generate(**each) for each in calls]
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def row_of(kind: type) -> Row:
    """Runs a class."""
    signal.alarm(_SECONDS)
    try:
        try:
            model, calls, stock = run_by_stock(kind)
        except (Exception, _TooLong) as error:
            return Row(kind.__name__, "", "none", f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}")
        reads = "images" if "pixel_values" in calls[0] else "text"
        stats(reset=True)
        with SmallerIndexFirst(), fused_decoding(model):
            found = [model.generate(**each) for each in calls]
        new = [*stats(reset=True).reasons]
        is_equal = all(torch.equal(one, other) for one, other in zip(stock, found, strict=True))
        if new:
            return Row(kind.__name__, reads, f"stock: {new[0]}", str(is_equal))
        # Whole steps are made for the part of the model that writes the text.
        ready = next(each for part in model.modules() if (each := entry._ready.get(part)) is not None)
        form = row_form.decoder_of(ready.twin).__name__
        way = "a row for each beam" if form == "RowDecoder" else "shared prompt"
        return Row(kind.__name__, reads, way, str(is_equal))
    except _TooLong:
        return Row(kind.__name__, "", "none", "too long")
    finally:
        signal.alarm(0)


def kinds() -> list[type]:
    """The generating classes that write text."""
    names: set[str] = set()
    for table in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        getattr(modeling_auto, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", {}),
        getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),
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
    # These small models write from few logits, too.
    reasons.FEW_LOGITS = 0
    print("| class | reads | whole steps | equal to stock |\n| --- | --- | --- | --- |", flush=True)
    made = []
    for kind in kinds():
        if names and kind.__name__ not in names:
            continue
        row = row_of(kind)
        made.append(row)
        print(f"| {row.name} | {row.reads} | {row.way} | {row.equal} |", flush=True)
    run = [row for row in made if row.way != "none"]
    served = [row for row in run if not row.way.startswith("stock")]
    differ = [row.name for row in run if row.equal != "True"]
    print(f"\n{grouped(run)}\n")
    print(f"{len(made)} classes, {len(run)} that this script runs, {len(served)} served; differ: {differ}")


def grouped(rows: list[Row]) -> str:
    """A table with a line for each way. `+` stands for ForConditionalGeneration; ForCausalLM and LMHeadModel are left out."""
    found: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row.way.startswith("stock")):
        name = re.sub("(ForCausalLM|LMHeadModel)$", "", row.name).replace("ForConditionalGeneration", "+")
        way = re.sub(f"{row.name} |( raises \\w+).*", r"\1", row.way)
        found.setdefault(way + ", after an image" * (row.reads == "images"), []).append(name)
    lines = [f"| {way} ({len(names)}) | {', '.join(names)} |" for way, names in found.items()]
    return "\n".join(["| way | classes |", "|---|---|", *lines])


def _raise_too_long(*_: Any) -> None:
    raise _TooLong


if __name__ == "__main__":
    main()

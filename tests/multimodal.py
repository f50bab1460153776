# SPDX-License-Identifier: Apache-2.0
"""Small models that read images and text, with random weights, and inputs for them."""

import functools
import inspect

import torch
import transformers

from decoding import BOS, PAD, TOKENS, VERSION, with_biases, with_own_head

# Before the places of an image, each of them, and after it.
BEGIN, IMAGE, VIDEO, END = 94, 95, 96, 93
_TEXT = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "tie_word_embeddings": False,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_ROTARY = {"rope_type": "default", "type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_QWEN_TEXT = {**_TEXT, "rope_parameters" if VERSION >= (5, 0) else "rope_scaling": _ROTARY}


def _with_tower(name: str, vision: str, text: str, **options):
    own = {"text_config": getattr(transformers, text)(**_TEXT, **options.pop("of_text", {}))}
    own["vision_config"] = getattr(transformers, vision)(**_VISION, **options.pop("of_vision", {}))
    return getattr(transformers, f"{name}Config")(**own, **options, image_token_id=IMAGE, image_token_index=IMAGE)


def _qwen(name: str, **vision):
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN}
    config = getattr(transformers, f"{name}Config")
    return config(text_config=_QWEN_TEXT, vision_config={**_QWEN_VISION, **vision}, **tokens)


# Each with the number of places that an image takes.
_CONFIGS = {
    "Llava": (16, lambda: _with_tower("Llava", "CLIPVisionConfig", "LlamaConfig", image_seq_length=16)),
    "Gemma3": (
        4,
        lambda: _with_tower(
            "Gemma3",
            "SiglipVisionConfig",
            "Gemma3TextConfig",
            mm_tokens_per_image=4,
            boi_token_index=BEGIN,
            eoi_token_index=END,
            of_text={
                "sliding_window": 5,
                "query_pre_attn_scalar": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ),
    "PaliGemma": (
        16,
        lambda: _with_tower(
            "PaliGemma", "SiglipVisionConfig", "GemmaConfig", projection_dim=32, hidden_size=32,
            of_vision={"projection_dim": 32},
        ),
    ),
    "Qwen2VL": (6, lambda: _qwen("Qwen2VL", embed_dim=32, mlp_ratio=2)),
    "Qwen3VL": (
        6,
        lambda: _qwen(
            "Qwen3VL",
            intermediate_size=64,
            out_hidden_size=32,
            deepstack_visual_indexes=[0],
            num_position_embeddings=16,
        ),
    ),
}  # fmt: skip
MULTIMODAL = [*_CONFIGS]


@functools.cache
def multimodal(name: str):
    """A model. Not to be changed: it is kept."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(_CONFIGS[name][1]())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            # Those of images would be so small that texts are not of them; some are zero, or as they were in memory.
            if "language_model" not in path and "lm_head" not in path and weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return with_biases(with_own_head(model), 0).eval()


@functools.cache
def encoder_of_images(decoder: str):
    """A model of two: one reads an image, the other writes of it. Not to be changed: it is kept."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "initializer_range": 0.3}
    encoder = transformers.ViTConfig(hidden_size=48, image_size=16, patch_size=4, **shape)
    options = {
        "vocab_size": 97,
        "max_position_embeddings": 96,
        "hidden_size": 32,
        "tie_word_embeddings": False,
        **shape,
    }
    own = getattr(transformers, f"{decoder}Config")(**options)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, own)
    torch.manual_seed(0)
    model = transformers.VisionEncoderDecoderModel(config)
    for name, value in {**TOKENS, "decoder_start_token_id": BOS}.items():
        setattr(config, name, value)
        setattr(model.generation_config, name, value)
    with_own_head(model.decoder)
    return with_biases(model, 0).eval()


def images_for(model, batch: int = 2, padding: int = 2, seed: int = 0, has_images: bool = True):
    """Prompts with an image each; `padding` places on the left of the first are padding."""
    name = type(model).__name__.removesuffix("ForConditionalGeneration")
    generator = torch.Generator().manual_seed(seed)
    places = _CONFIGS[name][0]
    text = torch.randint(8, 90, (batch, 7), generator=generator)
    image = torch.tensor([BEGIN, *[IMAGE] * places, END]).expand(batch, -1)
    ids = torch.cat([text[:, :3], image, text[:, 3:]], 1) if has_images else text
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = PAD, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if not has_images:
        return inputs
    if name.startswith("Qwen"):
        inputs["pixel_values"] = torch.randn(batch * 24, 96, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 6]] * batch)
    else:
        inputs["pixel_values"] = torch.randn(batch, 3, 16, 16, generator=generator)
    arguments = inspect.signature(model.forward).parameters
    for kind in ("token_type_ids", "mm_token_type_ids"):
        if kind in arguments:
            inputs[kind] = (ids == IMAGE).long()
    return inputs

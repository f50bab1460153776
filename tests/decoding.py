# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers models with random weights, and the comparison of stock and fused generate()."""

import copy
import functools
import math
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fused_topk.generation import fused_decoding, statistics
from rows import also as also

transformers.logging.set_verbosity_error()

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
PAD, BOS, EOS = 0, 1, 5
NAMES = ("gpt2", "llama", "t5", "bart", "whisper", "mixtral", "mamba")
ENCODER_DECODERS = ("t5", "bart", "whisper")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

# Fields of configurations: of small models with few tokens, and of encoder-decoders.
TOKENS = {"vocab_size": 97, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_DECODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 96}
SHAPE_OF_BOTH = {
    "d_model": 32,
    **{f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in (("layers", 2), ("attention_heads", 4))},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}
SOUND = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 96}
# Weights large enough that the next token is neither certain nor uniform, and that some hypotheses end early.
_CONFIGS = {
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}),
    "llama": ("Llama", "ForCausalLM", {**_DECODER, "intermediate_size": 64, "num_key_value_heads": 2}),
    "mixtral": ("Mixtral", "ForCausalLM",
        {**_DECODER, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4}),
    "mamba": ("Mamba", "ForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "t5": ("T5", "ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "initializer_factor": 3.0}),
    "bart": ("Bart", "ForConditionalGeneration",
        {**SHAPE_OF_BOTH, "max_position_embeddings": 96, "forced_eos_token_id": None}),
    "whisper": ("Whisper", "ForConditionalGeneration", {**SHAPE_OF_BOTH, **SOUND}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(threads):
    """For the tests of modules that import it: models this small spend ten times as long where threads wait in turns."""
    threads(1)


@functools.cache
def tiny(name: str, dtype: torch.dtype = torch.float32, vocab_size: int = 211, seed: int = 0):
    """A model with random weights, the same for the same arguments. Not to be changed: it is kept."""
    family, head, options = _CONFIGS[name]
    options = {**TOKENS, "vocab_size": vocab_size, **options}
    if name in ENCODER_DECODERS:
        options["decoder_start_token_id"] = 2
    if "initializer_factor" not in options:
        options["init_std" if name in ("bart", "whisper") else "initializer_range"] = 0.3
    torch.manual_seed(seed)
    model = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**options))
    return with_biases(model, seed).to(dtype).eval()


def with_biases(model, seed: int):
    """The model with random biases, which transformers makes zero: a forgotten one would show nowhere."""
    generator = torch.Generator().manual_seed(seed)
    # A buffer of the name may be a causal mask.
    buffers = [(name, each) for name, each in model.named_buffers() if name == "final_logits_bias"]
    with torch.no_grad():
        for name, each in [*model.named_parameters(), *buffers]:
            if name.endswith("bias"):
                each.copy_(torch.randn(each.shape, generator=generator) * 0.3)
    return model


# What a model has in the place of logits that are not to be chosen: of a padded vocabulary, of images.
FILLS = {"1e4": -1e4, "1e9": -1e9, "min": torch.finfo(torch.float32).min, "inf": -math.inf}


def masking(model, first: int, fill: float):
    """A copy of the model whose forward() gives `fill` as the logits of the tokens from `first` on."""

    @functools.wraps(type(model).forward)
    def forward(self, *args, **kwargs):
        output = super(type(self), self).forward(*args, **kwargs)
        output.logits[..., first:] = fill
        return output

    copied = copy.deepcopy(model)
    copied.__class__ = type(f"Masking{type(model).__name__}", (type(model),), {"forward": forward})
    return copied


def with_own_head(model):
    """The model with another head: random embeddings of tokens that are read would choose themselves."""
    head = torch.nn.Linear(32, 97, bias=False)
    head.weight.data = torch.randn(97, 32, generator=torch.Generator().manual_seed(0)) * 0.4
    model.set_output_embeddings(head)
    return model


def prompt_of_all(model, first: int):
    """Two prompts of all tokens before `first`, each once."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(first, generator=generator) for _ in range(2)])
    return {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}


def inputs_for(model, batch: int = 2, length: int = 6, padding: int = 0) -> dict[str, Tensor]:
    """Random inputs; `padding` places on the left of the first text are padding."""
    generator = torch.Generator().manual_seed(batch * 100 + length)
    if model.config.model_type == "whisper":
        shape = (batch, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator).to(model.dtype).to(model.device)}
    ids = torch.randint(8, model.config.vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = PAD, 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


class SmallerIndexFirst(TorchFunctionMode):
    """Within it torch.topk of plain tensors takes the smaller index among equals, where it promises none.

    `gap` is the smallest difference between neighbours of the k + 1 largest values of a row that it has seen. Rows
    shorter than `vocab_size` do not count: a router's experts, hypotheses that have ended.
    """

    # Beams that do not exist yet have scores of about this.
    _NO_CANDIDATE = -1e8

    def __init__(self, vocab_size: int = 0):
        super().__init__()
        self.vocab_size = vocab_size
        self.gap = float("inf")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.topk or type(args[0]) is not Tensor:
            return func(*args, **kwargs)
        k = kwargs["k"] if "k" in kwargs else args[1]
        values, indices = args[0].sort(dim=-1, descending=True, stable=True)
        if values.shape[-1] >= self.vocab_size:
            is_candidate = values[..., 1 : k + 1] > self._NO_CANDIDATE
            self.gap = min([self.gap, *(-values[..., : k + 1].diff(dim=-1)[is_candidate]).tolist()])
        return torch.return_types.topk((values[..., :k], indices[..., :k]))


def stock_gap(model, inputs, **options) -> float:
    """How far apart the closest two candidates are that stock generate() has to put in order."""
    order = SmallerIndexFirst(model.config.vocab_size)
    with order:
        model.generate(**inputs, do_sample=False, **options)
    return order.gap


class Steps(NamedTuple):
    """The tokens since the last reset, with those of whole steps that were compiled and captured."""

    whole: int
    stock: int
    reasons: dict[str, int]
    compiled: int
    captured: int


def stats(reset: bool = False) -> Steps:
    by_way = statistics.tokens_by_way()
    return Steps(*statistics.stats(reset), by_way.get("compiled", 0), by_way.get("captured", 0))


def generate_both(model, inputs=None, *, fused=fused_decoding, **options):
    """What stock and fused generate() give, and the steps of the fused one, as stats()."""
    inputs = inputs_for(model) if inputs is None else inputs
    options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, **options}
    # Without it beam search gives no scores of its sequences.
    options.setdefault("output_scores", options.get("num_beams", 1) > 1)
    with SmallerIndexFirst():
        stock = model.generate(**inputs, **options)
        stats(reset=True)
        with fused(model):
            given = model.generate(**inputs, **options)
    return stock, given, stats(reset=True)


def assert_same(stock, given, atol: float = 2e-5) -> None:
    """Same sequences; scores of sequences and of tokens within `atol`, or some units in the last place of float32."""
    assert type(given) is type(stock)
    torch.testing.assert_close(given["sequences"], stock["sequences"], rtol=0, atol=0)
    for name in ("sequences_scores", "scores", "logits"):
        assert (given.get(name) is None) == (stock.get(name) is None), name
        if stock.get(name) is not None:
            torch.testing.assert_close(given[name], stock[name], rtol=5e-7, atol=atol)
    if stock.get("beam_indices") is not None:
        torch.testing.assert_close(given["beam_indices"], stock["beam_indices"], rtol=0, atol=0)
    for name in ("cache", "past_key_values"):
        assert_same_cache(stock.get(name), given.get(name), atol)


def layers_of(cache) -> list:
    """The layers of a cache of transformers, those of sources behind the others."""
    parts = [getattr(cache, f"{part}_attention_cache", None) for part in ("self", "cross")]
    return [layer for part in parts if part is not None for layer in part.layers] or list(getattr(cache, "layers", ()))


def assert_same_cache(stock, given, atol: float = 2e-5) -> None:
    """Same types, lengths and contents."""
    assert type(given) is type(stock)
    for one, other in zip(layers_of(stock), layers_of(given), strict=True):
        assert type(other) is type(one) and vars(other).keys() == vars(one).keys()
        # A layer with a state alone has no length.
        if hasattr(one, "get_seq_length"):
            assert other.get_seq_length() == one.get_seq_length()
        for name in ("keys", "values"):
            if isinstance(getattr(one, name, None), Tensor):
                torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=1e-4, atol=10 * atol)
        for name in ("conv_states", "recurrent_states"):
            # By the number of the state, which may be None.
            torch.testing.assert_close(getattr(other, name, None), getattr(one, name, None), rtol=1e-4, atol=10 * atol)


# Attention adds in another order in whole steps than in stock generate(), whose own scores of these models lie up to 1.2e-5 from
# float64. Experts multiply rows in another order too.
TOLERANCE = 5e-5
# The logits of T5 are up to 41, and those of stock lie up to 1.4e-3 from float64.
_OF_T5 = 2e-4


def assert_whole(model, inputs=None, *, compile=False, kinds=(), **options):
    """Stock and whole-step generate() agree, and every step of the latter was whole. Gives what stock gives.

    Args:
        compile: see `fused_decoding`.
        kinds: of "compiled" and "captured", what every step was.
    """
    fused = functools.partial(fused_decoding, compile=compile)
    stock, given, steps = generate_both(model, inputs, fused=fused, **options)
    assert_same(stock, given, _OF_T5 if model.config.model_type == "t5" else TOLERANCE)
    assert not steps.reasons and steps.whole > 0 and steps.stock == 0, steps
    of_kinds = {"compiled": steps.compiled, "captured": steps.captured}
    assert not kinds or of_kinds == {kind: steps.whole * (kind in kinds) for kind in of_kinds}, steps
    return stock


def is_likely(counts, probabilities, draws):
    """Pearson's chi-square test: False for what 1 in 10,000 sets of draws from the distribution would show.

    Tokens with fewer than five draws expected count together.
    """
    expected = probabilities.double() * draws
    assert counts[expected == 0].sum() == 0, "a token with probability 0 was drawn"
    is_rare = expected < 5
    observed = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]]).double()
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    # The upper tail of the chi-square distribution.
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2)) > 1e-4


OPTIONS = {"max_new_tokens": 6, "do_sample": False}


def run(model, **options):
    """The sequences of generate() on two prompts, and its steps as stats()."""
    stats(reset=True)
    with SmallerIndexFirst():
        found = model.generate(**inputs_for(model), **{**OPTIONS, **options})
    return found, stats(reset=True)


@pytest.fixture(name="model")
def own_model():
    """A model of its own for each test, which may change it."""
    return copy.deepcopy(tiny("llama"))


class Recorder(transformers.generation.streamers.BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value.tolist())

    def end(self):
        self.pieces.append("end")

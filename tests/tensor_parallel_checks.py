# SPDX-License-Identifier: Apache-2.0
"""What each process of a tensor-parallel model checks (test_generation_tensor_parallel.py)."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distributed_checks import frame
from fused_topk import backends
from fused_topk.generation import (
    FusedTopKLogitsProcessor,
    TokenTrie,
    TrieLogitsProcessor,
    disable,
    enable,
    fused_decoding,
    generate,
    stats,
)
from fused_topk.generation.choice import masks
from fused_topk.generation.choice.rows import Rows
from fused_topk.generation.tensor_parallel.sharded_logits import Columns, ShardedLogits
from fused_topk.generation.tensor_parallel.sharded_rows import ShardedRows

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FOLDER = ""  # that all processes can write
PAD, BOS, EOS = 0, 1, 5
_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
# Earlier versions leave the LM head whole on every process.
IS_SERVED = _VERSION >= (5, 17)
# Whether the vocabulary may be one that the group does not divide.
MAY_BE_UNEVEN = _VERSION >= (5, 24)
VOCAB_SIZE = 211 if MAY_BE_UNEVEN else 212
LLAMA, GEMMA, QWEN = "Llama", "Gemma2", "Qwen2"
_OWN = {
    GEMMA: {
        "head_dim": 8,
        "sliding_window": 16,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    }
}
NEW_TOKENS = 7
PROMPTS = torch.tensor([[1, 8, 9, 12], [3, 40, 10, 8]])


@functools.cache
def models(family: str = LLAMA, vocab_size: int = VOCAB_SIZE, tied: bool = False):
    """The same weights spread over all processes, and in this one alone. Not to be changed."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    path = Path(FOLDER, f"{family}_{vocab_size}_{tied}")
    if dist.get_rank() == 0:
        config = getattr(transformers, f"{family}Config")(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            initializer_range=0.3,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            **{"tie_word_embeddings": tied, **_OWN.get(family, {})},
        )
        torch.manual_seed(0)
        kind(config).save_pretrained(path)
    dist.barrier()
    sharded = kind.from_pretrained(path, **_plan()).eval()
    assert (type(sharded.lm_head.weight).__name__ == "DTensor") == IS_SERVED
    return sharded, kind.from_pretrained(path).eval()


def _plan() -> dict[str, object]:
    """What from_pretrained() takes for a tensor-parallel model."""
    from transformers.distributed import DistributedConfig

    if "tp_plan" in inspect.signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}


class Collectives(TorchDispatchMode):
    """The bytes that this process gives to each all-gather within the block, whoever calls it."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "gather" in func.name() and "c10d" in func.namespace:
            given = args[0] if func.namespace == "_c10d_functional" else args[1]
            self.given.append(given.nbytes)
        return func(*args, **(kwargs or {}))


def sequences(model, prompts=PROMPTS, **options) -> Tensor:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)


def assert_sharded(model, alone, sampling: bool = False, **options) -> list[int]:
    """The sequences of one process, and no step gathers the logits. Returns the bytes of all all-gathers."""
    stats(reset=True)
    with fused_decoding(model, sampling=sampling, whole_step=False), Collectives() as collectives:
        got = sequences(model, **options)
    steps = stats(reset=True)
    assert torch.equal(got, sequences(alone, **options)), options
    assert steps.gathered == {} and steps.reasons == {}, (options, steps.gathered, steps.reasons)
    assert steps.sharded == steps.fused > 0, (options, steps.sharded, steps.fused)
    return collectives.given


def assert_gathered(reason: str, model, alone, **options) -> None:
    """The sequences of one process, and every step gathers the logits for that reason."""
    stats(reset=True)
    with fused_decoding(model, whole_step=False):
        got = sequences(model, **options)
    steps = stats(reset=True)
    assert torch.equal(got, sequences(alone, **options)), options
    assert list(steps.gathered) == [reason], (options, steps.gathered)
    assert steps.sharded == 0 and steps.gathered[reason] == steps.fused + steps.fallback > 0


def whole_heads(rank: int, size: int) -> None:
    """A head that every process has whole, as in versions that do not spread it, gathers nothing and is fused as ever."""
    model, alone = (models()[1],) * 2 if IS_SERVED else models()
    stats(reset=True)
    for options in ({}, {"num_beams": 3}):
        with fused_decoding(model, whole_step=False), Collectives() as collectives:
            got = sequences(model, **options)
        assert torch.equal(got, sequences(alone, **options)) and collectives.given == []
    steps = stats(reset=True)
    assert steps.fused > 0 == steps.sharded and steps.gathered == {} and steps.reasons == {}


def greedy_and_beams(rank: int, size: int) -> None:
    model, alone = models()
    for options in ({}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}):
        assert_sharded(model, alone, **options)


def the_choice_of_columns(rank: int, size: int) -> None:
    """Each question that a step may ask of its rows, with and without tokens that are left out."""
    # Of 9 tokens the fourth process has none.
    for vocab_size in (VOCAB_SIZE, 9):
        _check_choice(rank, size, vocab_size)


def _check_choice(rank: int, size: int, vocab_size: int) -> None:
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))
    columns = Columns.of(dist.group.WORLD, rank, size, vocab_size)
    own = logits[:, columns.start : columns.start + columns.length]
    backend = backends.pick(logits.device, logits.dtype, 1, None)
    whole = Rows(logits, backend)
    sharded = ShardedRows(ShardedLogits.of(own, columns), backend, None)
    assert torch.equal(sharded.greatest(), whole.greatest())
    beam_scores = torch.tensor([[-1.0, -1.5, -2.0], [-0.5, -0.2, -3.0]])
    ids = torch.randint(vocab_size, (6, 9), generator=torch.Generator().manual_seed(1))
    allowed = torch.rand(6, vocab_size, generator=torch.Generator().manual_seed(2)) < 0.4
    for mask in (None, masks.of(allowed.numpy(), logits.device), masks.of(allowed[:1].numpy(), logits.device)):
        for got, want in (
            (sharded.topk(7, mask), whole.topk(7, mask)),
            (sharded.log_softmax_topk(7, mask), whole.log_softmax_topk(7, mask)),
            (sharded.beam_topk(beam_scores, 8, mask), whole.beam_topk(beam_scores, 8, mask)),
        ):
            assert torch.equal(got.indices, want.indices)
            torch.testing.assert_close(got.values, want.values, rtol=0, atol=2e-6, equal_nan=True)
            torch.testing.assert_close(got.logsumexp, want.logsumexp, rtol=0, atol=2e-6)
        (whole_row, of_ids), (expected, of_expected) = (
            rows.state_and_logits(7, mask, ids) for rows in (sharded, whole)
        )
        assert torch.equal(of_ids, of_expected)
        for got, want in (
            (whole_row, expected),
            (sharded.state(1, mask, "allowed", 0.6), whole.state(1, mask, "allowed", 0.6)),
        ):
            for name in ("logits", "indices", "m"):
                assert torch.equal(getattr(got, name), getattr(want, name)), name
            torch.testing.assert_close(got.d, want.d, rtol=2e-6, atol=0)


def few_bytes_a_step(rank: int, size: int) -> None:
    """One all-gather of the candidates a step, besides one a call."""
    model, alone = models()
    for options, rows, k in (({}, 2, 1), ({"num_beams": 3}, 6, 6), ({"repetition_penalty": 1.5}, 2, 1)):
        sequences_of(model, options)
        given = assert_sharded(model, alone, eos_token_id=None, **options)
        of_state = 16 + rows * 8 + rows * k * 8 + -(-rows * k * 4 // 8) * 8
        # The logits of the tokens of the text that a penalty changes.
        texts = [PROMPTS.shape[1] + step for step in range(NEW_TOKENS)]
        touched = [-(-rows * length * 4 // 8) * 8 if options.get("repetition_penalty") else 0 for length in texts]
        assert given == [16, *(frame(of_state + each) for each in touched)], (options, given)
        assert of_state + max(touched) < rows * VOCAB_SIZE // size * 4


def sequences_of(model, options) -> None:
    with fused_decoding(model, whole_step=False):
        sequences(model, eos_token_id=None, **options)


def other_heads(rank: int, size: int) -> None:
    """A soft cap behind the head, one tied to the embedding, and vocabularies that a group divides and that it does not."""
    for family, vocab_size, tied in ((GEMMA, 211, True), (QWEN, 208, False), (QWEN, 209, True), (LLAMA, 212, True)):
        if not MAY_BE_UNEVEN:
            vocab_size = 208
        model, alone = models(family, vocab_size, tied)
        assert_sharded(model, alone)
        assert_sharded(model, alone, num_beams=3)
        assert_sharded(model, alone, num_beams=2, repetition_penalty=1.3)


def processors(rank: int, size: int) -> None:
    """Those that are fused elsewhere are fused here."""
    model, alone = models()
    tokens = torch.tensor([0, 31, 32, 104, 105, 106, 107, 210])
    trie = TokenTrie(torch.cartesian_prod(tokens, tokens, tokens), end_token_id=5)
    for options in (
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 5, "suppress_tokens": list(range(90, 160))},
        {"bad_words_ids": [[7], [3, 40], [200]], "sequence_bias": {(210,): 3.0, (33, 4): 9.0}},
        {"forced_eos_token_id": 5, "forced_bos_token_id": 4, "begin_suppress_tokens": [105, 106, 107]},
        {"exponential_decay_length_penalty": (2, 1.5)},
        {"remove_invalid_values": True},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [5, 104, 105, 106, 107, 210, int(ids[-1])]},
        {"logits_processor": [TrieLogitsProcessor(trie, PROMPTS.shape[1])]},
        {"renormalize_logits": True, "repetition_penalty": 0.8},
    ):
        assert_sharded(model, alone, **options)
        assert_sharded(model, alone, num_beams=3, **options)


def sampling(rank: int, size: int) -> None:
    """The same draws on all processes, whatever their own random numbers; of the tokens that the warpers keep."""
    model, alone = models()
    prompts = PROMPTS[:1].expand(400, -1)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(1000 * seed + (0 if rank == 0 else rank + 7 * seed))
        stats(reset=True)
        with fused_decoding(model, sampling=True, whole_step=False):
            found.append(sequences(model, prompts, do_sample=True, top_k=6, temperature=2.0, max_new_tokens=2))
        steps = stats(reset=True)
        assert steps.sharded == 2 and steps.gathered == {}, steps.gathered
        assert_equal_everywhere(found[-1])
    # Named by the first process's random numbers.
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    logits = alone(PROMPTS[:1]).logits[0, -1] / 2.0
    best = logits.topk(6)
    counts = torch.stack([(each[:, PROMPTS.shape[1]] == best.indices.unsqueeze(1)).sum(1) for each in found[1:]]).sum(0)
    assert counts.sum() == 800
    expected = best.values.softmax(-1) * 800
    # Of 5 degrees of freedom: more in 1 of a million.
    assert ((counts - expected) ** 2 / expected).sum() < 37, (counts, expected)
    for options in (
        {"top_k": 0, "min_new_tokens": 3},
        {"top_k": 0, "temperature": 1.5},
        {"top_k": 0, "repetition_penalty": 1.1},
        {"top_p": 0.7, "top_k": 0},
        {"min_p": 0.1, "top_k": 0, "repetition_penalty": 1.2},
        {"num_beams": 3, "top_k": 5},
    ):
        torch.manual_seed(rank)
        with fused_decoding(model, sampling=True, whole_step=False):
            got = sequences(model, do_sample=True, **options)
        steps = stats(reset=True)
        assert steps.sharded == steps.fused > 0 and steps.gathered == {}, (options, steps.gathered)
        assert_equal_everywhere(got)
    assert_sharded(model, alone, sampling=True, do_sample=True, top_k=1)
    # Scores that processors change, in the columns of the first process and of the last: there is nothing random.
    for token in (0, VOCAB_SIZE - 1):
        options = {"sequence_bias": {(token,): 1000.0}, "repetition_penalty": 1.1, "eos_token_id": None}
        assert_sharded(model, alone, sampling=True, do_sample=True, top_k=0, **options)
    assert_sharded(
        model, alone, sampling=True, do_sample=True, top_k=0, forced_eos_token_id=VOCAB_SIZE - 1, max_new_tokens=1
    )


def draws_of_stock_operations(rank: int, size: int) -> None:
    """They use the caller's random numbers, and none of them have been used before."""
    model, alone = models()
    own = {"logits_processor": transformers.LogitsProcessorList([lambda ids, scores: scores])}
    for sampling, options in ((False, {}), (True, own)):
        torch.manual_seed(3)
        want = sequences(alone, do_sample=True, **options)
        torch.manual_seed(3)
        with fused_decoding(model, sampling=sampling, whole_step=False):
            assert torch.equal(sequences(model, do_sample=True, **options), want)


def draws_from_gathered_logits(rank: int, size: int) -> None:
    """The same on all processes, whatever their own random numbers."""
    model, _ = models()
    torch.manual_seed(rank)
    stats(reset=True)
    with fused_decoding(model, sampling=True, whole_step=False):
        options = {"return_dict_in_generate": True, "output_scores": True, "top_k": 0, "top_p": 0.8}
        found = model.generate(PROMPTS, do_sample=True, max_new_tokens=NEW_TOKENS, **options)
    steps = stats(reset=True)
    assert steps.gathered and steps.fused > 0, steps
    assert_equal_everywhere(found.sequences)


def assert_equal_everywhere(tokens: Tensor) -> None:
    everywhere = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, tokens)
    assert all(torch.equal(each, tokens) for each in everywhere)


def records(rank: int, size: int) -> None:
    """The best tokens of each step, as the record of a block."""
    model, alone = models()
    with fused_decoding(model, topk_per_step=4, whole_step=False) as given:
        sequences(model, num_beams=2)
    with fused_decoding(alone, topk_per_step=4, whole_step=False) as expected:
        sequences(alone, num_beams=2)
    for got, of_alone in zip(given.topk, expected.topk, strict=True):
        assert torch.equal(got.indices, of_alone.indices)
        torch.testing.assert_close(got.values, of_alone.values, rtol=0, atol=1e-5)
        torch.testing.assert_close(got.logsumexp, of_alone.logsumexp, rtol=0, atol=1e-5)


def ways_to_ask(rank: int, size: int) -> None:
    model, alone = models()
    forward = model.lm_head.__dict__["forward"]
    expected = sequences(alone, num_beams=2)
    stats(reset=True)
    assert torch.equal(sequences(model, num_beams=2, custom_generate=generate, whole_step=False), expected)
    assert stats(reset=True).sharded == NEW_TOKENS
    enable(model, whole_step=False)
    assert torch.equal(sequences(model, num_beams=2), expected)
    assert stats(reset=True).sharded == NEW_TOKENS
    whole = model(PROMPTS).logits
    assert type(whole) is Tensor and whole.shape[-1] == VOCAB_SIZE
    disable(model)
    assert model.lm_head.__dict__["forward"] is forward
    with fused_decoding(model, whole_step=True):
        assert torch.equal(sequences(model, num_beams=2), expected)
    steps = stats(reset=True)
    assert steps.not_whole == {} and steps.whole == NEW_TOKENS, steps
    assert model.lm_head.__dict__["forward"] is forward
    # Without grad mode off it is transformers' own forward() that runs, as autograd needs it.
    assert sequences(model, num_beams=2).tolist() == expected.tolist()


def others_get_whole_logits(rank: int, size: int) -> None:
    """Hooks, scores that are kept, processors and a forward() of the user's: plain tensors of the whole vocabulary."""
    model, alone = models()
    seen = []

    def see(found):
        assert type(found) is Tensor and found.shape[-1] == VOCAB_SIZE, (type(found), found.shape)
        seen.append(found.float())

    handle = model.register_forward_hook(lambda module, args, output: see(output.logits))
    assert_gathered("a forward hook of the model", model, alone)
    handle.remove()
    handle = model.lm_head.register_forward_hook(lambda module, args, output: see(output))
    assert_gathered("a forward hook of the LM head", model, alone, num_beams=2)
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    assert_gathered("a forward hook of all modules", model, alone)
    handle.remove()
    kept = type(model).forward.__get__(model)
    model.forward = functools.wraps(kept)(lambda *args, **kwargs: kept(*args, **kwargs))
    assert_gathered("a forward() of the model that has been replaced", model, alone)
    del model.forward
    kind = type(model)

    class Updating(kind):
        def _update_model_kwargs_for_generation(self, outputs, *args, **kwargs):
            see(outputs.logits.detach())
            return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)

    model.__class__ = Updating
    assert_gathered("_update_model_kwargs_for_generation of Updating", model, alone)
    model.__class__ = kind
    assert len(seen) == 3 * NEW_TOKENS

    def process(ids, scores):
        see(scores)
        return scores

    reason = f"logits processor {__name__}.{process.__qualname__}"
    assert_gathered(reason, model, alone, logits_processor=[process])
    assert_gathered(reason, model, alone, logits_processor=[process], num_beams=2)
    assert len(seen) == 7 * NEW_TOKENS, len(seen)

    # Another's question in the middle of a call.
    def ask(batch, ids):
        see(model(ids[None]).logits)
        see(model.lm_head(torch.zeros(1, 32)))
        return list(range(VOCAB_SIZE))

    stats(reset=True)
    with fused_decoding(model, whole_step=False):
        got = sequences(model, prefix_allowed_tokens_fn=ask)
    assert torch.equal(got, sequences(alone))
    assert list(stats().gathered) == ["a call of the model in the middle of generate()"]
    assert stats(reset=True).sharded == NEW_TOKENS


def models_that_do_more(rank: int, size: int) -> None:
    """What a model does to logits besides a soft cap runs on whole ones, and a compiled model computes as it is."""
    model, alone = models()
    forward = model.lm_head.__dict__["forward"]
    kind = type(model)

    class Filling(kind):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            # In place, through a view.
            output.logits[..., :3].fill_(-1e3)
            return output

    model.__class__ = Filling
    stats(reset=True)
    with fused_decoding(model, whole_step=False):
        got = sequences(model, num_beams=2)
    assert stats(reset=True).gathered == {"operation __getitem__ on the logits of a tensor-parallel model": NEW_TOKENS}
    assert torch.equal(got, sequences(model, num_beams=2))

    class Normalizing(kind):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.log_softmax(-1)
            return output

    model.__class__ = Normalizing
    assert_gathered("operation log_softmax on the logits of a tensor-parallel model", model, alone, num_beams=2)
    model.__class__ = kind
    model.compile(backend="eager")
    assert_gathered("a forward pass whose LM head gives no columns, such as a compiled one", model, alone)
    del model._compiled_call_impl
    torch.compiler.reset()
    assert model.lm_head.__dict__["forward"] is forward
    assert_sharded(model, alone)


def scores_that_are_kept(rank: int, size: int) -> None:
    model, alone = models()
    for beams in (1, 2):
        for name in ("output_scores", "output_logits"):
            options = {"num_beams": beams, name: True, "return_dict_in_generate": True}
            with fused_decoding(model, whole_step=False):
                got = sequences(model, **options)
            assert list(stats(reset=True).gathered) == [name]
            expected = sequences(alone, **options)
            assert torch.equal(got.sequences, expected.sequences)
            for of_step, of_alone in zip(got[name[7:]], expected[name[7:]], strict=True):
                assert type(of_step) is Tensor
                torch.testing.assert_close(of_step, of_alone, rtol=1e-5, atol=1e-5)


def what_cannot_be_served(rank: int, size: int) -> None:
    model, alone = models()
    # What a call asks for is not the same everywhere, though what it gives is.
    own = [FusedTopKLogitsProcessor(VOCAB_SIZE)] if rank == size - 1 else []
    assert_gathered("a call that is not the same on all processes", model, alone, logits_processor=own)
    stats(reset=True)
    with fused_decoding(model, whole_step=False):
        torch.manual_seed(0)
        sequences(model, do_sample=True)
    assert list(stats(reset=True).gathered) == ["do_sample without sampling=True"]
    with fused_decoding(model, sampling=True, whole_step=False):
        torch.manual_seed(rank)
        got = sequences(model, do_sample=True, top_k=0, temperature=1e31)
    assert list(stats(reset=True).gathered) == ["sampling from the whole vocabulary"]
    assert_equal_everywhere(got)
    linear = type(model.lm_head)
    model.lm_head.__class__ = type("OwnLinear", (linear,), {})
    assert_gathered("an LM head that is a OwnLinear", model, alone)
    model.lm_head.__class__ = linear

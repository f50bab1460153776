# SPDX-License-Identifier: Apache-2.0
"""What each process of a tensor-parallel model checks (test_whole_step_parallel.py)."""

import functools
import inspect
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from captured import StandIn, graphs_of
from decoding import EOS, TOKENS, VERSION, Recorder, Steps, stats
from fused_topk.generation import TokenTrie, TrieLogitsProcessor, disable, enable, fused_decoding
from fused_topk.generation.whole_step import entry, graphs, trial
from fused_topk.generation.whole_step.entry import drop
from processes import assert_equal_everywhere

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FOLDER = ""  # that all processes can write
# Earlier versions leave the LM head whole on every process.
IS_SERVED = VERSION >= (5, 17)
# Whether the vocabulary may be one that the group does not divide.
MAY_BE_UNEVEN = VERSION >= (5, 24)
VOCAB_SIZE = 211 if MAY_BE_UNEVEN else 212
LLAMA, GRANITE, QWEN = "Llama", "Granite", "Qwen2"
_OWN = {GRANITE: {"embedding_multiplier": 3.0, "logits_scaling": 4.0}}
NEW_TOKENS = 7
PROMPTS = torch.tensor([[1, 8, 9, 12], [3, 40, 10, 8]])
ALONE = "a trial that has failed on another process"
UNLIKE = "a call that is not the same on all processes"
CLOCK = "max_time or stop_strings in a tensor-parallel model"
POSITIONAL = "generate() with three positional arguments or more"
FUNCTION = "a function of the user's, or a grammar, in a tensor-parallel model"


@functools.cache
def models(family: str = LLAMA, vocab_size: int = VOCAB_SIZE, tied: bool = False):
    """The same weights spread over all processes, and in this one alone. Not to be changed."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    path = Path(FOLDER, f"{family}_{vocab_size}_{tied}")
    if dist.get_rank() == 0:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        options = {**TOKENS, **shape, "vocab_size": vocab_size, "num_key_value_heads": 4, "initializer_range": 0.3}
        own = {"tie_word_embeddings": tied, **_OWN.get(family, {})}
        config = getattr(transformers, f"{family}Config")(**options, **own)
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


class Never(StoppingCriteria):
    """Ends no text."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


class OwnList(LogitsProcessorList):
    """Changes nothing."""


class Dying(BaseStreamer):
    """Ends the process in the middle of a call."""

    def __init__(self):
        self.left = 12

    def put(self, value):
        self.left -= 1
        if not self.left:
            os._exit(1)

    def end(self):
        pass


def sequences(model, prompts=PROMPTS, *args, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return model.generate(prompts, *args, **{"attention_mask": torch.ones_like(prompts), **options})


def fused(model, prompts=PROMPTS, *args, compile=False, **options) -> tuple[Tensor, Steps]:
    """What a call in a block gives, and its steps."""
    stats(reset=True)
    with fused_decoding(model, compile=compile):
        found = sequences(model, prompts, *args, **options)
    return found, stats(reset=True)


def whole(model, prompts=PROMPTS, **options):
    """What a call in whole steps gives. Every step of it is one."""
    found, steps = fused(model, prompts, **options)
    assert steps.reasons == {} and steps.stock == 0 < steps.whole, (options, steps)
    return found


def assert_stock(reason: str, model, expected: Tensor, **options) -> None:
    """The call gives these texts, and none of its steps is whole for that reason."""
    found, steps = fused(model, **options)
    assert torch.equal(found, expected), options
    assert steps.whole == 0 < steps.stock and steps.reasons == {reason: 1}, (options, steps)


def heads_that_are_whole(rank: int, size: int) -> None:
    """In versions that do not spread the LM head: stock's texts."""
    model, alone = models()
    for options in ({}, {"num_beams": 3}):
        found, steps = fused(model, **options)
        assert torch.equal(found, sequences(alone, **options))
        assert steps.whole == 0 < steps.stock, steps


def texts_and_scores(rank: int, size: int) -> None:
    """Of every kind of head, embedding and bias, with a scale behind the head, and of vocabularies that no group divides."""
    kinds = ((LLAMA, 211, False), (GRANITE, 211, True), (QWEN, 208, False), (QWEN, 209, True))
    for family, vocab_size, tied in kinds:
        model, alone = models(family, vocab_size if MAY_BE_UNEVEN else 208, tied)
        for options in (
            {},
            {"num_beams": 3},
            {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
            {"num_beams": 3, "eos_token_id": None, "max_new_tokens": 3},
        ):
            # Without scores the choice is made from columns.
            expected = sequences(alone, **options)
            assert torch.equal(whole(model, **options), expected), (family, options)
            kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
            got, of_stock = (run(model, **options, **kept) for run in (whole, sequences))
            assert torch.equal(got.sequences, expected), (family, options)
            names = ("scores", "logits", *(("sequences_scores", "beam_indices") if "num_beams" in options else ()))
            for name in names:
                torch.testing.assert_close(got[name], of_stock[name], rtol=1e-5, atol=1e-5)
    # Ends in the first of its steps, as tokens say.
    model, _ = models()
    first = sequences(model, max_new_tokens=1)[:, -1].tolist()
    assert whole(model, eos_token_id=first, max_new_tokens=50).shape[1] == PROMPTS.shape[1] + 1


def processors(rank: int, size: int) -> None:
    model, alone = models()
    tokens = torch.tensor([0, 31, 32, 104, 105, 106, 107, 210])
    trie = TokenTrie(torch.cartesian_prod(tokens, tokens, tokens), end_token_id=EOS)
    for options in (
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "suppress_tokens": list(range(90, 160))},
        {"bad_words_ids": [[7], [3, 40], [200]], "sequence_bias": {(210,): 3.0, (33, 4): 9.0}},
        {"logits_processor": [TrieLogitsProcessor(trie, PROMPTS.shape[1])]},
        {"renormalize_logits": True, "repetition_penalty": 0.8},
    ):
        for beams in ({}, {"num_beams": 3}):
            assert torch.equal(whole(model, **beams, **options), sequences(alone, **beams, **options)), options


def sampling(rank: int, size: int) -> None:
    """With one seed the texts of one process, and with several those of the first process on all of them."""
    model, alone = models()
    for options in (
        {},
        {"top_k": 0, "temperature": 1.5, "min_new_tokens": 3},
        {"top_k": 0, "top_p": 0.7},
        {"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.2},
        {"num_beams": 3, "top_k": 5},
    ):
        texts = []
        for run, of in ((whole, model), (sequences, alone), (sequences, model)):
            torch.manual_seed(3)
            # All have drawn as much.
            texts.append(torch.cat([run(of, do_sample=True, **options).flatten(), torch.randint(1 << 30, (1,))]))
        assert all(torch.equal(each, texts[0]) for each in texts), options
        torch.manual_seed(3 + rank)
        of_seeds = whole(model, do_sample=True, **options)
        assert torch.equal(of_seeds.flatten(), texts[0][:-1])
        assert_equal_everywhere(of_seeds)


def ways_to_ask(rank: int, size: int) -> None:
    model, alone = models()
    forward = model.lm_head.forward
    expected = sequences(alone, num_beams=2)
    stats(reset=True)
    enable(model)
    assert torch.equal(sequences(model, num_beams=2), expected)
    logits = model(PROMPTS).logits
    assert type(logits) is Tensor and logits.shape[-1] == VOCAB_SIZE
    disable(model)
    steps = stats(reset=True)
    assert steps.reasons == {} and steps.whole == NEW_TOKENS, steps
    assert torch.equal(sequences(model, num_beams=2), expected) and stats().whole == 0
    assert model.lm_head.forward is forward
    # Where the last process alone has a streamer, which asks for nothing that others must do.
    streamer = Recorder() if rank == size - 1 else None
    assert torch.equal(whole(model, streamer=streamer), sequences(alone))
    assert streamer is None or len(streamer.pieces) == NEW_TOKENS + 2
    # The record of a block.
    records = []
    for each in (model, alone):
        with fused_decoding(each, topk_per_step=4) as given:
            sequences(each, num_beams=2)
        records.append(given.topk)
    for of_model, of_alone in zip(*records, strict=True):
        assert torch.equal(of_model.indices, of_alone.indices)
        torch.testing.assert_close(of_model.values, of_alone.values, rtol=0, atol=1e-5)
        torch.testing.assert_close(of_model.logsumexp, of_alone.logsumexp, rtol=0, atol=1e-5)


def what_is_exchanged(rank: int, size: int) -> None:
    """A question, and in each step the candidates: no gather of logits. In the first call a trial, and one question more."""
    model, _ = models(LLAMA, 204)
    given = []
    for _ in range(2):
        with Collectives() as collectives:
            whole(model, eos_token_id=None, max_new_tokens=5)
        given.append(collectives.given)
    asked, frame = 8, 4096
    assert given[1] == [asked, *[frame] * 5], given
    assert given[0][0] == asked and given[0][-6:] == given[1], given


def a_process_that_differs(rank: int, size: int) -> None:
    """All run stock's generate(), and the next call is whole."""
    model, alone = models()
    expected, is_last = sequences(alone), rank == size - 1
    assert_stock(CLOCK if is_last else UNLIKE, model, expected, **({"max_time": 1000.0} if is_last else {}))
    assert torch.equal(whole(model), expected)


def processes_that_differ(rank: int, size: int) -> None:
    """Whatever differs, all run stock's generate(), and the next call is whole."""
    model, alone = models()
    expected, is_last = sequences(alone), rank == size - 1

    def differs(reason, *args, of_others=UNLIKE, **own):
        """The last process gives these arguments, and runs stock's generate() for this reason."""
        found, steps = fused(model, PROMPTS, *(args if is_last else ()), **(own if is_last else {}))
        assert torch.equal(getattr(found, "sequences", found), expected), own
        assert steps.whole == 0 and steps.stock == NEW_TOKENS, (own, steps)
        assert steps.reasons == {reason if is_last else of_others: 1}, (own, steps)

    def call(*args, **own):
        differs(*args, **own)
        assert torch.equal(whole(model), expected)

    # Without a trial so far.
    for own in ((POSITIONAL, None, LogitsProcessorList()), (CLOCK,)):
        drop(model)
        call(*own, **({"max_time": 1000.0} if own == (CLOCK,) else {}))
    # Before generate() prepares the call, and afterwards.
    call(POSITIONAL, None, LogitsProcessorList())
    differs("output_attentions", output_attentions=True, return_dict_in_generate=True)
    # This changes the model, so the last process must try it again. After the next call all do.
    call(UNLIKE)
    call("output_hidden_states", output_hidden_states=True, return_dict_in_generate=True)
    call(CLOCK, max_time=1000.0)
    call(CLOCK, stopping_criteria=[Never()])
    call(FUNCTION, prefix_allowed_tokens_fn=lambda batch, ids: list(range(VOCAB_SIZE)))
    call(FUNCTION, logits_processor=[lambda ids, scores: scores])
    # What both would serve, but not together, might be what they keep. So there is a trial again.
    call(UNLIKE, repetition_penalty=1.0 + 1e-7)
    call(UNLIKE, logits_processor=[RepetitionPenaltyLogitsProcessor(1.0 + 1e-7)])
    call(UNLIKE, output_scores=True, return_dict_in_generate=True)
    # A hook, and a model's own list of processors, in one process.
    handle = model.register_forward_hook(lambda module, args, output: None) if is_last else None
    differs("a forward hook of a LlamaForCausalLM")
    if handle is not None:
        handle.remove()
    with pytest.MonkeyPatch.context() as patch:
        if is_last:
            patch.setattr(type(model), "_get_logits_processor", lambda *args, **kwargs: OwnList())
        differs("logits processors in a OwnList")
    assert torch.equal(whole(model), expected)
    # A record of the best tokens, for which a step gathers logits.
    with fused_decoding(model, topk_per_step=4 * is_last):
        assert torch.equal(sequences(model), expected)
    assert stats(reset=True).reasons == {UNLIKE: 1}
    assert torch.equal(whole(model), expected)
    # A process that has forgotten what it knew of the model, when the others have not.
    if is_last:
        drop(model)
    call(UNLIKE)
    # One whose trial fails alone.
    for name, wrong in (("head", None), ("reason_against_parts", "wrong"), ("reason_against", "wrong")):
        drop(model)
        with pytest.MonkeyPatch.context() as patch:
            right = getattr(trial, name)
            patch.setattr(trial, name, lambda *args, right=right, wrong=wrong: (right(*args), wrong)[is_last])
            differs(wrong or UNLIKE, of_others=ALONE if wrong else UNLIKE)
        if name != "head":
            drop(model)
        assert torch.equal(whole(model), expected)


def calls_that_are_stock(rank: int, size: int) -> None:
    """Every process has the same reason."""
    model, alone = models()
    expected = sequences(alone)
    seen = []

    def process(ids, scores):
        seen.append(scores.shape[-1])
        return scores

    for reason, options in (
        (CLOCK, {"max_time": 1000.0}),
        (FUNCTION, {"logits_processor": LogitsProcessorList([process])}),
        (FUNCTION, {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(VOCAB_SIZE))}),
        ("use_cache=False", {"use_cache": False}),
        ("synced_gpus", {"synced_gpus": True}),
    ):
        assert_stock(reason, model, expected, **options)
    assert seen == [VOCAB_SIZE] * NEW_TOKENS
    # What is to be compiled runs without.
    found, steps = fused(model, compile=rank == 0)
    assert torch.equal(found, expected) and steps.whole == NEW_TOKENS and steps.compiled == 0
    reason = "compile=True with a tensor-parallel model, whose steps are not compiled"
    assert steps.reasons == ({reason: 1} if rank == 0 else {})
    # Stock raises on all processes, which go on.
    with fused_decoding(model), pytest.raises(ValueError, match="streamer"):
        sequences(model, num_beams=2, streamer=Recorder())
    # Found in the middle of a search, when nobody asks any more.
    norm = model.model.norm.weight
    with torch.no_grad():
        kept = norm.clone()
        norm.fill_(torch.nan)
        of_nan = sequences(model, num_beams=2)
        assert_stock("NaN among the scores", model, of_nan, num_beams=2)
        assert_stock("NaN among the scores", model, of_nan, num_beams=2, repetition_penalty=1.0 + 1e-7)
        norm.copy_(kept)
    assert torch.equal(whole(model), expected)


def models_that_are_stock(rank: int, size: int) -> None:
    """Of hooks, of a forward() and of methods of the user's, of unknown plans, and models that do more than read text."""
    model, alone = models()
    expected, kind = sequences(alone), type(model)
    part = model.model.layers[0].mlp.up_proj
    handle = model.lm_head.register_forward_hook(lambda module, args, output: None)
    assert_stock("a forward hook of a Linear", model, expected)
    handle.remove()
    for reason, module in (
        ("forward() of a LlamaForCausalLM that has been replaced", model),
        ("a tensor-parallel Linear of an unknown plan", part),
        ("a tensor-parallel Linear of an unknown plan", model.lm_head),
    ):
        own, kept = vars(module).get("forward"), module.forward
        module.forward = functools.wraps(kept)(lambda *args, kept=kept, **kwargs: kept(*args, **kwargs))
        assert_stock(reason, model, expected)
        del module.forward
        if own is not None:
            module.forward = own
    model.lm_head.__class__ = type("OwnLinear", (nn.Linear,), {})
    assert_stock("a tensor-parallel OwnLinear of ColwiseParallel", model, expected)
    model.lm_head.__class__ = nn.Linear

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super(kind, self).prepare_inputs_for_generation(*args, **kwargs)

    prepare_inputs_for_generation.__module__ = "transformers.models.own"
    model.__class__ = type("Own", (kind,), {"prepare_inputs_for_generation": prepare_inputs_for_generation})
    assert_stock("a tensor-parallel model that is more than a decoder of text", model, expected)
    model.__class__ = kind
    assert torch.equal(whole(model), expected)


def calls_after_each_other(rank: int, size: int) -> None:
    """Of other lengths, batches and ends; of a cache to go on with."""
    model, _ = models()
    generator = torch.Generator().manual_seed(3)
    for batch, length, new, beams in ((1, 3, 4, 1), (3, 20, 30, 2), (2, 9, 1, 1), (4, 33, 20, 3), (1, 3, 4, 1)):
        prompts = torch.randint(6, VOCAB_SIZE, (batch, length), generator=generator)
        options = {"num_beams": beams, "max_new_tokens": new}
        assert torch.equal(whole(model, prompts, **options), sequences(model, prompts, **options)), (batch, length)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), PROMPTS], 1)
    padded[1, :3] = 7
    for beams in (1, 3):
        options = {"attention_mask": (padded != 0).long(), "num_beams": beams}
        assert torch.equal(whole(model, padded, **options), sequences(model, padded, **options))
    assert stats(reset=True).reasons == {}
    stats(reset=True)
    first = whole(model, return_dict_in_generate=True)
    of_stock = sequences(model, return_dict_in_generate=True)
    name = "cache" if "cache" in first else "past_key_values"
    for own, stock in zip(first[name].layers, of_stock[name].layers, strict=True):
        torch.testing.assert_close(own.keys, stock.keys, rtol=1e-5, atol=1e-5)


class Failing(StandIn):
    """A capture that fails, when all is said that other processes wait for."""

    def __init__(self, run, device, beside):
        super().__init__(run, device, beside)
        raise RuntimeError("no memory for a graph")


def captured_steps(rank: int, size: int) -> None:
    """Kept on all processes or on none, and replayed by later calls of a block."""
    model, _ = models()
    drop(model)
    is_last = rank == size - 1
    for options in ({}, {"num_beams": 3}, {"num_beams": 3, "max_new_tokens": 80, "eos_token_id": None}):
        expected = sequences(model, **options)
        with graphs_of(), fused_decoding(model):
            for is_first in (True, False):
                before = StandIn.made
                with Collectives() as collectives:
                    assert torch.equal(sequences(model, **options), expected), options
                steps = stats(reset=True)
                assert steps.captured == steps.whole > 0 and steps.reasons == {}, steps
                assert (StandIn.made > before) == is_first
        # The question, the logits of the prompt, and as many steps as there are or some more in vain.
        assert steps.whole <= len(collectives.given) - 1 <= steps.whole + graphs.LATENESS, collectives.given
        # NCCL waits for graphs that nobody needs.
        assert len(entry.ready_for(model).store._kept) == 0
    tokens = torch.tensor([31, 32, 104, 105, 106, 107, 210])
    trie = TokenTrie(torch.cartesian_prod(tokens, tokens, tokens), end_token_id=EOS)
    of_trie = {"logits_processor": [TrieLogitsProcessor(trie, PROMPTS.shape[1])]}
    calls = [of_trie, {"num_beams": 3, **of_trie}, {"do_sample": True, "top_k": 20}]
    expected = []
    for options in calls:
        torch.manual_seed(3)
        expected.append(sequences(model, **options))
    enable(model)
    with graphs_of():
        sequences(model)
        # What one process has dropped.
        if is_last:
            entry.ready_for(model).store.release()
        for reasons in ([], [UNLIKE], []):
            assert list(stats(reset=True).reasons) == reasons
            sequences(model)
        for options, of_stock in zip(calls, expected, strict=True):
            stats(reset=True)
            # The first process's numbers decide.
            torch.manual_seed(3 + rank)
            assert torch.equal(sequences(model, **options), of_stock), options
            assert stats(reset=True).captured > 0
    disable(model)
    expected = sequences(model)
    with graphs_of(Failing if is_last else StandIn), fused_decoding(model):
        for _ in range(3):
            assert torch.equal(sequences(model), expected)
            steps = stats(reset=True)
            error = "no memory for a graph" if is_last else "a capture on another process"
            assert list(steps.reasons) == [f"a step that is to be captured raises RuntimeError: {error}"], steps
            assert steps.whole == 0 and steps.stock == NEW_TOKENS
    drop(model)


def weights_that_change(rank: int, size: int) -> None:
    """In place they are the twin's, too."""
    model, _ = models()
    expected = whole(model)
    norm, local = model.model.norm.weight, model.model.layers[0].mlp.up_proj.weight.to_local()
    with torch.no_grad():
        norm.mul_(-1)
        local.mul_(2)
        changed = sequences(model)
        assert not torch.equal(changed, expected) and torch.equal(whole(model), changed)
        norm.mul_(-1)
        local.div_(2)


def a_process_dies(rank: int, size: int) -> None:
    """The others get an error."""
    model, _ = models()
    enable(model)
    streamer = Dying() if rank == size - 1 else None
    with pytest.raises(RuntimeError):
        sequences(model, max_new_tokens=60, eos_token_id=None, streamer=streamer)

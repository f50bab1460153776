# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in compact form: of given texts, of next tokens, and of the steps of generate()."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from decoding import DTYPES, PAD, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.generation import fused_decoding, next_token_topk, text_topk_logprobs, topk_logprobs


def random_logits(*shape, dtype=torch.float32, offset=0.0):
    logits = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0)) + offset
    return logits.to(dtype)


def random_targets(logits):
    return torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(1))


def assert_right(found, logits, k, targets):
    exact = logits.detach().double().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(found.indices, order[..., :k])
    torch.testing.assert_close(found.values.double(), exact.gather(-1, found.indices), rtol=0, atol=2e-6)
    torch.testing.assert_close(found.logsumexp.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=2e-6)
    expected = exact.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.target_logprobs.double(), expected, rtol=0, atol=4e-6)
    assert torch.equal(found.target_ranks, 1 + (order == targets.unsqueeze(-1)).int().argmax(-1))


@DTYPES
@pytest.mark.parametrize("shape", [(33,), (1, 33), (7, 33), (2, 5, 33), (2, 0, 33)], ids=str)
def test_topk_logprobs_against_float64(shape, dtype):
    logits = random_logits(*shape, dtype=dtype)
    targets = random_targets(logits)
    assert_right(topk_logprobs(logits, 4, targets), logits, 4, targets)


def test_topk_logprobs_of_positions_that_do_not_merge():
    logits = random_logits(3, 20, 33)
    # Without its last position the batch does not merge with the positions.
    for view in (logits, logits[:, :-1], logits.transpose(0, 1)):
        targets = random_targets(view)
        assert_right(topk_logprobs(view, 3, targets), view, 3, targets)


def test_topk_logprobs_loses_nothing_to_a_common_offset():
    logits = random_logits(5, 4000, offset=1e4).double().float()
    found = topk_logprobs(logits, 3, random_targets(logits))
    assert_right(found, logits, 3, random_targets(logits))


def test_of_equal_tokens_the_smaller_index_ranks_first():
    logits = random_logits(40, 33).round()
    targets = random_targets(logits)
    assert_right(topk_logprobs(logits, 4, targets), logits, 4, targets)


def test_positions_without_target_and_no_targets():
    logits = random_logits(4, 33)
    targets = torch.tensor([3, -100, 0, -1])
    found = topk_logprobs(logits, 2, targets)
    assert found.target_logprobs.isnan().tolist() == [False, True, False, True]
    assert (found.target_ranks == 0).tolist() == [False, True, False, True]
    found = topk_logprobs(logits, 2)
    assert found.target_logprobs is None and found.target_ranks is None


def test_topk_logprobs_have_gradients():
    logits = random_logits(3, 21, dtype=torch.float64).requires_grad_()
    targets = random_targets(logits)

    def sums(x):
        found = topk_logprobs(x, 4, targets)
        return found.values.sum() + found.logsumexp.sum() + found.target_logprobs.sum()

    assert torch.autograd.gradcheck(sums, (logits,))


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        ([1, 2], TypeError, "`targets` must be a torch.Tensor"),
        (torch.tensor([1, 2], dtype=torch.int32), TypeError, "`targets` must be int64, got torch.int32"),
        (torch.tensor([[1, 2]]), ValueError, r"`targets` must have the shape \(2,\) of the positions, got \(1, 2\)"),
    ],
    ids=["list", "int32", "shape"],
)
def test_topk_logprobs_says_what_is_wrong_with_targets(targets, error, message):
    with pytest.raises(error, match=message):
        topk_logprobs(torch.zeros(2, 9), 3, targets)


@DTYPES
@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba", "t5", "bart"])
def test_next_token_topk(name, dtype):
    model = tiny(name, dtype)
    inputs = inputs_for(model)
    found = next_token_topk(model, inputs, 5)
    given = dict(inputs)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.full((2, 1), model.config.decoder_start_token_id)
    with torch.no_grad():
        exact = model(**given).logits[:, -1].double().log_softmax(-1)
    torch.testing.assert_close(found.values.double(), exact.gather(1, found.indices), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.values.double(), exact.topk(5).values, rtol=0, atol=1e-5)
    assert torch.equal(next_token_topk(model, inputs["input_ids"], 5).indices, found.indices)


def test_next_token_topk_looks_behind_padding():
    model = tiny("llama")
    alone = inputs_for(model, batch=1, length=4)["input_ids"]
    expected = next_token_topk(model, alone, 4)
    for pad_left in (True, False):
        pads, ones = torch.full((1, 3), PAD), torch.ones_like(alone)
        parts = (pads, alone) if pad_left else (alone, pads)
        mask = torch.cat((torch.zeros_like(pads), ones) if pad_left else (ones, torch.zeros_like(pads)), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": torch.cat(parts, 1), "attention_mask": mask, "position_ids": positions}
        found = next_token_topk(model, inputs, 4)
        assert torch.equal(found.indices, expected.indices)
        torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("given", [True, False, None])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_next_token_topk_takes_return_dict_among_the_inputs(name, given):
    inputs = inputs_for(tiny(name))
    expected = next_token_topk(tiny(name), inputs, 5)
    for found, wanted in zip(next_token_topk(tiny(name), {**inputs, "return_dict": given}, 5), expected, strict=True):
        assert torch.equal(found, wanted)


def test_next_token_topk_says_what_is_wrong():
    model = tiny("llama")
    with pytest.raises(TypeError, match="`inputs` must be a tensor of input ids or a mapping"):
        next_token_topk(model, [1, 2, 3], 4)
    with pytest.raises(TypeError, match="`model` must have a language modelling head, got LlamaModel"):
        next_token_topk(model.model, inputs_for(model), 4)
    with pytest.raises(ValueError, match="`k` must"):
        next_token_topk(model, inputs_for(model), 10**6)


@pytest.mark.parametrize("function", [next_token_topk, text_topk_logprobs])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            torch.tensor([5, 9]),
            ValueError,
            r"`inputs` must have ids of shape \(batch, length\) .* got \(2,\); .*\.unsqueeze\(0\)",
        ),
        (
            torch.zeros(2, 0).long(),
            ValueError,
            r"`inputs` must have ids of shape .* at least one token .* got \(2, 0\)",
        ),
        (torch.zeros(2, 2), TypeError, "`inputs` must have ids of int64 or int32, got torch.float32"),
        (torch.zeros(2, 2, device="meta").long(), ValueError, "`inputs` must have ids on the model's device, got meta"),
        ({"input_ids": [[5, 9]]}, TypeError, "`inputs` must have ids as a tensor, got list; .*return_tensors='pt'"),
    ],
)
def test_ids_that_are_none_of_a_batch_are_refused(function, given, error, message):
    with pytest.raises(error, match=message):
        function(tiny("llama"), given, 2)


@pytest.mark.parametrize("function", [next_token_topk, text_topk_logprobs])
@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2)], ids=str)
def test_what_is_no_model_is_refused(function, model):
    with pytest.raises(
        TypeError, match=f"`model` must be a transformers model, got {type(model).__name__}; pass the model"
    ):
        function(model, torch.ones(1, 2, dtype=torch.int64), 2)


def test_next_token_topk_of_an_encoder_decoder_needs_a_first_token():
    model = copy.deepcopy(tiny("t5"))
    texts = inputs_for(model)["input_ids"]
    encoded = {"encoder_outputs": model.encoder(texts)}
    with pytest.raises(ValueError, match=r"`inputs` must have `decoder_input_ids`.*pass decoder_input_ids"):
        next_token_topk(model, encoded, 4)
    begin = torch.full((len(texts), 1), model.generation_config.decoder_start_token_id)
    found = next_token_topk(model, {**encoded, "decoder_input_ids": begin}, 4)
    assert torch.equal(found.indices, next_token_topk(model, texts, 4).indices)
    # A configuration need not say how texts begin.
    model.generation_config.decoder_start_token_id = None
    vars(model.config).pop("decoder_start_token_id", None)
    with pytest.raises(ValueError, match="`inputs` must have `decoder_input_ids`"):
        next_token_topk(model, texts, 4)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_compact_results_of_each_step(num_beams):
    model = tiny("llama")
    options = {"num_beams": num_beams, "max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(**inputs_for(model), output_logits=True, **options)
    with fused_decoding(model, topk_per_step=4) as given:
        model.generate(**inputs_for(model), **options)
    assert len(given.topk) == len(expected.logits) == 5
    for step, logits in zip(given.topk, expected.logits, strict=True):
        assert step.values.shape == (2 * num_beams, 4)
        exact = logits.double().log_softmax(-1)
        torch.testing.assert_close(step.values.double(), exact.topk(4).values, rtol=0, atol=1e-5)
        torch.testing.assert_close(step.values.double(), exact.gather(1, step.indices), rtol=0, atol=1e-5)
        torch.testing.assert_close(step.logsumexp.double(), logits.double().logsumexp(-1), rtol=0, atol=1e-5)
    # A later call begins anew, and one of a mode that is not served has none.
    with fused_decoding(model, topk_per_step=4) as given:
        model.generate(**inputs_for(model), **options)
        model.generate(**inputs_for(model), max_new_tokens=2, use_cache=False)
    assert given.topk == []


@pytest.mark.parametrize(("k", "error"), [(-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_number_of_compact_results_is_checked(k, error):
    with (
        pytest.raises(error, match="`topk_per_step` must"),
        fused_decoding(tiny("llama"), topk_per_step=k),
    ):
        pass

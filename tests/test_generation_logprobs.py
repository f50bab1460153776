# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in compact form: of given texts, of next tokens, and of the steps of generate()."""

import copy

import pytest
import torch

from contract_results import flat
from decoding import DTYPES, PAD, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk import generation
from fused_topk.generation import fused_decoding, next_token_topk, text_token_logprobs


def own_next_tokens(ids, mask=None):
    """By loops."""
    tokens = torch.full_like(ids, -100, dtype=torch.int64)
    for row in range(len(ids)):
        for place in range(ids.shape[1] - 1):
            if mask is None or (mask[row, place] and mask[row, place + 1]):
                tokens[row, place] = ids[row, place + 1]
    return tokens


@pytest.mark.parametrize("padded", ["", "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba"])
def test_the_tokens_of_the_text_itself(name, padded):
    """At each position the next one; none at the last one and at padding."""
    model = tiny(name)
    ids = inputs_for(model)["input_ids"]
    inputs, mask = {"input_ids": ids}, None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, slice(0, 3) if padded == "left" else slice(-3, None)] = 0
        inputs["attention_mask"] = mask
    want = own_next_tokens(ids, mask)
    assert (want >= 0).sum() == ids.numel() - len(ids) - (3 if padded else 0)
    found = text_token_logprobs(model, inputs, k=3, ranks=True)
    given = text_token_logprobs(model, inputs, want, k=3, ranks=True)
    for a, b in zip(flat(found), flat(given), strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert torch.equal(found.logprobs.isnan(), want < 0)
    with torch.no_grad():
        exact = model(**inputs).logits.double().log_softmax(-1)
    of_tokens = exact.gather(-1, want.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.logprobs.double()[want >= 0], of_tokens[want >= 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_tokens_of_a_decoder(name):
    model = tiny(name)
    inputs = {**inputs_for(model), "decoder_input_ids": torch.tensor([[0, 5, 9], [0, 7, 7]])}
    found = text_token_logprobs(model, inputs)
    with torch.no_grad():
        exact = model(**inputs).logits.double().log_softmax(-1)
    want = exact[:, :-1].gather(-1, inputs["decoder_input_ids"][:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found.logprobs[:, :-1].double(), want, rtol=2e-6, atol=1e-5)
    assert found.logprobs[:, -1].isnan().all()
    # Without a text of the decoder there are no tokens to take.
    with pytest.raises(ValueError, match="`tokens` must be given where the inputs have no texts"):
        text_token_logprobs(model, inputs_for(model))
    one = torch.tensor([[4], [5]])
    assert text_token_logprobs(model, inputs_for(model), one).logprobs.shape == (2, 1)


def test_embeddings_have_no_tokens():
    model = tiny("llama")
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs_for(model)["input_ids"])}
    with pytest.raises(ValueError, match="`tokens` must be given where the inputs have no texts"):
        text_token_logprobs(model, embedded)
    tokens = inputs_for(model)["input_ids"]
    assert text_token_logprobs(model, embedded, tokens).logprobs.shape == tokens.shape


def test_names_that_are_gone_say_what_to_write_instead():
    for name, remedy in {
        "topk_logprobs": "use fused_topk.token_logprobs",
        "text_topk_logprobs": "use text_token_logprobs",
        "TokenLogprobs": "use fused_topk.TokenLogprobs",
        "generate": "with fused_decoding",
    }.items():
        with pytest.raises(AttributeError, match=f"{name} is gone; .*{remedy}"):
            getattr(generation, name)


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


@pytest.mark.parametrize("function", [next_token_topk, lambda *given: text_token_logprobs(*given[:2])])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.tensor([5, 9]), ValueError, r"ids of shape \(batch, length\) .* got \(2,\); .*\.unsqueeze\(0\)"),
        (torch.zeros(2, 0).long(), ValueError, r"ids of shape .* at least one token .* got \(2, 0\)"),
        (torch.zeros(2, 2), TypeError, "`inputs` must have ids of int64 or int32, got torch.float32"),
        (torch.zeros(2, 2, device="meta").long(), ValueError, "`inputs` must have ids on the model's device, got meta"),
        ({"input_ids": [[5, 9]]}, TypeError, "`inputs` must have ids as a tensor, got list; .*return_tensors='pt'"),
    ],
)
def test_ids_that_are_none_of_a_batch_are_refused(function, given, error, message):
    with pytest.raises(error, match=message):
        function(tiny("llama"), given, 2)


@pytest.mark.parametrize("function", [next_token_topk, lambda *given: text_token_logprobs(*given[:2])])
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

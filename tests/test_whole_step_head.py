# SPDX-License-Identifier: Apache-2.0
"""Whole steps that choose from hidden states: which LM heads that is for, its order, and that no logits exist."""

import copy

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import fused_topk
from decoding import assert_whole, inputs_for, one_thread  # noqa: F401
from fused_topk.generation.whole_step import entry
from fused_topk.generation.whole_step.head import Head, head_of
from rows import packed
from whole_steps import compiling, encoder_decoder, family, source_for, traced_only  # noqa: F401

pytestmark = pytest.mark.usefixtures("traced")
VOCAB_SIZE = 97


class Wide(TorchDispatchMode):
    """Counts the tensors with a number for each token of the vocabulary that operations make."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        if isinstance(found, torch.Tensor) and found.shape[-1:] == (VOCAB_SIZE,):
            # A shape without memory is none.
            self.count += found.untyped_storage().nbytes() >= found.nbytes
        return found


def assert_steps(model, inputs, has_head, **options):
    """Compiled steps give what stock gives, and are made as they are said to be."""
    options = {"max_new_tokens": 10, "output_scores": False, **options}
    assert_whole(model, inputs, compile=True, kinds=["compiled"], **options)
    step = next(reversed(entry._ready.get(model).store._kept.values()))
    assert (step.head is not None) == has_head
    args = step._tokens.clone(), copy.deepcopy(step._parents), torch.ones(1, dtype=torch.int64), 2
    with torch.no_grad():
        # To find the code: torch.compile does not do that in a mode.
        step.read(*args)
        with Wide() as wide:
            step.read(*args)
    assert (wide.count == 0) == has_head


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("name", ["Llama", "Phi", "Gemma2", "Marian"])
def test_no_logits_exist_where_the_head_is_a_product(name, num_beams):
    # Gemma 2 has a soft cap behind it, Marian a bias of the model's own.
    is_both = name == "Marian"
    model = copy.deepcopy((encoder_decoder if is_both else family)(name, 1))
    inputs = source_for(model) if is_both else inputs_for(model, 3, padding=2)
    assert_steps(model, inputs, name in ("Llama", "Phi"), num_beams=num_beams)


def test_a_head_that_is_written_to_or_that_the_model_looks_at():
    class Model(torch.nn.Module):
        def __init__(self, after):
            super().__init__()
            self.lm_head = torch.nn.Linear(4, 9)
            self.after = after

        def get_output_embeddings(self):
            return self.lm_head

        def forward(self, hidden, use_cache):
            self.hidden = hidden
            logits = self.lm_head(hidden)
            return transformers.modeling_outputs.CausalLMOutput(logits=self.after(self, logits))

    def found(after):
        torch.manual_seed(0)
        return head_of(Model(after), {"hidden": torch.randn(2, 3, 4)})

    assert found(lambda model, logits: logits) is not None
    with torch.inference_mode():
        assert found(lambda model, logits: logits) is not None
    assert found(lambda model, logits: logits.mul_(2)) is None
    # What few logits show, or none of a few texts.
    assert found(lambda model, logits: logits.clamp(max=99.0)) is None
    assert found(lambda model, logits: logits.data.clamp_(min=-99.0) is None or logits) is None
    assert found(lambda model, logits: logits.nan_to_num_()) is None
    assert found(lambda model, logits: logits[..., :9]) is None
    assert found(lambda model, logits: model.hidden.zero_() is None or logits) is None
    assert found(lambda model, logits: model.lm_head(logits.new_ones(2, 3, 4))) is None
    assert found(lambda model, logits: logits * model.lm_head.out_features) is None


def head_with(weight):
    linear = torch.nn.Linear(weight.shape[1], len(weight), bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return Head(None, linear)


@pytest.mark.parametrize("share", [None, 0.5, 0.03])
@pytest.mark.parametrize("k", [1, 4, 12])
def test_continuations_are_ordered_as_by_beam_topk(k, share):
    """Args: share: of the tokens that a mask allows."""
    # Whole numbers, so that many totals are equal and all sums are exact.
    generator = torch.Generator().manual_seed(k)
    hidden, weight = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((6, 8), (50, 8)))
    hidden[1] = hidden[0]
    scores = torch.tensor([[0.0, 0.0, -1.0], [-1e9, 0.0, -1e9]])
    mask = None
    if share is not None:
        allowed = torch.rand(6, 50, generator=generator) < share
        mask = packed(allowed)
    head, logits = head_with(weight), hidden @ weight.T
    found = head.continuations(hidden, scores, k, mask)
    of_beams = None if mask is None else mask.view(2, 3, -1)
    expected = fused_topk.beam_topk(logits.view(2, 3, 50), scores, k, mask=of_beams, normalize="all")
    torch.testing.assert_close(found[0], expected.values, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1], expected.indices)
    best = logits if mask is None else logits.where(allowed, -torch.inf)
    assert torch.equal(head.greatest(hidden, mask), best.argmax(-1))

# SPDX-License-Identifier: Apache-2.0
"""Processors of grammar libraries: of xgrammar, where it is installed."""

import contextlib
import functools

import pytest
import torch

from decoding import TOLERANCE, assert_same, generate_both, inputs_for, one_thread, stats  # noqa: F401
from fused_topk.generation import fused_decoding
from fused_topk.generation.whole_step import compiled
from whole_steps import compiling, family, traced_only, whole  # noqa: F401

xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar: pip install xgrammar")
hf = pytest.importorskip("xgrammar.contrib.hf")

END = 3


@functools.cache
def grammar(rule: str):
    """One letter a token. Some logits have no token."""
    letters = [chr(ord("a") + token % 26) if token > END else f"<{token}>" for token in range(90)]
    info = xgrammar.TokenizerInfo(letters, vocab_size=97, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info).compile_grammar(xgrammar.Grammar.from_ebnf(rule))


def both(fused, batch=3, rule='root ::= ("ab" | "c" | "zy")+ ("q" | "r" | "s")*', **options):
    """A processor serves one call."""
    model = family("Llama", 1)
    inputs = inputs_for(model, batch, padding=2)
    options = {
        "do_sample": False,
        "max_new_tokens": 12,
        "eos_token_id": END,
        "return_dict_in_generate": True,
        **options,
    }

    def run():
        torch.manual_seed(1)
        return model.generate(**inputs, **options, logits_processor=[hf.LogitsProcessor(grammar(rule))])

    stock = run()
    stats(reset=True)
    with fused(model):
        given = run()
    return stock, given, stats(reset=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_scores": True, "repetition_penalty": 1.3},
        {"rule": 'root ::= "abc"'},
        {"remove_invalid_values": True},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_texts_of_a_grammar(way, options, traced):
    fused = {"eager": whole, "compiled": compiling}[way]
    stock, given, steps = both(fused, **options)
    assert_same(stock, given, TOLERANCE)
    assert steps.whole > 0 and not steps.reasons


def test_drawn_texts_are_of_the_grammar():
    stock, given, steps = both(fused_decoding, do_sample=True)
    assert steps.whole > 0 and torch.equal(stock.sequences, given.sequences)
    for text in given["sequences"][:, 6:].tolist():
        assert xgrammar_accepts(text)


def xgrammar_accepts(text):
    matcher = xgrammar.GrammarMatcher(grammar('root ::= ("ab" | "c" | "zy")+ ("q" | "r" | "s")*'))
    return all(matcher.is_terminated() or matcher.accept_token(token) for token in text)


def test_a_step_that_cannot_be_compiled_has_not_called_the_processor(monkeypatch):
    def fail(graph, inputs):
        raise OSError("no compiler")

    monkeypatch.setattr(compiled, "_inductor", fail)
    stock, given, steps = both(compiling)
    assert_same(stock, given, TOLERANCE)
    assert steps.reasons and steps.whole > 0


def test_beams_are_the_error_of_stock():
    """xgrammar has one matcher for each row, and rows of beams change places."""
    model = family("Llama", 1)
    inputs = inputs_for(model, 1)
    for block in (contextlib.nullcontext(), whole(model)):
        with block, pytest.raises(AssertionError):
            model.generate(**inputs, num_beams=2, logits_processor=[hf.LogitsProcessor(grammar('root ::= "a"'))])

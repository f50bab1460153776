# SPDX-License-Identifier: Apache-2.0
"""Logits processors where a length or an index is at a boundary, each against the one of the transformers that runs.

Versions differ there: these tests run with each that tests/transformers_versions.sh names.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'fused_topk[transformers]'")

from transformers.generation import logits_process as stock

from decoding import assert_fused, inputs_for, one_thread, tiny  # noqa: F401
from fused_topk.backends import cpu
from fused_topk.generation.choice.rows import Rows
from fused_topk.generation.choice.selection import best
from fused_topk.generation.edits.plan import Plan

BATCH, BEAMS, VOCAB_SIZE = 2, 2, 40
NUM_ROWS = BATCH * BEAMS
ENDS = [5, 9]


def text(length):
    """Input ids [R, length] in which every n-gram comes again."""
    rows = ([7], [1, 2], [5, 9, 5], [3, 1, 2])
    return torch.tensor([(row * length)[:length] for row in rows])


def phrases(n):
    """Sequences of n tokens of which some are completed by the next token of a text of n - 1 tokens or more."""
    sequences = [[7] * n, [1, 2, 1, 2, 1][:n], [30, 31, 32, 33, 34][:n]]
    sequences += [[*(int(token) for token in row[-(n - 1) :]), 20] for row in text(6)] if n > 1 else []
    return [list(each) for each in {tuple(sequence) for sequence in sequences}]


# Name: the processor for a text of a length.
PROCESSORS = {"forced_bos": lambda length: stock.ForcedBOSTokenLogitsProcessor(3)}
for n in range(1, 6):
    PROCESSORS |= {
        f"no_repeat_{n}gram": lambda length, n=n: stock.NoRepeatNGramLogitsProcessor(n),
        f"encoder_no_repeat_{n}gram": lambda length, n=n: stock.EncoderNoRepeatNGramLogitsProcessor(n, text(6)[::2]),
        f"encoder_shorter_than_{n}gram": lambda length, n=n: stock.EncoderNoRepeatNGramLogitsProcessor(
            n, text(max(1, n - 1))[::2]
        ),
        f"bad_words_of_{n}": lambda length, n=n: stock.NoBadWordsLogitsProcessor(phrases(n), ENDS),
        f"biased_sequences_of_{n}": lambda length, n=n: stock.SequenceBiasLogitsProcessor(
            [[sequence, 1.5 + i] for i, sequence in enumerate(phrases(n))] + [[[7], -2.0], [[20], 0.0]]
        ),
    }
for d in (-1, 0, 1):
    PROCESSORS |= {
        f"min_length{d:+}": lambda length, d=d: stock.MinLengthLogitsProcessor(length + d, ENDS),
        f"min_new_tokens{d:+}": lambda length, d=d: stock.MinNewTokensLengthLogitsProcessor(1, max(0, length + d), 5),
        f"suppress_at_begin{d:+}": lambda length, d=d: stock.SuppressTokensAtBeginLogitsProcessor([3, 4], length + d),
        f"forced_eos{d:+}": lambda length, d=d: stock.ForcedEOSTokenLogitsProcessor(length + 1 + d, ENDS),
        f"exponential_decay{d:+}": lambda length, d=d: stock.ExponentialDecayLengthPenalty((length + d, 1.3), ENDS, 0),
        f"prompt_ignored{d:+}": lambda length, d=d: stock.RepetitionPenaltyLogitsProcessor(1.7, length + d),
        f"prompts_ignored{d:+}": lambda length, d=d: stock.RepetitionPenaltyLogitsProcessor(
            1.7, torch.tensor([0, length - 1, length + d, length + 9])
        ),
    }


def whole_rows(processor, ids, logits, are_log_probs):
    """The scores [R, V] of the processor's edit."""
    rows = Rows(logits, cpu)
    plan = Plan([processor], is_sampling=False)
    assert plan.reason is None
    found = best(rows, plan.edits(ids, rows, are_log_probs), logits.shape[1], are_log_probs)
    return torch.full_like(logits, math.nan).scatter(1, found.ids, found.scores)


@pytest.mark.parametrize("are_log_probs", [True, False], ids=["log_probs", "logits"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_edits_at_boundaries_of_length(name, are_log_probs):
    for length in range(1, 7):
        try:
            expecting, given = (PROCESSORS[name](length) for _ in range(2))
        except (ValueError, TypeError):
            continue  # which this version does not take
        logits = 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(length))
        expected = expecting(text(length), logits.log_softmax(-1) if are_log_probs else logits.clone())
        found = whole_rows(given, text(length), logits, are_log_probs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda m, n=length: f"length {n}: {m}")


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_a_text_one_token_shorter_than_a_banned_phrase(name, num_beams):
    # The first token is banned after a text of one, or not, as the version has it; the wrong one changes the sequence.
    model = tiny(name)
    inputs = inputs_for(model, batch=1, length=1)
    begin = inputs["input_ids"][0, 0].item() if name == "llama" else model.config.decoder_start_token_id
    for bias in (-math.inf, 9.0):
        banned = [[[begin, token], bias] for token in range(6, 211, 2)]
        assert_fused(model, inputs, num_beams=num_beams, sequence_bias=banned, max_new_tokens=4)

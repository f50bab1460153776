# SPDX-License-Identifier: Apache-2.0
"""Translation with an encoder-decoder and beam search in whole steps: English numbers into German ones.

    $ python demos/translation.py "nine hundred forty one" "seven thousand sixty two"
    nine hundred forty one: neunhunderteinundvierzig

The model, a BART with 200,000 parameters, is trained here in a minute. With `--model`, any encoder-decoder that is
on this disk translates instead (`--target nld_Latn` for models that begin with the language, such as NLLB).
"""

from __future__ import annotations

import random
from typing import Annotated, Any

import torch
import transformers
import typer
from tqdm import trange
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, BartForConditionalGeneration

from fused_topk.generation import fused_decoding, stats

ENGLISH = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
GERMAN = "ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn"
GERMAN_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"

PAD, START, END = 0, 1, 2
PIECES = ["<pad>", "<s>", "</s>", "hundred", "thousand", "hundert", "tausend", "und", "s"]
PIECES += f"{ENGLISH} eighteen nineteen {ENGLISH_TENS} {GERMAN} achtzehn neunzehn {GERMAN_TENS}".split()
PIECE_OF = {piece: token for token, piece in enumerate(PIECES)}


def english(number: int) -> list[str]:
    """The words of a number from 1 to 9999."""
    if number >= 1000:
        return [*english(number // 1000), "thousand", *(english(number % 1000) if number % 1000 else [])]
    if number >= 100:
        return [*english(number // 100), "hundred", *(english(number % 100) if number % 100 else [])]
    if number < 20:
        return [f"{ENGLISH} eighteen nineteen".split()[number - 1]]
    tens = ENGLISH_TENS.split()[number // 10 - 2]
    return [tens, *(english(number % 10) if number % 10 else [])]


def german(number: int, is_last: bool = True) -> list[str]:
    """The pieces of the number's German name, which is one word: ones before tens, and "eins" at the end."""
    if number >= 1000:
        return [*german(number // 1000, False), "tausend", *(german(number % 1000) if number % 1000 else [])]
    if number >= 100:
        return [*german(number // 100, False), "hundert", *(german(number % 100) if number % 100 else [])]
    if number < 20:
        word = f"{GERMAN} achtzehn neunzehn".split()[number - 1]
        return [word, "s"] if number == 1 and is_last else [word]
    tens = GERMAN_TENS.split()[number // 10 - 2]
    return [*([*german(number % 10, False), "und"] if number % 10 else []), tens]


def padded(texts: list[list[str]], begin: list[int]) -> torch.Tensor:
    """Token ids [texts, length], filled up on the right."""
    rows = [torch.tensor([*begin, *(PIECE_OF[piece] for piece in text), END]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def trained(steps: int) -> BartForConditionalGeneration:
    """A model that has seen a part of the numbers."""
    torch.manual_seed(0)
    # A model this small is only slowed down by threads that wait for each other.
    torch.set_num_threads(1)
    sides = {f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in (("layers", 2), ("ffn_dim", 128))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    special = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
    shape = {"vocab_size": len(PIECES), "max_position_embeddings": 32, "d_model": 64, "dropout": 0.0}
    config = BartConfig(**shape, **sides, **heads, **special, forced_eos_token_id=None)
    model = BartForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    numbers = random.Random(0)
    for step in (bar := trange(steps, desc="Learning to count in German")):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        batch = [numbers.randint(1, 9999 if i % 2 else 999) for i in range(64)]
        source, target = padded([english(n) for n in batch], []), padded([german(n) for n in batch], [START])
        labels = target[:, 1:].masked_fill(target[:, 1:] == PAD, -100)
        found = model(input_ids=source, attention_mask=source != PAD, decoder_input_ids=target[:, :-1], labels=labels)
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{found.loss.item():.3f}")
    return model.eval()


def translate_numbers(model: Any, texts: list[list[str]], beams: int) -> list[str]:
    """The best translation of each text."""
    source = padded(texts, [])
    with fused_decoding(model):
        found = model.generate(input_ids=source, attention_mask=source != PAD, num_beams=beams, max_new_tokens=20)
    return ["".join(PIECES[token] for token in row if token > END) for row in found.tolist()]


def translate_with(name_or_path: str, texts: list[str], beams: int, target: str) -> list[str]:
    """The same with a model and a tokenizer from disk."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, local_files_only=True)
        model = AutoModelForSeq2SeqLM.from_pretrained(name_or_path, local_files_only=True).eval()
    # No such folder, no such files in it, or a model of another kind.
    except (OSError, ValueError) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise typer.BadParameter(
            f"--model must be an encoder-decoder on this disk, got {name_or_path!r} ({cause})"
        ) from error
    first = {"forced_bos_token_id": tokenizer.convert_tokens_to_ids(target)} if target else {}
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with fused_decoding(model):
        found = model.generate(**inputs, num_beams=beams, max_new_tokens=128, **first)
    decoded: list[str] = tokenizer.batch_decode(found, skip_special_tokens=True)
    return decoded


def main(
    texts: Annotated[list[str], typer.Argument(help="What to translate.", show_default=False)] = [  # noqa: B006
        "twenty one",
        "nine hundred forty one",
        "three thousand seven hundred twelve",
    ],
    model: Annotated[str, typer.Option(metavar="PATH", help="An encoder-decoder on this disk.")] = "",
    target: Annotated[str, typer.Option(help="The token that its translations begin with.")] = "",
    beams: Annotated[int, typer.Option(min=1, help="Hypotheses kept for each text.")] = 4,
    steps: Annotated[int, typer.Option(min=0, help="Of training.")] = 600,
) -> None:
    transformers.logging.set_verbosity_error()
    if model:
        found = translate_with(model, texts, beams, target)
    else:
        unknown = [word for text in texts for word in text.split() if word not in PIECE_OF]
        if unknown:
            raise typer.BadParameter(f"the small model knows number words such as 'forty', got {unknown[0]!r}")
        found = translate_numbers(trained(steps), [text.split() for text in texts], beams)
    for text, translation in zip(texts, found, strict=True):
        print(f"{text}: {translation}")
    counted = stats()
    print(f"Tokens in whole steps: {counted.whole}; calls that ran as stock: {counted.reasons or 'none'}.")


if __name__ == "__main__":
    typer.run(main)

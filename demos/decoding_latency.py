# SPDX-License-Identifier: Apache-2.0
"""Decodes with a real language model and shows what whole steps save.

Beam search, greedy search and sampling, on the same prompts. Calls of generate() in turns: stock, in whole steps, and with transformers'
static cache. Then a check in float32: whole steps write stock's texts, with sampling those of the same seed.

    python demos/decoding_latency.py                                  # a tiny model, trained here in about a minute
    python demos/decoding_latency.py --peer ctranslate2               # also CTranslate2, on a CPU
    python demos/decoding_latency.py --compiled                       # also compiled whole steps, on a GPU too
    python demos/decoding_latency.py --random-weights llama-1b        # a true shape, for a GPU
    python demos/decoding_latency.py --model path/to/any/causal-lm

Reading order: whole_calls.py (all ways, and their times), generate_comparison.py (the check), causal_models.py and tiny_language_model.py
(what it decodes with), decoding_report.py (what it prints and plots).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import torch
    import transformers
    import typer
    from rich.console import Console
    from torch import Tensor
    from tqdm import tqdm

    import ctranslate2_peer
    import whole_calls
    from benchmark.devices import best_device
    from causal_models import RANDOM_SHAPES, CausalModel, encode, from_disk, random_prompts, tiny, with_random_weights
    from decoding_report import Measurement, print_calls, print_checks, print_texts, save_json, save_plot
    from fused_topk import backends
    from fused_topk.backends import cpu
    from generate_comparison import check, options_of
    from tiny_language_model import Recipe
    from whole_calls import COMPILED, STATIC, STOCK, WHOLE, Calls
except ModuleNotFoundError as error:
    raise SystemExit(
        f"this demo needs the package {(error.name or '?').partition('.')[0]!r}, which is not installed; "
        "run: pip install 'fused_topk[demo]' (in a checkout: pip install '.[demo]')"
    ) from error

# None ends in a space: the tokenizer joins a space to the word after it.
PROMPTS = [
    "class Parser:\n    def __init__(self,",
    "import os\n\n\ndef read_file(path):",
    "    for name in names:\n        if not",
    "        try:\n            return",
    "        if not isinstance(",
    "    while True:\n        line =",
    "    def close(self):",
    "def main():",
]
RANDOM_PROMPT_LENGTH = 32
MODES = ("beam search", "greedy", "sampling")
PIPE_WIDTH = 130

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command(help=(__doc__ or "").partition("\n\n    ")[0])
def main(
    model: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="A causal LM on this disk; nothing is fetched.")
    ] = "",
    random_weights: Annotated[
        str, typer.Option(metavar="|".join(RANDOM_SHAPES), help="A true shape with random weights.")
    ] = "",
    beams: Annotated[int, typer.Option(help="Hypotheses kept per prompt in beam search.")] = 4,
    batch: Annotated[
        int,
        typer.Option(help="Prompts decoded together; by default 4, or as many as --prompt gives.", show_default=False),
    ] = 0,
    new_tokens: Annotated[int, typer.Option(help="Tokens to add to each prompt.")] = 64,
    prompt: Annotated[list[str], typer.Option(help="A prompt; may be given several times.")] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; by default a GPU where its kernels work.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16; by default bfloat16 on a GPU.")] = "",
    rounds: Annotated[int, typer.Option(help="Calls of generate() each way and mode.")] = 3,
    training_steps: Annotated[int, typer.Option(help="Of the tiny model: more give better text.")] = Recipe.steps,
    output: Annotated[Path, typer.Option(help="Where the plot goes, as a PNG.")] = Path("out/decoding_latency.png"),
    json_path: Annotated[str, typer.Option("--json", metavar="PATH", help="Also write every number there.")] = "",
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled", help="Also compile whole steps on a GPU: up to a minute each. On a CPU this is done anyway."
        ),
    ] = False,
    peer: Annotated[str, typer.Option(metavar="ctranslate2", help="Also time it, where it is installed.")] = "",
) -> None:
    for option, value, least in (
        ("beams", beams, 1),
        ("new-tokens", new_tokens, 3),
        ("rounds", rounds, 1),
        ("training-steps", training_steps, 1),
    ):
        if value < least:
            _fail(f"`--{option}` must be at least {least}, got {value}; give a greater number")
    if batch < 0:
        _fail(f"`--batch` must be at least 1, got {batch}; give a greater number, or leave it out")
    if 0 < batch < len(prompt):
        _fail(f"`--batch` must be at least the number of prompts ({len(prompt)}), got {batch}; leave --batch out")
    if model and random_weights:
        _fail(f"`--model` and `--random-weights` exclude each other, got {model!r} and {random_weights!r}; give one")
    if prompt and random_weights:
        _fail("`--prompt` needs a tokenizer, which random weights do not have; leave --prompt or --random-weights out")
    if peer not in ("", "ctranslate2"):
        _fail(f"`--peer` must be ctranslate2, got {peer!r}; leave it out")
    if peer and random_weights:
        _fail("`--peer` needs a tokenizer, which random weights do not have; leave --peer or --random-weights out")
    if output.suffix.lower() != ".png":
        _fail(f"`--output` must end in .png, got {str(output)!r}; rename it")
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    place = _device(device)
    precision = _dtype(dtype, place)

    transformers.logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(_kernels(place), markup=False)
    try:
        if model:
            chosen = from_disk(model, place, precision)
        elif random_weights:
            chosen = with_random_weights(random_weights, place, precision)
        else:
            chosen = tiny(place, precision, Recipe(steps=training_steps))
        texts = _repeated(prompt or PROMPTS, batch or len(prompt) or 4)
        tokens, mask = (
            random_prompts(chosen, len(texts), RANDOM_PROMPT_LENGTH, place)
            if chosen.tokenizer is None
            else encode(chosen, texts, place)
        )
        _check_length(chosen, tokens.shape[1], new_tokens)
        inputs = {"input_ids": tokens, "attention_mask": mask}
        # On a CPU that takes seconds.
        more = [COMPILED] if compiled or place.type == "cpu" else []
        ways = [STOCK, WHOLE, *more, STATIC]
        # Without an end token every call has the same number of steps, and so the same work.
        chosen.model.generation_config.eos_token_id = None
        chosen.model.generation_config.pad_token_id = chosen.end_token or 0
        measured = Measurement(
            model=chosen.name,
            device=str(place),
            dtype=str(precision).removeprefix("torch."),
            batch=len(tokens),
            beams=beams,
            vocab_size=chosen.vocab_size,
            new_tokens=new_tokens,
            load_before=load_before,
            calls=measure_calls(
                chosen, inputs, ways, beams=beams, new_tokens=new_tokens, rounds=rounds, has_peer=bool(peer)
            ),
        )
        # In 16 bits the forward pass of a whole step rounds otherwise, and some texts differ.
        chosen.model.float()
        written = tokens
        for mode in tqdm(MODES, desc="checks in float32", unit=" modes"):
            found, texts_of_mode = check(chosen, inputs, mode, beams=beams, new_tokens=new_tokens)
            measured.checks.append(found)
            if mode == "beam search":
                written = texts_of_mode
    except (ValueError, RuntimeError) as error:
        _fail(str(error))

    if chosen.tokenizer is None:
        console.print("Random weights write no text, so none is shown.")
    else:
        print_texts(console, chosen, texts, written, tokens.shape[1])
    print_calls(console, measured)
    print_checks(console, measured)
    try:
        save_plot(output, measured)
        console.print(f"Plot: {output}")
        if json_path:
            save_json(Path(json_path), measured)
            console.print(f"Numbers: {json_path}")
    except OSError as error:
        _fail(
            f"`--output` and `--json` must be writable paths, got {error.filename!r} ({error.strerror}); give another"
        )
    if not measured.is_right:
        raise typer.Exit(1)


def measure_calls(
    chosen: CausalModel,
    inputs: dict[str, Tensor],
    ways: list[str],
    *,
    beams: int,
    new_tokens: int,
    rounds: int,
    has_peer: bool,
) -> dict[str, dict[str, Calls]]:
    """Calls of every mode, by way."""
    found = {}
    for mode in tqdm(MODES, desc="calls, all ways in turns", unit=" modes"):
        options = options_of(mode, beams)
        runs = {way: whole_calls.way_of(chosen.model, inputs, options, way) for way in ways}
        if has_peer and mode != "sampling":
            folder = chosen.model.config._name_or_path
            runs[ctranslate2_peer.NAME] = ctranslate2_peer.way_of(
                folder, chosen.tokenizer, inputs, options["num_beams"]
            )
        found[mode] = whole_calls.measure(runs, new_tokens, rounds, chosen.model)
    return found


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name) if name else best_device()
    except RuntimeError:
        _fail(f"`--device` must name a device of torch, got {name!r}; give cpu or cuda")
    if device.type not in ("cpu", "cuda"):
        _fail(f"`--device` must be a CPU or a CUDA GPU, got {name!r}; give cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            _fail(f"`--device` must be a GPU that torch sees (it sees {count}), got {name!r}; give --device cpu")
        device = torch.device("cuda", device.index or 0)
    # Without its kernels there is nothing to measure.
    if cause := backends.available(device)[device.type]:
        _fail(f"`--device` must have kernels, got {str(device)!r}: {cause}")
    if device.type == "cuda":
        # Kernels that torch itself launches go to the current device.
        torch.cuda.set_device(device)
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    name = name or ("bfloat16" if device.type == "cuda" else "float32")
    if name not in dtypes:
        _fail(f"`--dtype` must be one of {', '.join(dtypes)}, got {name!r}; choose one of these")
    return dtypes[name]


def _check_length(chosen: CausalModel, prompt_length: int, new_tokens: int) -> None:
    longest = chosen.longest_text
    if longest is not None and prompt_length + new_tokens > longest:
        raise ValueError(
            f"`--new-tokens` and the longest prompt must fit into the model's {longest} positions, got {new_tokens} "
            f"and {prompt_length}; give fewer new tokens or shorter prompts"
        )


def _kernels(device: torch.device) -> str:
    """Which kernels choose the tokens. On a machine with a GPU also why not the GPU's."""
    if device.type == "cuda":
        return f"Kernels: the GPU's, on {torch.cuda.get_device_name(device)}."
    line = f"Kernels: the CPU's ({cpu.instruction_set()})."
    cause = backends.available()["cuda"]
    return f"{line} The GPU's do not work here: {cause}." if cause and torch.cuda.is_available() else line


def _repeated(prompts: list[str], batch: int) -> list[str]:
    return [prompts[i % len(prompts)] for i in range(batch)]


def _fail(message: str) -> NoReturn:
    """Ends the run with one line rather than a traceback: what is wrong is in the message."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()

# SPDX-License-Identifier: Apache-2.0
"""Decodes with a real language model and shows what whole steps save.

Beam search, greedy search and sampling, on the same prompts. Calls of generate() in turns: stock, in whole steps, and with transformers'
static cache. Then a check in float32: whole steps write stock's texts, with sampling those of the same seed.

    python demos/decoding_latency.py                                  # a tiny model, trained here in about a minute
    python demos/decoding_latency.py --peer ctranslate2               # also CTranslate2, on a CPU
    python demos/decoding_latency.py --compiled                       # also compiled whole steps, on a GPU too
    python demos/decoding_latency.py --shape llama-1b-8x4-prompt-512  # a true shape with random weights, for a GPU; or all
    python demos/decoding_latency.py --model path/to/any/causal-lm

Reading order: whole_calls.py (all ways, their times, and the check), causal_models.py and tiny_language_model.py (what it decodes
with), decoding_report.py (what it prints and plots).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

try:
    import torch
    import transformers
    import typer
    from rich.console import Console
    from torch import Tensor

    import whole_calls
    from benchmark import results
    from benchmark.devices import device_of
    from causal_models import SHAPES, CausalModel, encode, from_disk, random_prompts, tiny, with_random_weights
    from decoding_report import print_calls, print_texts, save_plot
    from fused_topk import backends
    from fused_topk.backends import cpu
    from tiny_language_model import Recipe
    from whole_calls import COMPILED, CTRANSLATE2, STATIC, STOCK, WHOLE, Calls
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
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PIPE_WIDTH = 130

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


class Work(NamedTuple):
    """Calls of generate() to measure. Without an end token every call has the same number of steps, and so the same work."""

    name: str
    model: Any
    inputs: dict[str, Tensor]
    options: dict[str, Any]
    new_tokens: int


@app.command(help=(__doc__ or "").partition("\n\n    ")[0])
def main(
    model: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="A causal LM on this disk; nothing is fetched.")
    ] = "",
    shape: Annotated[
        list[str], typer.Option(metavar="NAME", help=f"Random weights: of {', '.join(SHAPES)}, or all.")
    ] = [],  # noqa: B006
    beams: Annotated[int, typer.Option(min=1, help="Hypotheses kept per prompt in beam search.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=3, help="Tokens to add to each prompt.")] = 64,
    prompt: Annotated[list[str], typer.Option(help="A prompt; may be given several times.")] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; by default a GPU where its kernels work.")] = "",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16; by default bfloat16 on a GPU.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each way, of which the median counts.")] = 3,
    training_steps: Annotated[
        int, typer.Option(min=1, help="Of the tiny model: more give better text.")
    ] = Recipe.steps,
    output: Annotated[Path, typer.Option(help="Where the plot goes, as a PNG.")] = Path("out/decoding_latency.png"),
    csv: Annotated[Path | None, typer.Option(help="Also write every number there.")] = None,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled", help="Also compile whole steps on a GPU: up to a minute each. On a CPU this is done anyway."
        ),
    ] = False,
    peer: Annotated[str, typer.Option(metavar="ctranslate2", help="Also time it, where it is installed.")] = "",
) -> None:
    if unknown := [name for name in shape if name not in (*SHAPES, "all")]:
        _fail(f"`--shape` must be of {', '.join(SHAPES)} or all, got {unknown[0]!r}")
    if shape and (model or prompt or peer):
        _fail("`--shape` has random weights and no tokenizer; leave --model, --prompt and --peer out")
    if peer not in ("", "ctranslate2"):
        _fail(f"`--peer` must be ctranslate2, got {peer!r}; leave it out")
    if peer and find_spec(peer) is None:
        _fail(
            "`--peer ctranslate2` needs a package that is not installed; run: pip install ctranslate2, or leave it out"
        )
    if output.suffix.lower() != ".png":
        _fail(f"`--output` must end in .png, got {str(output)!r}; rename it")
    place = device_of(device)
    if dtype not in ("", *DTYPES):
        _fail(f"`--dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}; choose one of these")
    precision = DTYPES[dtype or ("bfloat16" if place.type == "cuda" else "float32")]

    transformers.logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(kernels(place), markup=False)
    # Compiling takes seconds on a CPU.
    ways = [STOCK, WHOLE, *([COMPILED] if compiled or place.type == "cpu" else []), STATIC]
    chosen: CausalModel | None = None
    try:
        if shape:
            title, works = "Random weights", works_of_shapes([*SHAPES] if "all" in shape else shape, place, precision)
        else:
            chosen = (
                from_disk(model, place, precision) if model else tiny(place, precision, Recipe(steps=training_steps))
            )
            texts = [(prompt or PROMPTS)[i % len(prompt or PROMPTS)] for i in range(max(batch, len(prompt)))]
            works = works_of_model(chosen, encode(chosen, texts, place), beams, new_tokens)
            title = f"{chosen.name}: {len(texts)} prompts, {beams} beams in beam search, {chosen.vocab_size:,} tokens"
        calls: dict[str, dict[str, Calls]] = {}
        for work in works:
            runs = {way: whole_calls.way_of(work.model, work.inputs, work.options, way) for way in ways}
            if peer and chosen and not work.options["do_sample"]:
                of_beams = work.options["num_beams"]
                runs[CTRANSLATE2] = whole_calls.with_ctranslate2(work.model, chosen.tokenizer, work.inputs, of_beams)
            calls[work.name] = whole_calls.measure(runs, work.new_tokens, rounds, place)
            if csv:
                # After each, so that an interrupted run has what it found.
                results.write(csv, records_of(calls, place))
            typer.echo(f"measured: {work.name}", err=True)
        is_right = chosen is None or checked(console, chosen, texts, works)
    except (ValueError, RuntimeError) as error:
        _fail(str(error))

    records, origin = records_of(calls, place), results.origin_on(place)
    title += f", {str(precision).removeprefix('torch.')}"
    print_calls(console, title, calls, origin)
    save_plot(output, f"{title}\n{origin.machine}, {origin.date}, commit {origin.commit or 'unknown'}", records)
    console.print(f"Plot: {output}")
    if csv:
        console.print(f"Numbers: {csv}")
    if not is_right:
        raise typer.Exit(1)


def records_of(calls: dict[str, dict[str, Calls]], place: torch.device) -> list[results.Record]:
    origin = results.origin_on(place)
    return [record for case, ways in calls.items() for record in whole_calls.records_of(case, ways, origin)]


def works_of_model(chosen: CausalModel, inputs: dict[str, Tensor], beams: int, new_tokens: int) -> list[Work]:
    """Beam search, greedy search and sampling."""
    longest, length = getattr(chosen.model.config, "max_position_embeddings", None), inputs["input_ids"].shape[1]
    if longest is not None and length + new_tokens > longest:
        raise ValueError(
            f"`--new-tokens` and the longest prompt must fit into the model's {longest} positions, got {new_tokens} "
            f"and {length}; give fewer new tokens or shorter prompts"
        )
    _without_end(chosen.model)
    modes = {
        "beam search": {"num_beams": beams, "do_sample": False},
        "greedy": {"num_beams": 1, "do_sample": False},
        "sampling": {"num_beams": 1, "do_sample": True, "top_k": 50, "top_p": 0.95},
    }
    return [Work(mode, chosen.model, inputs, options, new_tokens) for mode, options in modes.items()]


def works_of_shapes(names: list[str], device: torch.device, dtype: torch.dtype) -> Iterator[Work]:
    """Each with a model of its own, which is gone before the next one."""
    for name in names:
        shape = SHAPES[name]
        model = _without_end(with_random_weights(shape.config, device, dtype))
        inputs = random_prompts(shape.config.vocab_size, shape.batch, shape.prompt, device)
        yield Work(name, model, inputs, shape.options, shape.new_tokens)
        del model
        # Models refer to themselves, and compiled code to its model. They would count as memory of the next shape.
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _without_end(model: Any) -> Any:
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def checked(console: Console, chosen: CausalModel, texts: list[str], works: Any) -> bool:
    """Whether whole steps write stock's texts in float32. Shows those of beam search."""
    # In 16 bits the forward pass of a whole step rounds otherwise, and some texts differ.
    chosen.model.float()
    is_right = True
    for work in works:
        wrong, found = whole_calls.compared(work.model, work.inputs, work.options, work.new_tokens)
        if work.name == "beam search":
            print_texts(console, chosen.tokenizer, texts, found, work.inputs["input_ids"].shape[1])
        verdict = (
            f"[bold red]FAILED[/]: {wrong}" if wrong else "[bold green]Passed[/]: all texts in float32 are stock's"
        )
        console.print(f"{work.name}: {verdict}{' of the same seed' if work.options['do_sample'] else ''}")
        is_right &= not wrong
    return is_right


def kernels(device: torch.device) -> str:
    """Which kernels choose the tokens. On a machine with a GPU also why not the GPU's."""
    if device.type == "cuda":
        return f"Kernels: the GPU's, on {torch.cuda.get_device_name(device)}."
    line = f"Kernels: the CPU's ({cpu.instruction_set()})."
    cause = backends.available()["cuda"]
    return f"{line} The GPU's do not work here: {cause}." if cause and torch.cuda.is_available() else line


def _fail(message: str) -> NoReturn:
    """Ends the run with one line rather than a traceback: what is wrong is in the message."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()

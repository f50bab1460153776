# SPDX-License-Identifier: Apache-2.0
"""Climbs from three passes over the logits to one: softmax and softmax + top-k, rung by rung, checked and timed.

    python demos/ladder.py                             # a GPU where there is one, else the same rungs on the CPU
    python demos/ladder.py --device cpu --plot out/ladder.png --json out/ladder.json
    python demos/ladder.py --from-json demos/results/ladder_cpu.json    # shows an older run again

The rungs are csrc/ladder/ladder.cu, to be read from top to bottom, and csrc/ladder/ladder.cpp; demos/README.md says what each adds
and why it is as fast as it is. Nothing is timed before its answer was compared with float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

try:
    import torch
    import typer
    from rich.console import Console
    from tqdm import tqdm

    from benchmark.command_options import device_of
    from benchmark.devices import best_device
    from benchmark.report import origin
    from benchmark.timing import warm_up_gpu
    from fused_topk import backends
    from fused_topk.machine import describe
    from ladder_measure import measure, naive_overflow, shapes
    from ladder_report import Document, draw, print_ladder, print_rows
except ModuleNotFoundError as error:
    raise SystemExit(
        f"this demo needs the package {(error.name or '?').partition('.')[0]!r}, which is not installed; "
        "run: pip install 'fused_topk[demo]' (in a checkout: pip install '.[demo]')"
    ) from error

# Elements of a tensor: logits and probabilities together take 8 bytes each, and float64 some more of a part of them.
MOST_ON_CPU = 1 << 24
# The shortest row that is measured.
LEAST_MOST = 10
PIPE_WIDTH = 130

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command(help=(__doc__ or "").partition("\n\n    ")[0])
def main(
    device: Annotated[str, typer.Option(help="cuda or cpu; by default a GPU where its kernels work.")] = "",
    most: Annotated[int, typer.Option(help="Leave out shapes of more elements than this; 0 for none.")] = 0,
    plot: Annotated[Path, typer.Option(help="Where the figure goes (PNG, SVG, PDF).")] = Path("out/ladder.png"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
    from_json: Annotated[
        Path | None, typer.Option(exists=True, help="Measure nothing; show what an older run wrote.")
    ] = None,
) -> None:
    if most and most < LEAST_MOST:
        raise typer.BadParameter(f"--most must be at least {LEAST_MOST}, or 0 for no limit, got {most}")
    if from_json:
        run = older_run(from_json)
    else:
        chosen = device_of(device) if device else best_device()
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        run = climb(chosen, most)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    print_ladder(run, console)
    print_rows(run, console)
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        console.print(f"Wrote {json_path}")
    plot.parent.mkdir(parents=True, exist_ok=True)
    draw(run, plot)
    console.print(f"Wrote {plot}")


def older_run(path: Path) -> Document:
    """What --json wrote."""
    try:
        run: Document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--from-json must be a JSON file that --json wrote, got {path}: {error}") from error
    if not isinstance(run, dict) or not {"points", "overflow"} <= run.keys():
        raise typer.BadParameter(
            f"--from-json must be a JSON file that --json wrote, got {path}, which is of another command"
        )
    return run


def climb(device: torch.device, most: int) -> Document:
    """Measures everything."""
    cause = backends.available().get(device.type, "there are rungs for cuda and cpu")
    if cause:
        raise SystemExit(f"the ladder cannot run on {device}: {cause}")
    on_gpu = device.type == "cuda"
    if on_gpu:
        warm_up_gpu()
    affordable = torch.cuda.mem_get_info(device)[0] // 16 if on_gpu else MOST_ON_CPU
    todo = shapes(on_gpu, min(most or affordable, affordable))
    points = []
    with tqdm(todo, unit="shape", disable=None) as progress:
        for shape in progress:
            progress.set_description(f"{shape.rows} x {shape.vocab}" + (f", k = {shape.k}" if shape.k else ""))
            points += measure(shape, device)
            if on_gpu:
                torch.cuda.empty_cache()
    return {
        **origin(describe()),
        "device": str(device),
        "overflow": naive_overflow(device),
        "points": points,
    }


if __name__ == "__main__":
    app()

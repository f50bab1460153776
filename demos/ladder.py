# SPDX-License-Identifier: Apache-2.0
"""Climbs from three passes over the logits to one: softmax and softmax + top-k, rung by rung, checked and timed.

    python demos/ladder.py                                         # a GPU where there is one, else the same rungs on the CPU
    python demos/ladder.py --device cpu --plot out/ladder.png --csv out/ladder.csv
    python demos/ladder.py --from-csv demos/results/h200.csv       # shows an older run again

The rungs are csrc/ladder/ladder.cu, to be read from top to bottom, and csrc/ladder/ladder.cpp; ladder_rungs.py lists them. Nothing is timed
before its answer was compared with float64.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

try:
    import torch
    import typer
    from rich.console import Console
    from torch import Tensor
    from tqdm import tqdm

    import ladder_rungs
    from benchmark import results, rivals
    from benchmark.cases import Case
    from benchmark.devices import device_of
    from benchmark.inputs import inputs_from_memory
    from benchmark.results import Origin, Record
    from benchmark.timing import Effort, in_turns, sampler, warm_up_gpu
    from ladder_report import BASELINES, BY_K, BY_LENGTH, LADDER, draw, print_ladder
    from ladder_rungs import GPU_K, RUNGS, Rung, Scratch
except ModuleNotFoundError as error:
    raise SystemExit(
        f"this demo needs the package {(error.name or '?').partition('.')[0]!r}, which is not installed; "
        "run: pip install 'fused_topk[demo]' (in a checkout: pip install '.[demo]')"
    ) from error

# Elements of a tensor: logits and probabilities together take 8 bytes each, and float64 some more of a part of them.
MOST_ON_CPU = 1 << 24
LENGTHS = (100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
# Results are float32, with a few roundings an element. Naive softmax sums exponentials that nothing has scaled.
TOLERANCE = 1e-4
EFFORT = Effort(samples=9, sample_us=1000.0)
PIPE_WIDTH = 130

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


class Shape(NamedTuple):
    """One measurement: which part of the demo asks for it, and its size; k = 0 for softmax."""

    suite: str
    rows: int
    vocab: int
    k: int


@app.command(help=(__doc__ or "").partition("\n\n    ")[0])
def main(
    device: Annotated[str, typer.Option(help="cuda or cpu; by default a GPU where its kernels work.")] = "",
    most: Annotated[int, typer.Option(min=LENGTHS[0], help="Leave out shapes of more elements than this.")] = 1 << 40,
    plot: Annotated[Path, typer.Option(help="Where the figure goes (PNG, SVG, PDF).")] = Path("out/ladder.png"),
    csv: Annotated[Path | None, typer.Option(help="Write all numbers here.")] = None,
    from_csv: Annotated[
        Path | None, typer.Option(exists=True, help="Measure nothing; show what an older run wrote.")
    ] = None,
) -> None:
    if from_csv:
        records = older_run(from_csv)
    else:
        chosen = device_of(device)
        naive, safe = naive_overflow(chosen)
        print(f"Of one logit 100 among zeros, whose probability is 1, naive softmax makes {naive}, safe {safe}.")
        records = climb(chosen, most)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    print_ladder(records, console)
    if csv:
        results.write(csv, records)
        console.print(f"Wrote {csv}")
    draw(records, plot)
    console.print(f"Wrote {plot}")


def older_run(path: Path) -> list[Record]:
    """What --csv wrote."""
    try:
        records = [record for record in results.read(path) if record.suite in (LADDER, BY_LENGTH, BY_K)]
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--from-csv must be a CSV file that --csv wrote: {error}") from error
    if not records:
        raise typer.BadParameter(f"--from-csv must be a CSV file that --csv wrote, got {path}, which has no ladder")
    return records


def climb(device: torch.device, most: int) -> list[Record]:
    """Measures everything."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        warm_up_gpu()
    origin = results.origin_on(device)
    affordable = torch.cuda.mem_get_info(device)[0] // 16 if on_gpu else MOST_ON_CPU
    records: list[Record] = []
    with tqdm(shapes(on_gpu, min(most, affordable)), unit="shape", disable=None) as progress:
        for shape in progress:
            progress.set_description(f"{shape.rows} x {shape.vocab}" + (f", k = {shape.k}" if shape.k else ""))
            records += measure(shape, device, origin)
    return records


def shapes(on_gpu: bool, most_elements: int) -> list[Shape]:
    """All shapes that the demo measures, without those of more elements than `most_elements`."""
    # On a CPU rows that its caches do not hold, so that a pass is a pass over memory.
    rows, vocab = (4000, 25_000) if on_gpu else (16, 1_000_000)
    rows = min(rows, max(1, most_elements // vocab))
    found = [Shape(LADDER, rows, min(vocab, most_elements), k) for k in (0, 5)]
    found += [Shape(BY_LENGTH, 4000 if on_gpu else 16, length, k) for length in LENGTHS for k in (0, 5)]
    found += [Shape(BY_K, 4000 if on_gpu else 64, 25_000, k) for k in GPU_K]
    return [shape for shape in found if shape.rows * shape.vocab <= most_elements]


def measure(shape: Shape, device: torch.device, origin: Origin) -> Iterator[Record]:
    """The times of all contenders. Raises RuntimeError where a rung's answer is wrong."""
    suite, rows, vocab, k = shape
    case = Case(rows, vocab, k, "fp32")
    inputs = inputs_from_memory(case, device)
    scratch = ladder_rungs.scratch_for(inputs[0], k)
    contenders: dict[str, Any] = {}
    for rung in RUNGS:
        if (rung.gives == "topk") == bool(k) and ladder_rungs.unavailable(rung, device, vocab, k) is None:
            ladder_rungs.climb(rung, inputs[0], scratch)
            check(rung, inputs[0], scratch)
            contenders[rung.name] = climber(rung, scratch)
    contenders["torch"] = with_torch(scratch, k)
    contenders |= {"read": rivals.read(case, device)} if k else {"copy": scratch.y.copy_}
    samplers = {name: sampler(function, inputs, EFFORT.sample_us) for name, function in contenders.items()}
    times = in_turns(samplers, EFFORT.samples)
    for name, time in times.items():
        if suite != LADDER:
            yield Record(suite, case.label, "time", name, time.median, "µs", time.p10, time.p90, origin)
            continue
        number = ladder_rungs.BY_NAME[name].number if name in ladder_rungs.BY_NAME else name
        number += (", top-k" if k else ", softmax") if name == "torch" else ""
        yield Record(suite, number, "time", "rung", time.median, "µs", time.p10, time.p90, origin)
        yield Record(suite, number, "time", "baseline", times[BASELINES[k]].median, "µs", None, None, origin)


def climber(rung: Rung, scratch: Scratch) -> Any:
    return lambda logits: ladder_rungs.climb(rung, logits, scratch)


def with_torch(scratch: Scratch, k: int) -> Any:
    def softmax(logits: Tensor) -> Tensor:
        return torch.softmax(logits, -1, out=scratch.y)

    def softmax_topk(logits: Tensor) -> object:
        return torch.topk(softmax(logits), k, out=(scratch.values, scratch.indices))

    return softmax_topk if k else softmax


def check(rung: Rung, logits: Tensor, scratch: Scratch) -> None:
    """Raises RuntimeError where the rung's answer is wrong. Errors of probabilities are relative to the row's greatest."""
    # Some rows are enough, and float64 of all would not fit beside the largest inputs.
    some = slice(0, max(1, min(logits.shape[0], (1 << 24) // logits.shape[1])))
    exact = logits[some].double().softmax(-1)
    if rung.gives == "softmax":
        got = scratch.y[some].double()
    else:
        got, exact = scratch.values[some].double(), exact.gather(-1, scratch.indices[some])
        best = logits[some].topk(scratch.values.shape[-1]).values
        if not torch.equal(logits[some].gather(-1, scratch.indices[some]), best) and "then" not in rung.name:
            raise RuntimeError(f"rung {rung.number}, {rung.title}: not the greatest logits")
    error = float(((got - exact).abs() / exact.amax(-1, keepdim=True)).max())
    if not error <= TOLERANCE:
        raise RuntimeError(f"rung {rung.number}, {rung.title}: off by {error:.1e}")


def naive_overflow(device: torch.device) -> tuple[float, float]:
    """What naive and safe softmax make of a logit of 100 among zeros; the probability is 1."""
    logits = torch.zeros(1, 1000, device=device)
    logits[0, 0] = 100.0
    found = []
    for name in ("naive", "safe"):
        scratch = ladder_rungs.scratch_for(logits)
        ladder_rungs.climb(ladder_rungs.BY_NAME[name], logits, scratch)
        found.append(float(scratch.y[0, 0]))
    return found[0], found[1]


if __name__ == "__main__":
    app()

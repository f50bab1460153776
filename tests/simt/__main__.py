# SPDX-License-Identifier: Apache-2.0
"""Runs one case on the emulated machine and says what happened."""

import os
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle import DTYPES

from .build import address_sanitizer_environment, unavailable
from .cases import Case, check
from .launch import SCHEDULES

_Dtype = Enum("Dtype", {name: name for name in DTYPES}, type=str)
_Schedule = Enum("Schedule", {name: name for name in (*SCHEDULES, "all")}, type=str)
_Owner = Enum("Owner", {name: name for name in ("few", "some", "many")}, type=str)


def main(
    vocab_size: Annotated[int, typer.Option(help="Length of a row.")] = 3001,
    k: Annotated[int, typer.Option(help="Results a row.")] = 5,
    dtype: Annotated[_Dtype, typer.Option(help="Of the logits.")] = _Dtype.fp32,
    rows: Annotated[
        str,
        typer.Option(
            help="adversarial: those of tests/rows.py; 2/7: every 7th from the 2nd on; one by its name; "
            "or a number of normal rows."
        ),
    ] = "adversarial",
    entry: Annotated[str, typer.Option(help="softmax_topk, log_softmax_topk or topk.")] = "log_softmax_topk",
    owner: Annotated[_Owner, typer.Option(help="Laid over the GPU as one row is, or 200, or a million.")] = _Owner.few,
    splits: Annotated[int, typer.Option(help="Blocks that share a row; 0: as many as fused_topk chooses.")] = 0,
    tiles_per_part: Annotated[
        int, typer.Option(help="Tiles of 1024 elements that a warp sums as one; 0: as fused_topk chooses.")
    ] = 0,
    mask: Annotated[str, typer.Option(help="none, bool or packed.")] = "none",
    normalize: Annotated[str, typer.Option(help="allowed, all or topk.")] = "allowed",
    temperature: Annotated[str, typer.Option(help="none, a number, or rows: one for each.")] = "none",
    start: Annotated[int, typer.Option(help="Elements between a 256-byte boundary and the first row.")] = 0,
    padding: Annotated[int, typer.Option(help="Elements between rows.")] = 0,
    beams: Annotated[int, typer.Option(help="Beam search over so many; 0: none.")] = 0,
    schedule: Annotated[_Schedule, typer.Option(help="Whose turn it is (tests/simt/README.md).")] = _Schedule.random,
    seed: Annotated[int, typer.Option(help="Of the schedule.")] = 0,
    repeat: Annotated[int, typer.Option(help="Run so many seeds, from --seed on.")] = 1,
    architecture: Annotated[int, typer.Option(help="Compute capability times ten.")] = 90,
    debug: Annotated[bool, typer.Option(help="Compile for a debugger.")] = False,
    address_sanitizer: Annotated[bool, typer.Option(help="Under AddressSanitizer instead of our own checks.")] = False,
) -> None:
    """Runs one kernel of csrc/ on the emulated machine, and compares the result with the reference."""
    if cause := unavailable():
        raise SystemExit(cause)
    if address_sanitizer and "LD_PRELOAD" not in os.environ:
        raise SystemExit(subprocess.run(sys.orig_argv, env=address_sanitizer_environment()).returncode)
    case = Case(
        vocab_size, k, dtype.value, rows, entry, owner.value, splits, tiles_per_part, mask, normalize, temperature,
        start, padding, beams,
    )  # fmt: skip
    print(f"{case}\n{case.choice()}")
    failed = 0
    for name in SCHEDULES if schedule.value == "all" else (schedule.value,):
        for number in range(seed, seed + repeat):
            print(f"--schedule {name} --seed {number}: ", end="", flush=True)
            try:
                outcomes = check(
                    case, schedule=name, seed=number, architecture=architecture, debug=debug,
                    address_sanitizer=address_sanitizer,
                )  # fmt: skip
            except AssertionError as error:
                failed += 1
                print(f"FAILED\n{error}")
            else:
                print("as the reference; " + ", ".join(f"{n} {what}" for what, n in outcomes[-1].counts.items()))
    if failed:
        raise SystemExit(1)


typer.run(main)

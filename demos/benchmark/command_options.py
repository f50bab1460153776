# SPDX-License-Identifier: Apache-2.0
"""What the text of a command's option means: shapes, a device, a list. A wrong text is an error that names the option."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from .suites import Case

# A larger input takes a CPU minutes.
_MOST_CPU_BYTES = 256 << 20


def cases_of(suite: str, on_gpu: bool, rows: str, vocab: str, k: str, dtype: str) -> list[tuple[str, Case]]:
    """The shapes of the suites that pass the filters, each with its suite's name."""
    from .suites import SUITES, select

    # The cpu suite's targets are about the CPU kernel.
    names = [name for name in SUITES if name != "cpu" or not on_gpu]
    if suite != "all":
        names = words(suite or ("decode,paper" if on_gpu else "cpu"), SUITES, "--suite")
    cases = select(names, *filters_of(rows, vocab, k, dtype))
    if not on_gpu:
        small = [(name, case) for name, case in cases if case.input_bytes <= _MOST_CPU_BYTES]
        if len(small) < len(cases):
            typer.echo(
                f"Left out on the CPU: {len(cases) - len(small)} shapes over {_MOST_CPU_BYTES >> 20} MiB.", err=True
            )
        cases = small
    if not cases:
        raise typer.BadParameter("no shape of the chosen suites passes the filters")
    return cases


def judged(cases: list[tuple[str, Case]], on_gpu: bool, targets: bool) -> list[tuple[str, Case]]:
    """The cases, with targets only if they are asked for and are about this kind of machine."""

    def is_about(suite: str) -> bool:
        # Draws are judged by the top-k of the same rows, wherever they run.
        return suite == "sampling" or on_gpu == (suite != "cpu")

    return [
        (name, case if targets and is_about(name) else case._replace(target=None, hot=None)) for name, case in cases
    ]


def device_of(name: str) -> Any:
    """The torch.device, with an index for a GPU. No name: a GPU where there is one."""
    import torch

    try:
        chosen = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise typer.BadParameter(f"--device must be cuda, cuda:N or cpu, got {name!r}") from error
    if chosen.type not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device must be cuda, cuda:N or cpu, got {name!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "--device cuda needs a GPU that torch sees; `python -m fused_topk info` says what is missing"
        )
    if chosen.type == "cpu":
        return torch.device("cpu")
    # torch.cuda.set_device needs an index.
    index, count = chosen.index or 0, torch.cuda.device_count()
    if index >= count:
        raise typer.BadParameter(f"--device must be a GPU that torch sees (it sees {count}), got {name!r}")
    return torch.device("cuda", index)


def gpu_of(name: str) -> Any:
    """The torch.device of a GPU."""
    chosen = device_of(name)
    if chosen.type != "cuda":
        raise typer.BadParameter(f"--device must be cuda or cuda:N, got {name!r}")
    return chosen


def filters_of(rows: str, vocab: str, k: str, dtype: str) -> tuple[list[int], list[int], list[int], list[str]]:
    """The arguments of suites.filtered() behind the cases."""
    from .suites import ITEM_BYTES

    sizes = numbers(rows, "--rows"), numbers(vocab, "--vocab"), numbers(k, "--k")
    return *sizes, words(dtype, ITEM_BYTES, "--dtype")


def words(text: str, known: Any, option: str) -> list[str]:
    """The words between commas, each of them `known`."""
    given = [word.strip() for word in text.split(",") if word.strip()]
    for word in given:
        if word not in known:
            raise typer.BadParameter(f"{option} must be of {', '.join(known)}, got {word!r}")
    return given


def numbers(text: str, option: str) -> list[int]:
    """The whole numbers between commas."""
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{option} must be whole numbers with commas between, got {text!r}") from error

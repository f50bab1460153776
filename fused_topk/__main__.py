# SPDX-License-Identifier: Apache-2.0
"""`python -m fused_topk`: what works on this machine, and which compiled kernels are on disk."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from fused_topk import env, machine
from fused_topk.cuda_runtime import kernel_cache

_MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Args:
        arguments: the words after `python -m fused_topk`; by default those that this process was started with.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.command == "info":
        return _info(chosen.json)
    if chosen.command == "cache":
        return _cache(chosen.clear)
    parser.print_help()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fused_topk", description="Softmax and top-k in one read of the logits.")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")

    text = "Versions, devices, which backends work and if not why, and where compiled kernels are cached."
    info = commands.add_parser("info", help=text, description=text)
    info.add_argument("--json", action="store_true", help="Print JSON instead.")

    text = (
        "Show the compiled kernels that are kept for later processes: where, how many, how much memory, when last used."
    )
    cache = commands.add_parser("cache", help=text, description=text, epilog="Exits with 1 if they cannot be removed.")
    cache.add_argument("--clear", action="store_true", help="Remove them; they are compiled again when needed.")
    return parser


def _info(as_json: bool) -> int:
    found = machine.describe()
    print(json.dumps(found, indent=2) if as_json else machine.as_text(found))
    return 0


def _cache(clear: bool) -> int:
    kept = kernel_cache.kept()
    print(f"folder     {env.kernel_cache_dir() or 'none'}")
    print(f"kernels    {len(kept)}, {sum(file.bytes for file in kept) / _MIB:.1f} MiB")
    if kept:
        newest, oldest = (_duration(time.time() - kept[i].last_use) for i in (0, -1))
        print(f"last used  {newest} ago; the one that was not used for longest, {oldest} ago")
    if problem := kernel_cache.problem():
        print(f"problem    {problem}")
    if clear:
        try:
            print(f"removed    {kernel_cache.clear()}")
        except OSError as error:
            print(f"not all could be removed: {error}", file=sys.stderr)
            return 1
    return 0


def _duration(seconds: float) -> str:
    """The duration as text, in the largest unit of which it has at least two."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"


if __name__ == "__main__":
    sys.exit(main())

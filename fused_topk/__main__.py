# SPDX-License-Identifier: Apache-2.0
"""`python -m fused_topk info`: what works on this machine, and why the rest does not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fused_topk import machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status. arguments: the words after `python -m fused_topk`; by default the process's."""
    parser = argparse.ArgumentParser("python -m fused_topk", description="Softmax and top-k in one read of the logits.")
    text = "Versions, devices, which backends work and if not why, and where compiled kernels are cached."
    parser.add_argument("command", choices=["info"], metavar="info", help=text)
    parser.parse_args(arguments)
    print(machine.as_text(machine.describe()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

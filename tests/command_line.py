# SPDX-License-Identifier: Apache-2.0
"""`python -m fused_topk` in this process."""

import contextlib
import io
from typing import NamedTuple

from fused_topk.__main__ import main


class Done(NamedTuple):
    exit_code: int
    output: str  # and errors


def invoke(*arguments: object) -> Done:
    """Runs the command with these words after its name."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            exit_code = main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # argparse, at a wrong word or --help
            exit_code = int(stopped.code or 0)
    return Done(exit_code, printed.getvalue())

# SPDX-License-Identifier: Apache-2.0
"""`python -m fused_topk`: see fused_topk/cli.py."""

import sys

try:
    from fused_topk.cli import app
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich"):
        raise
    sys.exit(f"The command line needs typer and rich, and {error.name} is missing: pip install typer rich")

app(prog_name="python -m fused_topk")

# SPDX-License-Identifier: Apache-2.0
"""`python demos/benchmark`: see cli.py."""

import sys
from pathlib import Path

# The demos' folder, as for the demos beside this one: Python puts the folder that it runs, which is inside the package.
sys.path[0] = str(Path(__file__).resolve().parents[1])

try:
    from benchmark.cli import app
except ModuleNotFoundError as error:
    raise SystemExit(
        f"the benchmark needs the package {(error.name or '?').partition('.')[0]!r}, which is not installed; "
        "run: pip install '.[demo]' in the checkout"
    ) from error

app(prog_name="python demos/benchmark")

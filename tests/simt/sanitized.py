# SPDX-License-Identifier: Apache-2.0
"""Calls of a test module's functions in a process that AddressSanitizer watches."""

import pickle
import subprocess
import sys
from typing import Any

from .build import address_sanitizer_environment

_PROGRAM = """if True:
    import importlib, pickle, sys
    sys.path[:] = pickle.load(sys.stdin.buffer)
    module, name, calls = pickle.load(sys.stdin.buffer)
    function = getattr(importlib.import_module(module), name)
    for arguments in calls:
        print(*arguments, flush=True)
        function(*arguments)
"""


def call(module: str, name: str, calls: list[tuple[Any, ...]]) -> subprocess.CompletedProcess[str]:
    """Runs `module.name` with the arguments of each call, up to the first fault; the output's last line names the call."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        # The path comes first: without it the calls' own types are not found.
        input=pickle.dumps(sys.path) + pickle.dumps((module, name, calls)),
        env=address_sanitizer_environment(),
        capture_output=True,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

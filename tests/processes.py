# SPDX-License-Identifier: Apache-2.0
"""Runs checks in several processes of this machine, which talk by Gloo or, each with a GPU of its own, by NCCL."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_PROGRAM = """if True:
    import pickle, sys
    sys.path[:] = pickle.load(sys.stdin.buffer)
    import processes
    processes.work(*pickle.load(sys.stdin.buffer))
"""


def run(
    module: str, checks: Sequence[str], size: int, seconds: int = 240, backend: str = "gloo"
) -> list[dict[str, str | None]]:
    """Runs the functions named `checks` of a module, one after the other, in each of `size` processes of a group.

    Returns:
        For each process, by the check's name, None if it passed, else the traceback. A process that died has no entries.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(size):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            # As torchrun sets them: transformers asks for them.
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, env=environment)
            process.stdin.write(pickle.dumps(sys.path) + pickle.dumps((module, checks, rank, size, folder, backend)))
            process.stdin.close()
            started.append(process)
        try:
            for process in started:
                process.wait(seconds)
        finally:
            for process in started:
                process.kill()
        results = [Path(folder, f"result_{rank}") for rank in range(size)]
        return [pickle.loads(path.read_bytes()) if path.exists() else {} for path in results]


def work(module: str, checks: Sequence[str], rank: int, size: int, folder: str, backend: str) -> None:
    """One process of run()."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    join(folder, "store", rank, size, backend=backend)
    results: dict[str, str | None] = {}
    found = __import__(module)
    found.FOLDER = folder
    for name in checks:
        try:
            getattr(found, name)(rank, size)
            results[name] = None
        except Exception:
            results[name] = f"rank {rank} of {size}:\n{traceback.format_exc()}"
    Path(folder, f"result_{rank}").write_bytes(pickle.dumps(results))
    # Without the clean-up of a group that may have lost a process.
    os._exit(0)


def join(folder: str, store: str, rank: int, size: int, seconds: int = 60, backend: str = "gloo") -> None:
    """Initialises torch.distributed."""
    dist.init_process_group(
        backend, init_method=f"file://{folder}/{store}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )

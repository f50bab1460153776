# SPDX-License-Identifier: Apache-2.0
"""Runs checks in several processes of this machine, which talk by Gloo or, each with a GPU of its own, by NCCL."""

import faulthandler
import functools
import inspect
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from kept import built, key

_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports these once, for all processes that it forks.
_CONTEXT.set_forkserver_preload(["pytest", "fused_topk.distributed", "torch._dynamo", "torch.distributed.tensor"])


def assert_equal_everywhere(tokens: torch.Tensor) -> None:
    everywhere = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, tokens.contiguous())
    assert all(torch.equal(each, tokens) for each in everywhere)


def run(
    module: str, checks: Sequence[str], size: int, seconds: int = 240, backend: str = "gloo"
) -> list[dict[str, str | None]]:
    """Runs the functions named `checks` of a module, one after the other, in each of `size` processes of a group.

    Returns:
        For each process, by the check's name, None if it passed, else the traceback. A process that died has no entries.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [
            _CONTEXT.Process(target=work, args=(module, checks, rank, size, folder, backend, seconds))
            for rank in range(size)
        ]
        try:
            for process in started:
                process.start()
            for process in started:
                process.join(seconds)
                if process.exitcode is None:
                    raise TimeoutError(f"a process of {module} has not ended after {seconds} s")
        finally:
            for process in started:
                if process.pid is not None:
                    process.kill()
        results = [Path(folder, f"result_{rank}") for rank in range(size)]
        return [pickle.loads(path.read_bytes()) if path.exists() else {} for path in results]


def checks_of(module: ModuleType, *others: str) -> list[str]:
    """The functions of a module that each process calls, but those that have processes of their own."""
    found = {name: check for name, check in vars(module).items() if inspect.isfunction(check) and name not in others}
    return [name for name, check in found.items() if list(inspect.signature(check).parameters) == ["rank", "size"]]


def run_once(module: str, checks: Sequence[str], size: int, backend: str) -> list[dict[str, str | None]]:
    """run(), once for all workers of pytest-xdist: one of them runs the checks, and the others wait for its results."""
    tests = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if tests is None:
        return run(module, checks, size, backend=backend)
    name = f"{key(tests, module, *checks, str(size))}.results"

    def build(_: Path, path: Path) -> None:
        path.write_bytes(pickle.dumps(run(module, checks, size, backend=backend)))

    return pickle.loads(built(name, build).read_bytes())


@functools.cache
def _results(module: str, checks: tuple[str, ...], size: int, backend: str) -> list[dict[str, str | None]]:
    return run_once(module, checks, size, backend)


def assert_survivors(module: str, size: int, **how: Any) -> None:
    """That the processes which are left pass where the last one dies. how: as of run()."""
    *survivors, dead = run(module, ["a_process_dies"], size, **how)
    assert dead == {} and survivors == [{"a_process_dies": None}] * (size - 1), survivors


def assert_passes(module: str, check: str, size: int, checks: Sequence[str], backend: str = "gloo") -> None:
    """That a check passes in each of `size` processes, which run all of `checks` once."""
    for rank, of_rank in enumerate(_results(module, tuple(checks), size, backend)):
        assert check in of_rank, f"rank {rank} of {size} has no result; it died or did not end"
        assert of_rank[check] is None, of_rank[check]


def work(module: str, checks: Sequence[str], rank: int, size: int, folder: str, backend: str, seconds: int) -> None:
    """One process of run()."""
    # A process that does not end says where it is.
    faulthandler.dump_traceback_later(0.8 * seconds)
    # As torchrun sets them: transformers asks for them.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
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


def join(folder: str, store: str, rank: int, size: int, backend: str = "gloo") -> None:
    """Initialises torch.distributed."""
    minute = timedelta(seconds=60)
    dist.init_process_group(backend, init_method=f"file://{folder}/{store}", rank=rank, world_size=size, timeout=minute)

# SPDX-License-Identifier: Apache-2.0
"""What compilers make for the tests, kept under a hash of all that it follows from: nothing is compiled twice.

The folder is FUSED_TOPK_TEST_CACHE, or `fused_topk/tests` in the user's cache folder. It may be removed at any time.
"""

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

_MOST_IDLE_SECONDS = 3 * 86400
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_FOLDER = Path(os.environ.get("FUSED_TOPK_TEST_CACHE") or _CACHE / "fused_topk" / "tests")


def key(*parts: str) -> str:
    """The name of what follows from these texts: sources, options, the compiler and its version."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def built(name: str, build: Callable[[Path, Path], None]) -> Path:
    """The file of that name. If it is not there, `build` is called with a folder to work in and the path to write to. Other
    processes that want the file meanwhile wait."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    path = _FOLDER / name
    with _lock(_FOLDER / f"{name}.lock"):
        if path.exists():
            os.utime(path)
            return path
        _remove_old()
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            unfinished = Path(folder) / name
            build(Path(folder), unfinished)
            unfinished.rename(path)
    return path


@contextmanager
def _lock(path: Path):
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_old() -> None:
    """What was long unused is of a text that is no more."""
    for path in _FOLDER.iterdir():
        try:
            if path.is_file() and path.stat().st_mtime < time.time() - _MOST_IDLE_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue

# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, a file each, which later processes load instead of compiling.

The files are code that runs on the GPU. So only a file that nobody else can have written is loaded: a file of this user, in a
folder that only this user can write. A header tells a whole file from a damaged one. A damaged file counts as missing, and is
replaced when its kernel is compiled again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import struct
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .. import env

MOST_BYTES = 256 << 20
"""How much the files may take together: all kernels of one version, for one GPU, take about a tenth of it."""
MOST_IDLE_SECONDS = 90 * 86400
_MOST_WRITING_SECONDS = 3600

_MAGIC, _FORMAT = b"fused_topk", 1
# Magic, format, length of what follows, SHA-256 of the key and of what follows.
_HEADER = struct.Struct("<12sIQ32s")
# The names of our files. Other files in the folder are left alone.
_FINISHED = re.compile(r"[0-9a-f]{64}\.cubin")
_UNFINISHED = re.compile(r"[0-9a-f]{64}\..*\.part")

_logger = logging.getLogger("fused_topk")


class KeptFile(NamedTuple):
    """A file of the cache."""

    path: Path
    bytes: int
    last_use: float  # seconds since 1970


def load(key: str) -> bytes | None:
    """The compiled kernel of that key. None if its file is missing, damaged, or perhaps not written by this user."""
    folder = env.kernel_cache_dir()
    if folder is None or _distrust(folder):
        return None
    path = folder / f"{key}.cubin"
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))) as file:
            found = os.fstat(file.fileno())
            content = file.read() if stat.S_ISREG(found.st_mode) and _is_mine(found) else b""
    except OSError:
        return None
    compiled = content[_HEADER.size :]
    if content[: _HEADER.size] != _header(key, compiled):
        return None
    with suppress(OSError):
        os.utime(path)  # _sweep() takes this time for that of the last use.
    return compiled


def store(key: str, compiled: bytes) -> None:
    """Keeps a compiled kernel for later processes. Where that is impossible, a warning says why, once."""
    folder = env.kernel_cache_dir()
    cause = "there is no home folder" if folder is None else None
    if folder is not None:
        try:
            _make(folder)
            cause = _distrust(folder)
            if cause is None:
                _write(folder, key, compiled)
                _sweep(folder)
        except OSError as error:
            cause = f"{folder} cannot be written ({error.strerror})"
    if cause is not None:
        _warn_once(f"compiled kernels are not kept, so every process compiles them again: {_with_remedy(cause)}")


def problem() -> str | None:
    """None if compiled kernels are kept for later processes, else the cause and the remedy in one sentence."""
    folder = env.kernel_cache_dir()
    if folder is None:
        return _with_remedy("there is no home folder")
    cause = _distrust(folder)
    if cause is None:
        nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
        if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            cause = f"{nearest} cannot be written"
    return _with_remedy(cause) if cause else None


def kept() -> list[KeptFile]:
    """The kernels on disk, the most recently used first."""
    folder = env.kernel_cache_dir()
    return sorted(_files(folder, _FINISHED), key=lambda file: -file.last_use) if folder else []


def _header(key: str, compiled: bytes) -> bytes:
    # With the key in it, a file under the name of another kernel counts as damaged.
    digest = hashlib.sha256(key.encode() + compiled).digest()
    return _HEADER.pack(_MAGIC, _FORMAT, len(compiled), digest)


def _is_mine(found: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or found.st_uid == os.geteuid()


def _distrust(folder: Path) -> str | None:
    """Why the folder cannot be trusted: others may have written to it, or it is not a folder. None if it can, or is missing."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror})"
    if stat.S_ISLNK(found.st_mode):
        return f"{folder} is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if not _is_mine(found):
        return f"{folder} belongs to another user (uid {found.st_uid})"
    if hasattr(os, "geteuid") and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} can be written by others (chmod 700 ends that)"
    return None


def _make(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _write(folder: Path, key: str, compiled: bytes) -> None:
    """Writes a temporary file beside the final place and renames it, so that another process sees the whole file or none."""
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{key}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_header(key, compiled) + compiled)
        os.replace(temporary, folder / f"{key}.cubin")
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sweep(folder: Path) -> None:
    """Removes the unfinished files of killed processes. Then, until the limits are met, the kernels that were unused for longest,
    such as those of other versions."""
    now = time.time()
    old = [file for file in _files(folder, _UNFINISHED) if now - file.last_use > _MOST_WRITING_SECONDS]
    total = 0
    for file in kept():
        total += file.bytes
        if total > MOST_BYTES or now - file.last_use > MOST_IDLE_SECONDS:
            old.append(file)
    for file in old:
        with suppress(OSError):
            file.path.unlink()


def _files(folder: Path, name: re.Pattern[str]) -> list[KeptFile]:
    files = []
    with suppress(OSError):
        for path in folder.iterdir():
            # Another process may remove it meanwhile.
            with suppress(OSError):
                if name.fullmatch(path.name):
                    found = path.lstat()
                    files.append(KeptFile(path, found.st_size, found.st_mtime))
    return files


def _with_remedy(cause: str) -> str:
    return f"{cause}; FUSED_TOPK_CACHE_DIR can name another folder, of your own"


@cache
def _warn_once(message: str) -> None:
    _logger.warning("fused_topk: %s", message)

# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: what is damaged or not ours is never loaded, and mended by compiling."""

import logging
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from command_line import invoke
from fused_topk import env
from fused_topk.cuda_runtime import driver, kernel_cache, kernel_source
from gpu_stand_in import StandInGpus

KEY, OTHER_KEY = "a" * 64, "b" * 64
KERNEL = "fused_topk::read_rows_kernel"
has_users = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="a system without users")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The cache's folder, which does not exist yet."""
    kernel_cache._warn_once.cache_clear()
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(tmp_path / "cache" / "kernels"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def gpus(monkeypatch, folder):
    return StandInGpus(monkeypatch)


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_kernel_is_kept_and_found_again(folder):
    assert kernel_cache.load(KEY) is None and kernel_cache.problem() is None
    for compiled in (b"first", b"second, and longer", b""):
        kernel_cache.store(KEY, compiled)
        assert kernel_cache.load(KEY) == compiled
    assert kernel_cache.load(OTHER_KEY) is None
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.cubin"]


@has_users
def test_folders_and_files_are_the_users_alone(folder):
    kernel_cache.store(KEY, b"kernel")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, folder / f"{KEY}.cubin")]
    assert modes == [0o700, 0o700, 0o600]


def damages(whole: bytes) -> dict[str, bytes]:
    header = kernel_cache._HEADER.size
    flipped = {f"bit of byte {i}": whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))}
    return {
        "empty": b"", "half a header": whole[: header // 2], "header alone": whole[:header], "truncated": whole[:-1],
        "longer": whole + b"\0", "zeros": bytes(len(whole)), "no header": whole[header:], **flipped,
    }  # fmt: skip


def test_what_is_damaged_is_not_loaded(folder):
    kernel_cache.store(KEY, b"a kernel")
    path = folder / f"{KEY}.cubin"
    for damage, content in damages(path.read_bytes()).items():
        path.write_bytes(content)
        assert kernel_cache.load(KEY) is None, damage
    kernel_cache.store(KEY, b"a kernel")
    assert kernel_cache.load(KEY) == b"a kernel"


def test_the_kernel_of_another_name_is_not_loaded(folder):
    kernel_cache.store(OTHER_KEY, b"another kernel")
    (folder / f"{OTHER_KEY}.cubin").rename(folder / f"{KEY}.cubin")
    assert kernel_cache.load(KEY) is None


def test_a_link_is_not_followed(folder, tmp_path):
    kernel_cache.store(KEY, b"kernel")
    (folder / f"{KEY}.cubin").rename(tmp_path / "elsewhere")
    (folder / f"{KEY}.cubin").symlink_to(tmp_path / "elsewhere")
    assert kernel_cache.load(KEY) is None
    kernel_cache.store(KEY, b"new")
    assert kernel_cache.load(KEY) == b"new" and (tmp_path / "elsewhere").read_bytes().endswith(b"kernel")


@has_users
def test_the_file_of_another_user_is_not_loaded_but_replaced(folder, monkeypatch):
    kernel_cache.store(KEY, b"planted")
    if os.geteuid() == 0:
        os.chown(folder / f"{KEY}.cubin", 12345, -1)
    else:
        monkeypatch.setattr(kernel_cache, "_is_mine", lambda found: stat.S_ISDIR(found.st_mode))
    assert kernel_cache.load(KEY) is None
    kernel_cache.store(KEY, b"ours")
    monkeypatch.undo()
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(folder))
    assert kernel_cache.load(KEY) == b"ours"


def of_another_user(folder, monkeypatch):
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    return r"belongs to another user \(uid \d+\)"


def writable_by_others(folder, monkeypatch):
    folder.chmod(0o770)
    return "can be written by others"


def a_link(folder, monkeypatch):
    folder.rename(folder.parent / "real")
    folder.symlink_to(folder.parent / "real")
    return "is a symbolic link"


def a_file(folder, monkeypatch):
    folder.rename(folder.parent / "real")
    folder.write_text("")
    return "is not a folder"


def below_a_file(folder, monkeypatch):
    folder.rename(folder.parent / "real")
    folder.write_text("")
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(folder / "kernels"))
    return "Not a directory"


def no_home(folder, monkeypatch):
    def fail():
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("FUSED_TOPK_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    return "no home folder"


@has_users
@pytest.mark.parametrize("state", [of_another_user, writable_by_others, a_link, a_file, below_a_file, no_home])
def test_an_untrusted_folder_is_neither_read_nor_written_and_info_says_why(folder, monkeypatch, caplog, state):
    kernel_cache.store(KEY, b"kernel")
    before = sorted(path.name for path in folder.iterdir())
    cause = state(folder, monkeypatch)
    assert kernel_cache.load(KEY) is None
    with caplog.at_level(logging.WARNING, logger="fused_topk"):
        for _ in range(2):
            kernel_cache.store(OTHER_KEY, b"kernel")
    (record,) = caplog.records
    assert re.search(cause, record.getMessage()) and "FUSED_TOPK_CACHE_DIR" in record.getMessage()
    shown = invoke("info")
    assert shown.exit_code == 0 and re.search(cause, " ".join(shown.output.split())), shown.output
    monkeypatch.undo()
    left = folder if folder.is_dir() else folder.parent / "real"
    assert sorted(path.name for path in left.iterdir()) == before


def test_no_folder_is_taken_where_all_can_write(folder, monkeypatch):
    """Whoever is there first owns a name that can be guessed."""
    no_home(folder, monkeypatch)
    assert env.kernel_cache_dir() is None
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", "~/kernels")
    monkeypatch.setattr(Path, "expanduser", lambda path: Path.home())
    assert env.kernel_cache_dir() is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_read(folder, caplog):
    kernel_cache.store(KEY, b"kernel")
    folder.chmod(0o500)
    try:
        assert kernel_cache.load(KEY) == b"kernel"
        kernel_cache.store(OTHER_KEY, b"kernel")
        assert "cannot be written" in caplog.text and "cannot be written" in kernel_cache.problem()
    finally:
        folder.chmod(0o700)


def test_a_full_disk_leaves_no_half_file(folder, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    kernel_cache.store(KEY, b"kernel")
    monkeypatch.setattr(os, "replace", full)
    kernel_cache.store(OTHER_KEY, b"kernel")
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.cubin"]
    assert "No space left" in caplog.text


def test_writers_and_readers_at_once_see_whole_kernels(folder):
    kernels = [bytes([i]) * (10_000 * i + 1) for i in range(8)]

    def work(number: int) -> int:
        for turn in range(30):
            kernel_cache.store(KEY, kernels[(number + turn) % 8])
            assert kernel_cache.load(KEY) in kernels
        return number

    kernel_cache.store(KEY, kernels[0])
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.cubin"]


def test_leftovers_and_old_kernels_are_removed(folder, monkeypatch):
    kernel_cache.store(KEY, bytes(1000))
    stale, fresh = folder / f"{OTHER_KEY}.x1.part", folder / f"{OTHER_KEY}.x2.part"
    unused, not_ours = folder / f"{'c' * 64}.cubin", folder / "thesis.part"
    for path in (stale, fresh, unused, not_ours):
        path.write_bytes(b"")
    age(stale, 2 * kernel_cache._MOST_WRITING_SECONDS)
    age(unused, kernel_cache.MOST_IDLE_SECONDS + 60)
    age(not_ours, 10 * kernel_cache.MOST_IDLE_SECONDS)
    kernel_cache.store(OTHER_KEY, bytes(1000))
    kept = {f"{KEY}.cubin", f"{OTHER_KEY}.cubin", fresh.name, not_ours.name}
    assert {path.name for path in folder.iterdir()} == kept


def test_what_was_used_last_stays_within_the_limit(folder, monkeypatch):
    keys = [letter * 64 for letter in "abcdef"]
    for number, key in enumerate(keys[:5]):
        kernel_cache.store(key, bytes(1000))
        age(folder / f"{key}.cubin", 1000 - number)
    assert kernel_cache.load(keys[0]) is not None
    monkeypatch.setattr(kernel_cache, "MOST_BYTES", 3 * (1000 + kernel_cache._HEADER.size))
    kernel_cache.store(keys[5], bytes(1000))
    assert sorted(file.path.name[0] for file in kernel_cache.kept()) == ["a", "e", "f"]


# The CUDA backend over it.


def test_a_later_process_compiles_nothing(gpus):
    function = driver.function(0, KERNEL)
    assert gpus.compiled == [(KERNEL, 90)]
    binary = gpus.loaded[0]
    gpus.restart()
    assert driver.function(0, KERNEL).entry == function.entry == f"entry of {KERNEL}"
    assert gpus.compiled == [] and gpus.loaded == [binary]


def test_a_damaged_kernel_is_mended_by_compiling(gpus, folder):
    driver.function(0, KERNEL)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    header = kernel_cache._HEADER.size
    for content in (b"", whole[: header + 4], whole[:-3] + b"???", b"entry\0\x7fELF"):
        path.write_bytes(content)
        gpus.restart()
        driver.function(0, KERNEL)
        assert gpus.compiled == [(KERNEL, 90)] and gpus.loaded == [f"binary of {KERNEL} for 90".encode()]
        assert path.read_bytes() == whole


def test_a_patch_of_the_compiler_compiles_anew(gpus):
    driver.function(0, KERNEL)
    gpus.restart()
    gpus.compiler = "NVRTC 13.5.38"
    driver.function(0, KERNEL)
    assert gpus.compiled == [(KERNEL, 90)]


def test_the_compiler_names_its_patch_and_build():
    try:
        major, minor = driver._nvrtc().getVersion()
    except Exception as error:
        pytest.skip(f"no NVRTC: {error}")
    assert re.search(rf"V{major}\.{minor}\.\d+", driver._compiler())
    assert re.search(r"Build ID: \S*\d+", driver._compiler())


def test_the_key_covers_every_source(monkeypatch):
    """A binary is found again only if nothing that shapes it has changed."""
    key = kernel_source.cache_key("kernel", 90, "13.0")
    assert key != kernel_source.cache_key("other", 90, "13.0")
    assert key != kernel_source.cache_key("kernel", 80, "13.0")
    assert key != kernel_source.cache_key("kernel", 90, "13.1")
    monkeypatch.setattr(kernel_source, "OPTIONS", ("-std=c++20",))
    assert key != kernel_source.cache_key("kernel", 90, "13.0")
    monkeypatch.undo()
    unit = kernel_source.translation_unit("kernel")
    for name in kernel_source.sources_of(""):
        first_lines = (kernel_source.source_folder() / name).read_text().splitlines()[:2]
        assert f'#line 1 "{name}"' in unit
        assert first_lines[1] in unit
    monkeypatch.setattr(kernel_source, "translation_unit", lambda kernel: unit.replace("kLog2E", "kLogTwoE"))
    assert key != kernel_source.cache_key("kernel", 90, "13.0")

# SPDX-License-Identifier: Apache-2.0
"""What compilers make for the tests is kept, and made anew when anything that it follows from changes."""

import os
import time

import pytest

import kept
from fused_topk.cuda_runtime import kernel_source
from test_cuda_compile import kept_report


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "_FOLDER", tmp_path / "kept")
    return tmp_path / "kept"


def test_a_file_is_built_once():
    builds = []

    def build(folder, path):
        assert folder.is_dir()
        builds.append(path)
        path.write_text("built")

    for _ in range(2):
        assert kept.built("name", build).read_text() == "built"
    assert len(builds) == 1


def test_a_build_that_fails_leaves_nothing(folder):
    def build(_, path):
        path.write_text("half")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        kept.built("name", build)
    assert [path.name for path in folder.iterdir()] == ["name.lock"]


def test_what_was_long_unused_is_removed(folder):
    def build(_, path):
        path.write_text("built")

    old, used = kept.built("old", build), kept.built("used", build)
    long_ago = time.time() - 2 * kept._MOST_IDLE_SECONDS
    for path in (old, used):
        os.utime(path, (long_ago, long_ago))
    kept.built("used", build)
    kept.built("new", build)
    assert used.exists() and not old.exists()


def test_keys_tell_texts_apart():
    assert kept.key("a", "bc") != kept.key("ab", "c") != kept.key("abc")


def test_a_kernel_is_compiled_again_when_its_code_changes_but_not_for_a_comment(monkeypatch):
    compiled = []

    def report(source, compiler="NVRTC 1", architecture=90):
        monkeypatch.setattr(kernel_source, "translation_unit", lambda kernel: source)

        def compile_kernel(kernel, architecture):
            compiled.append(source)
            return b"\x7fELF" + bytes(100), "entry", f"log {len(compiled)}"

        return kept_report(compiler, compile_kernel, "kernel", architecture)

    first = report("int a;  // a comment\n\n// another\nint b;\n")
    assert first[0][:4] == b"\x7fELF" and first[1:] == ("entry", "log 1")
    assert report("int a;\n  int b;  // changed\n") == first
    for changed in (("int a;\nint c;\n",), ("int a;\nint b;\n", "NVRTC 2"), ("int a;\nint b;\n", "NVRTC 1", 80)):
        assert report(*changed) != first
    assert len(compiled) == 4

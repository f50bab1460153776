# SPDX-License-Identifier: Apache-2.0
"""The command line of the package, and its environment variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fused_topk
from command_line import invoke
from fused_topk import backends, env


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "required"), (["bench"], "invalid choice"), (["info", "--clear"], "unrecognized")]
)
def test_wrong_words_are_refused(arguments, said):
    done = invoke(*arguments)
    assert done.exit_code == 2 and said in done.output


def test_help_says_what_the_command_does():
    done = invoke("--help")
    assert done.exit_code == 0 and "kernels" in done.output


def test_info_names_every_part():
    result = invoke("info")
    assert result.exit_code == 0, result.output
    for part in ["fused_topk", "torch", "numpy", "cpu", "compiled kernels", *backends.available()]:
        assert f"{part} " in result.output or f"{part}\n" in result.output
    assert fused_topk.__version__ in result.output and str(torch.__version__) in result.output


def test_info_shows_causes_in_full(monkeypatch):
    cause = "CuPy is not installed: pip install fused_topk[cuda13]"
    monkeypatch.setattr(backends, "available", lambda: {"cuda": cause, "reference": None})
    assert cause in invoke("info").output


def test_info_says_where_kernels_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(tmp_path))
    assert re.search(rf"^  folder +{re.escape(str(tmp_path))}\n  kept +yes$", invoke("info").output, re.MULTILINE)


@pytest.mark.parametrize("broken", ["is_available", "get_device_properties"])
def test_info_survives_a_broken_driver_and_a_missing_cache(broken, monkeypatch, tmp_path):
    def fails(*_):
        raise RuntimeError("CUDA driver initialization failed\nsee the log")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, broken, fails)
    monkeypatch.setattr(backends, "available", lambda: {"reference": None})
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(tmp_path / "nowhere"))
    result = invoke("info")
    assert result.exit_code == 0, result.output
    assert "RuntimeError: CUDA driver initialization failed" in result.output


def test_kernel_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_TOPK_CACHE_DIR", str(tmp_path))
    assert env.kernel_cache_dir() == tmp_path
    monkeypatch.delenv("FUSED_TOPK_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.kernel_cache_dir() == tmp_path / "fused_topk" / "kernels"
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.kernel_cache_dir() == tmp_path / ".cache" / "fused_topk" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.kernel_cache_dir() == tmp_path / ".cache" / "fused_topk" / "kernels"


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_print_choice(monkeypatch, value, expected):
    monkeypatch.setenv("FUSED_TOPK_PRINT_CHOICE", value)
    assert env.print_choice() is expected
    monkeypatch.delenv("FUSED_TOPK_PRINT_CHOICE")
    assert env.print_choice() is False

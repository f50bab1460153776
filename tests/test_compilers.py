# SPDX-License-Identifier: Apache-2.0
"""The extension as other compilers make it, without a warning: Clang, and GCC for ARM, whose code runs emulated.

Where a tool is missing the test is skipped, unless FUSED_TOPK_REQUIRE_COMPILERS (a comma list, such as "clang,aarch64")
names its script: then it fails.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive

REQUIRED = os.environ.get("FUSED_TOPK_REQUIRE_COMPILERS", "").replace(" ", "").split(",")
TOOLS_FOR_ARM = ["g++"] if platform.machine() == "aarch64" else ["aarch64-linux-gnu-g++", "qemu-aarch64"]


@pytest.mark.parametrize(
    ("script", "tools", "arguments"),
    [("clang", ["clang++"], []), ("aarch64", TOOLS_FOR_ARM, ["300"])],
    ids=["clang", "aarch64"],
)
def test_extension_of_another_compiler(script, tools, arguments):
    for tool in tools:
        if shutil.which(tool) is None:
            (pytest.fail if script in REQUIRED else pytest.skip)(f"{tool} is not installed")
    path = Path(__file__).parent / "cpp" / f"{script}.sh"
    # The scripts call this Python.
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run([path, *arguments], capture_output=True, text=True, env={**os.environ, "PATH": paths})
    assert done.returncode == 0, done.stdout + done.stderr

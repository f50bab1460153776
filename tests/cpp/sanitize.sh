#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the CPU kernel with AddressSanitizer and UndefinedBehaviorSanitizer, with g++, in a temporary folder, and runs
# tests on it. Arguments go to pytest; without any, the tests of the CPU kernel are run. Needs the package installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=$(mktemp -d "${TMPDIR:-/tmp}/fused_topk-sanitize.XXXXXX")
readonly work
trap 'rm -rf "$work"' EXIT

cmake -S . -B "$work/build" -DFUSED_TOPK_SANITIZE=ON -DCMAKE_CXX_COMPILER=g++ \
  -DPython_EXECUTABLE="$(command -v python)" -Dnanobind_DIR="$(python -m nanobind --cmake_dir)"
cmake --build "$work/build" --parallel

FUSED_TOPK_TEST_EXTENSION=$(echo "$work"/build/_cpu*.so)
export FUSED_TOPK_TEST_EXTENSION PYTHONPATH=tests
# Python itself keeps memory until the end: its leaks are not the kernel's. The C++ runtime comes along because the
# sanitizer looks up where exceptions are thrown before torch has loaded it.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
if (($# == 0)); then
  set -- tests/test_cpu.py tests/test_adversarial.py tests/test_determinism.py tests/test_masks.py \
    -k "not reference"
fi
# Uncaptured, because a report ends the process.
python -m pytest -p other_extension --capture=no -q "$@"

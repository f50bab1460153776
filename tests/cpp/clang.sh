#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the extension with clang++, free of warnings, in a temporary folder, and runs tests on it. Arguments go to pytest;
# without any, each part of the CPU kernel is tested. Needs the package installed. Debian: apt-get install clang.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=$(mktemp -d "${TMPDIR:-/tmp}/fused_topk-clang.XXXXXX")
readonly work
trap 'rm -rf "$work"' EXIT

CXX=clang++ python -m pip wheel --quiet --no-deps --wheel-dir "$work" \
  -C build-dir="$work/build" -C cmake.define.CMAKE_CXX_FLAGS=-Werror .
FUSED_TOPK_TEST_EXTENSION=$(echo "$work"/build/_cpu*.so)
export FUSED_TOPK_TEST_EXTENSION PYTHONPATH=tests
if (($# == 0)); then
  set -- tests/test_cpu.py tests/test_merge.py tests/test_softmax.py tests/test_linear.py tests/test_sampling.py \
    -k "cpu and (instruction_sets or routers or unsharded or sizes or float64 or exact_sums)"
fi
python -m pytest -p other_extension -q "$@"

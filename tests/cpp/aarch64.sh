#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the CPU kernel for aarch64 and runs it on random problems, emulated where this is another machine.
# Debian: apt-get install g++-aarch64-linux-gnu qemu-user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=$(mktemp -d "${TMPDIR:-/tmp}/fused_topk-aarch64.XXXXXX")
readonly work
trap 'rm -rf "$work"' EXIT

mapfile -t sources < <(find csrc/cpu csrc/ladder -name '*.cpp' ! -name binding.cpp)
aarch64-linux-gnu-g++ -std=c++17 -O3 -fno-math-errno -Wall -Wextra -static -pthread \
  -DFUSED_TOPK_SET=Baseline \
  tests/cpp/rows.cpp "${sources[@]}" -o "$work/rows"
run=(qemu-aarch64)
if [[ $(uname -m) == aarch64 ]]; then run=(); fi
"${run[@]}" "$work/rows" "${1:-1000}"

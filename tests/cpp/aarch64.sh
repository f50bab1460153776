#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the extension for aarch64, free of warnings, and runs its CPU kernel on random problems, emulated where this is
# another machine. The argument is their number. Debian: apt-get install g++-aarch64-linux-gnu qemu-user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=$(mktemp -d "${TMPDIR:-/tmp}/fused_topk-aarch64.XXXXXX")
readonly work
trap 'rm -rf "$work"' EXIT

compiler=aarch64-linux-gnu-g++ run=(qemu-aarch64)
system=(-C cmake.define.CMAKE_SYSTEM_NAME=Linux -C cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64)
if [[ $(uname -m) == aarch64 ]]; then compiler=g++ run=() system=(); fi
# The headers of this machine's Python serve: both are 64 bits wide.
CXX=$compiler python -m pip wheel --quiet --no-deps --wheel-dir "$work" \
  -C build-dir="$work/build" -C cmake.define.CMAKE_CXX_FLAGS=-Werror "${system[@]}" .

mapfile -t objects < <(find "$work/build" -path '*/csrc/*.o' ! -name binding.cpp.o)
"$compiler" -std=c++17 -O3 -Wall -Wextra -Werror -static -pthread tests/cpp/rows.cpp "${objects[@]}" -o "$work/rows"
"${run[@]}" "$work/rows" "${1:-1000}"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the small tests (-m sanitize) of the CUDA backend under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck
# and synccheck. Needs a GPU, and compute-sanitizer of the CUDA toolkit on the PATH or named by COMPUTE_SANITIZER.
#
#     tests/sanitize.sh              all four tools
#     tests/sanitize.sh memcheck     only the ones that are named
#     tests/sanitize.sh racecheck -- -k mask        further arguments for pytest
set -euo pipefail
cd "$(dirname "$0")/.."

sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
if ! command -v "$sanitizer" >/dev/null; then
  echo "compute-sanitizer is not on the PATH; install the CUDA toolkit or set COMPUTE_SANITIZER" >&2
  exit 1
fi

tools=()
while [[ $# -gt 0 && $1 != -- ]]; do
  tools+=("$1")
  shift
done
[[ $# -gt 0 ]] && shift
[[ ${#tools[@]} -eq 0 ]] && tools=(memcheck racecheck initcheck synccheck)

# Every tensor in an allocation of its own: inside the blocks of torch's cache no tool could see where a tensor ends.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export FUSED_TOPK_REQUIRE_BACKENDS=cuda

for tool in "${tools[@]}"; do
  options=(--tool "$tool" --error-exitcode 1 --launch-timeout 0)
  # Only our kernels, but for initcheck: it must see torch's kernels write what ours read.
  [[ $tool != initcheck ]] && options+=(--kernel-name kernel_substring=softmax_topk_kernel)
  [[ $tool == memcheck ]] && options+=(--padding 64)
  echo "== $tool"
  "$sanitizer" "${options[@]}" python -m pytest -q -x -p no:cacheprovider -m sanitize -k "cuda and not reference" tests "$@"
done

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

status=0
for tool in "${tools[@]}"; do
  options=(--tool "$tool" --error-exitcode 1 --launch-timeout 0)
  selection="cuda and not reference"
  if [[ $tool == initcheck ]]; then
    # It must see torch's kernels write what ours read, and is slow, most of all with torch's sorts of long rows: fewer tests.
    # What it says of torch's own is not ours.
    selection+=" and (merges and not V32000 and not V50257 or not log and bf16 and"
    selection+=" (row_topk_mask and (1000-8 or 40001-5) or writes_out and (4099-65 or 30011-5)))"
    options=(--tool initcheck --launch-timeout 0 --print-limit 1000000)
  else
    options+=(--kernel-name kernel_substring=fused_topk)
  fi
  [[ $tool == memcheck ]] && options+=(--padding 64)
  # racecheck crashes in cuBLAS's 16-bit products, also without a kernel of ours; test_pieces_on_a_gpu has the same pieces.
  [[ $tool == racecheck ]] && selection+=" and not (takes_pieces_into_one_state and (fp16 or bf16))"
  echo "== $tool"
  log=$(mktemp)
  "$sanitizer" "${options[@]}" --log-file "$log" \
    python -m pytest -q -x -p no:cacheprovider -m sanitize -k "$selection" tests "$@" || status=1
  if [[ $tool == initcheck ]]; then
    reports=$(grep -c "at .*fused_topk::" "$log" || true)
    echo "$reports reports of our kernels"
    [[ $reports -eq 0 ]] || status=1
  fi
  grep -A 8 "at .*fused_topk::" "$log" | head -n 100 || true
  tail -n 1 "$log"
  rm -f "$log"
done
exit $status

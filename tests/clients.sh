#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs libraries that call generate(), in whole steps and as stock: tests/clients.py.
#
#     tests/clients.sh [FOLDER]
#
# To be run in an environment that has the package and its tests' requirements, transformers 5.24, and the CPU build of torch 2.13. The
# libraries get a virtual environment on top of it, in FOLDER, which is kept for the next run, or in a temporary one. It takes some 700 MB.
set -euo pipefail
tests=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$tests/environment_above.sh"

work=$(mktemp -d "${TMPDIR:-/tmp}/clients.XXXXXX")
trap 'rm -rf "$work"' EXIT
environment=$(realpath -m "${1:-$work/environment}")
environment_with "$environment" trl==1.16.0 datasets==5.2.0 peft==0.21.2 lm-eval==0.4.13 smolagents==1.26.0

# Away from the checkout, so that the installed package is imported, which has its native kernel.
cd "$work"
export HF_HUB_OFFLINE=1 HF_HOME=$work/home TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
timeout 600 "$environment/bin/python" -m pytest -q -p no:cacheprovider -m "" --durations=10 "$tests/clients.py"

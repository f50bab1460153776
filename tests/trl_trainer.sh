#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains with TRL's GRPOTrainer, and with the method of docs/training.md in it: tests/trl_trainer.py.
#
#     tests/trl_trainer.sh [FOLDER]
#
# To be run in an environment that has the package and its tests' requirements, transformers 5.24, and the CPU build of torch 2.13. TRL
# gets a virtual environment on top of it, in FOLDER, which is kept for the next run, or in a temporary one. It takes some 300 MB.
set -euo pipefail
tests=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$tests/environment_above.sh"

work=$(mktemp -d "${TMPDIR:-/tmp}/trl-trainer.XXXXXX")
trap 'rm -rf "$work"' EXIT
environment=$(realpath -m "${1:-$work/environment}")
environment_with "$environment" trl==1.16.0 datasets==5.2.0

# Away from the checkout, so that the installed package is imported, which has its native kernel.
cd "$work"
export HF_HUB_OFFLINE=1 HF_HOME=$work/home TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
timeout 600 "$environment/bin/python" -m pytest -q -p no:cacheprovider -m "" --durations=5 "$tests/trl_trainer.py"

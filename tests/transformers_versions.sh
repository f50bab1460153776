#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of fused_topk.generation with other versions of transformers than the one that is installed: the tier that
# plain pytest runs (conftest.py), of whole steps those that ask for models, boundaries, images, reasons, seeds, streamers and traces.
#
#     tests/transformers_versions.sh [VERSION ...]
#
# To be run in an environment that has the package and its tests' requirements. Each version gets a virtual environment
# on top of it, which holds only what must differ: transformers, and what it needs in another version.
set -euo pipefail
tests=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# The oldest that pyproject.toml allows, the first of the fifth series, and one between it and the newest.
versions=("$@")
((${#versions[@]})) || versions=(4.57.6 5.0.0 5.17.0)
source "$tests/environment_above.sh"

work=$(mktemp -d "${TMPDIR:-/tmp}/transformers-versions.XXXXXX")
trap 'rm -rf "$work"' EXIT
# Away from the checkout, so that the installed package is imported, which has its native kernel.
cd "$work"

for version in "${versions[@]}"; do
  printf '\n== transformers %s\n' "$version"
  environment=$work/$version
  environment_above "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==$version"
  "$environment/bin/python" -c "import transformers; assert transformers.__version__ == '$version', transformers.__file__"
  # Models this small are slowed down by threads that wait in turns; two processes are not.
  pytest=(timeout 600 "$environment/bin/python" -m pytest -q -n 2 -p no:cacheprovider)
  "${pytest[@]}" "$tests"/test_generation*.py "$tests"/test_whole_step{,_boundaries,_encoder_decoders,_images,_reasons,_seeds,_streaming,_traces}.py
done

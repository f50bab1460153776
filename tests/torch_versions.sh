#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the plain tests of what torch sees with another version of torch than the one that is installed, and with the oldest NumPy.
#
#     tests/torch_versions.sh [VERSION ...]
#
# To be run in an environment that has the package and its tests' requirements. Each version gets a virtual environment on top
# of it, as in transformers_versions.sh. The native kernel is not linked with torch, so it serves all versions. A build of torch
# for CUDA takes several GB, which are removed afterwards.
set -euo pipefail
tests=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

versions=("$@")
# The oldest that pyproject.toml allows.
oldest() { sed -n "s/^ *\"$1>=\([0-9.]*\),.*/\1.0/p" "$tests/../pyproject.toml"; }
((${#versions[@]})) || versions=("$(oldest torch)")

work=$(mktemp -d "${TMPDIR:-/tmp}/torch-versions.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
below=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
chosen=("$tests"/test_{arguments,autograd,beam,determinism,lengths,linear,masks,merge,operators,out,private_names,reference,routers,sampling,softmax,temperature,token_trie,tokens}.py)

for version in "${versions[@]}"; do
  printf '\n== torch %s\n' "$version"
  environment=$work/$version
  python -m venv "$environment"
  above=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # First with torch alone, so that pip installs all that this version needs.
  PIP_CONSTRAINT="" "$environment/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check \
    "torch==$version" "numpy==$(oldest numpy)"
  echo "import site; site.addsitedir('$below')" >"$above/environment_below.pth"
  "$environment/bin/python" -c "import torch; assert torch.__version__.split('+')[0] == '$version', torch.__file__"
  timeout 900 "$environment/bin/python" -m pytest -q -n 2 -p no:cacheprovider "${chosen[@]}"
  rm -rf "$environment"
done

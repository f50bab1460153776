# SPDX-License-Identifier: Apache-2.0
# To be sourced.

# Makes a virtual environment in a folder. What is installed in it comes before what the environment of `python` has.
environment_above() {
  local environment=$1 below above
  below=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  python -m venv "$environment"
  above=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # site.addsitedir appends, and reads .pth files: an editable install is one of them.
  echo "import site; site.addsitedir('$below')" >"$above/environment_below.pth"
}

# The same with packages beside those that it stands on, where it is not there yet. They have to work with what is below, and bring
# none of their own.
environment_with() {
  local environment=$1 below
  shift
  [[ ! -e $environment/complete ]] || return 0
  environment_above "$environment"
  below=$(mktemp)
  python -c 'import sys; from importlib.metadata import version; print(*(f"{each}=={version(each)}" for each in sys.argv[1:]), sep="\n")' \
    accelerate huggingface_hub numpy tokenizers torch transformers >"$below"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$below" "$@"
  rm "$below"
  touch "$environment/complete"
}

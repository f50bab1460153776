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

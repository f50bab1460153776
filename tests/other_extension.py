# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: the extension that FUSED_TOPK_TEST_EXTENSION names takes the place of the installed one."""

import importlib.util
import os
import sys

_spec = importlib.util.spec_from_file_location("fused_topk._cpu", os.environ["FUSED_TOPK_TEST_EXTENSION"])
assert _spec is not None and _spec.loader is not None
# Before anything imports the package, which then finds this one.
sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[_spec.name])

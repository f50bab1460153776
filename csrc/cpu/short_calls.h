// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace fused_topk::cpu {

// Adds the class ShortCalls, which short_calls.cpp describes.
void bind_short_calls(nanobind::module_& module);

}  // namespace fused_topk::cpu

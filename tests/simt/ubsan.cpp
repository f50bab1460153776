// SPDX-License-Identifier: Apache-2.0
// The functions that -fsanitize=undefined makes a kernel call where its behaviour is undefined. As with __tsan_*
// (kernel_calls.cpp), only the names are those of the sanitizer, so that a report can name the thread.
#include "machine.h"

namespace simt {
namespace {

void report_undefined(const char* what, const void* code) {
  machine.report("undefined behaviour",
                 machine.name_of(current->id, current->past.time) + " " + what + Machine::place(code), code, false);
}

}  // namespace
}  // namespace simt

extern "C" {

// The sanitizer passes arguments that describe the operands. They differ by function, and are not read here.
#define SIMT_UNDEFINED(name, what) \
  void __ubsan_handle_##name() { simt::report_undefined(what, __builtin_return_address(0)); }

SIMT_UNDEFINED(add_overflow, "adds signed integers past their range")
SIMT_UNDEFINED(sub_overflow, "subtracts signed integers past their range")
SIMT_UNDEFINED(mul_overflow, "multiplies signed integers past their range")
SIMT_UNDEFINED(negate_overflow, "negates a signed integer past its range")
SIMT_UNDEFINED(divrem_overflow, "divides by zero or past the range of a signed integer")
SIMT_UNDEFINED(shift_out_of_bounds, "shifts by as many bits as the type has, or out of a signed type")
SIMT_UNDEFINED(out_of_bounds, "indexes past the end of an array")
SIMT_UNDEFINED(load_invalid_value, "loads a bool or an enum that holds neither of its values")
SIMT_UNDEFINED(builtin_unreachable, "comes where it said that it would never come")
SIMT_UNDEFINED(missing_return, "leaves a function without the value that it returns")
SIMT_UNDEFINED(vla_bound_not_positive, "makes an array of no size")
SIMT_UNDEFINED(nonnull_arg, "passes null where that is ruled out")
SIMT_UNDEFINED(nonnull_return_v1, "returns null where that is ruled out")
SIMT_UNDEFINED(invalid_builtin, "counts the zeros of zero")
}

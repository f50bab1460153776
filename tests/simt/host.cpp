// SPDX-License-Identifier: Apache-2.0
// The C interface that launch.py calls.
#include <string>

#include "machine.h"

namespace simt {

// One array that a launch may touch.
struct Array {
  void* begin;
  u64 size;
  const char* name;
  u8* state;  // [size], ByteState
  u32 is_read_only;
};

}  // namespace simt

extern "C" {

// Runs a kernel and returns what the machine reported: lines "kind<tab>text".
const char* simt_launch(const simt::Launch* launch, const simt::Array* arrays, simt::u32 num_arrays,
                        simt::Counts* counts) {
  for (simt::u32 i = 0; i < num_arrays; ++i)
    simt::memory.add(arrays[i].name, arrays[i].begin, arrays[i].size, arrays[i].is_read_only, arrays[i].state, 0, 0);
  simt::machine.run(*launch);
  simt::memory.clear();
  *counts = simt::machine.counts;
  return simt::machine.reports().c_str();
}
}

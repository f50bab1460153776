// SPDX-License-Identifier: Apache-2.0
// Threads that wait for work between calls. A pool of our own, not OpenMP: torch brings its private copy of that
// library, a second one would compete with it for the cores, and it does not survive a fork.
#pragma once

#include <functional>

namespace fused_topk::cpu {

// Runs `work` on the calling thread and, at the same time, on up to `threads` - 1 others. It may run fewer times than
// that, once at the least, so `work` must itself fetch one task after another until none is left. Returns when every
// run has ended; then rethrows the first exception. Several threads may call at once, and a forked child may call.
void run_on_threads(unsigned threads, const std::function<void()>& work);

}  // namespace fused_topk::cpu

// SPDX-License-Identifier: Apache-2.0
// Threads that share the work of a call: those of torch's own team if the process has GNU OpenMP, else a pool.
//
// After each of torch's operations the threads of its team spin for milliseconds. They start at once, and a thread of another pool
// would have to take the core from them first: 8 x 128256 between torch's operations on two cores takes 270 µs with a pool, as long as
// on one, and 150 with the team. A parallel region ends when every thread of the team has run, which takes milliseconds where other
// processes want the cores; but so do torch's.
#pragma once

#include <functional>

namespace fused_topk::cpu {

// Runs `work` on the calling thread and, at the same time, on up to `threads` - 1 others. It may run fewer times than
// that, once at the least, so `work` must itself fetch one task after another until none is left. Returns when every
// run has ended; then rethrows the first exception. Several threads may call at once, and a forked child may call.
void run_on_threads(unsigned threads, const std::function<void()>& work);

}  // namespace fused_topk::cpu

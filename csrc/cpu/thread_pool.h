// SPDX-License-Identifier: Apache-2.0
// Threads that share the work of a call: those of torch's own team if the process has GNU OpenMP, else a pool.
//
// After each of torch's operations the threads of its team spin for milliseconds. They start a task at once. A thread
// of another pool would first have to take the core from them, and a pool would be no faster than one thread. A
// parallel region ends when every thread of the team has run. Where other processes want the cores that takes
// milliseconds, for torch too.
#pragma once

#include <functional>

namespace fused_topk::cpu {

// Runs `work` on the calling thread and, at the same time, on up to `threads` - 1 others. It may run fewer times, at
// least once, so `work` fetches one task after another until none is left. Returns when every run has ended, and then
// rethrows the first exception. Several threads may call at once, and a forked child may call.
void run_on_threads(unsigned threads, const std::function<void()>& work);

}  // namespace fused_topk::cpu

// SPDX-License-Identifier: Apache-2.0
// Threads that wait for work between calls. A pool of our own and not torch's OpenMP threads, although those spin for a
// while after each of torch's operations and would start at once (8 x 128256: twice as fast then). But a parallel region
// ends when every thread of the team has run: 4 to 12 ms where other processes want the cores, too (measured on 2 busy
// cores, GNU OpenMP, Linux 6.18). Here, whoever comes late finds nothing left to do. Nor does a team survive a fork.
#pragma once

#include <functional>

namespace fused_topk::cpu {

// Runs `work` on the calling thread and, at the same time, on up to `threads` - 1 others. It may run fewer times than
// that, once at the least, so `work` must itself fetch one task after another until none is left. Returns when every
// run has ended; then rethrows the first exception. Several threads may call at once, and a forked child may call.
void run_on_threads(unsigned threads, const std::function<void()>& work);

}  // namespace fused_topk::cpu

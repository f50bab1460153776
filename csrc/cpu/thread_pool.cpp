// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace fused_topk::cpu {
namespace {

// Lives on the caller's stack. The caller leaves when no thread can touch it any more.
struct Job {
  const std::function<void()>& work;
  unsigned still_wanted;
  unsigned running = 0;
  std::exception_ptr error = nullptr;
  std::condition_variable ended = {};
};

std::exception_ptr attempt(const std::function<void()>& work) {
  try {
    work();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

class Pool {
 public:
  void run(unsigned threads, const std::function<void()>& work) {
    Job job{work, threads - 1};
    {
      const std::lock_guard lock(mutex_);
      grow(threads - 1);
      jobs_.push_back(&job);
    }
    for (unsigned i = 0; i < threads - 1; ++i) posted_.notify_one();
    std::exception_ptr error = attempt(work);

    std::unique_lock lock(mutex_);
    // A thread that comes now finds no task.
    const auto waiting = std::find(jobs_.begin(), jobs_.end(), &job);
    if (waiting != jobs_.end()) jobs_.erase(waiting);
    job.ended.wait(lock, [&] { return job.running == 0; });
    if (!error) error = job.error;
    lock.unlock();
    if (error) std::rethrow_exception(error);
  }

 private:
  void grow(unsigned workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system has no more threads. The existing ones and the caller do all the work.
    }
  }

  [[noreturn]] void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      posted_.wait(lock, [&] { return !jobs_.empty(); });
      Job& job = *jobs_.front();
      ++job.running;
      if (--job.still_wanted == 0) jobs_.pop_front();
      lock.unlock();
      const std::exception_ptr error = attempt(job.work);
      lock.lock();
      if (!job.error) job.error = error;
      if (--job.running == 0) job.ended.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<Job*> jobs_;  // those that want more threads
  unsigned workers_ = 0;
};

// The function that a compiler calls for an OpenMP `parallel` region: runs `function` in each thread of a team and
// waits for all. threads = 0: as many as torch has set.
using OpenMpParallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// Always the whole team, as torch does. Threads that a smaller team leaves out would end and be made again later.
void run_on_team(OpenMpParallel parallel, unsigned threads, const std::function<void()>& work) {
  struct Run {
    const std::function<void()>& work;
    const unsigned wanted;
    std::atomic<unsigned> come{0};
    std::mutex mutex = {};
    std::exception_ptr error = nullptr;
  } run{work, threads};
  parallel(
      [](void* data) {
        Run& run = *static_cast<Run*>(data);
        if (run.come.fetch_add(1, std::memory_order_relaxed) >= run.wanted) return;
        const std::exception_ptr error = attempt(run.work);
        if (!error) return;
        const std::lock_guard lock(run.mutex);
        if (!run.error) run.error = error;
      },
      &run, 0, 0);
  if (run.error) std::rethrow_exception(run.error);
}

// Null if this process has no OpenMP, or must not use it.
OpenMpParallel openmp_parallel = nullptr;
// Never destroyed: its threads wait in it until the process ends.
Pool* pool = nullptr;

// A forked child has no thread of a team or a pool, and may have a lock that one of them held. It starts with a new
// pool.
void abandon_threads() {
  openmp_parallel = nullptr;
  pool = new Pool;
}

// Runs when this library is loaded, before a child that could use it is forked.
[[maybe_unused]] const bool is_ready = [] {
  openmp_parallel = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  pool = new Pool;
  pthread_atfork(nullptr, nullptr, abandon_threads);
  return true;
}();

}  // namespace

void run_on_threads(unsigned threads, const std::function<void()>& work) {
  if (threads <= 1) return work();
  if (openmp_parallel) return run_on_team(openmp_parallel, threads, work);
  pool->run(threads, work);
}

}  // namespace fused_topk::cpu

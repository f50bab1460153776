// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace fused_topk::cpu {
namespace {

// Lives on the stack of the thread that called, which leaves only when nobody can touch it any more.
struct Job {
  const std::function<void()>& work;
  unsigned still_wanted;
  unsigned running = 0;
  std::exception_ptr error = nullptr;
  std::condition_variable ended = {};
};

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
    // Whoever comes now would find no task left.
    const auto waiting = std::find(jobs_.begin(), jobs_.end(), &job);
    if (waiting != jobs_.end()) jobs_.erase(waiting);
    job.ended.wait(lock, [&] { return job.running == 0; });
    if (!error) error = job.error;
    lock.unlock();
    if (error) std::rethrow_exception(error);
  }

 private:
  static std::exception_ptr attempt(const std::function<void()>& work) {
    try {
      work();
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }

  void grow(unsigned workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // No more threads to be had: those that there are, and the caller, do it all.
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

// Never destroyed: its threads wait in it until the process ends.
Pool* pool = nullptr;

// A forked child has none of the threads, and perhaps a lock that one of them held: it starts with a new pool.
void abandon_pool() { pool = new Pool; }

Pool& the_pool() {
  static const bool ready = [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, abandon_pool);
    return true;
  }();
  (void)ready;
  return *pool;
}

}  // namespace

void run_on_threads(unsigned threads, const std::function<void()>& work) {
  if (threads <= 1) return work();
  the_pool().run(threads, work);
}

}  // namespace fused_topk::cpu

// SPDX-License-Identifier: Apache-2.0
// Vector clocks: what a thread knows of the others' pasts. An access of thread j at its time t happened before whatever
// thread i does now if i knows of j's time t.
//
// After a barrier its threads know the same, except their own times. So they share one clock, and each thread keeps its own
// time apart from it.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "simt.h"

namespace simt {

// A counted reference to an array [threads] of times. When the last reference goes, the array is kept for the next clock.
// A clock without an array knows nothing.
class Clock {
 public:
  // Sets the length of all clocks. No clock of another length may exist.
  static void set_threads(u32 threads) {
    if (threads == threads_) return;
    threads_ = threads;
    for (Data* data : spare_) delete data;
    spare_.clear();
  }

  Clock() = default;
  Clock(const Clock& other) : data_(other.data_) {
    if (data_) ++data_->references;
  }
  Clock(Clock&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Clock& operator=(Clock other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~Clock() {
    if (data_ && --data_->references == 0) spare_.push_back(data_);
  }

  bool is(const Clock& other) const { return data_ == other.data_; }
  u32 operator[](u32 thread) const { return data_ ? data_->times[thread] : 0; }

  // Learns one time, or all that another clock knows. Clocks that share this array learn nothing.
  void learn(u32 thread, u32 time) {
    make_own();
    data_->times[thread] = std::max(data_->times[thread], time);
  }
  void learn(const Clock& other) {
    if (!other.data_ || other.data_ == data_) return;
    if (!data_) {
      *this = other;
      return;
    }
    make_own();
    u32* times = data_->times.data();
    const u32* others = other.data_->times.data();
    for (u32 i = 0; i < threads_; ++i) times[i] = std::max(times[i], others[i]);
  }

 private:
  struct Data {
    u32 references;
    std::vector<u32> times;
  };

  void make_own() {
    if (data_ && data_->references == 1) return;
    Data* own;
    if (spare_.empty()) {
      own = new Data{1, std::vector<u32>(threads_)};
    } else {
      own = spare_.back();
      spare_.pop_back();
      own->references = 1;
      if (!data_) std::fill(own->times.begin(), own->times.end(), 0);
    }
    if (data_) {
      own->times = data_->times;
      --data_->references;
    }
    data_ = own;
  }

  Data* data_ = nullptr;

  static inline u32 threads_ = 0;
  static inline std::vector<Data*> spare_;
};

}  // namespace simt

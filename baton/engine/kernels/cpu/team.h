// Threads that take a step together: phases of equal units, a barrier after each.
//
// A unit goes to whoever asks next, so a thread that lost its core for a while does less. At the
// barrier a thread spins for as long as a unit or two take, then sleeps in the kernel: on a machine
// that is shared, the thread awaited may need the very core.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace baton {

constexpr int kSpins = 1000;  // pauses before sleeping: some 20 us

class Team {
 public:
  // All units of a phase, shared among `threads` threads that call this alike; returns when all are
  // done. `work(unit, next)` runs once for each; `next`: the unit that this thread takes after it,
  // not below `units` if there is none.
  template <class Work>
  void share(int64_t threads, int64_t units, const Work& work) {
    for (int64_t unit = take(); unit < units;) {
      const int64_t next = take();
      work(unit, next);
      unit = next;
    }
    meet(threads);
  }

 private:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  void meet(int64_t threads) {
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      // Nobody reads these before the phase is a new one.
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1);
      if (asleep_.load() != 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      _mm_pause();
    }
    // Counted before the kernel looks at the phase: whoever changes it sees the count, or is seen.
    asleep_.fetch_add(1);
    while (phase_.load() == phase) futex(FUTEX_WAIT_PRIVATE, phase);
    asleep_.fetch_sub(1);
  }

  void futex(int operation, uint32_t value) {
    static_assert(sizeof phase_ == sizeof(uint32_t), "the kernel compares 32 bits");
    syscall(SYS_futex, &phase_, operation, value, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<int32_t> asleep_{0};
};

}  // namespace baton

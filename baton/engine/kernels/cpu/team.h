// Threads that take a step together: phases of equal units, each phase after the one before.
//
// Every thread begins with a share of its own, in order: what it needs next is known, so memory can
// be asked for it early. Who is through takes from the ends of the others' shares. A phase is over
// when its units are done, not when all threads came by: one that wakes late, or lost its core
// between two units, joins where the others are. Who waits asks memory for the next phase's first
// bytes, then spins, then lets others have the core, then sleeps in the kernel.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <vector>

namespace baton {

constexpr int kSpins = 1000;  // pauses before yielding: some 20 us, a unit or two
constexpr int kYields = 200;  // before sleeping: waking up again may take 50 us
// Of rows a microsecond each: taking a unit costs a tenth of that.
constexpr int64_t kManyRowsOfPhase = 64, kRowsOfUnit = 8;
constexpr int64_t kAsked = 256 << 10;  // bytes: leaves room in a core's cache

// What a thread needs first in the phase after this one.
struct Coming {
  const char* from = nullptr;
  int64_t bytes = 0;
};

class Team {
 public:
  explicit Team(int64_t threads) : shares_(threads) {}

  int64_t size() const { return static_cast<int64_t>(shares_.size()); }

  // One thread's way through the phases.
  class Member {
   public:
    Member(Team& team, int64_t thread) : team_(team), thread_(thread) {}

    // A phase that all threads of the team name alike. `work(unit, next)` runs once for each unit;
    // `next`: the unit that this thread takes after it as far as known, else `units`. Returns when
    // all units are done.
    template <class Work>
    void share(int64_t units, const Work& work, Coming coming = {}) {
      if (units == 0) return;  // there would be no last one to end the phase
      for (Taken mine; team_.take(phase_, units, thread_, mine);) {
        work(mine.unit, mine.next);
        team_.finish(phase_, units);
      }
      team_.wait(phase_++, coming);
    }

    // A phase of rows: work(row) once for each, of many rows several as a unit.
    template <class Work>
    void share_rows(int64_t rows, const Work& work, Coming coming = {}) {
      const int64_t many = rows < kManyRowsOfPhase ? 1 : kRowsOfUnit;
      const auto some = [&](int64_t unit, int64_t) {
        for (int64_t row = unit * many; row < std::min(rows, (unit + 1) * many); ++row) work(row);
      };
      share((rows + many - 1) / many, some, coming);
    }

    // The share of `units` that this thread begins with.
    int64_t first_of(int64_t units) const { return team_.begin_of(thread_, units); }

   private:
    Team& team_;
    const int64_t thread_;
    uint32_t phase_ = 0;
  };

 private:
  struct Taken {
    int64_t unit, next;
  };

  // Of one thread, in one word: phase, first unit that is left, end of them.
  struct alignas(64) Share {
    std::atomic<uint64_t> word{0};
  };

  static uint64_t packed(uint64_t phase, uint64_t first, uint64_t end) {
    return phase << 48 | first << 24 | end;
  }

  int64_t begin_of(int64_t thread, int64_t units) const {
    return units * thread / static_cast<int64_t>(shares_.size());
  }

  // False if no unit of the phase is left.
  bool take(uint32_t phase, int64_t units, int64_t thread, Taken& taken) {
    const int64_t threads = static_cast<int64_t>(shares_.size());
    for (int64_t i = 0; i < threads; ++i)
      if (take_from((thread + i) % threads, i == 0, phase, units, taken)) return true;
    return false;
  }

  bool take_from(int64_t thread, bool own, uint32_t phase, int64_t units, Taken& taken) {
    std::atomic<uint64_t>& word = shares_[thread].word;
    uint64_t seen = word.load(std::memory_order_acquire);
    while (true) {
      const uint64_t at = seen >> 48;
      // Not touched since an earlier phase: as it is in the beginning.
      int64_t first = begin_of(thread, units), end = begin_of(thread + 1, units);
      if (at == phase + 1) {
        first = seen >> 24 & kMost;
        end = seen & kMost;
      }
      if (at > phase + 1 || first >= end) return false;
      const int64_t unit = own ? first++ : --end;
      if (word.compare_exchange_weak(seen, packed(phase + 1, first, end),
                                     std::memory_order_acq_rel, std::memory_order_acquire)) {
        taken = {unit, own && first < end ? first : units};
        return true;
      }
    }
  }

  void finish(uint32_t phase, int64_t units) {
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 < units) return;
    // Nobody counts before the phase is a new one.
    done_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1);
    if (asleep_.load() != 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  // Until the phase is over.
  void wait(uint32_t phase, Coming coming) {
    const auto over = [&] { return phase_.load(std::memory_order_acquire) > phase; };
    const char* until = coming.from + std::min(coming.bytes, kAsked);
    for (const char* at = coming.from; at < until && !over(); at += 1024)
      for (int line = 0; line < 1024; line += 64) _mm_prefetch(at + line, _MM_HINT_T1);
    for (int spin = 0; spin < kSpins; ++spin) {
      if (over()) return;
      _mm_pause();
    }
    for (int spin = 0; spin < kYields; ++spin) {
      if (over()) return;
      sched_yield();
    }
    // Counted before the kernel looks at the phase: whoever changes it sees the count, or is seen.
    asleep_.fetch_add(1);
    for (uint32_t now = phase_.load(); now <= phase; now = phase_.load())
      futex(FUTEX_WAIT_PRIVATE, now);
    asleep_.fetch_sub(1);
  }

  void futex(int operation, uint32_t value) {
    static_assert(sizeof phase_ == sizeof(uint32_t), "the kernel compares 32 bits");
    syscall(SYS_futex, &phase_, operation, value, nullptr, nullptr, 0);
  }

  static constexpr uint64_t kMost = (1 << 24) - 1;
  std::vector<Share> shares_;
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<int32_t> asleep_{0};
};

// work(member), by all threads together, or by this one alone.
template <class Work>
void in_team(bool together, const Work& work) {
  Team team(omp_get_max_threads());
#pragma omp parallel if (together)
  {
    Team::Member me(team, omp_get_thread_num());
    work(me);
  }
}

}  // namespace baton

// Paged decode attention, shared out: who attends which keys.
//
// Rows of about the same length are a task each, few rows one for every part of their KV heads. A
// row that is long beside the others is a task for each of its stretches, and whoever is through
// with the last one puts them together; where that is still too few tasks for all threads, each is
// one for every part of the KV heads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention_int8.h"
#include "factors.h"
#include "team.h"

namespace baton {

// Of one call, for all threads.
class DecodeTasks {
 public:
  // Heeds the numbers of `a`, tokens and window.
  DecodeTasks(const DecodeArgs& a, int64_t threads)
      : kv_heads_(a.kv_heads), window_(a.window), rows_(a.count) {
    int64_t keys = 0;
    for (int64_t row = 0; row < a.count; ++row) {
      const Stretches of(a, row);
      keys += of.end - of.begin;
    }
    // Of few rows, KV heads make tasks: a phase less, and tasks of equal size.
    const int64_t wanted = kTasks * threads;
    if (a.count > 0 && a.count < wanted)
      parts_ = std::min({kv_heads_, threads, (wanted + a.count - 1) / a.count});
    const bool even = parts_ >= threads && kv_heads_ % parts_ == 0;  // each row for all threads
    int64_t units = 0;
    for (int64_t row = 0; row < a.count; ++row) {
      const Stretches of(a, row);
      const bool is_long = (of.end - of.begin) * wanted > keys;
      const bool split = threads > 1 && is_long && (!even || of.count() >= kTasks);
      rows_[row].stretches = of.count();
      rows_[row].units = split ? of.count() : 1;
      units += rows_[row].units;
    }
    if (units > a.count) parts_ = std::min(kv_heads_, (threads + units - 1) / units);
    const int64_t heads = (kv_heads_ + parts_ - 1) / parts_ * (a.query_heads / kv_heads_);
    states_ = (heads + kLanes - 1) / kLanes;
    for (Row& row : rows_) {
      row.first = count_;
      row.state = num_states_;
      count_ += parts_ * row.units;
      if (row.units > 1) num_states_ += parts_ * row.units * states_;
    }
    through_ = std::vector<std::atomic<int64_t>>(num_states_ > 0 ? parts_ * a.count : 0);
  }

  int64_t count() const { return count_; }
  int64_t window() const { return window_; }
  int64_t parts() const { return parts_; }

  // Whether several tasks may meet the same queries and keys of a row.
  bool split() const { return num_states_ > 0; }

  // Room for what is put together by several threads, for what one does alone.
  int64_t num_states() const { return num_states_; }
  int64_t num_own() const { return 2 * states_; }

  HeadRange heads(int64_t part) const {
    return {kv_heads_ * part / parts_, kv_heads_ * (part + 1) / parts_};
  }

  struct Task {
    int64_t row, part, stretch;
  };

  Task at(int64_t index) const {
    const auto after = [](int64_t wanted, const Row& row) { return wanted < row.first; };
    const auto row = std::upper_bound(rows_.begin(), rows_.end(), index, after) - 1;
    index -= row->first;
    return {row - rows_.begin(), index / row->units, index % row->units};
  }

  // Task `index`; `next`: this thread's next one, as far as known. `states`: num_states() for all
  // threads; `own`: num_own() for this one.
  template <class Pool>
  void run(const Pool& pool, int64_t index, int64_t next, Running* states, Running* own) {
    const Task task = at(index);
    const Row& row = rows_[task.row];
    DecodeRow<Pool> decode(pool, task.row, heads(task.part));
    if (row.units == 1) {
      decode.attend(0, true, own);
      put_together(decode, own, row.stretches, [&](int64_t stretch) {
        decode.attend(stretch, true, own + states_);
        return own + states_;
      });
      return;
    }
    states += row.state + task.part * row.units * states_;
    const bool on = next == index + 1 && task.stretch + 1 < row.units;
    decode.attend(task.stretch, on, states + task.stretch * states_);
    std::atomic<int64_t>& through = through_[task.row * parts_ + task.part];
    if (through.fetch_add(1, std::memory_order_acq_rel) + 1 < row.units) return;
    through.store(0, std::memory_order_relaxed);  // for the next layer, a phase later
    put_together(decode, states, row.units,
                 [&](int64_t stretch) { return states + stretch * states_; });
  }

 private:
  // Of equal size for each thread: then none is split. A row of fewer stretches need not be.
  static constexpr int64_t kTasks = 4;

  struct Row {
    int64_t stretches, units, first, state;  // tasks of each part; the first one; its states
  };

  template <class Decode, class Next>
  static void put_together(const Decode& decode, Running* states, int64_t count,
                           const Next& next) {
    for (int64_t stretch = 1; stretch < count; ++stretch) decode.add(states, next(stretch));
    decode.finish(states);
  }

  const int64_t kv_heads_, window_;
  std::vector<Row> rows_;
  int64_t parts_ = 1, states_, count_ = 0, num_states_ = 0;
  std::vector<std::atomic<int64_t>> through_;  // [rows, parts] stretches
};

// `work` with the pool as its numbers are stored.
template <class Work>
inline void with_pool(const DecodeArgs& a, const Work& work) {
  if (a.scales.keys != nullptr)
    work(Int8Pool{a});
  else
    work(PlainPool{a});
}

inline void decode_attention(const DecodeArgs& a) {
  DecodeTasks tasks(a, omp_get_max_threads());
  Running* const states = kept_room<DecodeTasks, Running>(tasks.num_states());
  in_team(true, [&](Team::Member& me) {
    std::vector<Running> own(tasks.num_own());
    with_pool(a, [&](const auto& pool) {
      me.share(tasks.count(), [&](int64_t index, int64_t next) {
        tasks.run(pool, index, next, states, own.data());
      });
    });
  });
}

}  // namespace baton

// Paged prefill attention: spans of several new tokens, keys read straight from the pool's blocks.
//
// A task is a KV head of some query rows: its keys are taken in tiles of 64, each repacked once for
// all those rows so that both products are dot products of bfloat16 pairs whose sums stay in their
// lanes, as in linear.h. Softmax goes along, as in FlashAttention; its weights are
// factors of the second product. Tiles begin at multiples of 64 of the sequence, and a tile that
// a row does not see changes nothing of it: what a row computes depends on its own keys alone,
// not on where its chunk began.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "factors.h"

namespace baton {

constexpr int kKeys = 64;             // of a tile
// Of a task, heads times rows, at least: they pay for repacking the keys. kManyQueries where threads have
// enough tasks.
constexpr int64_t kFewQueries = 96;
constexpr int64_t kTasks = 8;  // a thread
constexpr int64_t kRowsAhead = 8;  // whose queries are asked of memory
constexpr float kUnseen = -1e30f;  // score of a query that has met no key
constexpr float kAbove = 8.0f;  // a weight may be 2^8 before it becomes 1 and the others smaller

struct PrefillArgs {
  const bf16* q;          // [.., query_heads, k_dim]: row stride below
  bf16* out;              // [.., query_heads, v_dim], rows without gaps
  const void* keys;       // of this layer: block, token and head strides below, in numbers
  const void* values;
  const int64_t* tables;  // [spans, width] block ids
  const int64_t* spans;   // [count] rows of `tables`
  const int64_t* rows;    // [count] first row of q and out
  const int64_t* sizes;   // [count] rows
  const int64_t* starts;  // [count] position of the first row
  const int64_t* first;   // [count] block that a table begins with
  const float* sinks;     // [query_heads], or null
  int64_t count, width, q_stride;
  int64_t key_block, key_token, key_head, value_block, value_token, value_head;
  int64_t query_heads, kv_heads, k_dim, v_dim, block_size, window;
  float scale, softcap;  // softcap 0: none
  PoolScales scales;
};

// tanh, absolutely to about 1e-7.
inline Floats hyperbolic_tangent(Floats x) {
  const Floats one = broadcast(1.0f), two = broadcast(2.0f);
  return one - two / (exponential(x * two) + one);
}

// A thread's memory for its tasks, one at a time; kept for the thread's next one, so it has one of these
// at a time.
class PrefillTask {
 public:
  PrefillTask(const PrefillArgs& args, int64_t height)
      : a_(args), height_(height), group_(args.query_heads / args.kv_heads),
        wide_((args.v_dim + kKeys - 1) / kKeys * kKeys),
        key_pairs_(lines<struct KeyPairs, bf16>(args.k_dim * kKeys)),
        value_pairs_(lines<struct ValuePairs, bf16>(wide_ * kKeys)),
        query_factors_(lines<struct Queries, Factor>(height * group_ * args.k_dim)),
        sums_(lines<struct Sums, float>(height * group_ * wide_)),
        total_(lines<struct Totals, float>(16 * height * group_)), most_(height * group_),
        positions_(height * group_),
        widened_(args.scales.keys == nullptr ? 0 : kKeys * (args.k_dim + args.v_dim)),
        key_factors_(kKeys), value_factors_(kKeys) {
    std::fill_n(value_pairs_, wide_ * kKeys, 0);
  }

  // Rows [from, from + height) of a span, by one KV head.
  void run(int64_t span, int64_t from, int64_t head) {
    span_ = span;
    head_ = head;
    row_ = a_.rows[span] + from;
    position_ = a_.starts[span] + from;
    const int64_t rows = std::min(height_, a_.sizes[span] - from);
    const int64_t end = position_ + rows;
    const int64_t begin = a_.window > 0 ? std::max<int64_t>(0, position_ - a_.window + 1) : 0;
    queries_ = rows * group_;
    const bf16* q = a_.q + row_ * a_.q_stride + head * group_ * a_.k_dim;
    for (int64_t m = 0, row = 0; row < rows; ++row, q += a_.q_stride) {
      if (row + kRowsAhead < rows)  // rows lie far apart
        for (int64_t i = 0; i < group_ * a_.k_dim; i += 32) ask(q + kRowsAhead * a_.q_stride + i);
      for (int64_t of = 0; of < group_; ++of, ++m) {
        positions_[m] = position_ + row;
        load_query(m, q + of * a_.k_dim);
        // A sink is a key of its own without a value.
        const float sink = a_.sinks ? a_.sinks[head * group_ + of] * kLogTwoOfE : kUnseen;
        most_[m] = std::max(sink, kUnseen);
        store(&total_[16 * m], select(a_.sinks ? 1 : 0, broadcast(1.0f), broadcast(0.0f)));
      }
    }
    std::fill_n(sums_, queries_ * wide_, 0.0f);
    // Evenly: 10 queries are 5 and 5, not 6 and 4.
    const int64_t parts = (queries_ + kQueries - 1) / kQueries;
    const int64_t least = queries_ / parts, more = queries_ % parts;
    for (int64_t at = begin / kKeys * kKeys; at < end; at += kKeys) {
      repack(at, begin, end);
      for (int64_t part = 0, m = 0; part < parts; ++part) {
        const int64_t count = least + (part < more);
        if (sees(m, count, at)) attend(m, count, at);
        m += count;
      }
    }
    finish(rows);
  }

 private:
  template <class Use, class Number>
  static Number* lines(int64_t count) {
    return reinterpret_cast<Number*>(kept_lines<Use>(count * sizeof(Number)));
  }

  int64_t position(int64_t m) const { return positions_[m]; }

  // Scores are in powers of two, with a cap only once that is on them.
  float score_scale() const { return a_.softcap > 0.0f ? a_.scale : a_.scale * kLogTwoOfE; }

  const Factor* query(int64_t m) const { return query_factors_ + m * a_.k_dim; }

  void load_query(int64_t m, const bf16* from) {
    for (int64_t d = 0; d < a_.k_dim; d += 16)
      store_factors(&query_factors_[m * a_.k_dim + d], load_wide(from + d));
  }

  bool sees(int64_t m, int64_t count, int64_t at) const {
    const bool ahead = at > position(m + count - 1);
    return !ahead && (a_.window == 0 || at + kKeys > position(m) - a_.window + 1);
  }

  // Keys [at, at + 64) that lie in [begin, end), zeros for the others: nobody may have written there.
  void repack(int64_t at, int64_t begin, int64_t end) {
    static constexpr bf16 kNothing[kMaxDim] = {};
    const bf16 *key[kKeys], *value[kKeys];
    const int64_t* table = a_.tables + a_.spans[span_] * a_.width;
    for (int i = 0; i < kKeys; ++i) {
      key[i] = value[i] = kNothing;
      key_factors_[i] = score_scale();  // not those of another prompt, which may be no numbers
      value_factors_[i] = 1.0f;
      if (at + i < begin || at + i >= end) continue;
      const int64_t block = table[(at + i) / a_.block_size - a_.first[span_]];
      const int64_t token = (at + i) % a_.block_size;
      const int64_t from = block * a_.key_block + token * a_.key_token + head_ * a_.key_head;
      const int64_t of =
          block * a_.value_block + token * a_.value_token + head_ * a_.value_head;
      if (a_.scales.keys == nullptr) {
        key[i] = static_cast<const bf16*>(a_.keys) + from;
        value[i] = static_cast<const bf16*>(a_.values) + of;
        continue;
      }
      const PoolScales& s = a_.scales;
      key_factors_[i] = score_scale() * s.keys[block * s.key_block + token * s.key_token + head_];
      value_factors_[i] = s.values[block * s.value_block + token * s.value_token + head_];
      bf16* room = &widened_[i * (a_.k_dim + a_.v_dim)];
      key[i] = widened(static_cast<const int8_t*>(a_.keys) + from, a_.k_dim, room);
      value[i] = widened(static_cast<const int8_t*>(a_.values) + of, a_.v_dim, room + a_.k_dim);
    }
    for (int64_t d = 0; d < a_.k_dim; d += 32)
      for (int from = 0; from < kKeys; from += 16) {
        Line pairs[16];
        BATON_UNROLL for (int i = 0; i < 16; ++i) pairs[i] = load_line(key[from + i] + d);
        transpose_pairs(pairs);
        BATON_UNROLL for (int i = 0; i < 16; ++i)
          store_line(&key_pairs_[(d + 2 * i) * kKeys + 2 * from], pairs[i]);
      }
    bf16* const pairs = value_pairs_;
    const int64_t wide = wide_, v_dim = a_.v_dim;
    for (int i = 0; i < kKeys; i += 2)
      for (int64_t d = 0; d < v_dim; d += 32)
        store_pairs(pairs + i * wide + 2 * d, value[i] + d, value[i + 1] + d);
  }

  // Numbers in int8 as bfloat16, at `to`, which it returns.
  static const bf16* widened(const int8_t* from, int64_t count, bf16* to) {
    for (int64_t d = 0; d < count; d += 32) store_line(to + d, widen_int8(from + d));
    return to;
  }

  // Queries [m, m + count) by the tile, at most M of them.
  template <int M = kQueries>
  void attend(int64_t m, int64_t count, int64_t at) {
    if constexpr (M > 1)
      if (count < M) return attend<M - 1>(m, count, at);
    // The last query sees the most keys of the tile; those behind them have no weight.
    const int64_t keys = std::min<int64_t>(kKeys, position(m + M - 1) + 1 - at);
    alignas(64) Factor weights[M][kKeys];
    alignas(64) float kept[16];
    Floats sum[M][4];
    BATON_UNROLL for (int i = 0; i < M; ++i)
      BATON_UNROLL for (int j = 0; j < 4; ++j) sum[i][j] = broadcast(0.0f);
    multiply_pairs<M>(query(m), a_.k_dim, key_pairs_, kKeys, a_.k_dim, sum);
    const bool kept_all = a_.scales.keys == nullptr ? weigh<M, false>(m, at, sum, weights, kept)
                                                    : weigh<M, true>(m, at, sum, weights, kept);
    const int64_t wide = wide_;
    float* sums = sums_ + m * wide;
    for (int64_t d = 0; d < wide; d += kKeys, sums += kKeys) {
      BATON_UNROLL for (int i = 0; i < M; ++i)
        BATON_UNROLL for (int j = 0; j < 4; ++j) sum[i][j] = load(sums + i * wide + 16 * j);
      if (!kept_all)
        BATON_UNROLL for (int i = 0; i < M; ++i)
          BATON_UNROLL for (int j = 0; j < 4; ++j) sum[i][j] = sum[i][j] * broadcast(kept[i]);
      multiply_pairs<M>(weights[0], kKeys, value_pairs_ + 2 * d, wide, keys, sum);
      BATON_UNROLL for (int i = 0; i < M; ++i)
        BATON_UNROLL for (int j = 0; j < 4; ++j) store(sums + i * wide + 16 * j, sum[i][j]);
    }
  }

  // sum += x [M, inputs], whose rows lie `stride` apart, by 64 columns of w [inputs / 2, columns, 2].
  template <int M>
  [[gnu::always_inline]] static void multiply_pairs(const Factor* x, int64_t stride, const bf16* w,
                                                    int64_t columns, int64_t inputs,
                                                    Floats (*sum)[4]) {
    BATON_UNROLL for (int from = 0; from < 4; from += kQueryVectors)
      multiply_columns<M>(x, stride, w + 32 * from, columns, inputs, sum, from);
  }

  // The same of 16 * kQueryVectors columns, vectors `from` on of the sums.
  template <int M>
  [[gnu::always_inline]] static void multiply_columns(const Factor* x, int64_t stride, const bf16* w,
                                                      int64_t columns, int64_t inputs,
                                                      Floats (*sum)[4], int from) {
    const Factor* fourth[(M + 3) / 4];  // every fourth row, as in linear.h
    for (int i = 0; i < M; i += 4) fourth[i / 4] = x + i * stride;
    Floats local[M][kQueryVectors];
    BATON_UNROLL for (int i = 0; i < M; ++i)
      BATON_UNROLL for (int j = 0; j < kQueryVectors; ++j) local[i][j] = sum[i][from + j];
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * columns)
      dot_rows<M>(local, [&](int i) { return fourth[i / 4] + i % 4 * stride + k; }, w);
    BATON_UNROLL for (int i = 0; i < M; ++i)
      BATON_UNROLL for (int j = 0; j < kQueryVectors; ++j) sum[i][from + j] = local[i][j];
  }

  // Products of M queries -> their keys' weights. `kept`: what their sums so far are worth from now on;
  // returns whether that is all.
  template <int M, bool kRounded>
  bool weigh(int64_t m, int64_t at, Floats (*score)[4], Factor (*weights)[kKeys], float* kept) {
    const Floats lowest = broadcast(-INFINITY);
    Floats scale = broadcast(score_scale());  // that scores do not have yet
    if constexpr (kRounded) {
      BATON_UNROLL for (int j = 0; j < 4; ++j) {
        const Floats factors = load(&key_factors_[16 * j]);
        BATON_UNROLL for (int i = 0; i < M; ++i) score[i][j] = score[i][j] * factors;
      }
      scale = broadcast(1.0f);
    }
    if (a_.softcap > 0.0f) {
      const Floats cap = broadcast(a_.softcap);
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < 4; ++j)
          score[i][j] = cap * hyperbolic_tangent(score[i][j] * scale / cap) * broadcast(kLogTwoOfE);
      scale = broadcast(1.0f);
    }
    if (!sees_all(m, M, at))
      BATON_UNROLL for (int i = 0; i < M; ++i) {
        const uint64_t visible = visible_keys(position(m + i), at);
        BATON_UNROLL for (int j = 0; j < 4; ++j)
          score[i][j] = select(static_cast<Lanes>(visible >> (16 * j)), score[i][j], lowest);
      }
    Floats each[M];
    Lanes above = 0;
    BATON_UNROLL for (int i = 0; i < M; ++i) {
      each[i] = max(max(score[i][0], score[i][1]), max(score[i][2], score[i][3]));
      const Floats beyond = multiply_subtract(each[i], scale, broadcast(most_[m + i]));
      above |= greater(beyond, broadcast(kAbove));
    }
    if (above != 0) raise<M>(m, each, scale, kept);
    BATON_UNROLL for (int i = 0; i < M; ++i) {
      const Floats most = broadcast(most_[m + i]);
      Floats total = load(&total_[16 * (m + i)]);
      BATON_UNROLL for (int j = 0; j < 4; ++j) {
        const Floats weight = power_of_two(multiply_subtract(score[i][j], scale, most));
        total = total + weight;
        if constexpr (kRounded)
          store_factors(&weights[i][16 * j], weight * load(&value_factors_[16 * j]));
        else
          store_factors(&weights[i][16 * j], weight);
      }
      store(&total_[16 * (m + i)], total);
    }
    return above == 0;
  }

  // What weights of M queries are relative to becomes the highest of `scores`, where that is far above.
  template <int M>
  [[gnu::noinline]] void raise(int64_t m, const Floats scores[M], Floats scale, float* kept) {
    Floats rows[16];  // each of up to 8 twice: half of the work
    BATON_UNROLL for (int i = 0; i < 16; ++i) rows[i] = scores[std::min(M <= 8 ? i % 8 : i, M - 1)];
    const Floats most = across_each(rows, higher), highest = most * scale;
    const Floats before = load(&most_[m], lanes_of(M));
    // The same comparison as the caller's: a query rises or not whatever its neighbours do.
    const Lanes above = greater(multiply_subtract(most, scale, before), broadcast(kAbove));
    store(&most_[m], select(above, highest, before), lanes_of(M));
    store(kept, select(above, power_of_two(before - highest), broadcast(1.0f)));
    for (int i = 0; i < M; ++i) {
      float* const total = &total_[16 * (m + i)];
      store(total, load(total) * broadcast(kept[i]));
    }
  }

  // Whether queries [m, m + count) see all keys of the tile.
  bool sees_all(int64_t m, int64_t count, int64_t at) const {
    const bool behind = at + kKeys <= position(m) + 1;
    return behind && (a_.window == 0 || at >= position(m + count - 1) - a_.window + 1);
  }

  // Bit i: whether a query at `position` sees key at + i.
  uint64_t visible_keys(int64_t position, int64_t at) const {
    const int64_t until = std::clamp<int64_t>(position + 1 - at, 0, kKeys);
    const int64_t first = a_.window > 0 ? position - a_.window + 1 - at : 0;
    const int64_t from = std::clamp<int64_t>(first, 0, kKeys);
    return below(until) & ~below(from);
  }

  static uint64_t below(int64_t bit) {
    return bit == kKeys ? ~uint64_t{0} : (uint64_t{1} << bit) - 1;
  }

  void finish(int64_t rows) const {
    for (int64_t m = 0, row = 0; row < rows; ++row) {
      bf16* out = a_.out + ((row_ + row) * a_.query_heads + head_ * group_) * a_.v_dim;
      for (int64_t of = 0; of < group_; ++of, ++m, out += a_.v_dim) {
        const Floats share = broadcast(1.0f / sum_of(load(&total_[16 * m])));
        for (int64_t d = 0; d < a_.v_dim; d += 16)
          store_rounded(out + d, load(&sums_[m * wide_ + d]) * share);
      }
    }
  }

  const PrefillArgs& a_;
  const int64_t height_, group_, wide_;  // `wide_`: v_dim, filled up with zeros to whole tiles
  // From lines' beginnings on.
  bf16* const key_pairs_;         // [k_dim / 2, 64, 2]
  bf16* const value_pairs_;       // [32, wide, 2]
  Factor* const query_factors_;   // [queries, k_dim]
  float* const sums_;             // [queries, wide]
  float* const total_;            // [queries, 16] of weights
  std::vector<float> most_;       // [queries], what weights are relative to
  std::vector<int64_t> positions_;  // of queries
  std::vector<bf16> widened_;      // [64, k_dim + v_dim] of int8
  std::vector<float> key_factors_, value_factors_;  // [64], of scores and of weights
  int64_t span_ = 0, head_ = 0, row_ = 0, position_ = 0, queries_ = 0;
};

// Rows of a task.
inline int64_t task_height(const PrefillArgs& a) {
  int64_t rows = 0;
  for (int64_t span = 0; span < a.count; ++span) rows += a.sizes[span];
  const int64_t queries = rows * a.query_heads / (kTasks * omp_get_max_threads());
  return std::max<int64_t>(
      1, std::clamp(queries, kFewQueries, kManyQueries) * a.kv_heads / a.query_heads);
}

// Tasks are shared out among the threads, the longest first: later rows see more keys.
inline void prefill_attention(const PrefillArgs& a) {
  struct Part {
    int64_t span, from;
  };
  std::vector<Part> parts;
  const int64_t height = task_height(a);
  for (int64_t span = 0; span < a.count; ++span)
    for (int64_t from = 0; from < a.sizes[span]; from += height)
      parts.push_back({span, from});
  std::stable_sort(parts.begin(), parts.end(), [&](const Part& one, const Part& other) {
    return a.starts[one.span] + one.from > a.starts[other.span] + other.from;
  });
  const int64_t tasks = static_cast<int64_t>(parts.size()) * a.kv_heads;
#pragma omp parallel
  {
    PrefillTask mine(a, height);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const Part& part = parts[task / a.kv_heads];
      mine.run(part.span, part.from, task % a.kv_heads);
    }
  }
}

}  // namespace baton

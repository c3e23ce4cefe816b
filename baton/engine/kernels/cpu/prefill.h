// Paged prefill attention: spans of several new tokens, keys read straight from the pool's blocks.
//
// A task is a KV head of some query rows: its keys are taken in tiles of 64, each repacked once for
// all those rows so that both products are dot products of bfloat16 pairs whose sums stay in their
// lanes, as in linear.h. Softmax goes along, as in FlashAttention; its weights are rounded to
// bfloat16 for the second product. Tiles begin at multiples of 64 of the sequence, and a tile that
// a row does not see changes nothing of it: what a row computes depends on its own keys alone,
// not on where its chunk began.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace baton {

constexpr int kKeys = 64;             // of a tile
constexpr int kQueries = 6;           // at once: 24 of 32 vector registers accumulate
constexpr int64_t kTaskQueries = 96;  // of a task, heads times rows: pay for repacking the keys

struct PrefillArgs {
  const bf16* q;          // [.., query_heads, k_dim]: row stride below
  bf16* out;              // [.., query_heads, v_dim], rows without gaps
  const bf16* keys;       // of this layer: block, token and head strides below
  const bf16* values;
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
};

// 16 vectors of 16 pairs each -> pair by pair.
inline void transpose_pairs(__m512i rows[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
    }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 4; ++j) {
      a[8 * i + j] = _mm512_shuffle_i32x4(b[8 * i + j], b[8 * i + 4 + j], 0x88);
      a[8 * i + 4 + j] = _mm512_shuffle_i32x4(b[8 * i + j], b[8 * i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    rows[j] = _mm512_shuffle_i32x4(a[j], a[8 + j], 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(a[j], a[8 + j], 0xdd);
  }
}

// tanh, absolutely to about 1e-7.
inline __m512 hyperbolic_tangent(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  return _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(exponential(_mm512_mul_ps(x, two)), one)));
}

// A thread's memory for its tasks, one at a time.
class PrefillTask {
 public:
  explicit PrefillTask(const PrefillArgs& args)
      : a_(args), group_(args.query_heads / args.kv_heads),
        wide_((args.v_dim + kKeys - 1) / kKeys * kKeys), key_pairs_(args.k_dim * kKeys),
        value_pairs_(wide_ * kKeys), sums_(capacity(args) * wide_), most_(capacity(args)),
        total_(capacity(args)) {}

  // Rows of a task.
  static int64_t height(const PrefillArgs& args) {
    return std::max<int64_t>(1, kTaskQueries / (args.query_heads / args.kv_heads));
  }

  // Rows [from, from + height) of a span, by one KV head.
  void run(int64_t span, int64_t from, int64_t head) {
    span_ = span;
    head_ = head;
    row_ = a_.rows[span] + from;
    position_ = a_.starts[span] + from;
    const int64_t rows = std::min(height(a_), a_.sizes[span] - from);
    const int64_t end = position_ + rows;
    const int64_t begin = a_.window > 0 ? std::max<int64_t>(0, position_ - a_.window + 1) : 0;
    queries_ = rows * group_;
    for (int64_t m = 0; m < queries_; ++m) {
      // A sink is a key of its own without a value.
      most_[m] = a_.sinks ? a_.sinks[head * group_ + m % group_] : -INFINITY;
      total_[m] = a_.sinks ? 1.0f : 0.0f;
    }
    std::fill_n(sums_.begin(), queries_ * wide_, 0.0f);
    for (int64_t at = begin / kKeys * kKeys; at < end; at += kKeys) {
      repack(at, begin, end);
      int64_t parts = (queries_ + kQueries - 1) / kQueries;
      for (int64_t m = 0; m < queries_; --parts) {
        const int64_t count = (queries_ - m + parts - 1) / parts;
        if (sees(m, count, at)) attend(m, count, at);
        m += count;
      }
    }
    finish();
  }

 private:
  static int64_t capacity(const PrefillArgs& args) {
    return height(args) * (args.query_heads / args.kv_heads);
  }

  int64_t position(int64_t m) const { return position_ + m / group_; }

  const bf16* query(int64_t m) const {
    return a_.q + (row_ + m / group_) * a_.q_stride + (head_ * group_ + m % group_) * a_.k_dim;
  }

  bool sees(int64_t m, int64_t count, int64_t at) const {
    const bool ahead = at > position(m + count - 1);
    return !ahead && (a_.window == 0 || at + kKeys > position(m) - a_.window + 1);
  }

  // Keys [at, at + 64) that lie in [begin, end), zeros for the others: nobody may have written there.
  void repack(int64_t at, int64_t begin, int64_t end) {
    const bf16 *key[kKeys], *value[kKeys];
    const int64_t* table = a_.tables + a_.spans[span_] * a_.width;
    for (int i = 0; i < kKeys; ++i) {
      key[i] = value[i] = nullptr;
      if (at + i < begin || at + i >= end) continue;
      const int64_t block = table[(at + i) / a_.block_size - a_.first[span_]];
      const int64_t token = (at + i) % a_.block_size;
      key[i] = a_.keys + block * a_.key_block + token * a_.key_token + head_ * a_.key_head;
      value[i] =
          a_.values + block * a_.value_block + token * a_.value_token + head_ * a_.value_head;
    }
    for (int64_t d = 0; d < a_.k_dim; d += 32)
      for (int from = 0; from < kKeys; from += 16) {
        __m512i pairs[16];
        for (int i = 0; i < 16; ++i)
          pairs[i] = key[from + i] == nullptr ? _mm512_setzero_si512()
                                              : _mm512_loadu_si512(key[from + i] + d);
        transpose_pairs(pairs);
        for (int i = 0; i < 16; ++i)
          _mm512_storeu_si512(&key_pairs_[(d + 2 * i) * kKeys + 2 * from], pairs[i]);
      }
    for (int i = 0; i < kKeys; i += 2)
      for (int64_t d = 0; d < a_.v_dim; d += 16) {
        const __m512i low = numbers(value[i], d), high = numbers(value[i + 1], d);
        _mm512_storeu_si512(&value_pairs_[i * wide_ + 2 * d],
                            _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
  }

  static __m512i numbers(const bf16* value, int64_t d) {
    if (value == nullptr) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + d)));
  }

  void attend(int64_t m, int64_t count, int64_t at) {
    switch (count) {
      case 1: return attend<1>(m, at);
      case 2: return attend<2>(m, at);
      case 3: return attend<3>(m, at);
      case 4: return attend<4>(m, at);
      case 5: return attend<5>(m, at);
      default: return attend<kQueries>(m, at);
    }
  }

  // Queries [m, m + M) by the tile.
  template <int M>
  void attend(int64_t m, int64_t at) {
    alignas(64) bf16 weights[M][kKeys];
    float kept[M];
    const bf16* x[M];
    __m512 sum[M][4];
    BATON_UNROLL for (int i = 0; i < M; ++i) {
      x[i] = query(m + i);
      BATON_UNROLL for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_setzero_ps();
    }
    multiply_pairs<M>(x, key_pairs_.data(), kKeys, a_.k_dim, sum);
    BATON_UNROLL for (int i = 0; i < M; ++i) {
      kept[i] = weigh(m + i, at, sum[i], weights[i]);
      x[i] = weights[i];
    }
    for (int64_t d = 0; d < wide_; d += kKeys) {
      BATON_UNROLL for (int i = 0; i < M; ++i)
        BATON_UNROLL for (int j = 0; j < 4; ++j)
          sum[i][j] = _mm512_mul_ps(_mm512_loadu_ps(&sums_[(m + i) * wide_ + d + 16 * j]),
                                    _mm512_set1_ps(kept[i]));
      multiply_pairs<M>(x, value_pairs_.data() + 2 * d, wide_, kKeys, sum);
      BATON_UNROLL for (int i = 0; i < M; ++i)
        BATON_UNROLL for (int j = 0; j < 4; ++j)
          _mm512_storeu_ps(&sums_[(m + i) * wide_ + d + 16 * j], sum[i][j]);
    }
  }

  // sum += x [M, inputs] by 64 columns of w [inputs / 2, columns, 2].
  template <int M>
  static void multiply_pairs(const bf16* const* x, const bf16* w, int64_t columns, int64_t inputs,
                             __m512 (*sum)[4]) {
    __m512 local[M][4];
    BATON_UNROLL for (int i = 0; i < M; ++i)
      BATON_UNROLL for (int j = 0; j < 4; ++j) local[i][j] = sum[i][j];
    for (int64_t k = 0; k < inputs; k += 2, w += 2 * columns) {
      const __m512bh w0 = load_pairs(w), w1 = load_pairs(w + 32);
      const __m512bh w2 = load_pairs(w + 64), w3 = load_pairs(w + 96);
      BATON_UNROLL for (int i = 0; i < M; ++i) {
        const __m512bh pair = broadcast_pair(x[i] + k);
        local[i][0] = _mm512_dpbf16_ps(local[i][0], pair, w0);
        local[i][1] = _mm512_dpbf16_ps(local[i][1], pair, w1);
        local[i][2] = _mm512_dpbf16_ps(local[i][2], pair, w2);
        local[i][3] = _mm512_dpbf16_ps(local[i][3], pair, w3);
      }
    }
    BATON_UNROLL for (int i = 0; i < M; ++i)
      BATON_UNROLL for (int j = 0; j < 4; ++j) sum[i][j] = local[i][j];
  }

  // A query's products -> its keys' weights; what its sums so far are worth from now on.
  float weigh(int64_t m, int64_t at, const __m512 products[4], bf16* weights) {
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    const uint64_t visible = visible_keys(position(m), at);
    __m512 score[4];
    for (int j = 0; j < 4; ++j) {
      __m512 each = _mm512_mul_ps(products[j], _mm512_set1_ps(a_.scale));
      if (a_.softcap > 0.0f) {
        const __m512 cap = _mm512_set1_ps(a_.softcap);
        each = _mm512_mul_ps(cap, hyperbolic_tangent(_mm512_div_ps(each, cap)));
      }
      score[j] = _mm512_mask_mov_ps(lowest, static_cast<__mmask16>(visible >> (16 * j)), each);
    }
    const __m512 highest = _mm512_max_ps(_mm512_max_ps(score[0], score[1]),
                                         _mm512_max_ps(score[2], score[3]));
    const float before = most_[m], most = std::max(before, _mm512_reduce_max_ps(highest));
    // No key seen so far: -inf - -inf is no number.
    const __m512 from = _mm512_set1_ps(most == -INFINITY ? 0.0f : most);
    __m512 total = _mm512_setzero_ps();
    for (int j = 0; j < 4; ++j) {
      const __m512 weight = exponential(_mm512_sub_ps(score[j], from));
      total = _mm512_add_ps(total, weight);
      store_rounded(weights + 16 * j, weight);
    }
    const float kept = most == before ? 1.0f : std::exp(before - most);
    total_[m] = total_[m] * kept + _mm512_reduce_add_ps(total);
    most_[m] = most;
    return kept;
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

  void finish() const {
    for (int64_t m = 0; m < queries_; ++m) {
      const int64_t query_head = head_ * group_ + m % group_;
      bf16* out = a_.out + ((row_ + m / group_) * a_.query_heads + query_head) * a_.v_dim;
      const __m512 share = _mm512_set1_ps(1.0f / total_[m]);
      for (int64_t d = 0; d < a_.v_dim; d += 16)
        store_rounded(out + d, _mm512_mul_ps(_mm512_loadu_ps(&sums_[m * wide_ + d]), share));
    }
  }

  const PrefillArgs& a_;
  const int64_t group_, wide_;  // `wide_`: v_dim, filled up with zeros to whole tiles
  std::vector<bf16> key_pairs_;    // [k_dim / 2, 64, 2]
  std::vector<bf16> value_pairs_;  // [32, wide, 2]
  std::vector<float> sums_;        // [queries, wide]
  std::vector<float> most_, total_;
  int64_t span_ = 0, head_ = 0, row_ = 0, position_ = 0, queries_ = 0;
};

// Tasks are shared out among the threads, the longest first: later rows see more keys.
inline void prefill_attention(const PrefillArgs& a) {
  struct Part {
    int64_t span, from;
  };
  std::vector<Part> parts;
  for (int64_t span = 0; span < a.count; ++span)
    for (int64_t from = 0; from < a.sizes[span]; from += PrefillTask::height(a))
      parts.push_back({span, from});
  std::stable_sort(parts.begin(), parts.end(), [&](const Part& one, const Part& other) {
    return a.starts[one.span] + one.from > a.starts[other.span] + other.from;
  });
  const int64_t tasks = static_cast<int64_t>(parts.size()) * a.kv_heads;
#pragma omp parallel
  {
    PrefillTask mine(a);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const Part& part = parts[task / a.kv_heads];
      mine.run(part.span, part.from, task % a.kv_heads);
    }
  }
}

}  // namespace baton

// Paged decode attention: one new token per row, read straight from the pool's blocks.
//
// A row's keys are taken in tiles of 16, in their order, each tile with all the KV heads of a task.
// Softmax goes along, as in FlashAttention. What a row computes depends on its own keys alone. GQA:
// the query heads of one KV head share what is loaded. Both products are dot products of bfloat16
// pairs: of a key's neighbouring numbers, and of two keys' values, for which weights are rounded.
// While a tile is read, the next one is asked of memory line by line: all at once, a core would
// stand still until most of it is there. How keys and values are stored is a Pool's (PlainPool; in
// attention_int8.h Int8Pool): where a token lies, how its numbers are asked of memory and read, and
// the factors of a tile's scores and weights.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace baton {

constexpr int kTile = 16;       // keys at once
constexpr int kMaxDim = 256;    // numbers per head

struct DecodeArgs {
  const bf16* q;          // [.., query_heads, k_dim]: row stride below
  bf16* out;              // [.., query_heads, v_dim], rows without gaps
  const bf16* keys;       // of this layer: block, token and head strides below
  const bf16* values;
  const int64_t* tables;  // [spans, width] block ids
  const int64_t* rows;    // [count] rows of q and out
  const int64_t* spans;   // [count] rows of `tables`
  const int64_t* tokens;  // [count] keys that exist, the new token's included
  const int64_t* first;   // [count] block that a table begins with
  const float* sinks;     // [query_heads], or null
  int64_t count, width, q_stride;
  int64_t key_block, key_token, key_head, value_block, value_token, value_head;
  int64_t query_heads, kv_heads, k_dim, v_dim, block_size, window;
  float scale, softcap;  // softcap 0: none
};

// Where one row is with one query head. The sums lie as `weigh_values` makes them: of 32 numbers,
// first 0-3, 8-11, 16-19 and 24-27, then the others.
struct Running {
  float most, total;
  alignas(64) float sum[kMaxDim];
};

// Keys and values in bfloat16.
struct PlainPool {
  struct Token {
    const bf16 *key, *value;
  };

  // Of a tile's keys, by one KV head.
  struct Factors {
    __m512 score;
    __m512 weighed(__m512 weights) const { return weights; }
  };

  const DecodeArgs& a;

  Token at(int64_t block, int64_t token) const {
    return {a.keys + block * a.key_block + token * a.key_token,
            a.values + block * a.value_block + token * a.value_token};
  }

  // What lies beside a token's numbers: nothing.
  static void ask_factors(const Token&) {}
  static void ask_key(const Token& token, int64_t at) { ask(token.key + at); }
  static void ask_value(const Token& token, int64_t at) { ask(token.value + at); }

  Factors factors(const Token*, int, int64_t) const { return {_mm512_set1_ps(a.scale)}; }

  static __m512bh key(const Token& token, int64_t at) { return load_pairs(token.key + at); }

  static __m512bh value(const Token& token, int64_t at) { return load_pairs(token.value + at); }
};

template <class Pool>
class DecodeRow {
 public:
  DecodeRow(const Pool& pool, int64_t index, HeadRange kv, std::vector<Running>& running)
      : pool_(pool), a_(pool.a), index_(index), first_head_(kv.first), last_head_(kv.last),
        group_(a_.query_heads / a_.kv_heads), running_(running) {}

  void run() {
    const int64_t end = a_.tokens[index_];
    const int64_t begin = a_.window > 0 ? std::max<int64_t>(0, end - a_.window) : 0;
    const int64_t heads = (last_head_ - first_head_) * group_;
    for (int64_t h = 0; h < heads; ++h) {
      Running& each = running_[h];
      // A sink is a key of its own without a value.
      each.most = a_.sinks ? a_.sinks[first_head_ * group_ + h] : -INFINITY;
      each.total = a_.sinks ? 1.0f : 0.0f;
      std::fill_n(each.sum, a_.v_dim, 0.0f);
    }
    const auto span = [&](int64_t at) {
      return static_cast<int>(std::min<int64_t>(kTile, end - at));
    };
    for (int i = 0; i < span(begin); ++i) next_[i] = locate(begin + i);
    for (int64_t at = begin; at < end; at += kTile) {
      std::copy_n(next_, kTile, tile_);
      for (int i = 0; i < span(at + kTile); ++i) {
        next_[i] = locate(at + kTile + i);
        Pool::ask_factors(next_[i]);
      }
      for (int64_t head = first_head_; head < last_head_; ++head) attend(head, span(at));
    }
    finish();
  }

 private:
  using Token = typename Pool::Token;
  using Factors = typename Pool::Factors;

  Token locate(int64_t at) const {
    const int64_t* table = a_.tables + a_.spans[index_] * a_.width;
    return pool_.at(table[at / a_.block_size - a_.first[index_]], at % a_.block_size);
  }

  void attend(int64_t head, int count) {
    const Factors factors = pool_.factors(tile_, count, head);
    for (int64_t g = 0; g < group_; g += 2) {
      Running* states = &running_[(head - first_head_) * group_ + g];
      const int64_t query_head = head * group_ + g;
      if (count < kTile)  // once per row: a loop that the compiler cannot unroll
        for (int64_t i = 0; i < std::min<int64_t>(2, group_ - g); ++i)
          attend<1, false>(states + i, head, query_head + i, count, factors);
      else if (g + 1 < group_)
        attend<2, true>(states, head, query_head, count, factors);
      else
        attend<1, true>(states, head, query_head, count, factors);
    }
  }

  // `Heads` query heads of one KV head. `Full`: the tile has all its keys, a number known here.
  template <int Heads, bool Full>
  void attend(Running* states, int64_t head, int64_t query_head, int count,
              const Factors& factors) {
    alignas(64) bf16 weights[Heads][kTile];
    float kept[Heads];
    __m512 score[Heads];
    scores<Heads, Full>(head, query_head, count, factors, score);
    for (int h = 0; h < Heads; ++h) {
      Running& state = states[h];
      const float most = std::max(state.most, _mm512_reduce_max_ps(score[h]));
      const __m512 weight = exponential(_mm512_sub_ps(score[h], _mm512_set1_ps(most)));
      kept[h] = most == state.most ? 1.0f : std::exp(state.most - most);
      state.total = state.total * kept[h] + _mm512_reduce_add_ps(weight);
      state.most = most;
      store_rounded(weights[h], factors.weighed(weight));
    }
    weigh_values<Heads, Full>(states, head, count, weights, kept);
  }

  // sum = sum * kept + the tile's values by their weights.
  template <int Heads, bool Full>
  void weigh_values(Running* states, int64_t head, int count, const bf16 (*weights)[kTile],
                    const float* kept) const {
    const int keys = Full ? kTile : count;
    for (int64_t d = 0; d < a_.v_dim; d += 32) {
      __m512 low[Heads], high[Heads];
      BATON_UNROLL for (int h = 0; h < Heads; ++h) {
        const __m512 each = _mm512_set1_ps(kept[h]);
        low[h] = _mm512_mul_ps(_mm512_load_ps(states[h].sum + d), each);
        high[h] = _mm512_mul_ps(_mm512_load_ps(states[h].sum + d + 16), each);
      }
      BATON_UNROLL for (int i = 0; i < keys; i += 2) {
        const __m512i one = (__m512i)Pool::value(tile_[i], head * a_.value_head + d);
        const __m512i other = !Full && i + 1 == keys  // nobody may have written there
                                  ? _mm512_setzero_si512()
                                  : (__m512i)Pool::value(tile_[i + 1], head * a_.value_head + d);
        if (Full) {
          Pool::ask_value(next_[i], head * a_.value_head + d);
          Pool::ask_value(next_[i + 1], head * a_.value_head + d);
        }
        const auto first = (__m512bh)_mm512_unpacklo_epi16(one, other);
        const auto second = (__m512bh)_mm512_unpackhi_epi16(one, other);
        BATON_UNROLL for (int h = 0; h < Heads; ++h) {
          const __m512bh pair = broadcast_pair(weights[h] + i);
          low[h] = _mm512_dpbf16_ps(low[h], pair, first);
          high[h] = _mm512_dpbf16_ps(high[h], pair, second);
        }
      }
      BATON_UNROLL for (int h = 0; h < Heads; ++h) {
        _mm512_store_ps(states[h].sum + d, low[h]);
        _mm512_store_ps(states[h].sum + d + 16, high[h]);
      }
    }
  }

  // Query heads by the tile's keys, scaled and capped; -inf for keys that do not exist.
  template <int Heads, bool Full>
  void scores(int64_t head, int64_t query_head, int count, const Factors& factors,
              __m512* score) const {
    const bf16* q = a_.q + a_.rows[index_] * a_.q_stride + query_head * a_.k_dim;
    __m512 sums[Heads][kTile];
    constexpr int half = kTile / 2;  // 16 accumulators of two heads stay in registers
    for (int from = 0; from < kTile; from += half) {
      __m512 part[Heads][half];
      BATON_UNROLL for (int h = 0; h < Heads; ++h)
        BATON_UNROLL for (int i = 0; i < half; ++i) part[h][i] = _mm512_setzero_ps();
      for (int64_t d = 0; d < a_.k_dim; d += 32) {
        __m512bh query[Heads];
        BATON_UNROLL for (int h = 0; h < Heads; ++h) query[h] = load_pairs(q + h * a_.k_dim + d);
        BATON_UNROLL for (int i = 0; i < half; ++i) {
          if (!Full && from + i >= count) break;
          const __m512bh key = Pool::key(tile_[from + i], head * a_.key_head + d);
          if (Full) Pool::ask_key(next_[from + i], head * a_.key_head + d);
          BATON_UNROLL for (int h = 0; h < Heads; ++h)
            part[h][i] = _mm512_dpbf16_ps(part[h][i], query[h], key);
        }
      }
      BATON_UNROLL for (int h = 0; h < Heads; ++h)
        BATON_UNROLL for (int i = 0; i < half; ++i) sums[h][from + i] = part[h][i];
    }
    const __mmask16 exist = static_cast<__mmask16>((1u << count) - 1);
    for (int h = 0; h < Heads; ++h) {
      __m512 each = _mm512_mul_ps(sum_each(sums[h]), factors.score);
      if (a_.softcap > 0.0f) each = capped(each);
      score[h] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), exist, each);
    }
  }

  __m512 capped(__m512 scores) const {
    alignas(64) float each[kTile];
    _mm512_store_ps(each, scores);
    for (float& one : each) one = a_.softcap * std::tanh(one / a_.softcap);
    return _mm512_load_ps(each);
  }

  void finish() const {
    bf16* out = a_.out + a_.rows[index_] * a_.query_heads * a_.v_dim;
    for (int64_t h = first_head_ * group_; h < last_head_ * group_; ++h) {
      const Running& each = running_[h - first_head_ * group_];
      const __m512 share = _mm512_set1_ps(1.0f / each.total);
      for (int64_t d = 0; d < a_.v_dim; d += 32) {
        const __m512 low = _mm512_mul_ps(_mm512_load_ps(each.sum + d), share);
        const __m512 high = _mm512_mul_ps(_mm512_load_ps(each.sum + d + 16), share);
        store_in_order(out + h * a_.v_dim + d, low, high);
      }
    }
  }

  // 32 numbers, rounded, from the order of the sums.
  static void store_in_order(bf16* to, __m512 low, __m512 high) {
    const __m512i quads = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const auto both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(quads, both));
  }

  const Pool& pool_;
  const DecodeArgs& a_;
  const int64_t index_, first_head_, last_head_, group_;
  std::vector<Running>& running_;
  Token tile_[kTile];       // the keys at hand
  Token next_[kTile] = {};  // those after them; where there are no more, these
};

// When rows are few, the KV heads of each are shared out too: into so many parts.
inline int64_t parts_of(int64_t rows, int64_t kv_heads, int64_t threads) {
  const int64_t parts = rows >= 4 * threads ? 1 : (threads + rows - 1) / rows;
  return std::min(kv_heads, parts);
}

inline HeadRange heads_of(int64_t part, int64_t parts, int64_t kv_heads) {
  return {kv_heads * part / parts, kv_heads * (part + 1) / parts};
}

inline std::vector<Running> running_for(const DecodeArgs& a, int64_t parts) {
  return std::vector<Running>((a.kv_heads / parts + 1) * (a.query_heads / a.kv_heads));
}

// Part `task` % parts of row `task` / parts.
template <class Pool>
inline void attend_part(const Pool& pool, int64_t task, int64_t parts,
                        std::vector<Running>& running) {
  const HeadRange heads = heads_of(task % parts, parts, pool.a.kv_heads);
  DecodeRow<Pool>(pool, task / parts, heads, running).run();
}

// Rows are shared out among the threads.
template <class Pool>
inline void decode_attention(const Pool& pool) {
#pragma omp parallel
  {
    const DecodeArgs& a = pool.a;
    const int64_t parts = parts_of(a.count, a.kv_heads, omp_get_num_threads());
    std::vector<Running> running = running_for(a, parts);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < a.count * parts; ++task) attend_part(pool, task, parts, running);
  }
}

}  // namespace baton

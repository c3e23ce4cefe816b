// Paged decode attention: one new token per row, read straight from the pool's blocks.
//
// A row's keys are taken in tiles of 16, in their order, each tile with all the KV heads of a task:
// all scores, the weights of 16 query heads at once, all values. Softmax goes along, as in
// FlashAttention. What a row computes depends on its own keys alone. GQA: the query heads of one KV
// head share what is loaded. Both products are dot products of bfloat16 pairs: of a key's
// neighbouring numbers, and of two keys' values, by weights as factors.
// Memory is read in halves of a tile, all heads of 8 keys and then of the next 8, which are asked
// for meanwhile, line by line: with more at once the first would have left the core's cache before
// they are needed, and a core that asks for all in one go stands still. How keys and values are
// stored is a Pool's (PlainPool; in attention_int8.h Int8Pool): where a token lies, how its numbers
// are asked of memory and read, and the factors of a tile's scores and weights.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace baton {

constexpr int kTile = 16;       // keys at once
constexpr int kHalf = 8;        // keys that are read together
constexpr int kLanes = 16;      // query heads at once
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

// Where one row is with up to 16 query heads, a lane each. Of 32 sums lie first those of
// `interleave_first`, then those of `interleave_second`.
struct Running {
  Floats most, total;
  alignas(64) float sum[kLanes][kMaxDim];
};

// Keys and values in bfloat16.
struct PlainPool {
  struct Token {
    const bf16 *key, *value;
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

  // Of a tile's scores by a KV head; and its weights as its values meet them.
  Floats scales(const Token*, int64_t) const { return broadcast(a.scale); }
  Floats weighed(const Token*, int64_t, Floats weights) const { return weights; }

  static Pairs key(const Token& token, int64_t at) { return load_pairs(token.key + at); }

  static Line value(const Token& token, int64_t at) { return load_line(token.value + at); }
};

template <class Pool>
class DecodeRow {
 public:
  DecodeRow(const Pool& pool, int64_t index, HeadRange kv, std::vector<Running>& running)
      : pool_(pool), a_(pool.a), index_(index), group_(a_.query_heads / a_.kv_heads),
        first_(kv.first * group_), last_(kv.last * group_), running_(running) {}

  void run() {
    const int64_t end = a_.tokens[index_];
    const int64_t begin = a_.window > 0 ? std::max<int64_t>(0, end - a_.window) : 0;
    start();
    locate(begin, end, 0, kTile);
    for (int64_t at = begin; at < end; at += kTile) {
      locate(at + kTile, end, kTile, kTile);
      const Lanes exist = lanes_of(end - at);
      for (int64_t from = first_; from < last_; from += kLanes)
        attend(running_[(from - first_) / kLanes], from, std::min(last_, from + kLanes), exist);
      std::copy_n(tile_ + kTile, kTile, tile_);
    }
    finish();
  }

 private:
  using Token = typename Pool::Token;

  void start() {
    for (int64_t from = first_; from < last_; from += kLanes) {
      Running& state = running_[(from - first_) / kLanes];
      // A sink is a key of its own without a value.
      state.most = broadcast(-INFINITY);
      if (a_.sinks) state.most = load(a_.sinks + from, lanes_of(last_ - from));
      state.total = broadcast(a_.sinks ? 1.0f : 0.0f);
      for (auto& sum : state.sum) std::fill_n(sum, a_.v_dim, 0.0f);
    }
  }

  // `count` keys from `key` on, to tile_ + index; beyond the end the last one again, which then has
  // no weight.
  void locate(int64_t key, int64_t end, int index, int count) {
    const int64_t* table = a_.tables + a_.spans[index_] * a_.width;
    for (int i = index; i < index + count; ++i, ++key) {
      const int64_t at = std::min(key, end - 1);
      tile_[i] = pool_.at(table[at / a_.block_size - a_.first[index_]], at % a_.block_size);
      Pool::ask_factors(tile_[i]);
    }
  }

  // Query heads [from, until), two of one KV head together: `work(count, head, lane)`.
  template <class Work>
  void by_pairs(int64_t from, int64_t until, const Work& work) const {
    for (int64_t query = from; query < until;) {
      const int64_t head = query / group_, end = std::min(until, (head + 1) * group_);
      for (; query + 1 < end; query += 2)
        work(std::integral_constant<int, 2>(), head, query - from);
      if (query < end) work(std::integral_constant<int, 1>(), head, query++ - from);
    }
  }

  // Query heads [from, until) by the tile.
  void attend(Running& state, int64_t from, int64_t until, Lanes exist) {
    Floats score[kLanes];
    for (int64_t lane = until - from; lane < kLanes; ++lane) score[lane] = broadcast(0.0f);
    scores(from, until, exist, score);
    const Floats most = higher(state.most, across_each(score, higher));
    const Floats worth = exponential(state.most - most);  // of what was so far
    alignas(64) float highest[kLanes], kept[kLanes];
    store(highest, most);
    store(kept, worth);
    for (int64_t lane = 0; lane < until - from; ++lane)
      score[lane] = exponential(score[lane] - broadcast(highest[lane]));
    state.total = multiply_add(state.total, worth, across_each(score, added));
    state.most = most;
    values(state, from, until, score, kept);
  }

  // Scaled and capped; -inf for keys that do not exist.
  void scores(int64_t from, int64_t until, Lanes exist, Floats* score) const {
    const bf16* q = a_.q + a_.rows[index_] * a_.q_stride + from * a_.k_dim;
    Floats quarters[kLanes][4];
    for (int half = 0; half < kTile; half += kHalf)
      by_pairs(from, until, [&](auto heads, int64_t head, int64_t lane) {
        for (int at = half; at < half + kHalf; at += 4)
          products<heads>(q + lane * a_.k_dim, head, at, quarters + lane);
      });
    by_pairs(from, until, [&](auto heads, int64_t head, int64_t first) {
      const Floats scales = pool_.scales(tile_, head);
      for (int64_t lane = first; lane < first + heads; ++lane) {
        Floats each = across_quarters(quarters[lane], added) * scales;
        if (a_.softcap > 0.0f) each = capped(each);
        score[lane] = select(exist, each, broadcast(-INFINITY));
      }
    });
  }

  // Some query heads of one KV head by 4 keys from `at` on: a quarter of each head's scores.
  template <int Heads>
  void products(const bf16* q, int64_t head, int at, Floats (*quarters)[4]) const {
    Floats part[Heads][4];
    BATON_UNROLL for (int i = 0; i < 4; i += kKeysAtOnce)
      multiply_keys<Heads>(q, head, at + i, part, i);
    BATON_UNROLL for (int h = 0; h < Heads; ++h)
      quarters[h][at / 4] = across_four(part[h], added);
  }

  // kKeysAtOnce keys from `at` on, to part[..][first] and on: their products lane by lane.
  template <int Heads>
  void multiply_keys(const bf16* q, int64_t head, int at, Floats (*part)[4], int first) const {
    const Token *tile = tile_ + at, *next = tile_ + at + kHalf;
    Floats sum[Heads][kKeysAtOnce];
    BATON_UNROLL for (int h = 0; h < Heads; ++h)
      BATON_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) sum[h][i] = broadcast(0.0f);
    for (int64_t d = 0; d < a_.k_dim; d += 32) {
      Pairs query[Heads];
      BATON_UNROLL for (int h = 0; h < Heads; ++h) query[h] = load_pairs(q + h * a_.k_dim + d);
      BATON_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) {
        const Pairs key = Pool::key(tile[i], head * a_.key_head + d);
        Pool::ask_key(next[i], head * a_.key_head + d);
        BATON_UNROLL for (int h = 0; h < Heads; ++h) sum[h][i] = dot(sum[h][i], query[h], key);
      }
    }
    BATON_UNROLL for (int h = 0; h < Heads; ++h)
      BATON_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) part[h][first + i] = sum[h][i];
  }

  Floats capped(Floats scores) const {
    alignas(64) float each[kTile];
    store(each, scores);
    for (float& one : each) one = a_.softcap * std::tanh(one / a_.softcap);
    return load(each);
  }

  // The tile's values by their weights, to the sums; `kept`: what these are worth.
  void values(Running& state, int64_t from, int64_t until, const Floats* weight,
              float* kept) const {
    alignas(64) Factor factors[kLanes][kTile];
    by_pairs(from, until, [&](auto heads, int64_t head, int64_t lane) {
      for (int h = 0; h < heads; ++h)
        store_factors(factors[lane + h], pool_.weighed(tile_, head, weight[lane + h]));
    });
    for (int at = 0; at < kTile; at += kHalf) {
      by_pairs(from, until, [&](auto heads, int64_t head, int64_t lane) {
        int64_t d = 0;
        if constexpr (kValueParts > 1) {
          for (; d + 128 <= a_.v_dim; d += 128)
            add_values<heads, 4>(state.sum + lane, head, d, at, factors + lane, kept + lane);
          for (; d + 64 <= a_.v_dim; d += 64)
            add_values<heads, 2>(state.sum + lane, head, d, at, factors + lane, kept + lane);
        }
        for (; d < a_.v_dim; d += 32)
          add_values<heads, 1>(state.sum + lane, head, d, at, factors + lane, kept + lane);
      });
      std::fill_n(kept, kLanes, 1.0f);
    }
  }

  // sum = sum * kept + the values of 8 keys from `at` on: 32 * Parts numbers from `d` on.
  template <int Heads, int Parts>
  void add_values(float (*sum)[kMaxDim], int64_t head, int64_t d, int at,
                  const Factor (*weights)[kTile], const float* kept) const {
    Floats low[Heads][Parts], high[Heads][Parts];
    BATON_UNROLL for (int h = 0; h < Heads; ++h) {
      const Floats each = broadcast(kept[h]);
      BATON_UNROLL for (int p = 0; p < Parts; ++p) {
        low[h][p] = load(sum[h] + d + 32 * p) * each;
        high[h][p] = load(sum[h] + d + 32 * p + 16) * each;
      }
    }
    for (int i = at; i < at + kHalf; i += 2) {
      Pair pair[Heads];
      BATON_UNROLL for (int h = 0; h < Heads; ++h) pair[h] = broadcast_pair(weights[h] + i);
      BATON_UNROLL for (int p = 0; p < Parts; ++p) {
        const int64_t number = head * a_.value_head + d + 32 * p;
        const Line one = Pool::value(tile_[i], number);
        const Line other = Pool::value(tile_[i + 1], number);
        Pool::ask_value(tile_[i + kHalf], number);
        Pool::ask_value(tile_[i + 1 + kHalf], number);
        const Pairs first = interleave_first(one, other);
        const Pairs second = interleave_second(one, other);
        BATON_UNROLL for (int h = 0; h < Heads; ++h) {
          low[h][p] = dot(low[h][p], pair[h], first);
          high[h][p] = dot(high[h][p], pair[h], second);
        }
      }
    }
    BATON_UNROLL for (int h = 0; h < Heads; ++h)
      BATON_UNROLL for (int p = 0; p < Parts; ++p) {
        store(sum[h] + d + 32 * p, low[h][p]);
        store(sum[h] + d + 32 * p + 16, high[h][p]);
      }
  }

  void finish() const {
    bf16* out = a_.out + a_.rows[index_] * a_.query_heads * a_.v_dim;
    for (int64_t query = first_; query < last_; ++query) {
      const Running& state = running_[(query - first_) / kLanes];
      const int64_t lane = (query - first_) % kLanes;
      alignas(64) float total[kLanes];
      store(total, state.total);
      const Floats share = broadcast(1.0f / total[lane]);
      for (int64_t d = 0; d < a_.v_dim; d += 32) {
        store_interleaved(out + query * a_.v_dim + d, load(state.sum[lane] + d) * share,
                          load(state.sum[lane] + d + 16) * share);
      }
    }
  }

  const Pool& pool_;
  const DecodeArgs& a_;
  const int64_t index_, group_, first_, last_;  // query heads [first, last)
  std::vector<Running>& running_;
  Token tile_[2 * kTile];  // the keys at hand, and those after them
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
  return std::vector<Running>((a.kv_heads / parts + 1) * (a.query_heads / a.kv_heads) / kLanes + 1);
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

// Paged decode attention: one new token per row, read straight from the pool's blocks.
//
// A row's keys are taken in stretches, and these in tiles of 16, in their order, each tile with all
// the KV heads of a task: all scores, the weights of 16 query heads at once, all values. Softmax goes
// along a stretch, as in FlashAttention; then the stretches are put together, in their order. What a
// row computes depends on its own keys alone: also how long its stretches are. Who computes which is
// told in attention_tasks.h. GQA: the query heads of one KV head share what is loaded. Both products
// are dot products of bfloat16 pairs: of a key's neighbouring numbers, and of two keys' values, by
// weights as factors.
// Memory is read in groups of 4 or 8 keys, all heads of them, and what comes after them is asked for
// meanwhile, as it lies: in the order of the products, head by head, short heads came at half the speed,
// since a processor foresees only addresses that follow each other. A core that waits for many lines
// forgets some that it is asked for. So where reading is what takes time each line is asked for three
// times, by each of the three groups before it: what has come, or is on its way, costs an instruction.
// Into which of a core's caches is measured at the first start (asking.py): on some processors the first
// one waits for 16 lines at most. How keys and values are stored is a Pool's (PlainPool; in
// attention_int8.h Int8Pool): where a token lies, how its numbers are read, and the factors of a tile's
// scores and weights.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace baton {

constexpr int kTile = 16;       // keys at once
constexpr int kFour = 4;        // keys that meet a query together
constexpr int kMostKeys = 8;    // of a group that is read together
constexpr int kMostAsked = 3;   // groups that are asked for at once
constexpr int64_t kLongHead = 128;
constexpr int kLanes = 16;      // query heads at once
constexpr int kMaxDim = 576;    // numbers per head: DeepSeek's latents
constexpr int64_t kStretch = 128;    // keys, at least: a KV head's share of a task must be worth it
constexpr int64_t kStretches = 32;   // of a row, at most

// The scales of keys and values in int8, float32 [blocks, block_size, kv_heads]: strides in numbers. Null
// of a pool in bfloat16.
struct PoolScales {
  float *keys, *values;
  int64_t key_block, key_token, value_block, value_token;
};

struct DecodeArgs {
  const bf16* q;          // [.., query_heads, k_dim]: row stride below
  bf16* out;              // [.., query_heads, v_dim]: row and head strides below
  const void* keys;       // of this layer: block, token and head strides below, in numbers
  const void* values;
  const int64_t* tables;  // [spans, width] block ids
  const int64_t* rows;    // [count] rows of q and out
  const int64_t* spans;   // [count] rows of `tables`
  const int64_t* tokens;  // [count] keys that exist, the new token's included
  const int64_t* first;   // [count] block that a table begins with
  const float* sinks;     // [query_heads], or null
  int64_t count, width, q_stride, out_row, out_head;
  int64_t key_block, key_token, key_head, value_block, value_token, value_head;
  int64_t query_heads, kv_heads, k_dim, v_dim, block_size, window;
  float scale, softcap;  // softcap 0: none
  PoolScales scales;
};

// The keys that a row attends: [begin, end), in stretches.
struct Stretches {
  int64_t begin, end, size;

  Stretches(const DecodeArgs& a, int64_t row)
      : begin(a.window > 0 ? std::max<int64_t>(0, a.tokens[row] - a.window) : 0),
        end(a.tokens[row]) {
    const int64_t least = (end - begin + kStretches - 1) / kStretches;
    size = std::max(kStretch, (least + kTile - 1) / kTile * kTile);
  }

  int64_t count() const { return (end - begin + size - 1) / size; }
};

// Where a stretch is with up to 16 query heads, a lane each. Of 32 sums lie first those of
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

  static constexpr bool kQuick = kQuickProducts;  // beside reading

  const DecodeArgs& a;

  Token at(int64_t block, int64_t token) const {
    return {static_cast<const bf16*>(a.keys) + block * a.key_block + token * a.key_token,
            static_cast<const bf16*>(a.values) + block * a.value_block + token * a.value_token};
  }

  // Nothing lies beside a token's numbers.
  static void ask_factors(const Token&) {}

  // Of a tile's scores by a KV head; and its weights as its values meet them.
  struct NoScales {};
  Floats scales(const Token*, int64_t) const { return broadcast(a.scale); }
  static NoScales value_scales(const Token*, int64_t) { return {}; }
  static Floats weighed(Floats weights, NoScales) { return weights; }

  static Line value(const Token& token, int64_t at) { return load_line(token.value + at); }
};

// Whether keys and values are asked into a core's first cache, as asking.py has measured it.
inline std::atomic<bool> asking_near{false};

// How many keys are a group, and how many groups after the one at hand are asked for.
struct Groups {
  int keys, asked;

  // Of a model whose KV heads have so many query heads each; quick: as a Pool says. Where products take
  // longer than reading, memory keeps up: a line is asked for once. And groups are larger, because sums
  // go to memory and back once for each.
  static Groups of(int64_t dim, int64_t queries, bool quick) {
    const bool reads_longer = quick && queries <= (dim >= kLongHead ? 4 : 3);
    return reads_longer ? Groups{kMostKeys / 2, kMostAsked} : Groups{kMostKeys, 1};
  }
};

// What is asked of memory while a group is at hand, by the calls that work on it: each for an even share
// of a token, or for some whole tokens.
class NextGroups {
 public:
  // `bytes` of each token, in at least so many calls. at(i, token): of the i-th group after this one.
  template <class At>
  NextGroups(Groups groups, int64_t bytes, int64_t calls, const At& at)
      : groups_(groups), near_(asking_near.load(std::memory_order_relaxed)),
        calls_(std::max<int64_t>(1, calls / groups.keys)),
        tokens_((groups.keys + calls - 1) / calls),
        bytes_((bytes + 64 * calls_ - 1) / (64 * calls_) * 64) {
    for (int i = 0; i < kMostAsked; ++i)
      for (int token = 0; token < groups.keys; ++token)
        at_[i][token] = at(std::min(i, groups.asked - 1), token);
  }

  // What one call asks for.
  void ask() {
    for (int64_t i = 0; i < tokens_ && token_ < groups_.keys; ++i) {
      const int64_t from = call_ * bytes_;
      const char *next = at_[0][token_] + from, *second = at_[1][token_] + from,
                 *third = at_[2][token_] + from;
      for (int64_t byte = 0; byte < bytes_; byte += 64) {
        ask_line(next + byte);
        if (groups_.asked < kMostAsked) continue;
        ask_line(second + byte);
        ask_line(third + byte);
      }
      if (++call_ == calls_) call_ = 0, ++token_;
    }
  }

 private:
  void ask_line(const char* line) const { near_ ? baton::ask(line) : ask_early(line); }

  const Groups groups_;
  const bool near_;
  const int64_t calls_, tokens_;  // calls that a token takes, or tokens that a call takes
  const int64_t bytes_;           // that a call asks for of a token
  const char* at_[kMostAsked][kMostKeys] = {};
  int64_t token_ = 0, call_ = 0;
};

// Some KV heads of a row with their query heads, a Running for each 16 of these.
template <class Pool>
class DecodeRow {
 public:
  DecodeRow(const Pool& pool, int64_t index, HeadRange kv)
      : pool_(pool), a_(pool.a), index_(index), group_(a_.query_heads / a_.kv_heads),
        first_(kv.first * group_), last_(kv.last * group_), keys_(pool.a, index),
        groups_(Groups::of(a_.k_dim, group_, Pool::kQuick)) {}

  // One stretch, from nothing. `on`: this thread goes on with the next one.
  void attend(int64_t stretch, bool on, Running* states) {
    const int64_t begin = keys_.begin + stretch * keys_.size;
    const int64_t end = std::min(keys_.end, begin + keys_.size);
    const int64_t asked = on ? keys_.end : end;
    start(states, stretch == 0 ? a_.sinks : nullptr);
    locate(begin, asked, 0, kTile);
    for (int64_t at = begin; at < end; at += kTile) {
      locate(at + kTile, asked, kTile, kTile);
      const Lanes exist = lanes_of(end - at);
      for (int64_t from = first_; from < last_; from += kLanes)
        attend(states[(from - first_) / kLanes], from, std::min(last_, from + kLanes), exist);
      std::copy_n(tile_ + kTile, kTile, tile_);
    }
  }

  // The next stretch, to those before it.
  void add(Running* states, const Running* next) const {
    for (int64_t from = first_; from < last_; from += kLanes)
      add(*states++, *next++, std::min<int64_t>(kLanes, last_ - from));
  }

  // What all stretches come to.
  void finish(const Running* states) const {
    bf16* out = a_.out + a_.rows[index_] * a_.out_row;
    for (int64_t query = first_; query < last_; ++query) {
      const Running& state = states[(query - first_) / kLanes];
      const int64_t lane = (query - first_) % kLanes;
      alignas(64) float total[kLanes];
      store(total, state.total);
      const Floats share = broadcast(1.0f / total[lane]);
      for (int64_t d = 0; d < a_.v_dim; d += 32) {
        store_interleaved(out + query * a_.out_head + d, load(state.sum[lane] + d) * share,
                          load(state.sum[lane] + d + 16) * share);
      }
    }
  }

 private:
  using Token = typename Pool::Token;

  void start(Running* states, const float* sinks) const {
    for (int64_t from = first_; from < last_; from += kLanes) {
      Running& state = states[(from - first_) / kLanes];
      // A sink is a key of its own without a value.
      state.most = broadcast(-INFINITY);
      if (sinks) state.most = load(sinks + from, lanes_of(last_ - from));
      state.total = broadcast(sinks ? 1.0f : 0.0f);
      for (auto& sum : state.sum) std::fill_n(sum, a_.v_dim, 0.0f);
    }
  }

  void add(Running& state, const Running& next, int64_t heads) const {
    const Floats most = max(state.most, next.most);
    const Floats here = exponential(state.most - most), there = exponential(next.most - most);
    alignas(64) float kept[kLanes], added[kLanes];
    store(kept, here);
    store(added, there);
    state.total = multiply_add(state.total, here, next.total * there);
    state.most = most;
    for (int64_t lane = 0; lane < heads; ++lane)
      for (int64_t d = 0; d < a_.v_dim; d += 16) {
        const Floats more = load(next.sum[lane] + d) * broadcast(added[lane]);
        store(state.sum[lane] + d,
              multiply_add(load(state.sum[lane] + d), broadcast(kept[lane]), more));
      }
  }

  // `count` keys from `key` on, to tile_ + index; beyond the end the last one again, which then has
  // no weight.
  void locate(int64_t key, int64_t end, int index, int count) {
    const int64_t* table = a_.tables + a_.spans[index_] * a_.width;
    key = std::min(key, end - 1);
    int64_t block = key / a_.block_size - a_.first[index_], token = key % a_.block_size;
    for (int i = index; i < index + count; ++i) {
      tile_[i] = pool_.at(table[block], token);
      Pool::ask_factors(tile_[i]);
      if (++key == end) --key;
      else if (++token == a_.block_size) ++block, token = 0;
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

  // The KV heads whose first query heads are of [from, until): they lie side by side.
  HeadRange beginning(int64_t from, int64_t until) const {
    return {(from + group_ - 1) / group_, (until + group_ - 1) / group_};
  }

  // What so many calls ask for that work on the tile's keys from `key` on, of those KV heads: keys of the
  // groups after them; or values of these.
  NextGroups keys_after(int key, HeadRange kv, int64_t calls) const {
    const int64_t bytes = (kv.last - kv.first) * a_.k_dim * sizeof(*tile_->key);
    return {groups_, bytes, calls, [&](int group, int token) {
      const auto* from = tile_[key + (group + 1) * groups_.keys + token].key;
      return reinterpret_cast<const char*>(from + kv.first * a_.key_head);
    }};
  }
  NextGroups values_after(int key, HeadRange kv, int64_t calls) const {
    const int64_t bytes = (kv.last - kv.first) * a_.v_dim * sizeof(*tile_->value);
    return {groups_, bytes, calls, [&](int group, int token) {
      const auto* from = tile_[key + (group + 1) * groups_.keys + token].value;
      return reinterpret_cast<const char*>(from + kv.first * a_.value_head);
    }};
  }

  // How many times by_pairs works on query heads [from, until).
  int64_t count_pairs(int64_t from, int64_t until) const {
    if (group_ % 2 == 0) return (until - from) / 2;
    int64_t count = 0;
    by_pairs(from, until, [&](auto, int64_t, int64_t) { ++count; });
    return count;
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
    Folded quarters[kLanes][4];
    const HeadRange kv = beginning(from, until);
    const int64_t calls = count_pairs(from, until) * (groups_.keys / kFour);
    for (int key = 0; key < kTile; key += groups_.keys) {
      NextGroups next = keys_after(key, kv, calls);
      by_pairs(from, until, [&](auto heads, int64_t head, int64_t lane) {
        for (int at = key; at < key + groups_.keys; at += kFour) {
          next.ask();
          products<heads>(q + lane * a_.k_dim, head, at, quarters + lane);
        }
      });
    }
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
  void products(const bf16* q, int64_t head, int at, Folded (*quarters)[4]) const {
    Folded part[Heads][4];
    BATON_UNROLL for (int i = 0; i < 4; i += kKeysAtOnce)
      multiply_keys<Heads>(q, head, at + i, part, i);
    BATON_UNROLL for (int h = 0; h < Heads; ++h)
      quarters[h][at / 4] = across_four(part[h], added);
  }

  // kKeysAtOnce keys from `at` on, to part[..][first] and on: their products lane by lane.
  template <int Heads>
  void multiply_keys(const bf16* q, int64_t head, int at, Folded (*part)[4], int first) const {
    const Token* tile = tile_ + at;
    Folded sum[Heads][kKeysAtOnce];
    BATON_UNROLL for (int h = 0; h < Heads; ++h)
      BATON_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) sum[h][i] = Folded{};
    for (int64_t line = 0; line < a_.k_dim; line += 32) {
      const int64_t from = head * a_.key_head + line;
      BATON_UNROLL for (int d = 0; d < 32; d += kFoldedNumbers) {
        FoldedPairs query[Heads];
        BATON_UNROLL for (int h = 0; h < Heads; ++h)
          query[h] = load_folded(q + h * a_.k_dim + line + d);
        BATON_UNROLL for (int i = 0; i < kKeysAtOnce; ++i) {
          const FoldedPairs key = load_folded(tile[i].key + from + d);
          BATON_UNROLL for (int h = 0; h < Heads; ++h) sum[h][i] = dot(sum[h][i], query[h], key);
        }
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
      const auto scales = Pool::value_scales(tile_, head);
      for (int h = 0; h < heads; ++h)
        store_factors(factors[lane + h], Pool::weighed(weight[lane + h], scales));
    });
    const HeadRange kv = beginning(from, until);
    const auto by_groups = [&](auto keys) {
      for (int key = 0; key < kTile; key += keys) {
        values_of<keys>(state, from, until, key, factors, kept, kv);
        std::fill_n(kept, kLanes, 1.0f);
      }
    };
    if (groups_.keys == kMostKeys)
      by_groups(std::integral_constant<int, kMostKeys>());
    else
      by_groups(std::integral_constant<int, kMostKeys / 2>());
  }

  // Those of a group of keys from `key` on.
  template <int Keys>
  void values_of(Running& state, int64_t from, int64_t until, int key,
                 const Factor (*factors)[kTile], const float* kept, HeadRange kv) const {
    constexpr int64_t kMost = 32 * kValueParts;  // numbers of a call: as `add` is called below
    const int64_t left = a_.v_dim % kMost / 32;
    const int64_t calls = count_pairs(from, until) * (a_.v_dim / kMost + left / 2 + left % 2);
    NextGroups next = values_after(key, kv, calls);
    by_pairs(from, until, [&](auto heads, int64_t head, int64_t lane) {
      const auto add = [&](auto parts, int64_t d) {
        next.ask();
        add_values<heads, parts, Keys>(state.sum + lane, head, d, key, factors + lane, kept + lane);
      };
      int64_t d = 0;
      if constexpr (kValueParts > 1) {
        for (; d + 128 <= a_.v_dim; d += 128) add(std::integral_constant<int, 4>(), d);
        for (; d + 64 <= a_.v_dim; d += 64) add(std::integral_constant<int, 2>(), d);
      }
      for (; d < a_.v_dim; d += 32) add(std::integral_constant<int, 1>(), d);
    });
  }

  // sum = sum * kept + the values of those keys: 32 * Parts numbers from `d` on.
  template <int Heads, int Parts, int Keys>
  [[gnu::always_inline]] void add_values(float (*sum)[kMaxDim], int64_t head, int64_t d, int key,
                                         const Factor (*weights)[kTile], const float* kept) const {
    Floats low[Heads][Parts], high[Heads][Parts];
    BATON_UNROLL for (int h = 0; h < Heads; ++h) {
      const Floats each = broadcast(kept[h]);
      BATON_UNROLL for (int p = 0; p < Parts; ++p) {
        low[h][p] = load(sum[h] + d + 32 * p) * each;
        high[h][p] = load(sum[h] + d + 32 * p + 16) * each;
      }
    }
    BATON_UNROLL for (int i = key; i < key + Keys; i += 2) {
      Pair pair[Heads];
      BATON_UNROLL for (int h = 0; h < Heads; ++h) pair[h] = broadcast_pair(weights[h] + i);
      BATON_UNROLL for (int p = 0; p < Parts; ++p) {
        const int64_t number = head * a_.value_head + d + 32 * p;
        const auto one = Pool::value(tile_[i], number);
        const auto other = Pool::value(tile_[i + 1], number);
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

  const Pool& pool_;
  const DecodeArgs& a_;
  const int64_t index_, group_, first_, last_;  // query heads [first, last)
  const Stretches keys_;
  const Groups groups_;
  Token tile_[2 * kTile];  // the keys at hand, and those after them
};

}  // namespace baton

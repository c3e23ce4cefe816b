// The gated delta rule of linear attention over recurrent states, in their slots
// (kernels/delta_rule.py has the algebra and the torch twin).
//
// A unit is a key head of a span: its part of the convolution, and the matrices of the value heads that
// it serves. A single token reads each matrix from memory once and writes it once: the second pass over
// a head finds it in the core's cache. Several tokens go in chunks; all products are of float32, in tiles
// of registers. A unit is one thread's, and what a sequence computes depends on its own rows alone. It
// does depend on where its prompt is cut, within rounding: chunks begin at a span's first row.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "delta_args.h"
#include "vectors.h"

namespace baton {

constexpr int64_t kTokens = 32;  // of a chunk
constexpr int kFewTaps = 4;      // of the convolution: all models have so many

// The upper half of a float32 that is exact in bfloat16.
inline bf16 narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>(bits >> 16);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline Floats silu(Floats x) {
  return x / (broadcast(1.0f) + exponential(broadcast(0.0f) - x));
}

// M rows of a [.., depth] by V vectors of b: c = kept * c + a b, or a b if `kept` is 0.
template <int M, int V>
inline void multiply_floats(const float* a, int64_t depth, int64_t a_stride, const float* b, float* c,
                            int64_t columns, float kept) {
  // Every fourth row: what lies between is within reach of an address.
  const float* x[(M + 3) / 4];
  for (int m = 0; m < M; m += 4) x[m / 4] = a + m * a_stride;
  Floats sum[M][V];
  BATON_UNROLL for (int m = 0; m < M; ++m)
    BATON_UNROLL for (int j = 0; j < V; ++j) sum[m][j] = broadcast(0.0f);
  if (kept != 0.0f)
    BATON_UNROLL for (int m = 0; m < M; ++m)
      BATON_UNROLL for (int j = 0; j < V; ++j)
        sum[m][j] = broadcast(kept) * load(c + m * columns + 16 * j);
  for (int64_t k = 0; k < depth; ++k, b += columns) {
    Floats numbers[V];
    BATON_UNROLL for (int j = 0; j < V; ++j) numbers[j] = load(b + 16 * j);
    BATON_UNROLL for (int m = 0; m < M; ++m) {
      const Floats factor = broadcast(x[m / 4][m % 4 * a_stride + k]);
      BATON_UNROLL for (int j = 0; j < V; ++j)
        sum[m][j] = multiply_add(factor, numbers[j], sum[m][j]);
    }
  }
  BATON_UNROLL for (int m = 0; m < M; ++m)
    BATON_UNROLL for (int j = 0; j < V; ++j) store(c + m * columns + 16 * j, sum[m][j]);
}

template <int M, int V>
inline void multiply_up_to(int64_t rows, const float* a, int64_t depth, int64_t a_stride,
                           const float* b, float* c, int64_t columns, float kept) {
  if constexpr (M > 1)
    if (rows < M)
      return multiply_up_to<M - 1, V>(rows, a, depth, a_stride, b, c, columns, kept);
  multiply_floats<M, V>(a, depth, a_stride, b, c, columns, kept);
}

// c [rows, columns] = kept * c + a b, of b [depth, columns]; columns are whole vectors. Rows come
// first: what is 16 columns of many rows would lie in few sets of the core's cache.
inline void multiply_all(int64_t rows, int64_t columns, int64_t depth, const float* a,
                         int64_t a_stride, const float* b, float* c, float kept) {
  constexpr int64_t kColumns = 16 * kQueryVectors;
  for (int64_t m = 0; m < rows; m += kQueries) {
    const float* from = a + m * a_stride;
    int64_t at = 0;
    for (; at + kColumns <= columns; at += kColumns)
      multiply_up_to<kQueries, kQueryVectors>(rows - m, from, depth, a_stride, b + at,
                                              c + m * columns + at, columns, kept);
    for (; at < columns; at += 16)
      multiply_up_to<kQueries, 1>(rows - m, from, depth, a_stride, b + at, c + m * columns + at,
                                  columns, kept);
  }
}

// A thread's memory for its units, one at a time.
class DeltaTask {
 public:
  explicit DeltaTask(const DeltaArgs& args)
      : a_(args), shared_(a_.value_heads / a_.key_heads),
        width_(2 * a_.key_dim + shared_ * a_.value_dim), room_(room(a_)),
        window_((a_.num_taps + room_) * width_), mixed_(room_ * width_),
        heads_(2 * room_ * a_.key_dim), across_(room_ * a_.key_dim),
        products_(2 * room_ * kTokens), read_(2 * room_ * a_.value_dim), system_(room_ * kTokens),
        seen_(room_ * kTokens) {}

  // `next`: a matrix that this thread will read soon, or null.
  void run(int64_t span, int64_t head, const float* next) {
    head_ = head;
    slot_ = a_.slots[span];
    next_ = next;
    const int64_t size = a_.sizes[span];
    if (a_.begins[span]) forget();
    if (size == 1 && a_.num_taps == kFewTaps) {
      row_ = a_.rows[span];
      count_ = 1;
      convolve_one();
      advance(true);
      return;
    }
    each_channel([&](int64_t at, const bf16* kept) {
      for (int64_t tap = 0; tap < a_.num_taps; ++tap)
        window_[tap * width_ + at] = widened(kept[tap]);
    });
    for (int64_t from = 0; from < size; from += kTokens) {
      if (from > 0) std::copy_n(&window_[kTokens * width_], a_.num_taps * width_, window_.data());
      row_ = a_.rows[span] + from;
      count_ = std::min(kTokens, size - from);
      convolve(std::min(kTokens, size - from - count_));
      advance(size == 1);
    }
    each_channel([&](int64_t at, bf16* kept) {
      for (int64_t tap = 0; tap < a_.num_taps; ++tap)
        kept[tap] = narrowed(window_[(count_ + tap) * width_ + at]);
    });
  }

  // The first matrix of a unit.
  static float* matrix(const DeltaArgs& a, int64_t span, int64_t head) {
    return a.matrices + a.slots[span] * a.matrix_stride +
           head * (a.value_heads / a.key_heads) * a.key_dim * a.value_dim;
  }

 private:
  // Tokens that there is room for: many, or one if every span is one token.
  static int64_t room(const DeltaArgs& a) {
    const bool single = std::all_of(a.sizes, a.sizes + a.count, [](int64_t n) { return n == 1; });
    return single ? 1 : kTokens;
  }

  // The three ranges of channels of this unit: work(first in x, first in the window, how many).
  template <class Work>
  void each_part(const Work& work) const {
    const int64_t keys = a_.key_heads * a_.key_dim, values = shared_ * a_.value_dim;
    work(head_ * a_.key_dim, 0, a_.key_dim);
    work(keys + head_ * a_.key_dim, a_.key_dim, a_.key_dim);
    work(2 * keys + head_ * values, 2 * a_.key_dim, values);
  }

  // work(place in the window, the channel's inputs in the slot).
  template <class Work>
  void each_channel(const Work& work) const {
    bf16* const kept = a_.conv + slot_ * a_.conv_stride;
    each_part([&](int64_t first, int64_t at, int64_t count) {
      for (int64_t i = 0; i < count; ++i) work(at + i, kept + (first + i) * a_.num_taps);
    });
  }

  int64_t channels() const {
    return 2 * a_.key_heads * a_.key_dim + a_.value_heads * a_.value_dim;
  }

  // Numbers of the row behind the channels: gates of the value heads, rates, decays.
  const bf16* behind(int64_t token) const {
    return a_.x + (row_ + token) * a_.x_stride + channels();
  }

  float* matrix(int64_t value) const {
    const int64_t head = head_ * shared_ + value;
    return a_.matrices + slot_ * a_.matrix_stride + head * a_.key_dim * a_.value_dim;
  }

  // As a sequence that has no tokens.
  void forget() {
    each_channel([&](int64_t, bf16* kept) { std::fill_n(kept, a_.num_taps, bf16{0}); });
    std::fill_n(matrix(0), shared_ * a_.key_dim * a_.value_dim, 0.0f);
  }

  // The unit's tokens, once they are mixed.
  void advance(bool single) {
    for (int64_t token = 0; token < count_; ++token) normalize_heads(token);
    if (!single) multiply_keys();
    for (int64_t value = 0; value < shared_; ++value) single ? token(value) : chunk(value);
  }

  // mixed [count, width] = silu of the weighted last inputs. The window begins with inputs before.
  // `coming`: rows behind these that are next.
  void convolve(int64_t coming) {
    const int64_t taps = a_.num_taps, width = width_, all = channels();
    const int64_t gates = shared_ * a_.value_dim;
    for (int64_t token = 0; token < coming; ++token)
      for (int64_t i = 0; i < gates; i += 32) ask_early(behind(count_ + token) + head_ * gates + i);
    each_part([&](int64_t first, int64_t at, int64_t count) {
      const bf16* x = a_.x + row_ * a_.x_stride + first;
      float *window = window_.data() + at, *mixed = mixed_.data() + at;
      for (int64_t token = 0; token < coming; ++token)
        for (int64_t i = 0; i < count; i += 32) ask_early(x + (count_ + token) * a_.x_stride + i);
      for (int64_t token = 0; token < count_; ++token)
        for (int64_t i = 0; i < count; i += 16)
          store(window + (taps + token) * width + i, load_wide(x + token * a_.x_stride + i));
      for (int64_t i = 0; i < count; i += 16) {
        const float* weights = a_.taps + first + i;
        for (int64_t token = 0; token < count_; ++token) {
          Floats sum = broadcast(0.0f);
          for (int64_t tap = 0; tap < taps; ++tap)
            sum = multiply_add(load(window + (token + 1 + tap) * width + i),
                               load(weights + tap * all), sum);
          store(mixed + token * width + i, silu(sum));
        }
      }
    });
  }

  // The same of one token, with four taps: a channel's inputs are a word of 64 bits, the last on top.
  void convolve_one() {
    const int64_t all = channels();
    bf16* const kept = a_.conv + slot_ * a_.conv_stride;
    each_part([&](int64_t first, int64_t at, int64_t count) {
      const bf16* x = a_.x + row_ * a_.x_stride + first;
      for (int64_t i = 0; i < count; i += 16) {
        uint64_t words[16];
        alignas(64) uint32_t inputs[kFewTaps][16];
        std::memcpy(words, kept + (first + i) * kFewTaps, sizeof words);
        for (int c = 0; c < 16; ++c) words[c] = words[c] >> 16 | uint64_t{x[i + c]} << 48;
        std::memcpy(kept + (first + i) * kFewTaps, words, sizeof words);
        BATON_UNROLL for (int tap = 0; tap < kFewTaps; ++tap)
          for (int c = 0; c < 16; ++c)
            inputs[tap][c] = static_cast<uint32_t>(words[c] >> 16 * tap) << 16;
        Floats sum = broadcast(0.0f);
        BATON_UNROLL for (int tap = 0; tap < kFewTaps; ++tap)
          sum = multiply_add(load(reinterpret_cast<const float*>(inputs[tap])),
                             load(a_.taps + tap * all + first + i), sum);
        store(&mixed_[at + i], silu(sum));
      }
    });
  }

  // Rows of `heads`: all keys, then all queries, each of length one; queries by key_dim ** -0.5.
  void normalize_heads(int64_t token) {
    const float* query = &mixed_[token * width_];
    of_length_one(query + a_.key_dim, &heads_[token * a_.key_dim], 1.0f);
    of_length_one(query, &heads_[(count_ + token) * a_.key_dim],
                  1.0f / std::sqrt(static_cast<float>(a_.key_dim)));
  }

  void of_length_one(const float* from, float* to, float scale) const {
    Floats sum = broadcast(0.0f);
    for (int64_t i = 0; i < a_.key_dim; i += 16)
      sum = multiply_add(load(from + i), load(from + i), sum);
    const Floats by = broadcast(scale / std::sqrt(sum_of(sum) + 1e-6f));
    for (int64_t i = 0; i < a_.key_dim; i += 16) store(to + i, load(from + i) * by);
  }

  // The logarithm of a token's decay, and its rate.
  float decay(int64_t token, int64_t head) const {
    const bf16* row = behind(token) + a_.value_heads * a_.value_dim + a_.value_heads;
    return a_.decay[head] * softplus(widened(row[head]) + a_.step_bias[head]);
  }

  float rate(int64_t token, int64_t head) const {
    return sigmoid(widened(behind(token)[a_.value_heads * a_.value_dim + head]));
  }

  // One token, by one value head.
  void token(int64_t value) {
    const int64_t head = head_ * shared_ + value;
    const float *key = heads_.data(), *query = key + a_.key_dim;
    Floats sum = broadcast(0.0f);
    for (int64_t i = 0; i < a_.key_dim; i += 16)
      sum = multiply_add(load(key + i), load(query + i), sum);
    const Weights by{std::exp(decay(0, head)), rate(0, head), sum_of(sum)};
    for (int64_t at = 0; at < a_.value_dim; at += 16 * kStateVectors)
      advance_columns(value, at, (a_.value_dim - at) / 16, by);
    finish(0, head, read_.data());
  }

  struct Weights {
    float kept, rate, product;  // product: of key and query
  };

  // V vectors of columns from `at` on, or as many as there are: both sums over the matrix first, then
  // the matrix anew. Either pass asks memory for a half of the matrix after this one.
  template <int V = kStateVectors>
  void advance_columns(int64_t value, int64_t at, int64_t vectors, Weights by) {
    if constexpr (V > 1)
      if (vectors < V) return advance_columns<V - 1>(value, at, vectors, by);
    const int64_t depth = a_.key_dim, width = a_.value_dim;
    const float *key = heads_.data(), *query = key + depth;
    float* const from = matrix(value) + at;
    const float* wanted = &mixed_[2 * depth + value * width + at];
    const float* after = value + 1 < shared_ ? matrix(value + 1) : next_;
    const float* coming = after == nullptr ? nullptr : after + at;
    Floats by_key[V], by_query[V];
    BATON_UNROLL for (int j = 0; j < V; ++j) by_key[j] = by_query[j] = broadcast(0.0f);
    const float* row = from;
    for (int64_t i = 0; i < depth; ++i, row += width) {
      const Floats k = broadcast(key[i]), q = broadcast(query[i]);
      coming = ask_half<V>(coming, i, width);
      BATON_UNROLL for (int j = 0; j < V; ++j) {
        const Floats each = load(row + 16 * j);
        by_key[j] = multiply_add(k, each, by_key[j]);
        by_query[j] = multiply_add(q, each, by_query[j]);
      }
    }
    const Floats kept = broadcast(by.kept);
    BATON_UNROLL for (int j = 0; j < V; ++j) {
      by_key[j] = (load(wanted + 16 * j) - kept * by_key[j]) * broadcast(by.rate);
      store(&read_[at + 16 * j],
            multiply_add(broadcast(by.product), by_key[j], kept * by_query[j]));
    }
    float* to = from;
    for (int64_t i = 0; i < depth; ++i, to += width) {
      const Floats k = broadcast(key[i]);
      coming = ask_half<V>(coming, i, width);
      BATON_UNROLL for (int j = 0; j < V; ++j)
        store(to + 16 * j, multiply_add(k, by_key[j], kept * load(to + 16 * j)));
    }
  }

  // Asks for V vectors of a row at every second call; returns the row to ask for then.
  template <int V>
  static const float* ask_half(const float* row, int64_t i, int64_t width) {
    if (row == nullptr || i % 2 != 0) return row;
    BATON_UNROLL for (int j = 0; j < V; ++j) ask_early(row + 16 * j);
    return row + width;
  }

  // products [2 * count, kTokens] = keys and queries by keys.
  void multiply_keys() {
    const int64_t depth = a_.key_dim;
    static constexpr float kNothing[16] = {};
    for (int64_t from = 0; from < kTokens; from += 16)
      for (int64_t d = 0; d < depth; d += 16) {
        Line numbers[16];
        BATON_UNROLL for (int64_t i = 0; i < 16; ++i)
          numbers[i] = load_line(from + i < count_ ? &heads_[(from + i) * depth + d] : kNothing);
        transpose_pairs(numbers);
        BATON_UNROLL for (int64_t i = 0; i < 16; ++i) store_line(&across_[(d + i) * kTokens + from], numbers[i]);
      }
    multiply_all(2 * count_, kTokens, depth, heads_.data(), depth, across_.data(),
                 products_.data(), 0.0f);
  }

  // The chunk's tokens, by one value head.
  void chunk(int64_t value) {
    const int64_t head = head_ * shared_ + value, width = a_.value_dim;
    float sums[kTokens] = {}, rates[kTokens];
    for (int64_t t = 0; t < count_; ++t) {
      sums[t] = (t > 0 ? sums[t - 1] : 0.0f) + decay(t, head);
      rates[t] = rate(t, head);
    }
    weigh_products(sums, rates);
    float *corrections = read_.data(), *out = corrections + count_ * width;
    multiply_all(2 * count_, width, a_.key_dim, heads_.data(), a_.key_dim, matrix(value),
                 corrections, 0.0f);
    for (int64_t t = 0; t < count_; ++t) {
      const Floats passed = broadcast(std::exp(sums[t])), rate = broadcast(rates[t]);
      const float* wanted = &mixed_[t * width_ + 2 * a_.key_dim + value * width];
      for (int64_t i = 0; i < width; i += 16) {
        float *each = corrections + t * width + i, *read = out + t * width + i;
        store(each, (load(wanted + i) - passed * load(each)) * rate);
        store(read, passed * load(read));
      }
    }
    for (int64_t at = 0; at < width; at += 16 * kStateVectors)
      solve(corrections + at, (width - at) / 16);
    multiply_all(count_, width, count_, seen_.data(), kTokens, corrections, out, 1.0f);
    for (int64_t t = 0; t < count_; ++t) finish(t, head, out + t * width);
    const float whole = sums[count_ - 1];
    for (int64_t t = 0; t < count_; ++t) {
      const Floats left = broadcast(std::exp(whole - sums[t]));
      for (int64_t i = 0; i < width; i += 16) {
        float* each = corrections + t * width + i;
        store(each, load(each) * left);
      }
    }
    multiply_all(a_.key_dim, width, count_, across_.data(), kTokens, corrections, matrix(value),
                 std::exp(whole));
  }

  // Of the products, by the decay between both tokens: `system` of keys, by the rate, of tokens before;
  // `seen` of queries, of tokens up to their own.
  void weigh_products(const float* sums, const float* rates) {
    const Floats zero = broadcast(0.0f);
    for (int64_t t = 0; t < count_; ++t)
      for (int64_t s = 0; s < kTokens; s += 16) {
        const Floats since =
            exponential(min(zero, broadcast(sums[t]) - load(sums + s)));
        const Lanes before = lanes_of(std::max<int64_t>(0, t - s));
        const Lanes until = lanes_of(std::max<int64_t>(0, t + 1 - s));
        const Floats by_key = load(&products_[t * kTokens + s]) * since * broadcast(rates[t]);
        const Floats by_query = load(&products_[(count_ + t) * kTokens + s]) * since;
        store(&system_[t * kTokens + s], select(before, by_key, zero));
        store(&seen_[t * kTokens + s], select(until, by_query, zero));
      }
  }

  // V vectors of columns, or as many as there are: what earlier tokens correct is taken off.
  template <int V = kStateVectors>
  void solve(float* corrections, int64_t vectors) const {
    if constexpr (V > 1)
      if (vectors < V) return solve<V - 1>(corrections, vectors);
    for (int64_t t = 1; t < count_; ++t) {
      float* const own = corrections + t * a_.value_dim;
      Floats sum[V];
      BATON_UNROLL for (int j = 0; j < V; ++j) sum[j] = load(own + 16 * j);
      for (int64_t s = 0; s < t; ++s) {
        const Floats by = broadcast(system_[t * kTokens + s]);
        BATON_UNROLL for (int j = 0; j < V; ++j)
          sum[j] = subtract_product(sum[j], by, load(corrections + s * a_.value_dim + 16 * j));
      }
      BATON_UNROLL for (int j = 0; j < V; ++j) store(own + 16 * j, sum[j]);
    }
  }

  // What a token's query has read, normalized and gated.
  void finish(int64_t token, int64_t head, const float* read) const {
    const bf16* gate = behind(token) + head * a_.value_dim;
    bf16* y = a_.y + ((row_ + token) * a_.value_heads + head) * a_.value_dim;
    Floats sum = broadcast(0.0f);
    for (int64_t i = 0; i < a_.value_dim; i += 16)
      sum = multiply_add(load(read + i), load(read + i), sum);
    const float mean = sum_of(sum) / static_cast<float>(a_.value_dim);
    const Floats scale = broadcast(1.0f / std::sqrt(mean + a_.epsilon));
    for (int64_t i = 0; i < a_.value_dim; i += 16)
      store_rounded(y + i, load(read + i) * scale * load(a_.norm + i) * silu(load_wide(gate + i)));
  }

  const DeltaArgs& a_;
  const int64_t shared_, width_;  // value heads of a key head; channels of a unit
  const int64_t room_;
  std::vector<float> window_;     // [num_taps + room, width] inputs: those before, then new ones
  std::vector<float> mixed_;      // [room, width]
  std::vector<float> heads_;      // [2 * count, key_dim]
  std::vector<float> across_;     // [key_dim, kTokens], of several tokens
  std::vector<float> products_;   // [2 * count, kTokens]
  std::vector<float> read_;       // [2 * count, value_dim]
  std::vector<float> system_, seen_;  // [kTokens, kTokens]
  int64_t head_ = 0, slot_ = 0, row_ = 0, count_ = 0;
  const float* next_ = nullptr;
};

void share_delta_rule(Team::Member& me, const DeltaArgs& a, Coming coming) {
  DeltaTask mine(a);
  const int64_t units = a.count * a.key_heads;
  const auto work = [&](int64_t unit, int64_t next) {
    mine.run(unit / a.key_heads, unit % a.key_heads,
             next == units ? nullptr
                           : DeltaTask::matrix(a, next / a.key_heads, next % a.key_heads));
  };
  me.share(units, work, coming);
}

inline void delta_rule(const DeltaArgs& a) {
  in_team(true, [&](Team::Member& me) { share_delta_rule(me, a, {}); });
}

}  // namespace baton

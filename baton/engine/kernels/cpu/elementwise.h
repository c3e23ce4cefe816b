// What stands between the products, over bfloat16 rows, computed in float32 and rounded once:
// residual + RMSNorm, RMSNorm and rotation of heads, gates, rows to int8, rows into slots. A row is
// one thread's.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "team.h"
#include "vectors.h"

namespace baton {

constexpr int64_t kFewNumbers = 1 << 15;  // below, waking a second thread takes longer

// The squares of x [count], added up in 16 lanes. Four sums at once: one alone waits for itself.
inline Floats squares(const bf16* x, int64_t count) {
  Floats sums[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    BATON_UNROLL for (int j = 0; j < 4; ++j) {
      const Floats each = load_wide(x + i + 16 * j);
      sums[j] = multiply_add(each, each, sums[j]);
    }
  for (; i < count; i += 16) {
    const Floats each = load_wide(x + i);
    sums[0] = multiply_add(each, each, sums[0]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// A multiple of 32 of them.
inline void copy_numbers(bf16* to, const bf16* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 32) store_line(to + i, load_line(from + i));
}

// What all norms of a model have in common. `offset` is added to their weights.
struct NormRule {
  float epsilon, offset;
};

// y = x * scale * weight.
inline void scale_row(const bf16* x, const bf16* weight, bf16* y, int64_t count, Floats scale,
                      float offset) {
  const Floats added_to = broadcast(offset);
  for (int64_t i = 0; i < count; i += 16)
    store_rounded(y + i, load_wide(x + i) * scale * (load_wide(weight + i) + added_to));
}

inline void normalize(const bf16* x, const bf16* weight, bf16* y, int64_t count, NormRule rule) {
  const float mean = sum_of(squares(x, count)) / static_cast<float>(count);
  scale_row(x, weight, y, count, broadcast(1.0f / std::sqrt(mean + rule.epsilon)), rule.offset);
}

// x += delta (unless null), rounded; y = RMSNorm(x) * weight. All [size].
inline void add_norm_row(bf16* x, const bf16* delta, const bf16* weight, bf16* y, int64_t size,
                         NormRule rule) {
  if (delta != nullptr)
    for (int64_t i = 0; i < size; i += 16)
      store_rounded(x + i, load_wide(x + i) + load_wide(delta + i));
  normalize(x, weight, y, size, rule);
}

// The same of rows [rows, size].
inline void add_norm(bf16* residual, const bf16* delta, const bf16* weight, bf16* y, int64_t rows,
                     int64_t size, NormRule rule) {
#pragma omp parallel for if (rows * size > kFewNumbers)
  for (int64_t row = 0; row < rows; ++row)
    add_norm_row(residual + row * size, delta == nullptr ? nullptr : delta + row * size, weight,
                 y + row * size, size, rule);
}

// qkv [rows, heads + 2 * kv_heads, dim]: query and key heads normalized (unless both weights are
// null) and rotated in place: of each head the first `rotated` dims, the first half of them against
// the second, or neighbours; cos, sin [rows, rotated / 2].
struct RotateArgs {
  bf16* qkv;
  const bf16 *cos, *sin, *query_norm, *key_norm;
  int64_t rows, heads, kv_heads, dim, rotated, neighbours;
  NormRule norms;
};

constexpr int64_t kMostRotated = 512;

inline void rotate_halves(bf16* x, const bf16* cos, const bf16* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    const Floats first = load_wide(x + i), second = load_wide(x + half + i);
    const Floats c = load_wide(cos + i), s = load_wide(sin + i);
    store_rounded(x + i, multiply_subtract(first, c, second * s));
    store_rounded(x + half + i, multiply_add(second, c, first * s));
  }
}

// The factors of neighbours: each cosine twice; each sine twice, too, the first time negative.
struct NeighbourFactors {
  float cos[kMostRotated], sin[kMostRotated];

  NeighbourFactors(const bf16* each_cos, const bf16* each_sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
      float c[16], s[16];
      store(c, load_wide(each_cos + i));
      store(s, load_wide(each_sin + i));
      for (int64_t j = 0; j < 16; ++j) {
        cos[2 * (i + j)] = cos[2 * (i + j) + 1] = c[j];
        sin[2 * (i + j)] = -s[j];
        sin[2 * (i + j) + 1] = s[j];
      }
    }
  }
};

inline void rotate_neighbours(bf16* x, const NeighbourFactors& by, int64_t rotated) {
  for (int64_t i = 0; i < rotated; i += 16) {
    const Floats each = load_wide(x + i);
    store_rounded(x + i, multiply_add(each, load(by.cos + i),
                                      swap_neighbours(each) * load(by.sin + i)));
  }
}

// Heads x [count, dim], normalized by norm(i), if a model has such norms, and rotated by turn(i, head).
// Norms of 16 heads are computed together: each waits for sums along its numbers, a root and a quotient.
template <class Norm, class Turn>
inline void rotate_each(const RotateArgs& a, bf16* x, int64_t count, const Norm& norm,
                        const Turn& turn) {
  for (int64_t first = 0; first < count; first += 16) {
    const int64_t some = std::min<int64_t>(16, count - first);
    alignas(64) float scales[16];
    if (a.query_norm != nullptr) {
      Floats rows[16];
      for (int64_t i = 0; i < 16; ++i)
        rows[i] = i < some ? squares(x + i * a.dim, a.dim) : broadcast(0.0f);
      const Floats mean = across_each(rows, added) / broadcast(static_cast<float>(a.dim));
      store(scales, broadcast(1.0f) / square_root(mean + broadcast(a.norms.epsilon)));
    }
    for (int64_t i = 0; i < some; ++i, x += a.dim) {
      if (a.query_norm != nullptr)
        scale_row(x, norm(first + i), x, a.dim, broadcast(scales[i]), a.norms.offset);
      turn(first + i, x);
    }
  }
}

// Those heads of a row, counted over query heads, then key heads.
inline void rotate_heads(const RotateArgs& a, int64_t row, HeadRange heads) {
  const int64_t half = a.rotated / 2, width = (a.heads + 2 * a.kv_heads) * a.dim;
  const bf16 *cos = a.cos + row * half, *sin = a.sin + row * half;
  bf16* const x = a.qkv + row * width + heads.first * a.dim;
  const auto all = [&](const auto& turn) {
    const auto norm = [&](int64_t i) {
      return heads.first + i < a.heads ? a.query_norm : a.key_norm;
    };
    rotate_each(a, x, heads.last - heads.first, norm, turn);
  };
  if (a.neighbours) {
    const NeighbourFactors by(cos, sin, half);
    all([&](int64_t, bf16* head) { rotate_neighbours(head, by, a.rotated); });
  } else {
    all([&](int64_t, bf16* head) { rotate_halves(head, cos, sin, half); });
  }
}

inline void rotate(const RotateArgs& a) {
  const int64_t width = (a.heads + 2 * a.kv_heads) * a.dim;
#pragma omp parallel for if (a.rows * width > kFewNumbers)
  for (int64_t row = 0; row < a.rows; ++row) rotate_heads(a, row, {0, a.heads + a.kv_heads});
}

// x * sigmoid(slope), to 3e-6 of it.
inline Floats by_sigmoid(Floats x, Floats slope) {
  return x / (broadcast(1.0f) + power_of_two(slope * broadcast(-kLogTwoOfE)));
}

// Numbers [from, until) of activation(gate) * up, all [size]: x * sigmoid(x), or GELU by its tanh,
// which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)).
template <bool kGelu>
inline void gated_part(const bf16* gate, const bf16* up, bf16* y, int64_t from, int64_t until) {
  for (int64_t i = from; i < until; i += 16) {
    const Floats g = load_wide(gate + i);
    Floats slope = g;
    if constexpr (kGelu) {
      const Floats cube = g * g * g * broadcast(0.044715f);
      slope = (g + cube) * broadcast(1.5957691216057308f);
    }
    store_rounded(y + i, by_sigmoid(g, slope) * load_wide(up + i));
  }
}

// What a thread of a team does for gate_up [rows, 2 * size] -> y [rows, size].
template <bool kGelu = false>
inline void share_gated(Team::Member& me, const bf16* gate_up, bf16* y, int64_t rows, int64_t size,
                        Coming coming = {}) {
  const int64_t part = rows < kManyRowsOfPhase ? 512 : size;  // numbers
  const int64_t parts = (size + part - 1) / part;
  const auto work = [&](int64_t unit, int64_t) {
    const int64_t row = unit / parts, from = unit % parts * part;
    const bf16* gate = gate_up + row * 2 * size;
    gated_part<kGelu>(gate, gate + size, y + row * size, from, std::min(size, from + part));
  };
  me.share(rows * parts, work, coming);
}

// gate_up [rows, 2 * size] -> activation(gate) * up [rows, size].
template <bool kGelu>
inline void gated(const bf16* gate_up, bf16* y, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > kFewNumbers)
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* gate = gate_up + row * 2 * size;
    gated_part<kGelu>(gate, gate + size, y + row * size, 0, size);
  }
}

// Gates of heads: x [rows, heads, dim] *= sigmoid(gates), whose rows and heads lie so many numbers
// apart.
struct GateHeadsArgs {
  bf16* x;
  const bf16* gates;
  int64_t rows, heads, dim, gate_row, gate_head;
};

inline void gate_some_heads(const GateHeadsArgs& a, int64_t row, HeadRange heads) {
  for (int64_t head = heads.first; head < heads.last; ++head) {
    bf16* x = a.x + (row * a.heads + head) * a.dim;
    const bf16* gate = a.gates + row * a.gate_row + head * a.gate_head;
    for (int64_t i = 0; i < a.dim; i += 16)
      store_rounded(x + i, by_sigmoid(load_wide(x + i), load_wide(gate + i)));
  }
}

inline void gate_heads(const GateHeadsArgs& a) {
#pragma omp parallel for if (a.rows * a.heads * a.dim > kFewNumbers)
  for (int64_t row = 0; row < a.rows; ++row) gate_some_heads(a, row, {0, a.heads});
}

// The greatest magnitude, NaN if there is one.
inline float greatest(const bf16* x, int64_t count) {
  Floats most = broadcast(1e-12f);
  Lanes odd = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const Floats each = load_wide(x + i, lanes_of(count - i));
    odd |= unordered(each);
    most = max(most, absolute(each));
  }
  return odd ? NAN : most_of(most);
}

// x to int8, to nearest even; returns the scale: 1 if numbers are integers of int8 already.
inline float round_row(const bf16* x, int8_t* to, int64_t count, bool integers = false) {
  const float scale = integers ? 1.0f : greatest(x, count) / 127.0f;
  for (int64_t i = 0; i < count; i += 16) {
    const Lanes lanes = lanes_of(count - i);
    store_int8(to + i, load_wide(x + i, lanes) / broadcast(scale), lanes);
  }
  return scale;
}

// Rows of `bytes` each, `stride` bytes apart, to their slots: block slot / size, token slot % size.
struct StoreArgs {
  const char* from;
  char* to;
  const int64_t* slots;
  int64_t rows, bytes, stride, block_bytes, token_bytes, block_size;
};

inline void store_rows(const StoreArgs& a) {
#pragma omp parallel for if (a.rows * a.bytes > 2 * kFewNumbers)
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t block = a.slots[row] / a.block_size, token = a.slots[row] % a.block_size;
    std::memcpy(a.to + block * a.block_bytes + token * a.token_bytes, a.from + row * a.stride,
                a.bytes);
  }
}

}  // namespace baton

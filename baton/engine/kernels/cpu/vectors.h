// What the kernels share: 16 float32 or 32 bfloat16 at once, as the instruction set at hand has them.
//
// The kernels are written in this vocabulary; vectors_avx512.h and vectors_avx2.h spell it, and which
// of them does is the compiler's choice by its flags (build.py). All of it costs nothing by itself.
//
//   Floats   16 float32, with + - * / lane by lane
//   Line     64 bytes as they lie in memory
//   Int8s    32 int8 as products read them
//   Pairs    16 pairs of neighbouring bfloat16, ready for `dot`: sum + even * even + odd * odd
//   Folded   float32 whose sum alone matters, in one register: what is left of a Floats
//   FoldedPairs  kFoldedNumbers as pairs, ready for `dot` with a Folded
//   Factor   a number of what they are multiplied by: bfloat16, or float32 where products are
//   Pair     two neighbouring Factors, the same in every lane
//   Lanes    a set of lanes, lane i being bit i
//   Longs    kLongs uint64, with + ^ * >> of the language
//
// Constants of an instruction set are what its registers hold: how large a tile may be before its
// sums become memory.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Loops over registers, whose arrays must not become memory.
#define BATON_UNROLL _Pragma("GCC unroll 16")

namespace baton {

using bf16 = uint16_t;   // the upper half of a float32
using Lanes = uint16_t;

inline float widened(bf16 number) {
  const uint32_t bits = static_cast<uint32_t>(number) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Heads [first, last).
struct HeadRange {
  int64_t first, last;
};

constexpr float kLogTwoOfE = 1.44269504f;

// Of a polynomial that is 2^x from -0.5 to 0.5, to 3e-6 of it: the highest power first.
constexpr float kPowerTerms[] = {9.5700873e-3f, 5.5917859e-2f, 2.4024746e-1f, 6.9312179e-1f,
                                 9.9999928e-1f};

// For a line of memory that will be read soon.
inline void ask(const void* from) {
  _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0);
}

// For one that will be read some microseconds later: to the core's second cache, which on some
// processors takes more lines from memory at once than its first.
inline void ask_early(const void* from) {
  _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T1);
}

// The first `left` lanes.
inline Lanes lanes_of(int64_t left) {
  return left >= 16 ? 0xffff : static_cast<Lanes>((1u << left) - 1);
}

}  // namespace baton

#ifdef __AVX512F__
#include "vectors_avx512.h"
#else
#include "vectors_avx2.h"
#endif

namespace baton {

// Lane i of the result: all numbers of rows[i] combined. A tree, the same for every row.
template <class Combine>
inline Floats across_each(const Floats rows[16], const Combine& combine) {
  Folded quarters[4];
  BATON_UNROLL for (int i = 0; i < 4; ++i) {
    Folded four[4];
    BATON_UNROLL for (int j = 0; j < 4; ++j) four[j] = folded(rows[4 * i + j], combine);
    quarters[i] = across_four(four, combine);
  }
  return across_quarters(quarters, combine);
}

inline Pairs load_pairs(const bf16* from) { return pairs_of(load_line(from)); }

// sum [M][V] += the pair that begins at x(m), of each row m, by V vectors of pairs from `w` on.
template <int M, int V, class Row>
inline void dot_rows(Floats (*sum)[V], const Row& x, const bf16* w) {
#ifdef BATON_MANY_ROWS
  if constexpr (M >= BATON_MANY_ROWS && V == 1) return dot_many_rows<M>(sum, x, w);
#endif
  Pairs weights[V];
  BATON_UNROLL for (int j = 0; j < V; ++j) weights[j] = load_pairs(w + 32 * j);
  BATON_UNROLL for (int m = 0; m < M; ++m) {
    const Pair pair = broadcast_pair(x(m));
    BATON_UNROLL for (int j = 0; j < V; ++j) sum[m][j] = dot(sum[m][j], pair, weights[j]);
  }
}

// Outputs of a product: float32 to `wide`, or rounded to `y` if that is null.
template <class Args>
inline void store_output(const Args& a, int64_t at, Floats values, Lanes lanes) {
  if (a.wide != nullptr)
    store(a.wide + at, values, lanes);
  else
    store_rounded(a.y + at, values, lanes);
}

// What they are combined by.
constexpr auto added = [](auto one, auto other) { return one + other; };
constexpr auto higher = [](auto one, auto other) { return max(one, other); };

}  // namespace baton

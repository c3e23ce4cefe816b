// vectors.h's products in AVX-512 with BF16: pairs of bfloat16 meet in one instruction.
#pragma once

namespace baton {

using Factor = bf16;
using Pairs = __m512bh;
using Pair = __m512bh;

// linear.h
constexpr int kRows = 6;          // by a panel at once: 24 registers accumulate
constexpr int kHalfRows = kRows;  // halves of a panel are not taken
constexpr int kManyRows = kRows;  // at once where there are many
constexpr int kPartPasses = 4;    // so many over a panel go over parts of it
// prefill.h
constexpr int kQueries = 6;        // at once by kQueryVectors: 24 registers accumulate
constexpr int kQueryVectors = 4;

inline Pairs pairs_of(Line line) { return (Pairs)line; }

// Two neighbouring numbers of one row, in every pair of lanes.
inline Pair broadcast_pair(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (Pair)_mm512_set1_epi32(pair);
}

inline Floats dot(Floats sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }

// 32 numbers of `even` and `odd` as pairs, half of them each: numbers 0-3, 8-11, 16-19 and 24-27,
// and the others.
inline Pairs interleave_first(Line even, Line odd) {
  return (Pairs)_mm512_unpacklo_epi16(even, odd);
}

inline Pairs interleave_second(Line even, Line odd) {
  return (Pairs)_mm512_unpackhi_epi16(even, odd);
}

// 32 sums that lie so, rounded, in the numbers' order.
inline void store_interleaved(bf16* to, Floats first, Floats second) {
  const __m512i quads = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const auto both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(quads, both));
}

// 32 int8 as bfloat16, exactly.
inline Line widen_int8(const void* from) {
  const auto* halves = static_cast<const __m128i*>(from);
  const auto wide = [](__m128i numbers) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers)); };
  return (Line)_mm512_cvtne2ps_pbh(wide(_mm_loadu_si128(halves + 1)), wide(_mm_loadu_si128(halves)));
}

// Rounded to nearest even, as torch rounds.
inline void store_rounded(bf16* to, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}

// Of those lanes only.
inline void store_rounded(bf16* to, Floats values, Lanes lanes) {
  _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(values));
}

// As factors of a product.
inline void store_factors(Factor* to, Floats values) { store_rounded(to, values); }

}  // namespace baton

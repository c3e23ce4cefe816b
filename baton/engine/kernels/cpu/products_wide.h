// vectors.h's products in AVX-512 without BF16, or where its products are slow: Intel's cores take
// one in two cycles, two float32 ones in each. Pairs are widened, the even numbers and the odd ones
// apart, and meet in two float32 additions, the even product's first.
#pragma once

namespace baton {

using Factor = float;

struct Pairs {
  __m512 even, odd;
};

using Pair = Pairs;

// linear.h
constexpr int kRows = 4;              // by a panel at once: 16 registers accumulate, 8 hold weights
constexpr int kHalfRows = 12;         // by half a panel: 24 do, 4 hold weights
constexpr int kManyRows = kHalfRows;  // at once where there are many
constexpr int kPartPasses = 6;        // so many over a panel go over parts of it
// prefill.h
constexpr int kQueries = 12;      // at once by kQueryVectors: 24 registers accumulate
constexpr int kQueryVectors = 2;

inline __m512 even_of(Line pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

inline __m512 odd_of(Line pairs) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
}

inline Pairs pairs_of(Line line) { return {even_of(line), odd_of(line)}; }

// Pairs that are exact in bfloat16, as they lie in memory.
inline Line joined(Pairs pairs) {
  const Line upper = _mm512_and_si512(_mm512_castps_si512(pairs.odd),
                                      _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(pairs.even), 16), upper);
}

// Two neighbouring numbers of one row, in every pair of lanes.
inline Pair broadcast_pair(const Factor* from) { return {broadcast(from[0]), broadcast(from[1])}; }

inline Floats dot(Floats sum, Pairs a, Pairs b) {
  return multiply_add(a.odd, b.odd, multiply_add(a.even, b.even, sum));
}

// 32 numbers of `even` and `odd` as pairs, half of them each: the even numbers, the odd ones.
inline Pairs interleave_first(Line even, Line odd) { return {even_of(even), even_of(odd)}; }
inline Pairs interleave_second(Line even, Line odd) { return {odd_of(even), odd_of(odd)}; }

// Rounded to nearest even, as torch rounds, into the lower half of each lane; what is no number
// stays none.
inline Line rounded(Floats values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
  const __m512i kept =
      _mm512_mask_mov_epi32(near, unordered(values), _mm512_set1_epi32(0x7fc00000));
  return _mm512_srli_epi32(kept, 16);
}

// 32 sums as `interleave_first` and `interleave_second` order them, rounded, in the numbers' order.
inline void store_interleaved(bf16* to, Floats first, Floats second) {
  store_line(to, _mm512_or_si512(rounded(first), _mm512_slli_epi32(rounded(second), 16)));
}

// 32 int8 as bfloat16, exactly.
inline Line widen_int8(const void* from) {
  const auto* halves = static_cast<const __m128i*>(from);
  const auto wide = [](__m128i numbers) {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers)));
  };
  const auto upper = [](__m512i words) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)); };
  const __m256i low = upper(wide(_mm_loadu_si128(halves)));
  const __m256i high = upper(wide(_mm_loadu_si128(halves + 1)));
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

inline void store_rounded(bf16* to, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(rounded(values)));
}

// Of those lanes only.
inline void store_rounded(bf16* to, Floats values, Lanes lanes) {
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(rounded(values)));
}

// As factors of a product, which need no rounding.
inline void store_factors(Factor* to, Floats values) { store(to, values); }

}  // namespace baton

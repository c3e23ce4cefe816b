// vectors.h's vocabulary in AVX-512: a vector is a register, of 32. What products need is in
// products_bf16.h, or in products_wide.h for processors that have none of bfloat16 or slow ones.
#pragma once

namespace baton {

using Floats = __m512;
using Line = __m512i;
using Int8s = Line;  // widened to bfloat16
using Longs = uint64_t __attribute__((vector_size(64)));
constexpr int kLongs = 8;

// linear.h
constexpr int kPanelVectors = 4;  // of a panel
// attention.h
constexpr int kKeysAtOnce = 4;  // by two query heads: 8 registers accumulate
constexpr bool kQuickProducts = true;  // of decode attention: reading keys takes longer
constexpr int kValueParts = 4;  // of 32 numbers at once, by two query heads: 16 do
// prefill.h
constexpr int64_t kManyQueries = 768;  // with their sums 0.6 MB: second caches are of 1 MB and more
// delta_rule.h
constexpr int kStateVectors = 8;  // columns of a matrix at once: 16 registers accumulate

inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
inline Line load_line(const void* from) { return _mm512_loadu_si512(from); }
inline void store_line(void* to, Line line) { _mm512_storeu_si512(to, line); }

// Of those lanes only.
inline void store(float* to, Floats values, Lanes lanes) {
  _mm512_mask_storeu_ps(to, lanes, values);
}

// Zeros in the other lanes, which are not read.
inline Floats load(const float* from, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, from); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats subtract_product(Floats c, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, c); }
// 1 0 3 2 5 4 ...
inline Floats swap_neighbours(Floats values) { return _mm512_permute_ps(values, 0xb1); }

inline Floats square_root(Floats values) { return _mm512_sqrt_ps(values); }
inline Floats absolute(Floats values) { return _mm512_abs_ps(values); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline float sum_of(Floats values) { return _mm512_reduce_add_ps(values); }
inline float most_of(Floats values) { return _mm512_reduce_max_ps(values); }

inline Lanes unordered(Floats values) { return _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q); }
inline Lanes less_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline Lanes greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

// `a` in those lanes, `b` in the others.
inline Floats select(Lanes lanes, Floats a, Floats b) {
  return _mm512_mask_mov_ps(b, lanes, a);
}

// Those lanes side by side; nothing is written behind them.
inline void store_selected(float* to, Lanes lanes, Floats values) {
  _mm512_mask_compressstoreu_ps(to, lanes, values);
}

// Likewise the lanes' numbers, counted from `first` on.
inline void store_selected_ids(int32_t* to, Lanes lanes, int32_t first) {
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_mask_compressstoreu_epi32(to, lanes, _mm512_add_epi32(count, _mm512_set1_epi32(first)));
}

inline Floats widen(__m256i numbers) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

inline Floats load_wide(const bf16* from) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline Floats load_wide(const bf16* from, Lanes lanes) {
  return widen(_mm256_maskz_loadu_epi16(lanes, from));
}

// From float16.
inline Floats load_half(const void* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}

// To nearest even, as int8, those lanes only.
inline void store_int8(int8_t* to, Floats values, Lanes lanes) {
  _mm_mask_storeu_epi8(to, lanes, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(values)));
}

// e^x to about 2 ulp; 0 below -87 (also for -inf).
inline Floats exponential(Floats x) {
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 whole =
      _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // x - whole * ln 2, in two parts: the first is exact.
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
  for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(term));
  sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_mov_ps(_knot_mask16(tiny), _mm512_scalef_ps(sum, whole));
}

// 2^x to 3e-6 of it; 0 below -150 (also for -inf), infinite from 128 on.
inline Floats power_of_two(Floats x) {
  x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // x if it is no number
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 sum = _mm512_set1_ps(kPowerTerms[0]);
  for (int term = 1; term < 5; ++term)
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(kPowerTerms[term]));
  return _mm512_scalef_ps(sum, whole);
}

// 2^(x - 127) or a little more, for x >= 0 in units of 2^-23: x as its own bits.
inline Floats power_bound(Floats x) { return _mm512_castsi512_ps(_mm512_cvtps_epi32(x)); }

// 2^32 - 1 - the upper half of each of 16 numbers, to float32's precision.
inline Floats upper_complements(const Longs each[16 / kLongs]) {
  const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const __m512i upper = _mm512_permutex2var_epi32((__m512i)each[0], odds, (__m512i)each[1]);
  return _mm512_cvtepu32_ps(_mm512_xor_si512(upper, _mm512_set1_epi32(-1)));
}

// A vector that is only combined along itself from now on: itself.
using Folded = __m512;

template <class Combine>
inline Folded folded(Floats values, const Combine&) {
  return values;
}

// A quarter of a sum along each of 16 rows: of 4 rows, four numbers of each that are left to add.
template <class Combine>
inline __m512 across_four(const __m512* rows, const Combine& combine) {
  __m512d half[2];
  BATON_UNROLL for (int i = 0; i < 2; ++i)
    half[i] = _mm512_castps_pd(combine(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                                       _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1])));
  return combine(_mm512_castpd_ps(_mm512_unpacklo_pd(half[0], half[1])),
                 _mm512_castpd_ps(_mm512_unpackhi_pd(half[0], half[1])));
}

// Four quarters -> lane i: the whole of row i.
template <class Combine>
inline __m512 across_quarters(const __m512* quarters, const Combine& combine) {
  __m512 half[2];
  BATON_UNROLL for (int i = 0; i < 2; ++i)
    half[i] = combine(_mm512_shuffle_f32x4(quarters[2 * i], quarters[2 * i + 1], 0x88),
                      _mm512_shuffle_f32x4(quarters[2 * i], quarters[2 * i + 1], 0xdd));
  return combine(_mm512_shuffle_f32x4(half[0], half[1], 0x88),
                 _mm512_shuffle_f32x4(half[0], half[1], 0xdd));
}

// 32 numbers of `even` and `odd` as pairs, in their order, to `to`.
inline void store_pairs(bf16* to, const bf16* even, const bf16* odd) {
  alignas(64) static constexpr uint16_t kFirst[32] = {
      0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(kFirst);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  const Line low = load_line(even), high = load_line(odd);
  store_line(to, _mm512_permutex2var_epi16(low, first, high));
  store_line(to + 32, _mm512_permutex2var_epi16(low, second, high));
}

// 16 vectors of 16 pairs each -> pair by pair.
[[gnu::always_inline]] inline void transpose_pairs(Line rows[16]) {
  __m512i a[16], b[16];
  BATON_UNROLL for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  BATON_UNROLL for (int i = 0; i < 4; ++i)
    BATON_UNROLL for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm512_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      b[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
    }
  BATON_UNROLL for (int i = 0; i < 2; ++i)
    BATON_UNROLL for (int j = 0; j < 4; ++j) {
      a[8 * i + j] = _mm512_shuffle_i32x4(b[8 * i + j], b[8 * i + 4 + j], 0x88);
      a[8 * i + 4 + j] = _mm512_shuffle_i32x4(b[8 * i + j], b[8 * i + 4 + j], 0xdd);
    }
  BATON_UNROLL for (int j = 0; j < 8; ++j) {
    rows[j] = _mm512_shuffle_i32x4(a[j], a[8 + j], 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(a[j], a[8 + j], 0xdd);
  }
}

}  // namespace baton

#ifdef __AVX512BF16__
#include "products_bf16.h"
#else
#include "products_wide.h"
#endif

namespace baton {

inline Int8s load_int8s(const void* from) { return widen_int8(from); }

using FoldedPairs = Pairs;
constexpr int kFoldedNumbers = 32;

inline FoldedPairs load_folded(const bf16* from) { return pairs_of(load_line(from)); }
inline FoldedPairs load_folded(const int8_t* from) { return pairs_of(widen_int8(from)); }

}  // namespace baton

// What the kernels share: AVX-512 vectors of float32 and bfloat16, 16 and 32 numbers wide.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Loops over registers, whose arrays must not become memory.
#define BATON_UNROLL _Pragma("GCC unroll 16")

namespace baton {

using bf16 = uint16_t;  // the upper half of a float32

// Heads [first, last).
struct HeadRange {
  int64_t first, last;
};

// For a line of memory that will be read soon.
inline void ask(const void* from) {
  _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0);
}

inline __m512bh load_pairs(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

// Two neighbouring numbers of one row, in every pair of lanes.
inline __m512bh broadcast_pair(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

inline __m512 widen(__m256i numbers) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

inline __m512 load_wide(const bf16* from) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Rounded to nearest even, as torch rounds.
inline void store_rounded(bf16* to, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}

// Of those lanes only.
inline void store_rounded(bf16* to, __m512 values, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(values));
}

// e^x to about 2 ulp; 0 below -87 (also for -inf).
inline __m512 exponential(__m512 x) {
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

// Lane i of the result: the sum over rows[i]. A tree of additions, the same for every row.
inline __m512 sum_each(const __m512 rows[16]) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                         _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                       _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

}  // namespace baton

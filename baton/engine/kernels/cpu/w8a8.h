// y = x W^T + b with int8 weights and rows rounded to int8, by VNNI: the sums are exact integers.
//
// A row is rounded by its own greatest number (symmetric, as quantization.round_rows does) and
// stored 128 higher, because VNNI multiplies unsigned by signed; what that adds, 128 times the sum
// of an output's weights, is known when the weights are packed. Panels: 32 outputs, [inputs /
// 4][32][4], the inputs filled up with zeros.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "elementwise.h"
#include "quantized.h"

namespace baton {

struct W8A8Args {
  const bf16* x;         // [rows, inputs]
  const int8_t* panels;  // an even number of them
  const int32_t* extra;  // [outputs]: 128 * the sum of the weights
  const float* scales;   // [outputs]
  const bf16* bias;      // [outputs], or null
  bf16* y;               // [rows, outputs]
  uint8_t* rounded;      // room for [rows, 4 * quads]
  float* row_scales;     // room for [rows]
  int64_t rows, inputs, outputs, quads;
};

// The greatest magnitude, NaN if there is one.
inline float greatest(const bf16* x, int64_t count) {
  __m512 most = _mm512_set1_ps(1e-12f);
  __mmask16 unordered = 0;
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = static_cast<__mmask16>((1u << std::min<int64_t>(16, count - i)) - 1);
    const __m512 each = widen(_mm256_maskz_loadu_epi16(lanes, x + i));
    unordered |= _mm512_cmp_ps_mask(each, each, _CMP_UNORD_Q);
    most = _mm512_max_ps(most, _mm512_abs_ps(each));
  }
  return unordered ? NAN : _mm512_reduce_max_ps(most);
}

// x to int8, to nearest even; returns the scale.
inline float round_row(const bf16* x, int8_t* to, int64_t count) {
  const float scale = greatest(x, count) / 127.0f;
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = static_cast<__mmask16>((1u << std::min<int64_t>(16, count - i)) - 1);
    const __m512 wide = widen(_mm256_maskz_loadu_epi16(lanes, x + i));
    const __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(wide, _mm512_set1_ps(scale)));
    _mm_mask_storeu_epi8(to + i, lanes, _mm512_cvtepi32_epi8(whole));
  }
  return scale;
}

inline void round_unsigned(const W8A8Args& a, int64_t row) {
  uint8_t* to = a.rounded + row * a.quads * 4;
  a.row_scales[row] = round_row(a.x + row * a.inputs, reinterpret_cast<int8_t*>(to), a.inputs);
  for (int64_t i = 0; i < a.inputs; ++i) to[i] ^= 0x80;
  std::fill(to + a.inputs, to + a.quads * 4, 0x80);
}

template <int M, int P>
BATON_INTEGERS void multiply_int8(const W8A8Args& a, int64_t row, int64_t panel, Asking asking) {
  const int64_t stride = a.quads * 4, size = a.quads * 4 * kNarrow;
  const uint8_t* x[(M + 2) / 3];
  for (int m = 0; m < M; m += 3) x[m / 3] = a.rounded + (row + m) * stride;
  __m512i sum[P][M][2];
  BATON_UNROLL for (int p = 0; p < P; ++p)
    BATON_UNROLL for (int m = 0; m < M; ++m) sum[p][m][0] = sum[p][m][1] = _mm512_setzero_si512();
  const int64_t turn = std::max<int64_t>(0, size - kFarAhead) / (4 * kNarrow);
  int64_t ahead = asking.ahead;
  for (int64_t quad = 0; quad < a.quads; ++quad) {
    if (quad == turn) ahead = asking.last;
    BATON_UNROLL for (int p = 0; p < P; ++p) {
      const int8_t* w = a.panels + (panel + p) * size + quad * 4 * kNarrow;
      const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
      ask(w + ahead, 4 * kNarrow);
      BATON_UNROLL for (int m = 0; m < M; ++m) {
        int32_t four;
        std::memcpy(&four, x[m / 3] + (m % 3) * stride, sizeof four);
        const __m512i each = _mm512_set1_epi32(four);
        sum[p][m][0] = _mm512_dpbusd_epi32(sum[p][m][0], each, w0);
        sum[p][m][1] = _mm512_dpbusd_epi32(sum[p][m][1], each, w1);
      }
    }
    BATON_UNROLL for (int i = 0; i < (M + 2) / 3; ++i) x[i] += 4;
  }
  BATON_UNROLL for (int p = 0; p < P; ++p)
    BATON_UNROLL for (int half = 0; half < 2; ++half) {
      const int64_t output = (panel + p) * kNarrow + 16 * half;
      const int64_t left = std::clamp<int64_t>(a.outputs - output, 0, 16);
      if (left == 0) continue;
      const __mmask16 lanes = static_cast<__mmask16>((1u << left) - 1);
      const __m512i extra = _mm512_maskz_loadu_epi32(lanes, a.extra + output);
      const __m512 scale = _mm512_maskz_loadu_ps(lanes, a.scales + output);
      BATON_UNROLL for (int m = 0; m < M; ++m) {
        __m512 y = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[p][m][half], extra));
        y = _mm512_mul_ps(_mm512_mul_ps(y, _mm512_set1_ps(a.row_scales[row + m])), scale);
        if (a.bias != nullptr)
          y = _mm512_add_ps(y, widen(_mm256_maskz_loadu_epi16(lanes, a.bias + output)));
        store_rounded(a.y + (row + m) * a.outputs + output, y, lanes);
      }
    }
}

// `rows` rows, at most M of them, by a unit's panels, which lie side by side.
template <int M = kBlockRows>
void multiply_int8_block(const W8A8Args& a, const IntegerUnit& unit, int64_t row, int64_t rows) {
  if constexpr (M > 1)
    if (rows < M) return multiply_int8_block<M - 1>(a, unit, row, rows);
  const int64_t size = a.quads * 4 * kNarrow;
  each_panels<M>(unit, row, row + rows, size, [&](auto count, int64_t panel, Asking asking) {
    multiply_int8<M, count>(a, row, panel, asking);
  });
}

inline void multiply_int8_unit(const W8A8Args& a, const IntegerUnit& unit) {
  each_row_block(unit.from, unit.until, [&](int64_t row, int64_t count) {
    multiply_int8_block(a, unit, row, count);
  });
}

inline void w8a8_linear(const W8A8Args& a) {
#pragma omp parallel for if (a.rows * a.inputs > kFewNumbers)
  for (int64_t row = 0; row < a.rows; ++row) round_unsigned(a, row);
  each_unit(a.rows, 4 * a.quads, a.outputs,
            [&](const IntegerUnit& unit) { multiply_int8_unit(a, unit); });
}

// values [outputs, inputs] -> panels (zeros) and `extra`.
inline void pack_w8a8(const int8_t* values, int8_t* panels, int32_t* extra, int64_t outputs,
                      int64_t inputs) {
  const int64_t size = (inputs + 3) / 4 * 4 * kNarrow;
#pragma omp parallel for
  for (int64_t output = 0; output < outputs; ++output) {
    int8_t* to = panels + output / kNarrow * size + output % kNarrow * 4;
    int32_t sum = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      to[i / 4 * 4 * kNarrow + i % 4] = values[output * inputs + i];
      sum += values[output * inputs + i];
    }
    extra[output] = 128 * sum;
  }
}

}  // namespace baton

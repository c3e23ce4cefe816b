// What quantized.h and w8a8.h ask of AVX-512 beyond vectors.h: four bytes at once meet four bytes. How
// integers become pairs is in integers_bf16.h or integers_wide.h, by what products take.
#pragma once

#include "vectors.h"

namespace baton {

// What these functions need beyond the library's flags; quantized.py asks the processor for it.
#ifdef __AVX512BF16__
#define BATON_VNNI __attribute__((target("avx512vnni,avx512vbmi")))
#else
#define BATON_VNNI __attribute__((target("avx512vnni")))
#endif

constexpr int kBlockRows = 12;  // rows at once by one panel: 24 registers accumulate
constexpr int kBothRows = 6;    // up to here two panels go together
constexpr int halves_of(int) { return 2; }  // of a panel that some rows take at once

using Ints = __m512i;  // 16 int32
using RowByte = uint8_t;  // a number of a row rounded to 8 bits

inline Ints load_ints(const int32_t* from, Lanes lanes) {
  return _mm512_maskz_loadu_epi32(lanes, from);
}

inline Floats difference(Ints a, Ints b) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, b)); }

// sum [M][H] += the four numbers that begin at x(m), of each row m, by H vectors of four int8 a lane from
// `w` on, exactly.
template <int M, int H, class Row>
BATON_VNNI inline void dot_quads(Ints (*sum)[H], const Row& x, const int8_t* w) {
  Line weights[H];
  BATON_UNROLL for (int h = 0; h < H; ++h) weights[h] = load_line(w + 64 * h);
  BATON_UNROLL for (int m = 0; m < M; ++m) {
    int32_t four;
    std::memcpy(&four, x(m), sizeof four);
    const __m512i each = _mm512_set1_epi32(four);
    BATON_UNROLL for (int h = 0; h < H; ++h)
      sum[m][h] = _mm512_dpbusd_epi32(sum[m][h], each, weights[h]);
  }
}

}  // namespace baton

#ifdef __AVX512BF16__
#include "integers_bf16.h"
#else
#include "integers_wide.h"
#endif

// What quantized.h and w8a8.h ask of AVX-512 beyond vectors.h: integers become pairs of bfloat16 by
// tables, and four bytes at once meet four bytes.
#pragma once

#include "vectors.h"

namespace baton {

// What these functions need beyond the library's flags; quantized.py asks the processor for it.
#define BATON_VNNI __attribute__((target("avx512vnni,avx512vbmi")))

constexpr int kBlockRows = 12;  // rows at once by one panel: 24 registers accumulate
constexpr int kBothRows = 6;    // up to here two panels go together
constexpr int halves_of(int) { return 2; }  // of a panel that some rows take at once

using Ints = __m512i;  // 16 int32
using Quad = __m512i;  // four uint8, the same in every lane

inline Ints load_ints(const int32_t* from, Lanes lanes) {
  return _mm512_maskz_loadu_epi32(lanes, from);
}

inline Floats difference(Ints a, Ints b) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, b)); }

inline Quad broadcast_quad(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

// sum + the products of each lane's four uint8 and four int8, exactly.
BATON_VNNI inline Ints dot(Ints sum, Quad x, Line w) { return _mm512_dpbusd_epi32(sum, x, w); }

struct Nibbles {
  static constexpr int64_t bytes = 64;  // of a quad
  const __m512i table;
  static Nibbles make() {
    alignas(64) bf16 numbers[32];  // twice: the fifth bit of an index is the next nibble's
    for (int n = 0; n < 32; ++n) {
      const float number = static_cast<float>(n % 16 - 8);
      uint32_t word;
      std::memcpy(&word, &number, sizeof word);
      numbers[n] = static_cast<bf16>(word >> 16);
    }
    return {_mm512_load_si512(numbers)};
  }
  template <int H>
  void load(const uint8_t* at, int, Pairs w[4]) const {
    static_assert(H == 2);
    const __m512i line = _mm512_loadu_si512(at);
    w[0] = (Pairs)_mm512_permutexvar_epi16(line, table);
    w[1] = (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4), table);
    w[2] = (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16(line, 8), table);
    w[3] = (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16(line, 12), table);
  }
};

// Bytes become bfloat16 by tables of the magnitudes 0..127, low and high bytes apart. The code of a
// number is its sign and magnitude; the free one, -0, is -128 and shares its place with 0.
struct Bytes {
  static constexpr int64_t bytes = 128;
  const __m512i low[2], high[2], sign;
  static Bytes make() {
    alignas(64) uint8_t low[128], high[128];
    for (int m = 0; m < 128; ++m) {
      const float number = static_cast<float>(m == 0 ? 128 : m);
      uint32_t word;
      std::memcpy(&word, &number, sizeof word);
      low[m] = static_cast<uint8_t>(word >> 16);
      high[m] = static_cast<uint8_t>(word >> 24);
    }
    return {{_mm512_load_si512(low), _mm512_load_si512(low + 64)},
            {_mm512_load_si512(high), _mm512_load_si512(high + 64)},
            _mm512_set1_epi8(-128)};
  }
  static uint8_t code(int number) {
    return static_cast<uint8_t>(number >= 0 ? number : 0x80 | (-number & 0x7f));
  }
  template <int H>
  BATON_VNNI void load(const uint8_t* at, int, Pairs w[4]) const {
    static_assert(H == 2);
    BATON_UNROLL for (int pair = 0; pair < 2; ++pair) {
      const __m512i codes = _mm512_loadu_si512(at + 64 * pair);
      const __mmask64 some = _mm512_test_epi8_mask(codes, codes);
      const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
      __m512i upper = _mm512_maskz_permutex2var_epi8(some, high[0], codes, high[1]);
      upper = _mm512_ternarylogic_epi32(upper, codes, sign, 0xf8);  // upper | codes & sign
      w[2 * pair] = (Pairs)_mm512_unpacklo_epi8(lower, upper);
      w[2 * pair + 1] = (Pairs)_mm512_unpackhi_epi8(lower, upper);
    }
  }
};

}  // namespace baton

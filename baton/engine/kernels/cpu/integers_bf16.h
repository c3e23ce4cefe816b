// Integer weights as pairs of bfloat16, by tables.
#pragma once

namespace baton {

template <int (*number_of)(int)>
struct Nibbles {
  static constexpr int64_t bytes = 64;  // of a quad
  const __m512i table;
  static Nibbles make() {
    alignas(64) bf16 numbers[32];  // twice: the fifth bit of an index is the next nibble's
    for (int n = 0; n < 32; ++n) {
      const float number = static_cast<float>(number_of(n % 16));
      uint32_t word;
      std::memcpy(&word, &number, sizeof word);
      numbers[n] = static_cast<bf16>(word >> 16);
    }
    return {_mm512_load_si512(numbers)};
  }

  // A pair of a quad's inputs, all outputs.
  template <int H>
  void load(const uint8_t* at, int, int pair, Pairs w[2]) const {
    static_assert(H == 2);
    const __m512i line = _mm512_srli_epi16(_mm512_loadu_si512(at), 8 * pair);
    w[0] = (Pairs)_mm512_permutexvar_epi16(line, table);
    w[1] = (Pairs)_mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4), table);
  }
};

inline int integer4(int code) { return code - 8; }
using Integers4 = Nibbles<integer4>;
using Floats4 = Nibbles<number_of_float4>;

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
  static int64_t place(int64_t output, int64_t input) { return place_in_turns(output, input); }

  template <int H>
  BATON_VNNI void load(const uint8_t* at, int, int pair, Pairs w[2]) const {
    static_assert(H == 2);
    const __m512i codes = _mm512_loadu_si512(at + 64 * pair);
    const __mmask64 some = _mm512_test_epi8_mask(codes, codes);
    const __m512i lower = _mm512_permutex2var_epi8(low[0], codes, low[1]);
    __m512i upper = _mm512_maskz_permutex2var_epi8(some, high[0], codes, high[1]);
    upper = _mm512_ternarylogic_epi32(upper, codes, sign, 0xf8);  // upper | codes & sign
    w[0] = (Pairs)_mm512_unpacklo_epi8(lower, upper);
    w[1] = (Pairs)_mm512_unpackhi_epi8(lower, upper);
  }
};

}  // namespace baton

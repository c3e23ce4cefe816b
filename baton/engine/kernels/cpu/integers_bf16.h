// Integer weights as pairs of bfloat16, by tables.
#pragma once

namespace baton {

// Both kinds of numbers of 4 bits: the same loops with another table.
struct Nibbles {
  static constexpr int64_t bytes = 64;  // of a quad
  const __m512i table;
  static Nibbles make(int64_t bits) {
    alignas(64) bf16 numbers[32];  // twice: the fifth bit of an index is the next nibble's
    for (int n = 0; n < 32; ++n) {
      const int code = n % 16;
      const float number = static_cast<float>(bits == 4 ? code - 8 : number_of_float4(code));
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

using Integers4 = Nibbles;
using Floats4 = Nibbles;

// Bytes become bfloat16 by tables of the magnitudes 0..127, low and high bytes apart. The code of a
// number is its sign and magnitude; the free one, -0, is -128 and shares its place with 0.
struct Bytes {
  static constexpr int64_t bytes = 128;
  const __m512i low[2], high[2], sign;
  static Bytes make(int64_t) {
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

#define BATON_SIXES
#define BATON_WIDENED

// Numbers of 6 bits, 32 higher, which index tables of bfloat16's low and high bytes. Of a quad, 64
// bytes hold the low halves of a pair's 64 numbers, as Bytes has them, and of the other pair's; 32
// bytes hold two bits more of each: byte b of numbers b, b + 32, and those of the other pair.
struct Sixes {
  static constexpr int64_t bytes = 96;
  const __m512i low, high, upper, from[2];
  static Sixes make(int64_t) {
    alignas(64) uint8_t low[64], high[64], from[2][64];
    for (int n = 0; n < 64; ++n) {
      const float number = static_cast<float>(n - 32);
      uint32_t word;
      std::memcpy(&word, &number, sizeof word);
      low[n] = static_cast<uint8_t>(word >> 16);
      high[n] = static_cast<uint8_t>(word >> 24);
      for (int pair = 0; pair < 2; ++pair)  // the bits that come to bits 4 and 5 of byte n
        from[pair][n] = static_cast<uint8_t>((8 * (n % 8) + 2 * (2 * pair + n / 32) - 4) & 63);
    }
    return {_mm512_load_si512(low), _mm512_load_si512(high), _mm512_set1_epi8(0x30),
            {_mm512_load_si512(from[0]), _mm512_load_si512(from[1])}};
  }

  // Writes an input's number of an output to its place among a quad's zeros.
  static void put(uint8_t* quad, int64_t output, int64_t input, int number) {
    const int64_t at = place_in_turns(output, input), pair = input / 2 % 2;
    const int code = number + 32;
    quad[at] |= static_cast<uint8_t>((code & 15) << 4 * pair);
    quad[64 + at % 32] |= static_cast<uint8_t>((code >> 4) << 2 * (2 * pair + at / 32));
  }

  template <int H>
  BATON_VNNI void load(const uint8_t* at, int, int pair, Pairs w[2]) const {
    static_assert(H == 2);
    const __m512i line = _mm512_srli_epi16(_mm512_loadu_si512(at), 4 * pair);
    const __m512i rest = _mm512_broadcast_i64x4(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 64)));
    const __m512i codes = _mm512_ternarylogic_epi32(
        upper, _mm512_multishift_epi64_epi8(from[pair], rest), line, 0xca);  // upper ? rest : line
    const __m512i lower = _mm512_permutexvar_epi8(codes, low);
    const __m512i higher = _mm512_permutexvar_epi8(codes, high);
    w[0] = (Pairs)_mm512_unpacklo_epi8(lower, higher);
    w[1] = (Pairs)_mm512_unpackhi_epi8(lower, higher);
  }
};

}  // namespace baton

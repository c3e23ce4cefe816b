// What quantized.h and w8a8.h ask of AVX2 beyond vectors.h: integers become float32 by arithmetic, and
// bytes are multiplied as words, because products of bytes would be cut off at 16 bits.
#pragma once

#include "vectors.h"

namespace baton {

#define BATON_VNNI  // no more than the library's flags

constexpr int kBlockRows = 4;  // rows at once by half a panel: 8 registers accumulate
constexpr int kBothRows = 1;   // up to here two panels go together

// Of a panel that some rows take at once.
constexpr int halves_of(int rows) { return rows == 1 ? 2 : 1; }

constexpr int kW4A8Rows = 6;   // kBlockRows of w4a8.h
constexpr int64_t kRunQuads = 16;  // sums of words hold so many quads: 64 * 8 * 127 / 2 is less than 2^15

using Ints = Line;  // 16 int32

// Four uint8 as words, the same in every lane: the first and third, the others.
struct Quad {
  __m256i even, odd;
};

inline Ints load_ints(const int32_t* from, Lanes lanes) {
  const Line mask = mask_of(lanes);
  return {_mm256_maskload_epi32(from, mask.low), _mm256_maskload_epi32(from + 8, mask.high)};
}

inline Floats difference(Ints a, Ints b) {
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(a.low, b.low)),
          _mm256_cvtepi32_ps(_mm256_sub_epi32(a.high, b.high))};
}

inline Floats as_floats(Ints numbers) {
  return {_mm256_cvtepi32_ps(numbers.low), _mm256_cvtepi32_ps(numbers.high)};
}

inline Ints as_ints(Floats numbers) {
  return {_mm256_cvtps_epi32(numbers.low), _mm256_cvtps_epi32(numbers.high)};
}

inline Ints added_ints(Ints a, Ints b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

// a * b, and no part of a fused product and sum.
inline Floats rounded_product(Floats a, Floats b) {
  Floats y = a * b;
  asm("" : "+x"(y.low), "+x"(y.high));
  return y;
}

inline Quad broadcast_quad(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  const __m256i each = _mm256_set1_epi32(four);
  return {_mm256_and_si256(each, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(each, 8)};
}

inline __m256i dot(__m256i sum, Quad x, __m256i w) {
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
  const __m256i odd = _mm256_srai_epi16(w, 8);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even, x.even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(odd, x.odd));
}

// sum + the products of each lane's four uint8 and four int8, exactly.
inline Ints dot(Ints sum, Quad x, Line w) {
  return {dot(sum.low, x, w.low), dot(sum.high, x, w.high)};
}

using SignedQuad = __m256i;  // four int8, the same in every lane

inline SignedQuad broadcast_quad(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm256_set1_epi32(four);
}

// Sums of 16 outputs by nibbles, two words each: of the first two inputs of quads, and of the others.
// Words wrap around, so a sum that ends within them is exact.
using NibbleSums = Line;

// What both words of each lane begin with.
inline int32_t start_of(int first, int second) {
  return static_cast<int32_t>((first & 0xffff) | static_cast<uint32_t>(second) << 16);
}

inline NibbleSums start_at(int32_t start) {
  return {_mm256_set1_epi32(start), _mm256_set1_epi32(start)};
}

// A quad's nibbles of 16 * H outputs from 16 * half on, four to a lane.
template <int H>
inline void load_nibbles(const uint8_t* at, int half, Line w[H]) {
  const __m256i lowest = _mm256_set1_epi8(15);
  const Line line = load_line(at);
  BATON_UNROLL for (int h = 0; h < H; ++h) {
    const __m128i by = _mm_cvtsi32_si128(4 * (half + h));
    w[h] = {_mm256_and_si256(_mm256_srl_epi16(line.low, by), lowest),
            _mm256_and_si256(_mm256_srl_epi16(line.high, by), lowest)};
  }
}

// No sum of two products is cut off: 2 * 15 * 127 is less than 2^15.
inline NibbleSums add_nibbles(NibbleSums sum, Line w, SignedQuad x) {
  return {_mm256_add_epi16(sum.low, _mm256_maddubs_epi16(w.low, x)),
          _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(w.high, x))};
}

inline Ints whole_of(NibbleSums sum) {
  const __m256i one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sum.low, one), _mm256_madd_epi16(sum.high, one)};
}

// A word and a zero, the same in every lane.
inline __m256i broadcast_word(const int16_t* from) {
  int32_t two;
  std::memcpy(&two, from, sizeof two);
  return _mm256_set1_epi32(two);
}

// sum + a * x, `a` being words.
inline Ints add_words(Ints sum, Ints a, __m256i x) {
  return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(a.low, x)),
          _mm256_add_epi32(sum.high, _mm256_madd_epi16(a.high, x))};
}

// Nibble `n` of each word by a table of magnitudes, and its highest bit as the sign.
struct TableOfNibbles {
  static __m256 number(__m256i words, int nibble) {
    const __m256 magnitudes = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
    const __m256i code = _mm256_srli_epi32(words, 4 * nibble);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, code), _mm256_castsi256_ps(sign));
  }
};

// A nibble becomes the lowest bits of a float32 whose last bit is worth what the nibble's place is.
struct PlacesOfNibbles {
  static __m256 number(__m256i words, int nibble) {
    // 2^(23 - 4 * nibble): its last bit is 2^(-4 * nibble).
    const int power = (127 + 23 - 4 * nibble) << 23;
    const __m256i part = _mm256_and_si256(words, _mm256_set1_epi32(15 << (4 * nibble)));
    const __m256 raised = _mm256_castsi256_ps(_mm256_or_si256(part, _mm256_set1_epi32(power)));
    return raised - _mm256_set1_ps(static_cast<float>(1 << (23 - 4 * nibble)) + 8.0f);
  }
};

template <class Numbers>
struct Nibbles {
  static constexpr int64_t bytes = 64;  // of a quad
  static Nibbles make(int64_t) { return {}; }

  // A pair of a quad's inputs, of 16 * H outputs from 16 * half on.
  template <int H>
  void load(const uint8_t* at, int half, int pair, Pairs w[H]) const {
    const Line even = load_line(at);
    const Line odd = {_mm256_srli_epi32(even.low, 16), _mm256_srli_epi32(even.high, 16)};
    BATON_UNROLL for (int h = 0; h < H; ++h) {
      const int nibble = 2 * pair + half + h;
      w[h] = {{Numbers::number(even.low, nibble), Numbers::number(even.high, nibble)},
              {Numbers::number(odd.low, nibble), Numbers::number(odd.high, nibble)}};
    }
  }
};

using Integers4 = Nibbles<PlacesOfNibbles>;
using Floats4 = Nibbles<TableOfNibbles>;

// A byte is moved to the upper end of a lane of its own, and down again by its sign.
struct Bytes {
  static constexpr int64_t bytes = 128;
  const __m256i places[2][2];  // by half, by input of a pair

  static Bytes make(int64_t) {
    return {{{places_of(0), places_of(1)}, {places_of(8), places_of(9)}}};
  }

  static uint8_t code(int number) { return static_cast<uint8_t>(number); }

  static int64_t place(int64_t output, int64_t input) { return place_in_turns(output, input); }

  template <int H>
  void load(const uint8_t* at, int half, int pair, Pairs w[H]) const {
    const Line line = load_line(at + 64 * pair);
    BATON_UNROLL for (int h = 0; h < H; ++h) {
      const __m256i *even = &places[half + h][0], *odd = &places[half + h][1];
      w[h] = {{number(line.low, *even), number(line.high, *even)},
              {number(line.low, *odd), number(line.high, *odd)}};
    }
  }

 private:
  static __m256 number(__m256i line, __m256i place) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_shuffle_epi8(line, place), 24));
  }

  // Bytes `first`, and every second after it, to the fourth byte of each lane, the others zeros.
  static __m256i places_of(int first) {
    const auto place = [&](int lane) {
      return static_cast<int>(0x00808080u | static_cast<unsigned>(first + 2 * lane) << 24);
    };
    return _mm256_setr_epi32(place(0), place(1), place(2), place(3), place(0), place(1), place(2),
                             place(3));
  }
};

}  // namespace baton

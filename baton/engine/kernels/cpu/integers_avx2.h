// What quantized.h and w8a8.h ask of AVX2 beyond vectors.h: integers of 4 and 8 bits are multiplied as
// words, 16 of them at once, where float32 are 8; products of bytes would be cut off at 16 bits.
#pragma once

#include "vectors.h"

namespace baton {

#define BATON_VNNI  // no more than the library's flags
#define BATON_WORDS

constexpr int kBlockRows = 6;  // rows at once by half a panel: 12 registers accumulate
constexpr int kBothRows = 1;   // up to here two panels go together

// Of a panel that some rows take at once.
constexpr int halves_of(int rows) { return rows == 1 ? 2 : 1; }

constexpr int kW4A8Rows = 6;   // kBlockRows of w4a8.h
constexpr int64_t kRunQuads = 16;  // sums of words hold so many quads: 64 * 8 * 127 / 2 is less than 2^15

using Ints = Line;  // 16 int32

// A number of a row rounded to 8 bits, as a word: of each four the first and third, then the others.
using RowByte = int16_t;

inline Ints load_ints(const int32_t* from, Lanes lanes) {
  const Line mask = mask_of(lanes);
  return {_mm256_maskload_epi32(from, mask.low), _mm256_maskload_epi32(from + 8, mask.high)};
}

inline Floats difference(Ints a, Ints b) {
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(a.low, b.low)),
          _mm256_cvtepi32_ps(_mm256_sub_epi32(a.high, b.high))};
}

// Both halves of a line by the same.
template <class Work>
inline Line of_halves(Line line, const Work& work) {
  return {work(line.low), work(line.high)};
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

// sum + the products of each lane's two words, exactly.
inline Ints dot_words(Ints sum, __m256i x, Line w) {
  return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(x, w.low)),
          _mm256_add_epi32(sum.high, _mm256_madd_epi16(x, w.high))};
}

// Two words, the same in every lane.
inline __m256i broadcast_words(const int16_t* from) {
  int32_t two;
  std::memcpy(&two, from, sizeof two);
  return _mm256_set1_epi32(two);
}

// sum + the products of each lane's two words by the two that begin at x, exactly, in the registers of
// the sum and two more, as vectors_avx2.h's add_products.
inline Ints dot_words(Ints sum, const int16_t* x, Line w) {
  __m256i each, product;
  asm volatile(
      "vpbroadcastd %4, %2\n\t"
      "vpmaddwd %5, %2, %3\n\t"
      "vpaddd %3, %0, %0\n\t"
      "vpmaddwd %6, %2, %2\n\t"
      "vpaddd %2, %1, %1"
      : "+x"(sum.low), "+x"(sum.high), "=&x"(each), "=&x"(product)
      : "m"(*reinterpret_cast<const int32_t*>(x)), "x"(w.low), "x"(w.high));
  return sum;
}

// The first and third of each four int8, as words, and the second and fourth.
inline Line even_bytes(Line line) {
  return of_halves(line, [](__m256i four) {
    return _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
  });
}

inline Line odd_bytes(Line line) {
  return of_halves(line, [](__m256i four) { return _mm256_srai_epi16(four, 8); });
}

// sum [H] += the four numbers that begin at x, by H vectors of four int8 a lane from `w` on, exactly.
template <int H>
inline void dot_quads(Ints (&sum)[H], const int16_t* x, const int8_t* w) {
  const __m256i first = broadcast_words(x), other = broadcast_words(x + 2);
  BATON_UNROLL for (int h = 0; h < H; ++h) {
    const Line line = load_line(w + 64 * h);
    sum[h] = dot_words(sum[h], first, even_bytes(line));
    sum[h] = dot_words(sum[h], other, odd_bytes(line));
  }
}

// sum [M][H] += the four numbers that begin at x(m), of each row m, by H vectors of four int8 a lane from
// `w` on, exactly.
template <int M, int H, class Row>
inline void dot_quads(Ints (*sum)[H], const Row& x, const int8_t* w) {
  if constexpr (M == 1) return dot_quads(sum[0], x(0), w);
  BATON_UNROLL for (int h = 0; h < H; ++h) {
    const Line even = even_bytes(load_line(w + 64 * h));
    BATON_UNROLL for (int m = 0; m < M; ++m) sum[m][h] = dot_words(sum[m][h], x(m), even);
    asm volatile("" ::: "memory");  // the others are loaded behind these products: sums fill the registers
    const Line odd = odd_bytes(load_line(w + 64 * h));
    BATON_UNROLL for (int m = 0; m < M; ++m) sum[m][h] = dot_words(sum[m][h], x(m) + 2, odd);
  }
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

// What integers add up to: inputs 0 and 1 of each quad, inputs 2 and 3.
struct RunTotals {
  int first, second;
};

inline RunTotals run_totals(const int8_t* from, int64_t quads) {
  RunTotals total{0, 0};
  for (int64_t quad = 0; quad < quads; ++quad, from += 4) {
    total.first += from[0] + from[1];
    total.second += from[2] + from[3];
  }
  return total;
}

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

// sum + a * x, `a` being words.
inline Ints add_words(Ints sum, Ints a, __m256i x) { return dot_words(sum, x, a); }

// x / scale to nearest even; returns what they add up to, exactly up to 512 of them.
inline float round_words(const bf16* x, int16_t* to, int64_t count, float scale) {
  const Floats times = broadcast(1.0f / scale);
  Floats sum = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const Lanes lanes = lanes_of(count - i);
    const Floats scaled = load_wide(x + i, lanes) * times;
    const Ints each = {_mm256_cvtps_epi32(scaled.low), _mm256_cvtps_epi32(scaled.high)};
    // Packed by halves of a register: lanes 0-3, 8-11, 4-7, 12-15.
    const __m256i packed =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(each.low, each.high), 0xd8);
    int16_t words[16];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), packed);
    std::memcpy(to + i, words, sizeof(int16_t) * __builtin_popcount(lanes));
    sum = sum + as_floats(each);
  }
  return sum_of(sum);
}

struct Integers4 {
  static constexpr int64_t bytes = 64;   // of a quad
  static constexpr float higher = 8.0f;  // than the numbers: words

  // A pair of a quad's inputs, of 16 * H outputs from 16 * half on.
  template <int H>
  static void words(const uint8_t* at, int half, int pair, Line w[H]) {
    const Line line = load_line(at);
    BATON_UNROLL for (int h = 0; h < H; ++h)
      w[h] = of_halves(line, [&](__m256i codes) {
        return _mm256_and_si256(_mm256_srli_epi16(codes, 4 * (2 * pair + half + h)),
                                _mm256_set1_epi16(15));
      });
  }
};

// Of 4 bits, by a table of magnitudes and the highest bit as the sign.
struct Floats4 {
  static constexpr int64_t bytes = 64;
  static constexpr float higher = 0.0f;

  template <int H>
  static void words(const uint8_t* at, int half, int pair, Line w[H]) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const Line line = load_line(at);
    BATON_UNROLL for (int h = 0; h < H; ++h)
      w[h] = of_halves(line, [&](__m256i codes) {
        // The code in both bytes of a word: the number in both, the upper one then by its sign.
        const __m256i code = _mm256_and_si256(
            _mm256_srli_epi16(codes, 4 * (2 * pair + half + h)), _mm256_set1_epi16(15));
        const __m256i number = _mm256_shuffle_epi8(table, _mm256_slli_epi16(code, 8));
        return _mm256_srai_epi16(number, 8);
      });
  }
};

struct Bytes {
  static constexpr int64_t bytes = 128;
  static constexpr float higher = 0.0f;
  static uint8_t code(int number) { return static_cast<uint8_t>(number); }

  // Of a pair's 64 bytes: 16 outputs' two inputs, then the other outputs'.
  static int64_t place(int64_t output, int64_t input) { return 2 * output + input % 2; }

  template <int H>
  static void words(const uint8_t* at, int half, int pair, Line w[H]) {
    BATON_UNROLL for (int h = 0; h < H; ++h) {
      const auto* from = reinterpret_cast<const __m128i*>(at + 64 * pair + 32 * (half + h));
      w[h] = {_mm256_cvtepi8_epi16(_mm_loadu_si128(from)),
              _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
    }
  }
};

}  // namespace baton

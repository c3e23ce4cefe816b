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

constexpr int kW4A8Rows = kBlockRows;  // of w4a8.h
constexpr int64_t kRunQuads = 64;      // their inputs sum to a word: 256 * 127 is less than 2^15

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

inline Floats as_floats(Ints numbers) { return _mm512_cvtepi32_ps(numbers); }
inline Ints as_ints(Floats numbers) { return _mm512_cvtps_epi32(numbers); }
inline Ints added_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }

// a * b, and no part of a fused product and sum.
inline Floats rounded_product(Floats a, Floats b) {
  Floats y = a * b;
  asm("" : "+v"(y));
  return y;
}

// sum + the products of each lane's two words, exactly.
BATON_VNNI inline Ints dot_words(Ints sum, Line x, Line w) {
  return _mm512_dpwssd_epi32(sum, x, w);
}

using SignedQuad = __m512i;  // four int8, the same in every lane

inline SignedQuad broadcast_quad(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

// Sums of 16 outputs by nibbles.
using NibbleSums = Ints;

// What integers add up to: all of them in `first`, as start_of needs no more here.
struct RunTotals {
  int first, second;
};

inline RunTotals run_totals(const int8_t* from, int64_t quads) {
  const __m512i byte = _mm512_set1_epi8(1), word = _mm512_set1_epi16(1);
  __m512i sum = _mm512_setzero_si512();
  for (int64_t quad = 0; quad < quads; quad += 16) {
    const __m512i each =
        _mm512_maskz_loadu_epi32(lanes_of(quads - quad), from + 4 * quad);
    const __m512i pairs = _mm512_maddubs_epi16(byte, each);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, word));
  }
  return {_mm512_reduce_add_epi32(sum), 0};
}

// What sums begin with, of the first two inputs of quads and of the others.
inline int32_t start_of(int first, int second) { return first + second; }
inline NibbleSums start_at(int32_t start) { return _mm512_set1_epi32(start); }

// A quad's nibbles of 16 * H outputs from 16 * half on, four to a lane.
template <int H>
inline void load_nibbles(const uint8_t* at, int half, Line w[H]) {
  static_assert(H == 2, "shifts by a constant: others take units that products need");
  const Line line = load_line(at), lower = _mm512_set1_epi8(15);
  w[0] = _mm512_and_si512(line, lower);
  w[1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), lower);
}

BATON_VNNI inline NibbleSums add_nibbles(NibbleSums sum, Line w, SignedQuad x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}

inline Ints whole_of(NibbleSums sum) { return sum; }

inline NibbleSums sixteen_times(NibbleSums sum) { return _mm512_slli_epi32(sum, 4); }
inline Line added_bytes(Line a, Line b) { return _mm512_add_epi8(a, b); }

// The lowest byte of each lane four times.
inline Line four_bytes(Ints numbers) {
  return _mm512_mullo_epi32(_mm512_and_si512(numbers, _mm512_set1_epi32(255)),
                            _mm512_set1_epi32(0x01010101));
}

// Two words, the same in every lane.
inline Line broadcast_words(const int16_t* from) {
  int32_t two;
  std::memcpy(&two, from, sizeof two);
  return _mm512_set1_epi32(two);
}

// sum + a * x, `a` being words.
BATON_VNNI inline Ints add_words(Ints sum, Ints a, Line x) { return dot_words(sum, a, x); }

}  // namespace baton

#ifdef __AVX512BF16__
#include "integers_bf16.h"
#else
#include "integers_wide.h"
#endif

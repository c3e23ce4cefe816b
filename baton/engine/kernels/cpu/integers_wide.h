// Integer weights as words, pairs of them a lane; and what integer_words.h asks for beside them.
#pragma once

#define BATON_WORDS

namespace baton {

// sum + the products of each lane's two words by the two that begin at x, exactly.
BATON_VNNI inline Ints dot_words(Ints sum, const int16_t* x, Line w) {
  return dot_words(sum, broadcast_words(x), w);
}

// x / scale to nearest even; returns what they add up to, exactly up to 512 of them.
inline float round_words(const bf16* x, int16_t* to, int64_t count, float scale) {
  const Floats times = broadcast(1.0f / scale);
  Floats sum = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const Lanes lanes = lanes_of(count - i);
    const Ints each = _mm512_cvtps_epi32(load_wide(x + i, lanes) * times);
    _mm256_mask_storeu_epi16(to + i, lanes, _mm512_cvtsepi32_epi16(each));
    sum = sum + as_floats(each);
  }
  return sum_of(sum);
}

// Words as the pairs of products_wide.h.
inline Pairs pairs_of_words(Line words) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16)),
          _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16))};
}

// Of 4 bits, by a table.
struct Floats4 {
  static constexpr int64_t bytes = 64;     // of a quad
  static constexpr float higher = 0.0f;
  static Floats4 make(int64_t) { return {}; }

  template <int H>
  static void words(const uint8_t* at, int half, int pair, Line w[H]) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const Line line = load_line(at);
    BATON_UNROLL for (int h = 0; h < H; ++h)
      w[h] = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4 * (2 * pair + half + h)), table);
  }

  template <int H>
  void load(const uint8_t* at, int half, int pair, Pairs w[H]) const {
    Line each[H];
    words<H>(at, half, pair, each);
    BATON_UNROLL for (int h = 0; h < H; ++h) w[h] = pairs_of_words(each[h]);
  }
};

struct Integers4 {
  static constexpr int64_t bytes = 64;     // of a quad
  static constexpr float higher = 8.0f;  // than the numbers: words
  static Integers4 make(int64_t) { return {}; }

  // A pair of a quad's inputs, of 16 * H outputs from 16 * half on.
  template <int H>
  static void words(const uint8_t* at, int half, int pair, Line w[H]) {
    const Line line = load_line(at);
    BATON_UNROLL for (int h = 0; h < H; ++h)
      w[h] = _mm512_and_si512(_mm512_srli_epi16(line, 4 * (2 * pair + half + h)),
                              _mm512_set1_epi16(15));
  }

  template <int H>
  void load(const uint8_t* at, int half, int pair, Pairs w[H]) const {
    Line each[H];
    words<H>(at, half, pair, each);
    BATON_UNROLL for (int h = 0; h < H; ++h)
      w[h] = pairs_of_words(_mm512_sub_epi16(each[h], _mm512_set1_epi16(8)));
  }
};

struct Bytes {
  static constexpr int64_t bytes = 128;
  static constexpr float higher = 0.0f;
  static Bytes make(int64_t) { return {}; }
  static uint8_t code(int number) { return static_cast<uint8_t>(number); }

  // Of a pair's 64 bytes: 16 outputs' two inputs, then the other outputs'.
  static int64_t place(int64_t output, int64_t input) { return 2 * output + input % 2; }

  template <int H>
  static void words(const uint8_t* at, int half, int pair, Line w[H]) {
    BATON_UNROLL for (int h = 0; h < H; ++h) {
      const auto* from = reinterpret_cast<const __m256i*>(at + 64 * pair + 32 * (half + h));
      w[h] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(from));
    }
  }

  template <int H>
  void load(const uint8_t* at, int half, int pair, Pairs w[H]) const {
    Line each[H];
    words<H>(at, half, pair, each);
    BATON_UNROLL for (int h = 0; h < H; ++h) w[h] = pairs_of_words(each[h]);
  }
};

}  // namespace baton

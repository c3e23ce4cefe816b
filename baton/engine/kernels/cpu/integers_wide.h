// Integer weights as pairs of float32: nibbles by a table, bytes by their values.
#pragma once

namespace baton {

struct Nibbles {
  static constexpr int64_t bytes = 64;  // of a quad
  const __m512 table;

  static Nibbles make() {
    return {_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)};
  }

  // A pair of a quad's inputs, of 16 * H outputs from 16 * half on. The table takes a lane's last
  // four bits alone.
  template <int H>
  void load(const uint8_t* at, int half, int pair, Pairs w[H]) const {
    const Line line = load_line(at);
    BATON_UNROLL for (int h = 0; h < H; ++h) {
      const int bit = 4 * (2 * pair + half + h);
      w[h] = {_mm512_permutexvar_ps(_mm512_srli_epi32(line, bit), table),
              _mm512_permutexvar_ps(_mm512_srli_epi32(line, 16 + bit), table)};
    }
  }
};

struct Bytes {
  static constexpr int64_t bytes = 128;
  static Bytes make() { return {}; }
  static uint8_t code(int number) { return static_cast<uint8_t>(number); }

  // Of a pair's 64 bytes: 16 outputs' even inputs, their odd ones, then the other outputs'.
  static int64_t place(int64_t output, int64_t input) {
    return output / 16 * 32 + input % 2 * 16 + output % 16;
  }

  template <int H>
  void load(const uint8_t* at, int half, int pair, Pairs w[H]) const {
    BATON_UNROLL for (int h = 0; h < H; ++h) {
      const uint8_t* from = at + 64 * pair + 32 * (half + h);
      w[h] = {number(from), number(from + 16)};
    }
  }

 private:
  static __m512 number(const uint8_t* from) {
    const __m128i each = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(each));
  }
};

}  // namespace baton

// Integer weights by rows of 16-bit integers, where two products of words cost what one of float32 does.
//
// A row is rounded by the greatest number of every 128 inputs of a group, to 16 bits: twice as fine as
// bfloat16 is where the number is half of the greatest, and no coarser than 1 in 32,767 of that. Sums
// of such a chunk are exact integers; they meet the rounding's scale, the zero and the weights' scale
// in float32.
#pragma once

#include <cstdint>

#include "elementwise.h"
#include "integer_units.h"

namespace baton {

#ifdef BATON_WORDS

constexpr bool kWords = true;
constexpr int64_t kChunkQuads = 32;  // of a chunk: 128 * 32,767 * 128 is less than 2^31

inline int64_t chunks_of(const IntegerLayout& at) {
  return (at.quads + kChunkQuads - 1) / kChunkQuads;
}

// Rows [from, until) as words, side by side, with what each chunk's are to be multiplied by and what
// they add up to.
struct WordSlab {
  const int16_t* words;         // [rows, inputs]
  const float *scales, *sums;   // [rows, chunks]
  int64_t from, until, chunks;  // of all groups
};

// Rows as words, of one thread.
class WordRows {
 public:
  // x [.., inputs].
  WordRows(const bf16* x, int64_t inputs) : x_(x), inputs_(inputs) {}

  // Rows [from, until), until others are asked for; always of one layout.
  WordSlab of(int64_t from, int64_t until, const IntegerLayout& at) {
    const int64_t size = kQuad * at.quads, chunks = inputs_ / size * chunks_of(at);
    int16_t* const words = kept_room<WordRows, int16_t>((until - from) * inputs_);
    float* const scales = kept_room<WordRows, float>(2 * (until - from) * chunks);
    float* const sums = scales + (until - from) * chunks;
    if (from_ != from || until_ != until) round(from, until, size, words, scales, sums);
    return {words, scales, sums, from, until, chunks};
  }

 private:
  // `size`: inputs of a group.
  void round(int64_t from, int64_t until, int64_t size, int16_t* words, float* scales,
             float* sums) {
    for (int64_t row = from; row < until; ++row)
      for (int64_t group = 0; group < inputs_; group += size)
        for (int64_t at = group; at < group + size; at += kQuad * kChunkQuads) {
          const int64_t count = std::min(kQuad * kChunkQuads, group + size - at);
          const bf16* x = x_ + row * inputs_ + at;
          const float scale = greatest(x, count) / 32767.0f;
          *scales++ = scale;
          *sums++ = round_words(x, words, count, scale);
          words += count;
        }
    from_ = from;
    until_ = until;
  }

  const bf16* x_;
  int64_t inputs_;
  int64_t from_ = 0, until_ = 0;
};

// M rows by P panels: outputs from 16 * half on, of H halves.
template <class Source, int M, int P, int H>
BATON_VNNI void multiply_integers(const IntegerWork& work, const WordSlab& slab, int64_t row,
                                  int64_t panel, Asking asking, int half) {
  const IntegerArgs& a = work.a;
  const IntegerLayout& at = work.at;
  const int16_t* x[(M + 2) / 3];  // every third row: the others are one and two strides away
  for (int m = 0; m < M; m += 3) x[m / 3] = slab.words + (row - slab.from + m) * a.inputs;
  int64_t chunk = (row - slab.from) * slab.chunks;
  alignas(64) float total[P][M][16 * H] = {};
  for (int64_t g = 0; g < a.groups; ++g) {
    GroupLines<Source, P> of(work, panel, g, asking);
    for (int64_t begin = 0; begin < at.quads; begin += kChunkQuads, ++chunk) {
      const int64_t end = std::min(at.quads, begin + kChunkQuads);
      Ints sum[P][M][H];
      BATON_UNROLL for (int p = 0; p < P; ++p)
        BATON_UNROLL for (int m = 0; m < M; ++m)
          BATON_UNROLL for (int h = 0; h < H; ++h) sum[p][m][h] = Ints{};
      for (int64_t quad = begin; quad < end; ++quad) {
        if (quad == of.turn) of.ahead = of.last;
        BATON_UNROLL for (int p = 0; p < P; ++p) {
          const uint8_t* line = of.lines[p] + quad * Source::bytes;
          ask(line + of.ahead, Source::bytes);
          BATON_UNROLL for (int pair = 0; pair < 2; ++pair) {
            Line w[H];
            Source::template words<H>(line, half, pair, w);
            BATON_UNROLL for (int m = 0; m < M; ++m) {
              const int16_t* two = x[m / 3] + (m % 3) * a.inputs + 2 * pair;
              BATON_UNROLL for (int h = 0; h < H; ++h)
                sum[p][m][h] = dot_words(sum[p][m][h], two, w[h]);
            }
            // The next pair's loads stay behind these products: sums fill the registers.
            asm volatile("" ::: "memory");
          }
        }
        BATON_UNROLL for (int i = 0; i < (M + 2) / 3; ++i) x[i] += kQuad;
      }
      BATON_UNROLL for (int p = 0; p < P; ++p)
        BATON_UNROLL for (int h = 0; h < H; ++h) {
          const Floats scale = load_half(of.head[p] + 32 * (half + h));
          const Floats zero = work.zero(of.head[p], half + h) + broadcast(Source::higher);
          BATON_UNROLL for (int m = 0; m < M; ++m) {
            const int64_t index = chunk + m * slab.chunks;
            Floats part = as_floats(sum[p][m][h]);
            if (Source::higher != 0.0f || a.has_zeros)
              part = subtract_product(part, broadcast(slab.sums[index]), zero);
            float* to = total[p][m] + 16 * h;
            store(to, multiply_add(part * broadcast(slab.scales[index]), scale, load(to)));
          }
        }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int m = 0; m < M; ++m)
      for (int h = 0; h < H; ++h)
        store_outputs(a, row + m, (panel + p) * kNarrow + 16 * (half + h),
                      load(total[p][m] + 16 * h));
}

#else

constexpr bool kWords = false;

struct WordRows {
  WordRows(const bf16*, int64_t) {}
};

#endif

}  // namespace baton

// Weights of 4 bits by rows rounded to int8, whose groups sum to exact integers: the part of quantized.h
// for kW4A8.
//
// w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g] * peak[o] as there, with zeros that are integers. A row
// is rounded by its own greatest number, as w8a8's; then
//     y[o] = (sum over g of (sum of (q - zero) * x) * scale[o, g]) * scale of the row * peak[o] + b[o]
// where the inner sum is an integer below 2^24, and each product and each sum of float32 is rounded by
// itself, in the order of the groups: quantization/integer.py's W4A8Linear is this arithmetic in torch,
// equal to the bit.
#pragma once

#include "elementwise.h"
#include "integer_units.h"

namespace baton {

// Panels are of 4 bits; a line holds four inputs, byte 4 * (output % 16) + input % 4, outputs 16..31 in
// the upper nibbles. A nibble is 8 more than its integer.
inline void put_w4a8(uint8_t* quad, int64_t output, int64_t input, int number) {
  const int code = (number + 8) & 15;
  quad[4 * (output % 16) + input % 4] |= static_cast<uint8_t>(code << output / 16 * 4);
}

// What some inputs of a group, kRunQuads at most, add up to in a row: see start_of.
struct RunSums {
  int32_t start;     // what sums of products with nibbles begin with: those are 8 more than integers
  int16_t negative;  // minus the sum
  int16_t none = 0;
};

inline int64_t runs_of(const IntegerLayout& at) { return (at.quads + kRunQuads - 1) / kRunQuads; }

// Room for rounded rows, in the memory that IntegerWork::sums points to.
struct RoundedRows {
  int64_t inputs, runs;  // of a row
  int8_t* values;        // [rows, inputs]
  RunSums* sums;         // [rows, runs]
  float* scales;         // [rows]

  explicit RoundedRows(const IntegerWork& work)
      : inputs(work.a.inputs), runs(work.a.groups * runs_of(work.at)),
        values(reinterpret_cast<int8_t*>(work.sums)),
        sums(reinterpret_cast<RunSums*>(work.sums + work.a.rows * inputs / kQuad)),
        scales(reinterpret_cast<float*>(sums + work.a.rows * runs)) {}

  // float32 numbers of a row, at most: a quad's integers, a run of at least one quad, and the scale.
  static int64_t room(int64_t inputs) { return inputs / kQuad * 3 + 1; }

  void round(const IntegerArgs& a, int64_t row, const IntegerLayout& at) const {
    int8_t* to = values + row * inputs;
    scales[row] = round_row(a.x + row * inputs, to, inputs, a.integers != 0);
    RunSums* sum = sums + row * runs;
    for (int64_t group = 0; group < inputs; group += kQuad * at.quads)
      for (int64_t begin = 0; begin < at.quads; begin += kRunQuads) {
        const int64_t quads = std::min(kRunQuads, at.quads - begin);
        const RunTotals total = run_totals(to, quads);
        to += kQuad * quads;
        *sum++ = {start_of(-8 * total.first, -8 * total.second),
                  static_cast<int16_t>(-total.first - total.second)};
      }
  }
};

// What `count` rows from `row` on make of 16 outputs; totals of a row lie `apart` from the next one's.
inline void store_w4a8(const IntegerWork& work, const RoundedRows& rows, int64_t row, int64_t count,
                       int64_t output, const float* totals, int64_t apart) {
  const IntegerArgs& a = work.a;
  const Lanes lanes = lanes_of(std::max<int64_t>(0, a.outputs - output));
  if (lanes == 0) return;
  const Floats peak = load(a.peaks + output, lanes);
  for (int64_t m = 0; m < count; ++m) {
    const Floats scale = broadcast(rows.scales[row + m]);
    Floats y = rounded_product(rounded_product(load(totals + m * apart), scale), peak);
    if (a.bias != nullptr) y = y + load_wide(a.bias + output, lanes);
    store_output(a, (row + m) * a.stride + output, y, lanes);
  }
}

// M rows by P panels: outputs from 16 * half on, of H halves.
template <int M, int P, int H>
BATON_VNNI void multiply_w4a8(const IntegerWork& work, const RoundedRows& rows, int64_t row,
                              int64_t panel, Asking asking, int half) {
  const IntegerArgs& a = work.a;
  const int64_t stride = a.inputs, quads = work.at.quads, runs = rows.runs;
  const int8_t* x[(M + 2) / 3];  // every third row: the others are one and two strides away
  for (int m = 0; m < M; m += 3) x[m / 3] = rows.values + (row + m) * stride;
  const RunSums* sums = rows.sums + row * runs;
  alignas(64) float total[P][M][16 * H] = {};
  Ints longer[P][M][H];  // sums of a group that is longer than a run
  for (int64_t g = 0; g < a.groups; ++g) {
    GroupLines<Integers4, P> of(work, panel, g, asking);
    for (int64_t begin = 0; begin < quads; begin += kRunQuads, ++sums) {
      const int64_t end = std::min(quads, begin + kRunQuads);
      NibbleSums sum[P][M][H];
      BATON_UNROLL for (int m = 0; m < M; ++m)
        BATON_UNROLL for (int p = 0; p < P; ++p)
          BATON_UNROLL for (int h = 0; h < H; ++h) sum[p][m][h] = start_at(sums[m * runs].start);
      for (int64_t quad = begin; quad < end; ++quad) {
        if (quad == of.turn) of.ahead = of.last;
        BATON_UNROLL for (int p = 0; p < P; ++p) {
          const uint8_t* line = of.lines[p] + quad * Integers4::bytes;
          ask(line + of.ahead, Integers4::bytes);
          Line w[H];
          load_nibbles<H>(line, half, w);
          BATON_UNROLL for (int m = 0; m < M; ++m) {
            const SignedQuad four = broadcast_quad(x[m / 3] + (m % 3) * stride);
            BATON_UNROLL for (int h = 0; h < H; ++h)
              sum[p][m][h] = add_nibbles(sum[p][m][h], w[h], four);
          }
        }
        BATON_UNROLL for (int i = 0; i < (M + 2) / 3; ++i) x[i] += kQuad;
      }
      asm volatile("" ::: "memory");  // totals stay in memory: sums fill the registers
      BATON_UNROLL for (int p = 0; p < P; ++p)
        BATON_UNROLL for (int h = 0; h < H; ++h) {
          const Floats scale = load_half(of.head[p] + 32 * (half + h));
          const Ints zero = as_ints(work.zero(of.head[p], half + h));
          BATON_UNROLL for (int m = 0; m < M; ++m) {
            Ints part = whole_of(sum[p][m][h]);
            if (a.has_zeros) part = add_words(part, zero, broadcast_words(&sums[m * runs].negative));
            if (begin > 0) part = added_ints(part, longer[p][m][h]);
            if (end < quads) {
              longer[p][m][h] = part;
              continue;
            }
            float* to = total[p][m] + 16 * h;
            store(to, rounded_product(as_floats(part), scale) + load(to));
          }
        }
    }
  }
  for (int p = 0; p < P; ++p)
    for (int h = 0; h < H; ++h)
      store_w4a8(work, rows, row, M, (panel + p) * kNarrow + 16 * (half + h),
                 total[p][0] + 16 * h, 16 * H);
}

// `rows` rows, at most M of them, by a unit's panels, which lie side by side.
template <int M = kW4A8Rows>
void multiply_w4a8_block(const IntegerWork& work, const RoundedRows& rounded,
                         const IntegerUnit& unit, int64_t row, int64_t rows) {
  if constexpr (M > 1)
    if (rows < M) return multiply_w4a8_block<M - 1>(work, rounded, unit, row, rows);
  each_panels<M>(unit, row, row + rows, work.at.panel,
                 [&](auto count, int64_t panel, Asking asking) {
                   constexpr int halves = halves_of(M);
                   for (int half = 0; half < 2; half += halves)
                     multiply_w4a8<M, count, halves>(work, rounded, row, panel, asking, half);
                 });
}

}  // namespace baton

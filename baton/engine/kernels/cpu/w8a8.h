// y = x W^T + b with int8 weights and rows rounded to int8: the sums are exact integers.
//
// A row is rounded by its own greatest number (symmetric, as quantization.round_rows does) and
// stored 128 higher, because VNNI multiplies unsigned by signed; what that adds, 128 times the sum
// of an output's weights, is known when the weights are packed. Panels: 32 outputs, [inputs /
// 4][32][4], the inputs filled up with zeros.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "elementwise.h"
#include "quantized.h"

namespace baton {

struct W8A8Args {
  const bf16* x;         // [rows, inputs]
  const int8_t* panels;  // an even number of them
  const int32_t* extra;  // [outputs]: 128 * the sum of the weights
  const float* scales;   // [outputs]
  const bf16* bias;      // [outputs], or null
  bf16* y;               // [rows, outputs]
  uint8_t* rounded;      // room for [rows, 4 * quads]
  float* row_scales;     // room for [rows]
  int64_t rows, inputs, outputs, quads;
  float* wide = nullptr;  // [rows, outputs], instead of y
  int64_t integers = 0;   // whether x holds integers of int8; see round_row
  int64_t stride = 0;     // numbers from a row of y to the next; 0: outputs
};

inline void round_unsigned(const W8A8Args& a, int64_t row) {
  uint8_t* to = a.rounded + row * a.quads * 4;
  a.row_scales[row] =
      round_row(a.x + row * a.inputs, reinterpret_cast<int8_t*>(to), a.inputs, a.integers != 0);
#pragma omp simd  // at -O2 GCC leaves this loop by bytes
  for (int64_t i = 0; i < a.inputs; ++i) to[i] ^= 0x80;
  std::fill(to + a.inputs, to + a.quads * 4, 0x80);
}

// 16 outputs from `at` on, of any row: exact sums as numbers.
struct Int8Outputs {
  const W8A8Args& a;
  const int64_t at, stride;
  const Lanes lanes;
  const Ints extra;
  const Floats scale;

  Int8Outputs(const W8A8Args& args, int64_t first)
      : a(args), at(first), stride(a.stride == 0 ? a.outputs : a.stride),
        lanes(lanes_of(std::max<int64_t>(0, a.outputs - at))),
        extra(load_ints(a.extra + at, lanes)), scale(load(a.scales + at, lanes)) {}

  void store(int64_t row, Ints sum) const {
    Floats y = difference(sum, extra) * broadcast(a.row_scales[row]) * scale;
    if (a.bias != nullptr) y = y + load_wide(a.bias + at, lanes);
    store_output(a, row * stride + at, y, lanes);
  }
};

// M rows, which begin at `rows`, by P panels: outputs from 16 * half on, of H halves.
template <int M, int P, int H>
BATON_VNNI void multiply_int8(const W8A8Args& a, const RowByte* rows, int64_t row, int64_t panel,
                              Asking asking, int half) {
  const int64_t stride = a.quads * 4, size = a.quads * 4 * kNarrow;
  const RowByte* x[(M + 2) / 3];
  for (int m = 0; m < M; m += 3) x[m / 3] = rows + m * stride;
  Ints sum[P][M][H];
  BATON_UNROLL for (int p = 0; p < P; ++p)
    BATON_UNROLL for (int m = 0; m < M; ++m)
      BATON_UNROLL for (int h = 0; h < H; ++h) sum[p][m][h] = Ints{};
  const int64_t turn = std::max<int64_t>(0, size - kFarAhead) / (4 * kNarrow);
  int64_t ahead = asking.ahead;
  for (int64_t quad = 0; quad < a.quads; ++quad) {
    if (quad == turn) ahead = asking.last;
    BATON_UNROLL for (int p = 0; p < P; ++p) {
      const int8_t* lines = a.panels + (panel + p) * size + quad * 4 * kNarrow;
      ask(lines + ahead, 4 * kNarrow);
      dot_quads<M>(sum[p], [&](int m) { return x[m / 3] + m % 3 * stride; }, lines + 64 * half);
    }
    BATON_UNROLL for (int i = 0; i < (M + 2) / 3; ++i) x[i] += 4;
  }
  BATON_UNROLL for (int p = 0; p < P; ++p)
    BATON_UNROLL for (int h = 0; h < H; ++h) {
      const Int8Outputs outputs(a, (panel + p) * kNarrow + 16 * (half + h));
      if (outputs.lanes == 0) continue;
      BATON_UNROLL for (int m = 0; m < M; ++m) outputs.store(row + m, sum[p][m][h]);
    }
}

// `count` rows, at most M of them, which begin at `rows`, by a unit's panels, which lie side by side.
template <int M = kBlockRows>
void multiply_int8_block(const W8A8Args& a, const RowByte* rows, const IntegerUnit& unit,
                         int64_t row, int64_t count) {
  if constexpr (M > 1)
    if (count < M) return multiply_int8_block<M - 1>(a, rows, unit, row, count);
  const int64_t size = a.quads * 4 * kNarrow;
  each_panels<M>(unit, row, row + count, size, [&](auto panels, int64_t panel, Asking asking) {
    constexpr int halves = halves_of(M);
    for (int half = 0; half < 2; half += halves)
      multiply_int8<M, panels, halves>(a, rows, row, panel, asking, half);
  });
}

#ifdef BATON_TILES
constexpr int64_t kFewTiled = 8;  // rows: below, arithmetic is not what takes time

// The rows of a unit, tiled as they were rounded, by its panels.
inline void multiply_int8_tiled(const W8A8Args& a, const uint8_t* rows, const IntegerUnit& unit) {
  const TilesInUse tiles;
  constexpr int64_t kLine = 4 * kNarrow;  // bytes of four inputs
  const int64_t steps = a.quads / kTileRows, size = a.quads * kLine;
  for (int64_t panel = 2 * unit.two; panel < 2 * unit.two + 2; ++panel)
    each_tiled_rows(rows, steps * kTileSize, unit.from, unit.until,
                    [&](const uint8_t* x, int64_t groups, int64_t row, int64_t count) {
      const auto weights = [&](int64_t step, int which) {
        const int8_t* at = a.panels + panel * size + step * kTileRows * kLine + which * kTileBytes;
        if (row == unit.from && which == 0) ask(at + kFarAhead, kTileRows * kLine);
        return TiledWeights{at, kLine};
      };
      alignas(64) int32_t sums[4][16][16];
      multiply_steps<TileProduct::kBytes>(x, groups, steps * kTileSize, 0, steps, weights, sums);
      for (int64_t j = 0; j < 2; ++j) {
        const Int8Outputs outputs(a, panel * kNarrow + 16 * j);
        if (outputs.lanes == 0) continue;
        for (int64_t m = 0; m < count; ++m)
          outputs.store(row + m, load_ints(sums[m / 16 * 2 + j][m % 16], 0xffff));
      }
    });
}
#endif

// Rows as `round_unsigned` leaves them, for a unit.
inline ByteRows rounded_rows(const W8A8Args& a) { return {a.rounded, a.quads}; }

inline void multiply_int8_unit(const W8A8Args& a, ByteRows& rows, const IntegerUnit& unit) {
#ifdef BATON_TILES
  if (unit.until - unit.from >= kFewTiled && a.quads % kTileRows == 0)
    return multiply_int8_tiled(a, rows.tiled.of(unit.from, unit.until), unit);
#endif
  const RowByte* const x = rows.of(unit.from, unit.until);
  each_row_block(unit.from, unit.until, [&](int64_t row, int64_t count) {
    multiply_int8_block(a, x + (row - unit.from) * 4 * a.quads, unit, row, count);
  });
}

inline void w8a8_linear(const W8A8Args& a) {
  in_team(worth(a.rows * a.inputs * a.outputs), [&](Team::Member& me) {
    me.share(a.rows, [&](int64_t row, int64_t) { round_unsigned(a, row); });
    ByteRows rows = rounded_rows(a);
    share_units(me, a.rows, slab_of(4 * a.quads, kBlockRows, a.rows), a.outputs,
                [&](const IntegerUnit& unit) { multiply_int8_unit(a, rows, unit); });
  });
}

// values [outputs, inputs] -> panels (zeros) and `extra`.
inline void pack_w8a8(const int8_t* values, int8_t* panels, int32_t* extra, int64_t outputs,
                      int64_t inputs) {
  const int64_t size = (inputs + 3) / 4 * 4 * kNarrow;
#pragma omp parallel for
  for (int64_t output = 0; output < outputs; ++output) {
    int8_t* to = panels + output / kNarrow * size + output % kNarrow * 4;
    int32_t sum = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      to[i / 4 * 4 * kNarrow + i % 4] = values[output * inputs + i];
      sum += values[output * inputs + i];
    }
    extra[output] = 128 * sum;
  }
}

}  // namespace baton

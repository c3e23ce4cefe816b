// Weights of w4a8.h by many rows: the nibbles of a panel become bytes once, for all blocks of rows. Each
// block then meets lines that need no more work, as w8a8's are. The numbers are w4a8.h's, bit for bit:
// sums of integers are exact.
#pragma once

#include "w4a8.h"

#ifdef __AVX512F__
#define BATON_NIBBLES_ONCE

namespace baton {

constexpr int64_t kNibblesOnceRows = 36;  // fewer do not pay for it
constexpr int kBytesRows = 6;  // at once: 12 registers hold a group's sums, 12 those of all groups
constexpr int64_t kQuadLines = 2 * sizeof(Line);  // a quad of 32 outputs: bytes 4 * (output % 16) + input

inline bool opens_nibbles(const IntegerWork& work, int64_t rows) {
  return rows >= kNibblesOnceRows && work.at.quads <= kRunQuads;
}

// A panel's integers less their zeros and 128 more, at `to`, [groups][quads][2][64].
inline void open_nibbles(const IntegerWork& work, int64_t panel, uint8_t* to) {
  const IntegerLayout& at = work.at;
  for (int64_t g = 0; g < work.a.groups; ++g) {
    const uint8_t* line = work.head(panel, g);
    Line more[2];
    for (int h = 0; h < 2; ++h)
      more[h] = four_bytes(as_ints(broadcast(120.0f) - work.zero(line, h)));
    line += at.header;
    for (int64_t quad = 0; quad < at.quads; ++quad, line += Integers4::bytes, to += kQuadLines) {
      Line w[2];
      load_nibbles<2>(line, 0, w);
      for (int h = 0; h < 2; ++h) store_line(to + h * sizeof(Line), added_bytes(w[h], more[h]));
    }
  }
}

// A panel that is opened. Meanwhile its rows ask memory for bytes [from, until) of each group of the panel
// at `next`.
struct OpenPanel {
  int64_t index;
  const uint8_t *lines, *next;
  int64_t from = 0, until = 0;
};

// M rows by a panel.
template <int M>
BATON_VNNI void multiply_bytes(const IntegerWork& work, const RoundedRows& rows, int64_t row,
                               const OpenPanel& panel) {
  const uint8_t *lines = panel.lines, *next = panel.next;
  const int64_t stride = work.a.inputs, quads = work.at.quads, runs = rows.runs;
  const int8_t* x[(M + 2) / 3];
  for (int m = 0; m < M; m += 3) x[m / 3] = rows.values + (row + m) * stride;
  const RunSums* sums = rows.sums + row * runs;
  Floats total[M][2];
  BATON_UNROLL for (int m = 0; m < M; ++m)
    BATON_UNROLL for (int h = 0; h < 2; ++h) total[m][h] = broadcast(0.0f);
  for (int64_t g = 0; g < work.a.groups; ++g, ++sums) {
    for (int64_t byte = panel.from; byte < panel.until; byte += sizeof(Line)) ask(next + byte, 1);
    next += work.at.group;
    NibbleSums sum[M][2];
    BATON_UNROLL for (int m = 0; m < M; ++m)
      BATON_UNROLL for (int h = 0; h < 2; ++h)
        sum[m][h] = sixteen_times(start_at(sums[m * runs].start));  // 128 more, not 8
    for (int64_t quad = 0; quad < quads; ++quad, lines += kQuadLines) {
      const Line low = load_line(lines), high = load_line(lines + sizeof(Line));
      BATON_UNROLL for (int m = 0; m < M; ++m) {
        const SignedQuad four = broadcast_quad(x[m / 3] + (m % 3) * stride);
        sum[m][0] = add_nibbles(sum[m][0], low, four);
        sum[m][1] = add_nibbles(sum[m][1], high, four);
      }
      BATON_UNROLL for (int i = 0; i < (M + 2) / 3; ++i) x[i] += kQuad;
    }
    const uint8_t* head = work.head(panel.index, g);
    BATON_UNROLL for (int h = 0; h < 2; ++h) {
      const Floats scale = load_half(head + 32 * h);
      BATON_UNROLL for (int m = 0; m < M; ++m)
        total[m][h] = total[m][h] + rounded_product(as_floats(sum[m][h]), scale);
    }
  }
  alignas(64) float made[M][2][16];
  BATON_UNROLL for (int m = 0; m < M; ++m)
    BATON_UNROLL for (int h = 0; h < 2; ++h) store(made[m][h], total[m][h]);
  for (int h = 0; h < 2; ++h)
    store_w4a8(work, rows, row, M, panel.index * kNarrow + 16 * h, made[0][h], 32);
}

// `count` rows, at most M of them, likewise.
template <int M = kBytesRows>
void multiply_bytes_block(const IntegerWork& work, const RoundedRows& rows, int64_t row,
                          int64_t count, const OpenPanel& panel) {
  if constexpr (M > kBytesRows / 2)  // blocks are even
    if (count < M) return multiply_bytes_block<M - 1>(work, rows, row, count, panel);
  multiply_bytes<M>(work, rows, row, panel);
}

// The rows of a unit by its panels.
inline void multiply_bytes_unit(const IntegerWork& work, const RoundedRows& rows,
                                const IntegerUnit& unit) {
  struct Opened;  // the use of the room
  const int64_t bytes = work.a.groups * work.at.quads * kQuadLines;
  uint8_t* const lines = kept_lines<Opened>(bytes);
  const int64_t blocks = (unit.until - unit.from + kBytesRows - 1) / kBytesRows;
  const int64_t share = (work.at.group / blocks + sizeof(Line)) & -sizeof(Line);
  for (int64_t index = 2 * unit.two; index < 2 * unit.two + 2; ++index) {
    const int64_t next = index == 2 * unit.two ? index + 1 : 2 * unit.next;
    open_nibbles(work, index, lines);
    OpenPanel panel{index, lines, work.head(next, 0)};
    each_row_block<kBytesRows>(unit.from, unit.until, [&](int64_t row, int64_t count) {
      panel.from = panel.until;
      panel.until = std::min(work.at.group, panel.until + share);
      multiply_bytes_block(work, rows, row, count, panel);
    });
  }
}

}  // namespace baton

#endif

namespace baton {

inline void multiply_w4a8_unit(const IntegerWork& work, const IntegerUnit& unit) {
  const RoundedRows rounded(work);
#ifdef BATON_NIBBLES_ONCE
  if (opens_nibbles(work, unit.until - unit.from))
    return multiply_bytes_unit(work, rounded, unit);
#endif
  each_row_block<kW4A8Rows>(unit.from, unit.until, [&](int64_t row, int64_t count) {
    multiply_w4a8_block(work, rounded, unit, row, count);
  });
}

}  // namespace baton

// Integer weights by many rows, in products of pairs of bfloat16: a unit widens its two panels once, for
// all its rows, into the core's cache, and the rows read them there as linear.h's read panels. That is
// for integers whose widening takes as long as a good part of their products: 8 and 6 bits. What an
// output adds, and in which order, is what quantized.h's multiply_integers does.
#pragma once

#include "integer_units.h"

namespace baton {

// Rows of a unit from which on its panels are widened once, if `bits` are dear to widen.
constexpr int64_t kWidenedRows = 36;
constexpr int64_t kManyCached = 4 << 20;  // bytes of rows that stay in a cache behind a core's own
constexpr int64_t kAskingPasses = 24, kAskedQuads = 16;
constexpr int64_t kLeastUnits = 4;        // of a thread, unless slabs become too low for widening

#ifdef BATON_WIDENED

inline bool widens_once(const IntegerArgs& a, int64_t rows) {
  return (a.bits == 8 || a.bits == 6) && rows >= kWidenedRows && !tiles_take(a.inputs / a.groups);
}

// Of a product of so many rows, for a team: as high as possible, and even.
inline int64_t widened_slab(int64_t rows, int64_t row_bytes, int64_t outputs) {
  const int64_t units = kLeastUnits * omp_get_num_threads(), twos = twos_of(outputs);
  const int64_t busy = std::min((units + twos - 1) / twos, rows / (2 * kWidenedRows));
  const int64_t slabs = std::max((rows * row_bytes + kManyCached - 1) / kManyCached, busy);
  return (rows + slabs * kRows - 1) / (slabs * kRows) * kRows;
}

// Those panels, group by group: [scales: 64 float32][zeros, likewise][pairs of inputs][64 outputs][2].
constexpr int64_t kPairBytes = 4 * sizeof(Line), kHeaderBytes = 8 * sizeof(Floats);

template <class Source>
BATON_VNNI void widen_panels(const IntegerWork& work, const IntegerUnit& unit, uint8_t* to) {
  const IntegerLayout& at = work.at;
  const Source source = Source::make(work.a.bits);
  for (int64_t p = 0; p < 2; ++p) {
    uint8_t* line = to + p * (kPairBytes / 2);
    for (int64_t g = 0; g < work.a.groups; ++g) {
      const uint8_t* from = work.head(2 * unit.two + p, g);
      ask(from + kFarAhead, at.header);
      for (int64_t h = 0; h < 2; ++h) {
        store(reinterpret_cast<float*>(line) + 16 * h, load_half(from + 32 * h));
        store(reinterpret_cast<float*>(line + kPairBytes) + 16 * h, work.zero(from, h));
      }
      line += kHeaderBytes;
      from += at.header;
      for (int64_t quad = 0; quad < at.quads; ++quad, from += Source::bytes) {
        ask(from + kFarAhead, Source::bytes);
        for (int pair = 0; pair < 2; ++pair, line += kPairBytes) {
          Pairs w[2];
          source.template load<2>(from, 0, pair, w);
          store_line(line, (Line)w[0]);
          store_line(line + sizeof(Line), (Line)w[1]);
        }
      }
    }
  }
}

// The next unit's integers, which the passes over this one's ask of memory, each for an even share:
// `step` bytes with every quad. With many passes rows take the cache, and reading is a small part.
struct NextIntegers {
  const uint8_t* from;
  int64_t step;  // 0: nothing is asked for

  NextIntegers(const IntegerWork& work, const IntegerUnit& unit, int64_t passes)
      : from(work.head(2 * unit.next, 0)), step(0) {
    const int64_t asks = passes * work.a.groups * work.at.quads;
    const bool is_one = 2 * unit.next * kNarrow < work.a.outputs;
    if (is_one && passes <= kAskingPasses) step = (2 * work.at.panel + asks - 1) / asks;
  }
};

// M rows by both panels of a unit.
template <int M, bool Zeros>
void multiply_widened(const IntegerWork& work, const Slab& slab, int64_t row, int64_t output,
                      const uint8_t* lines, const NextIntegers& next) {
  const IntegerArgs& a = work.a;
  const int64_t stride = a.inputs, quads = work.at.quads, groups = a.groups;
  const Factor* x[(M + 3) / 4];  // every fourth row: what lies between is within an address's reach
  for (int m = 0; m < M; m += 4) x[m / 4] = slab.x + (row - slab.from + m) * stride;
  const float* sums = work.sums + row * groups;
  const uint8_t* asked = next.from + (row - slab.from) / kRows * groups * quads * next.step;
  alignas(64) float total[M][4][16] = {};
  for (int64_t g = 0; g < groups; ++g, ++sums) {
    const auto* header = reinterpret_cast<const float*>(lines);
    lines += kHeaderBytes;
    Floats sum[M][4];
    BATON_UNROLL for (int m = 0; m < M; ++m)
      BATON_UNROLL for (int j = 0; j < 4; ++j) sum[m][j] = broadcast(0.0f);
    for (int64_t quad = 0; quad < quads;) {
      const int64_t until = std::min(quad + kAskedQuads, quads);
      for (const uint8_t* end = asked + (until - quad) * next.step; asked < end; asked += 64)
        ask_early(asked);
      for (; quad < until; ++quad, lines += 2 * kPairBytes) {
        BATON_UNROLL for (int pair = 0; pair < 2; ++pair) {
          Pairs w[4];
          BATON_UNROLL for (int j = 0; j < 4; ++j)
            w[j] = pairs_of(load_line(lines + pair * kPairBytes + j * sizeof(Line)));
          BATON_UNROLL for (int m = 0; m < M; ++m) {
            const Pair two = broadcast_pair(x[m / 4] + m % 4 * stride + 2 * pair);
            BATON_UNROLL for (int j = 0; j < 4; ++j) sum[m][j] = dot(sum[m][j], two, w[j]);
          }
        }
        BATON_UNROLL for (int i = 0; i < (M + 3) / 4; ++i) x[i] += kQuad;
      }
    }
    asm volatile("" ::: "memory");  // totals stay in memory: sums fill the registers
    BATON_UNROLL for (int j = 0; j < 4; ++j) {
      const Floats scale = load(header + 16 * j), zero = load(header + 64 + 16 * j);
      BATON_UNROLL for (int m = 0; m < M; ++m) {
        Floats part = sum[m][j];
        if constexpr (Zeros) part = subtract_product(part, broadcast(sums[m * groups]), zero);
        store(total[m][j], multiply_add(part, scale, load(total[m][j])));
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < 4; ++j) store_outputs(a, row + m, output + 16 * j, load(total[m][j]));
}

// Up to M rows likewise.
template <int M = kRows>
void multiply_widened_block(const IntegerWork& work, const Slab& slab, int64_t row, int64_t rows,
                            int64_t output, const uint8_t* lines, const NextIntegers& next) {
  if constexpr (M > 1)
    if (rows < M) return multiply_widened_block<M - 1>(work, slab, row, rows, output, lines, next);
  if (work.a.has_zeros)
    multiply_widened<M, true>(work, slab, row, output, lines, next);
  else
    multiply_widened<M, false>(work, slab, row, output, lines, next);
}

// The rows of a unit by its panels.
template <class Source>
void multiply_widened_unit(const IntegerWork& work, const Slab& slab, const IntegerUnit& unit) {
  struct Widened;  // the use of the room
  const int64_t bytes = work.a.groups * (kHeaderBytes + 2 * work.at.quads * kPairBytes);
  uint8_t* const lines = kept_lines<Widened>(bytes);
  widen_panels<Source>(work, unit, lines);
  const int64_t passes = (slab.until - slab.from + kRows - 1) / kRows;
  const NextIntegers next(work, unit, passes);
  for (int64_t row = slab.from; row < slab.until; row += kRows)
    multiply_widened_block(work, slab, row, std::min<int64_t>(kRows, slab.until - row),
                           2 * unit.two * kNarrow, lines, next);
}

#else

inline bool widens_once(const IntegerArgs&, int64_t) { return false; }
inline int64_t widened_slab(int64_t rows, int64_t, int64_t) { return rows; }

#endif

}  // namespace baton

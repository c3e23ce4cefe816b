// y = x W^T + b for bfloat16 rows and integer weights, which are widened on their way from memory.
//
// w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g] * peak[o], i in group g. The integers, exact in
// bfloat16, meet x in pair products; a group's sum takes its zero and scale in float32:
//     y[o] = peak[o] * sum over g of scale[o, g] * (sum of q x - zero[o, g] * sum of x) + b[o]
//
// A panel holds 32 outputs, one stream that is read once: group after group [scales: 32 float16]
// [zeros: 32 float16, if any] [lines]. A line of 64 bytes: 8 bits, two inputs of 32 outputs, where
// Bytes::place says; 4 bits, four inputs, nibble n of its words being inputs 2 * (n / 2) + 0, 1 of
// outputs 16 * (n % 2) + 0..15.
// Every block of rows widens for itself, in registers: a widened copy in the cache, shared by the
// blocks, was no faster (docs/quantization.md). Tiles take their weights from memory: there a unit
// widens its panels once, into the cache. An output adds its inputs in their order, two at a time (in
// tiles 32), whatever the number of rows: what a row computes depends on no other row.
#pragma once

#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "linear.h"
#include "vectors.h"

namespace baton {

// Where a pair's 64 bytes hold an input of an output: byte 2 * (output % 16) + input % 2 of one of two
// vectors, which lie in turns of 8.
inline int64_t place_in_turns(int64_t output, int64_t input) {
  const int64_t byte = 2 * (output % 16);
  return byte / 8 * 16 + output / 16 * 8 + byte % 8 + input % 2;
}

}  // namespace baton

#ifdef __AVX512F__
#include "integers_avx512.h"
#else
#include "integers_avx2.h"
#endif

namespace baton {

constexpr int64_t kNarrow = 32;      // outputs of a panel
constexpr int64_t kQuad = 4;         // inputs at once
constexpr int64_t kFarAhead = 8192;  // bytes between asking memory for lines and using them

struct IntegerArgs {
  const bf16* x;          // [rows, inputs]
  const uint8_t* panels;  // an even number of them
  const float* peaks;     // [outputs]
  const bf16* bias;       // [outputs], or null
  bf16* y;                // [rows, outputs]
  int64_t rows, inputs, outputs, groups, bits, has_zeros;
  float* wide = nullptr;  // [rows, outputs], instead of y
};

// Asks for lines also beyond the end of the panels, which does nothing.
inline void ask(const void* from, int64_t count) {
  for (int64_t at = 0; at < count; at += 64) ask(static_cast<const char*>(from) + at);
}

// What a thread does at once: rows [from, until) by two panels, then those of `next`.
struct IntegerUnit {
  int64_t from, until, two, next;
};

// Weights come from memory once and must be asked for early: how far ahead of those that are read,
// in bytes, up to the panel's last kFarAhead, and there, where the next panel's follow.
struct Asking {
  int64_t ahead, last;
  // By rows from `row` on, until `until`, of a panel that `next` follows.
  static Asking of(const IntegerUnit& unit, int64_t row, int64_t until, int64_t panel,
                   int64_t next, int64_t panel_bytes) {
    if (row == unit.from && until == unit.until)
      return {kFarAhead, kFarAhead + (next - panel - 1) * panel_bytes};
    // Several blocks of rows: the last asks for the next unit's, which then are all in the cache.
    const int64_t ahead = until == unit.until ? 2 * (unit.next - unit.two) * panel_bytes : 0;
    return {ahead, ahead};
  }
};

// Where things lie in a panel, and what the rows' groups sum to.
struct IntegerLayout {
  int64_t quads, header, group, panel;  // quads of a group; bytes
  explicit IntegerLayout(const IntegerArgs& a)
      : quads(a.inputs / a.groups / kQuad), header(a.has_zeros ? 128 : 64),
        group(header + quads * (a.bits == 4 ? Nibbles::bytes : Bytes::bytes)),
        panel(a.groups * group) {}
};

struct IntegerWork {
  const IntegerArgs& a;
  const IntegerLayout at;
  const float* sums;  // [rows, groups] of x, if there are zeros
};

// Up to 6 rows meet both panels of a unit at once, more one after the other. Calls work(number of
// panels, the first, asking), the number being a constant.
template <int M, class Work>
void each_panels(const IntegerUnit& unit, int64_t row, int64_t until, int64_t panel_bytes,
                 const Work& work) {
  const int64_t first = 2 * unit.two, next = 2 * unit.next;
  if constexpr (M <= kBothRows) {
    work(std::integral_constant<int, 2>(), first,
         Asking::of(unit, row, until, first, next, panel_bytes));
  } else {
    constexpr std::integral_constant<int, 1> one;
    work(one, first, Asking::of(unit, row, until, first, first + 1, panel_bytes));
    work(one, first + 1, Asking::of(unit, row, until, first + 1, next, panel_bytes));
  }
}

inline void store_outputs(const IntegerArgs& a, int64_t row, int64_t output, Floats sum) {
  const Lanes lanes = lanes_of(std::max<int64_t>(0, a.outputs - output));
  if (lanes == 0) return;
  Floats bias = broadcast(0.0f);
  if (a.bias != nullptr) bias = load_wide(a.bias + output, lanes);
  const Floats peak = load(a.peaks + output, lanes);
  store_output(a, row * a.outputs + output, multiply_add(sum, peak, bias), lanes);
}

// M rows by P panels: outputs from 16 * half on, of H halves.
template <class Source, int M, int P, int H>
BATON_VNNI void multiply_integers(const IntegerWork& work, const Slab& slab, int64_t row,
                                  int64_t panel, Asking asking, int half) {
  const IntegerArgs& a = work.a;
  const IntegerLayout& at = work.at;
  const Source source = Source::make();
  const int64_t stride = a.inputs;
  const Factor* x[(M + 2) / 3];  // every third row: the others are one and two strides away
  for (int m = 0; m < M; m += 3) x[m / 3] = slab.x + (row - slab.from + m) * stride;
  alignas(64) float total[P][M][16 * H] = {};
  for (int64_t g = 0; g < a.groups; ++g) {
    const uint8_t* head[P];
    const uint8_t* lines[P];
    for (int p = 0; p < P; ++p) {
      head[p] = a.panels + (panel + p) * at.panel + g * at.group;
      lines[p] = head[p] + at.header;
    }
    const int64_t left = at.panel - kFarAhead - g * at.group;  // before the last kFarAhead bytes
    const int64_t turn = std::clamp<int64_t>((left - at.header) / Source::bytes, 0, at.quads);
    int64_t ahead = left > 0 ? asking.ahead : asking.last;
    for (int p = 0; p < P; ++p) ask(head[p] + ahead, at.header);
    Floats sum[P][M][H];
    BATON_UNROLL for (int p = 0; p < P; ++p)
      BATON_UNROLL for (int m = 0; m < M; ++m)
        BATON_UNROLL for (int h = 0; h < H; ++h) sum[p][m][h] = broadcast(0.0f);
    for (int64_t quad = 0; quad < at.quads; ++quad) {
      if (quad == turn) ahead = asking.last;
      BATON_UNROLL for (int p = 0; p < P; ++p) {
        ask(lines[p] + quad * Source::bytes + ahead, Source::bytes);
        BATON_UNROLL for (int pair = 0; pair < 2; ++pair) {
          Pairs w[H];
          source.template load<H>(lines[p] + quad * Source::bytes, half, pair, w);
          BATON_UNROLL for (int m = 0; m < M; ++m) {
            const Pair two = broadcast_pair(x[m / 3] + kQuad * quad + (m % 3) * stride + 2 * pair);
            BATON_UNROLL for (int h = 0; h < H; ++h)
              sum[p][m][h] = dot(sum[p][m][h], two, w[h]);
          }
        }
      }
    }
    BATON_UNROLL for (int i = 0; i < (M + 2) / 3; ++i) x[i] += kQuad * at.quads;
    BATON_UNROLL for (int p = 0; p < P; ++p)
      BATON_UNROLL for (int h = 0; h < H; ++h) {
        const uint8_t* factors = head[p] + 32 * (half + h);
        const Floats scale = load_half(factors);
        const Floats zero = a.has_zeros ? load_half(factors + 64) : broadcast(0.0f);
        BATON_UNROLL for (int m = 0; m < M; ++m) {
          Floats part = sum[p][m][h];
          if (a.has_zeros)
            part = subtract_product(part, broadcast(work.sums[(row + m) * a.groups + g]), zero);
          float* to = total[p][m] + 16 * h;
          store(to, multiply_add(part, scale, load(to)));
        }
      }
  }
  for (int p = 0; p < P; ++p)
    for (int m = 0; m < M; ++m)
      for (int h = 0; h < H; ++h)
        store_outputs(a, row + m, (panel + p) * kNarrow + 16 * (half + h),
                      load(total[p][m] + 16 * h));
}

// `rows` rows, at most M of them, by a unit's panels, which lie side by side.
template <class Source, int M = kBlockRows>
void multiply_block(const IntegerWork& work, const Slab& slab, const IntegerUnit& unit,
                    int64_t row, int64_t rows) {
  if constexpr (M > 1)
    if (rows < M) return multiply_block<Source, M - 1>(work, slab, unit, row, rows);
  each_panels<M>(unit, row, row + rows, work.at.panel,
                 [&](auto count, int64_t panel, Asking asking) {
                   constexpr int halves = halves_of(M);
                   for (int half = 0; half < 2; half += halves)
                     multiply_integers<Source, M, count, halves>(work, slab, row, panel, asking,
                                                                 half);
                 });
}

// Even blocks of rows [from, until): 16 are 8 and 8, not 12 and 4. Calls work(row, count).
template <class Work>
void each_row_block(int64_t from, int64_t until, const Work& work) {
  int64_t parts = (until - from + kBlockRows - 1) / kBlockRows;
  for (int64_t row = from; row < until; --parts) {
    const int64_t count = (until - row + parts - 1) / parts;
    work(row, count);
    row += count;
  }
}

// Panels lie in twos; a slab of rows that fits the cache meets one after the other.
inline int64_t twos_of(int64_t outputs) { return (outputs + 2 * kNarrow - 1) / (2 * kNarrow); }

// What a thread of a team does for a product of rows of so many bytes: work(unit) for its units.
template <class Work>
void share_units(Team::Member& me, int64_t rows, int64_t row_bytes, int64_t outputs,
                 const Work& work) {
  share_slabs(me, rows, slab_of(row_bytes, kBlockRows), twos_of(outputs),
              [&](int64_t from, int64_t until, int64_t two, int64_t next) {
                work(IntegerUnit{from, until, two, next});
              });
}

// What each group of a row adds up to, [groups].
inline void sum_groups(const IntegerArgs& a, int64_t row, float* sums) {
  const int64_t size = a.inputs / a.groups;
  for (int64_t g = 0; g < a.groups; ++g) {
    const bf16* x = a.x + row * a.inputs + g * size;
    Floats sum = broadcast(0.0f);
    for (int64_t i = 0; i < size; i += 16) sum = sum + load_wide(x + i, lanes_of(size - i));
    sums[g] = sum_of(sum);
  }
}

#ifdef BATON_TILES
// A panel's integers as bfloat16: [pairs of inputs][32 outputs][2].
template <class Source>
BATON_VNNI void widen_panel(const IntegerWork& work, int64_t panel, uint8_t* to) {
  const IntegerLayout& at = work.at;
  const Source source = Source::make();
  const uint8_t* from = work.a.panels + panel * at.panel;
  for (int64_t g = 0; g < work.a.groups; ++g, from += at.group) {
    ask(from + kFarAhead, at.header);
    for (int64_t quad = 0; quad < at.quads; ++quad) {
      const uint8_t* line = from + at.header + quad * Source::bytes;
      ask(line + kFarAhead, Source::bytes);
      for (int pair = 0; pair < 2; ++pair, to += 2 * kTileBytes) {
        Pairs w[2];
        source.template load<2>(line, 0, pair, w);
        store_line(to, joined(w[0]));
        store_line(to + kTileBytes, joined(w[1]));
      }
    }
  }
}

// Kept for the next ones: memory of this size comes from the kernel, page by page.
inline uint8_t* widened_room(int64_t bytes) {
  static thread_local std::vector<uint8_t> room;
  if (static_cast<int64_t>(room.size()) < bytes) room.resize(bytes);
  return room.data();
}

// The rows of a unit, tiled, by its panels.
template <class Source>
void multiply_integers_tiled(const IntegerWork& work, const uint8_t* rows,
                             const IntegerUnit& unit) {
  const IntegerArgs& a = work.a;
  const TilesInUse tiles;
  const int64_t size = a.inputs / a.groups, group = a.inputs / kTilePairs * kTileSize;
  constexpr int64_t kLine = 2 * kTileBytes;  // of a pair of inputs
  uint8_t* const widened = widened_room(a.inputs / 2 * kLine);
  for (int64_t panel = 2 * unit.two; panel < 2 * unit.two + 2; ++panel) {
    widen_panel<Source>(work, panel, widened);
    const auto weights = [&](int64_t step, int which) {
      return TiledWeights{widened + step * kTileRows * kLine + which * kTileBytes, kLine};
    };
    each_tiled_rows(rows, group, unit.from, unit.until, [&](const uint8_t* x, int64_t groups,
                                                            int64_t row, int64_t count) {
      alignas(64) float total[kTiledRows][kNarrow] = {};
      for (int64_t g = 0; g < a.groups; ++g) {
        alignas(64) float sums[4][16][16];
        const int64_t first = g * size / kTilePairs, until = (g + 1) * size / kTilePairs;
        multiply_steps<TileProduct::kPairs>(x, groups, group, first, until, weights, sums);
        const uint8_t* factors = a.panels + panel * work.at.panel + g * work.at.group;
        for (int64_t j = 0; j < 2; ++j) {
          const Floats scale = load_half(factors + 32 * j);
          const Floats zero = a.has_zeros ? load_half(factors + 32 * j + 64) : broadcast(0.0f);
          for (int64_t m = 0; m < count; ++m) {
            Floats part = load(sums[m / 16 * 2 + j][m % 16]);
            if (a.has_zeros)
              part = subtract_product(part, broadcast(work.sums[(row + m) * a.groups + g]), zero);
            float* to = total[m] + 16 * j;
            store(to, multiply_add(part, scale, load(to)));
          }
        }
      }
      for (int64_t m = 0; m < count; ++m)
        for (int64_t j = 0; j < 2; ++j)
          store_outputs(a, row + m, panel * kNarrow + 16 * j, load(total[m] + 16 * j));
    });
  }
}
#endif

// Whether tiles take products of such groups of inputs.
inline bool tiles_take(const IntegerArgs& a) { return tiles_take(a.inputs / a.groups); }

inline void multiply_unit(const IntegerWork& work, Rows& rows, const IntegerUnit& unit) {
#ifdef BATON_TILES
  if (tiles_take(work.a)) {
    const uint8_t* tiled = rows.tiled.of(unit.from, unit.until);
    if (work.a.bits == 4)
      multiply_integers_tiled<Nibbles>(work, tiled, unit);
    else
      multiply_integers_tiled<Bytes>(work, tiled, unit);
    return;
  }
#endif
  const Slab slab{rows.factors.of(unit.from, unit.until), unit.from, unit.until};
  each_row_block(unit.from, unit.until, [&](int64_t row, int64_t count) {
    if (work.a.bits == 4)
      multiply_block<Nibbles>(work, slab, unit, row, count);
    else
      multiply_block<Bytes>(work, slab, unit, row, count);
  });
}

inline void integer_linear(const IntegerArgs& a) {
  std::vector<float> sums(a.has_zeros ? a.rows * a.groups : 0);
  if (a.has_zeros)
    for (int64_t row = 0; row < a.rows; ++row) sum_groups(a, row, sums.data() + row * a.groups);
  const IntegerWork work{a, IntegerLayout(a), sums.data()};
  in_team(a.rows * a.inputs * a.outputs, [&](Team::Member& me) {
    Rows rows(a.x, a.inputs);
    share_units(me, a.rows, sizeof(Factor) * a.inputs, a.outputs,
                [&](const IntegerUnit& unit) { multiply_unit(work, rows, unit); });
  });
}

struct IntegerPack {
  const int8_t* values;    // [outputs, inputs]; of 4 bits: -8..7
  const uint16_t* scales;  // [outputs, groups] float16, of an output's peak
  const uint16_t* zeros;   // likewise, or null
  uint8_t* panels;         // zeros
  int64_t outputs, inputs, groups, bits;
};

inline void pack_integers(const IntegerPack& a) {
  const IntegerArgs like{nullptr, a.panels, nullptr, nullptr, nullptr, 0,
                         a.inputs, a.outputs, a.groups, a.bits, a.zeros != nullptr};
  const IntegerLayout at(like);
  const int64_t size = a.inputs / a.groups;
#pragma omp parallel for schedule(static, kNarrow)  // outputs of a panel share bytes
  for (int64_t output = 0; output < a.outputs; ++output) {
    const int64_t o = output % kNarrow;
    for (int64_t g = 0; g < a.groups; ++g) {
      uint8_t* to = a.panels + output / kNarrow * at.panel + g * at.group;
      std::memcpy(to + 2 * o, a.scales + output * a.groups + g, 2);
      if (a.zeros) std::memcpy(to + 64 + 2 * o, a.zeros + output * a.groups + g, 2);
      to += at.header;
      const int8_t* from = a.values + output * a.inputs + g * size;
      for (int64_t i = 0; i < size; i += 2) {
        if (a.bits == 8) {
          for (int64_t at = i; at < i + 2; ++at)
            to[at / 2 * 64 + Bytes::place(o, at)] = Bytes::code(from[at]);
          continue;
        }
        // Word 2 * (o % 16) + input % 2, nibble 2 * (pair of the quad) + o / 16.
        const int64_t nibble = i % 4 + o / 16;
        for (int64_t odd = 0; odd < 2; ++odd) {
          const int64_t byte = i / 4 * 64 + 2 * (2 * (o % 16) + odd) + nibble / 2;
          to[byte] |= static_cast<uint8_t>((from[i + odd] + 8) & 15) << 4 * (nibble % 2);
        }
      }
    }
  }
}

}  // namespace baton

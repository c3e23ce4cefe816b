// y = x W^T + b for bfloat16 rows and integer weights, which are widened on their way from memory.
//
// w[o, i] = (q[o, i] - zero[o, g]) * scale[o, g] * peak[o], i in group g. The integers meet x in
// products of pairs, exact in bfloat16, or of words (integer_words.h); a group's sum takes its zero and
// scale in float32:
//     y[o] = peak[o] * sum over g of scale[o, g] * (sum of q x - zero[o, g] * sum of x) + b[o]
//
// Every block of rows widens for itself, in registers; 8 and 6 bits are widened once for many rows
// (integer_widened.h). Tiles take their weights from memory: there a unit widens its panels once, into
// the cache. An output adds its inputs in their order, two at a time (in tiles 32), whatever the number
// of rows: what a row computes depends on no other row.
#pragma once

#include <omp.h>

#include <vector>

#include "integer_tiles.h"
#include "integer_units.h"
#include "integer_widened.h"
#include "integer_words.h"
#include "w4a8_bytes.h"

namespace baton {

// M rows by P panels: outputs from 16 * half on, of H halves.
template <class Source, int M, int P, int H>
BATON_VNNI void multiply_integers(const IntegerWork& work, const Slab& slab, int64_t row,
                                  int64_t panel, Asking asking, int half) {
  const IntegerArgs& a = work.a;
  const IntegerLayout& at = work.at;
  const Source source = Source::make(a.bits);
  const int64_t stride = a.inputs;
  const Factor* x[(M + 2) / 3];  // every third row: the others are one and two strides away
  for (int m = 0; m < M; m += 3) x[m / 3] = slab.x + (row - slab.from + m) * stride;
  alignas(64) float total[P][M][16 * H] = {};
  for (int64_t g = 0; g < a.groups; ++g) {
    GroupLines<Source, P> of(work, panel, g, asking);
    Floats sum[P][M][H];
    BATON_UNROLL for (int p = 0; p < P; ++p)
      BATON_UNROLL for (int m = 0; m < M; ++m)
        BATON_UNROLL for (int h = 0; h < H; ++h) sum[p][m][h] = broadcast(0.0f);
    for (int64_t quad = 0; quad < at.quads; ++quad) {
      if (quad == of.turn) of.ahead = of.last;
      BATON_UNROLL for (int p = 0; p < P; ++p) {
        const uint8_t* line = of.lines[p] + quad * Source::bytes;
        ask(line + of.ahead, Source::bytes);
        BATON_UNROLL for (int pair = 0; pair < 2; ++pair) {
          Pairs w[H];
          source.template load<H>(line, half, pair, w);
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
        const Floats scale = load_half(of.head[p] + 32 * (half + h));
        const Floats zero = work.zero(of.head[p], half + h);
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

// `rows` rows, at most M of them, by a unit's panels, which lie side by side. Rows: a Slab or WordRows'.
template <class Source, class Rows, int M = kBlockRows>
void multiply_block(const IntegerWork& work, const Rows& slab, const IntegerUnit& unit,
                    int64_t row, int64_t rows) {
  if constexpr (M > 1)
    if (rows < M) return multiply_block<Source, Rows, M - 1>(work, slab, unit, row, rows);
  each_panels<M>(unit, row, row + rows, work.at.panel,
                 [&](auto count, int64_t panel, Asking asking) {
                   constexpr int halves = halves_of(M);
                   for (int half = 0; half < 2; half += halves)
                     multiply_integers<Source, M, count, halves>(work, slab, row, panel, asking,
                                                                 half);
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

// Whether tiles take products of such groups of inputs.
inline bool tiles_take(const IntegerArgs& a) { return tiles_take(a.inputs / a.groups); }

// Rows that are rounded to unsigned bytes, as one thread's products take them: as numbers of that kind.
template <class Number>
class ByteRowsAs {
 public:
  TiledRows tiled;

  // rows [.., 4 * quads], or null: there are none.
  ByteRowsAs(const uint8_t* rows, int64_t quads)
      : tiled(rows, kQuad * quads), rows_(rows), quads_(quads) {}

  // Those of row `from` on; rows [from, until) may be read, until others are asked for.
  const Number* of(int64_t from, int64_t until) {
    if constexpr (std::is_same_v<Number, uint8_t>) {
      return rows_ + from * kQuad * quads_;
    } else {
      Number* const to = kept_room<ByteRowsAs, Number>((until - from) * kQuad * quads_);
      if (from_ != from || until_ != until) spread(to, from, until);
      return to;
    }
  }

 private:
  void spread(Number* to, int64_t from, int64_t until) {
    const uint8_t* x = rows_ + from * kQuad * quads_;
    for (int64_t quad = 0; quad < (until - from) * quads_; ++quad, x += kQuad, to += kQuad) {
      to[0] = x[0];
      to[1] = x[2];
      to[2] = x[1];
      to[3] = x[3];
    }
    from_ = from;
    until_ = until;
  }

  const uint8_t* rows_;
  int64_t quads_, from_ = 0, until_ = 0;
};

using ByteRows = ByteRowsAs<RowByte>;

// The rows of a product by integers, as one thread takes them.
struct IntegerRows : Rows {
  WordRows words;
  ByteRows rounded;

  // x [.., inputs].
  IntegerRows(const bf16* x, int64_t inputs)
      : Rows(x, inputs), words(x, inputs), rounded(nullptr, 0) {}
};

// Bytes of a row of so many inputs that units read.
inline int64_t integer_row_bytes(int64_t inputs) {
  return (kWords || kTiles ? 2 : sizeof(Factor)) * inputs;
}

// Rows of the slabs that a team shares.
inline int64_t integer_slab(const IntegerArgs& a) {
  const int64_t row_bytes = integer_row_bytes(a.inputs);
  if (a.bits == kW4A8) return slab_of(a.inputs, kW4A8Rows, a.rows);
  if (widens_once(a, a.rows)) return widened_slab(a.rows, row_bytes, a.outputs);
  return slab_of(row_bytes, kBlockRows, a.rows);
}

// Numbers of IntegerWork::sums that a row needs.
inline int64_t sums_of_row(const IntegerArgs& a) {
  if (a.bits == kW4A8) return RoundedRows::room(a.inputs);
  return a.has_zeros && (!kWords || tiles_take(a)) ? a.groups : 0;
}

// Finds them.
inline void prepare_row(const IntegerWork& work, int64_t row) {
  if (work.a.bits == kW4A8) return RoundedRows(work).round(work.a, row, work.at);
  sum_groups(work.a, row, work.sums + row * work.a.groups);
}

template <class Source>
struct OfSource {
  using Type = Source;
};

// Calls work(OfSource of so many bits).
template <class Work>
void by_source(int64_t bits, const Work& work) {
#ifdef BATON_SIXES
  if (bits == 6) return work(OfSource<Sixes>());
#endif
  if (bits == 8) return work(OfSource<Bytes>());
  if (bits == 4) return work(OfSource<Integers4>());
  work(OfSource<Floats4>());
}

inline void multiply_unit(const IntegerWork& work, IntegerRows& rows, const IntegerUnit& unit) {
  if (work.a.bits == kW4A8) return multiply_w4a8_unit(work, unit);
#ifdef BATON_TILES
  if (tiles_take(work.a)) {
    const uint8_t* tiled = rows.tiled.of(unit.from, unit.until);
    return by_source(work.a.bits, [&](auto source) {
      multiply_integers_tiled<typename decltype(source)::Type>(work, tiled, unit);
    });
  }
#endif
#ifdef BATON_WORDS
  const WordSlab slab = rows.words.of(unit.from, unit.until, work.at);
#else
  const Slab slab{rows.factors.of(unit.from, unit.until), unit.from, unit.until};
#endif
#ifdef BATON_WIDENED
  if (widens_once(work.a, unit.until - unit.from)) {
    if (work.a.bits == 6) return multiply_widened_unit<Sixes>(work, slab, unit);
    return multiply_widened_unit<Bytes>(work, slab, unit);
  }
#endif
  each_row_block(unit.from, unit.until, [&](int64_t row, int64_t count) {
    by_source(work.a.bits, [&](auto source) {
      multiply_block<typename decltype(source)::Type>(work, slab, unit, row, count);
    });
  });
}

inline void integer_linear(const IntegerArgs& a) {
  std::vector<float> sums(a.rows * sums_of_row(a));
  const IntegerWork work{a, IntegerLayout(a), sums.data()};
  in_team(worth(a.rows * a.inputs * a.outputs), [&](Team::Member& me) {
    if (!sums.empty()) me.share(a.rows, [&](int64_t row, int64_t) { prepare_row(work, row); });
    IntegerRows rows(a.x, a.inputs);
    share_units(me, a.rows, integer_slab(a), a.outputs,
                [&](const IntegerUnit& unit) { multiply_unit(work, rows, unit); });
  });
}

struct IntegerPack {
  const int8_t* values;    // [outputs, inputs]; of 4 bits: -8..7, or numbers of Floats4
  const uint16_t* scales;  // [outputs, groups] float16, of an output's peak
  const uint16_t* zeros;   // likewise, or null
  uint8_t* panels;         // zeros
  int64_t outputs, inputs, groups, bits;
};

inline void pack_integers(const IntegerPack& a) {
  const IntegerArgs like{nullptr, a.panels, nullptr, nullptr, nullptr, 0,
                         a.inputs, a.outputs, a.groups, a.bits, a.zeros != nullptr,
                         a.outputs};
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
#ifdef BATON_SIXES
        if (a.bits == 6) {
          for (int64_t at = i; at < i + 2; ++at)
            Sixes::put(to + at / 4 * Sixes::bytes, o, at, from[at]);
          continue;
        }
#endif
        if (a.bits == 8) {
          for (int64_t at = i; at < i + 2; ++at)
            to[at / 2 * 64 + Bytes::place(o, at)] = Bytes::code(from[at]);
          continue;
        }
        if (a.bits == kW4A8) {
          for (int64_t at = i; at < i + 2; ++at) put_w4a8(to + at / 4 * 64, o, at, from[at]);
          continue;
        }
        // Word 2 * (o % 16) + input % 2, nibble 2 * (pair of the quad) + o / 16.
        const int64_t nibble = i % 4 + o / 16;
        for (int64_t odd = 0; odd < 2; ++odd) {
          const int64_t byte = i / 4 * 64 + 2 * (2 * (o % 16) + odd) + nibble / 2;
          const int number = from[i + odd];
          const int code = a.bits == 4 ? (number + 8) & 15 : code_of_float4(number);
          to[byte] |= static_cast<uint8_t>(code << 4 * (nibble % 2));
        }
      }
    }
  }
}

}  // namespace baton

// Integer weights in panels: how they lie, who takes which, and where outputs go.
//
// A panel holds 32 outputs, one stream that is read once: group after group [scales: 32 float16]
// [zeros: 32 float16, if any] [lines]. A line of 64 bytes: 8 bits, two inputs of 32 outputs, where
// Bytes::place says; 4 bits, four inputs, nibble n of its words being inputs 2 * (n / 2) + 0, 1 of
// outputs 16 * (n % 2) + 0..15. A nibble is an integer, 8 less (Integers4), or twice an E2M1 number:
// its magnitude's place in a table, and a sign (Floats4). 6 bits: lines of 96 bytes, see Sixes, where
// there are any.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear.h"
#include "vectors.h"

namespace baton {

// Where a pair's 64 bytes hold an input of an output: byte 2 * (output % 16) + input % 2 of one of two
// vectors, which lie in turns of 8.
inline int64_t place_in_turns(int64_t output, int64_t input) {
  const int64_t byte = 2 * (output % 16);
  return byte / 8 * 16 + output / 16 * 8 + byte % 8 + input % 2;
}

constexpr int64_t kFloats4 = -4;  // in place of a number of bits
constexpr int64_t kW4A8 = 48;     // likewise: integers of 4 bits, by rows rounded to int8 (w4a8.h)

// What a nibble of Floats4 stands for, and back.
inline int number_of_float4(int code) {
  constexpr int magnitudes[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  return code < 8 ? magnitudes[code] : -magnitudes[code - 8];
}

inline int code_of_float4(int number) {
  const int magnitude = number < 0 ? -number : number;
  const int code = magnitude <= 4 ? magnitude : 4 + (magnitude - 4) / 2 - magnitude / 12;
  return number < 0 ? code + 8 : code;
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

// Bytes of a quad of 32 outputs.
inline int64_t quad_bytes(int64_t bits) {
#ifdef BATON_SIXES
  if (bits == 6) return Sixes::bytes;
#endif
  return bits == 8 ? Bytes::bytes : Integers4::bytes;
}

struct IntegerArgs {
  const bf16* x;          // [rows, inputs]
  const uint8_t* panels;  // an even number of them
  const float* peaks;     // [outputs]
  const bf16* bias;       // [outputs], or null
  bf16* y;                // [rows, outputs]
  int64_t rows, inputs, outputs, groups, bits, has_zeros;  // bits: 8, 6, 4, kFloats4, kW4A8
  int64_t stride;         // numbers from a row of y to the next
  float* wide = nullptr;  // [rows, outputs], instead of y
  int64_t integers = 0;   // kW4A8: whether x holds integers of int8; see round_row
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
        group(header + quads * quad_bytes(a.bits)),
        panel(a.groups * group) {}
};

struct IntegerWork {
  const IntegerArgs& a;
  const IntegerLayout at;
  float* sums;  // [rows, groups] of x, if there are zeros; or RoundedRows

  // Where a panel's group begins, and the zeros of 16 of its outputs.
  const uint8_t* head(int64_t panel, int64_t group) const {
    return a.panels + panel * at.panel + group * at.group;
  }
  Floats zero(const uint8_t* head, int64_t which) const {
    return a.has_zeros ? load_half(head + 64 + 32 * which) : broadcast(0.0f);
  }
};

// A group of P panels that are read side by side, its quads in order.
template <class Source, int P>
struct GroupLines {
  const uint8_t* head[P];
  const uint8_t* lines[P];
  int64_t turn, ahead, last;  // from quad `turn` on memory is asked for `last` ahead

  GroupLines(const IntegerWork& work, int64_t panel, int64_t group, Asking asking) {
    const IntegerLayout& at = work.at;
    for (int p = 0; p < P; ++p) {
      head[p] = work.head(panel + p, group);
      lines[p] = head[p] + at.header;
    }
    const int64_t left = at.panel - kFarAhead - group * at.group;  // before the last kFarAhead bytes
    turn = std::clamp<int64_t>((left - at.header) / Source::bytes, 0, at.quads);
    ahead = left > 0 ? asking.ahead : asking.last;
    last = asking.last;
    for (int p = 0; p < P; ++p) ask(head[p] + ahead, at.header);
  }
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
  store_output(a, row * a.stride + output, multiply_add(sum, peak, bias), lanes);
}

// Even blocks of rows [from, until): 16 are 8 and 8, not 12 and 4. Calls work(row, count).
template <int64_t Most = kBlockRows, class Work>
void each_row_block(int64_t from, int64_t until, const Work& work) {
  int64_t parts = (until - from + Most - 1) / Most;
  for (int64_t row = from; row < until; --parts) {
    const int64_t count = (until - row + parts - 1) / parts;
    work(row, count);
    row += count;
  }
}

// Panels lie in twos; a slab of rows that fits the cache meets one after the other.
inline int64_t twos_of(int64_t outputs) { return (outputs + 2 * kNarrow - 1) / (2 * kNarrow); }

// What a thread of a team does for a product of rows in slabs of `height`: work(unit) for its units.
template <class Work>
void share_units(Team::Member& me, int64_t rows, int64_t height, int64_t outputs,
                 const Work& work) {
  share_slabs(me, rows, height, twos_of(outputs),
              [&](int64_t from, int64_t until, int64_t two, int64_t next) {
                work(IntegerUnit{from, until, two, next});
              });
}

}  // namespace baton

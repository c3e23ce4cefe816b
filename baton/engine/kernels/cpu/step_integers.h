// A step's products by integer weights: the units of quantized.h and w8a8.h, shared among a team.
//
// What units need of the rows is found once for a product, in a phase of its own: the rows rounded
// to int8, or the sums that meet the zeros of the groups.
#pragma once

#include <algorithm>
#include <vector>

#include "quantized.h"
#include "team.h"
#include "w8a8.h"

namespace baton {

struct StepIntegers {
  const uint8_t* panels;
  const float* scales;   // [outputs]: IntegerArgs' peaks, W8A8Args' scales
  const int32_t* extra;  // W8A8Args'; null: rows are not rounded
  int64_t groups, bits, has_zeros;
  int64_t outputs, stride;   // of these; numbers from a row of y to the next
  const StepIntegers* next;  // of the outputs that follow, in another format; or null. Not of W8A8Args
};

struct StepLinear {
  const bf16* panels;
  const bf16* bias;  // or null
  const StepIntegers* integers;  // instead of panels, or null
};

class IntegerProducts {
 public:
  // `room`: so many numbers as `room_of` says.
  IntegerProducts(int64_t rows, float* room) : rows_(rows), room_(room), row_scales_(rows) {}

  // `most`: inputs of a product, of any format.
  static int64_t room_of(int64_t rows, int64_t most) {
    return rows * RoundedRows::room(kQuad * quads_of(most));
  }

  // The same of products by one linear's weights, which may be none of integers.
  static int64_t room_of(int64_t rows, int64_t most, const StepLinear& linear) {
    int64_t numbers = 0;
    for (const StepIntegers* by = linear.integers; by != nullptr; by = by->next) {
      int64_t own = by->has_zeros ? by->groups : 0;
      if (by->extra != nullptr)
        own = quads_of(most);
      else if (by->bits == kW4A8)
        own = RoundedRows::room(kQuad * quads_of(most));
      numbers = std::max(numbers, own);
    }
    return rows * numbers;
  }

  // What each thread of a team runs for y = x W^T + b, x [rows, inputs], y [rows, outputs].
  void multiply(Team::Member& me, const StepIntegers& by, const LinearArgs& like) {
    prepare(me, by, like);
    IntegerRows rows = rows_of(by, like);
    share_units(me, rows_, height(by, like), like.outputs, [&](const IntegerUnit& unit) {
      multiply_unit(by, like, rows, unit);
    });
  }

  // Its two parts: what is found of the rows, once for all weights of one format,
  void prepare(Team::Member& me, const StepIntegers& by, const LinearArgs& like) {
    if (by.extra != nullptr) {
      const W8A8Args args = rounding(by, like);
      me.share(rows_, [&](int64_t row, int64_t) { round_unsigned(args, row); });
    } else if (const IntegerArgs args = widening(by, like); sums_of_row(args) > 0) {
      const IntegerWork work{args, IntegerLayout(args), room_};
      me.share(rows_, [&](int64_t row, int64_t) { prepare_row(work, row); });
    }
  }

  // and a unit of it.
  void multiply_unit(const StepIntegers& by, const LinearArgs& like, IntegerRows& rows,
                     const IntegerUnit& unit);

  // The rows as a thread's units take them.
  IntegerRows rows_of(const StepIntegers& by, const LinearArgs& like) {
    IntegerRows rows(like.x, like.inputs);
    if (by.extra != nullptr) rows.rounded = rounded_rows(rounding(by, like));
    return rows;
  }

  // Rows of the slabs that a team shares.
  int64_t height(const StepIntegers& by, const LinearArgs& like) const {
    if (by.extra != nullptr) return slab_of(row_bytes(by, like), kBlockRows, rows_);
    return integer_slab(widening(by, like));
  }

  // Of a row, as units read it.
  static int64_t row_bytes(const StepIntegers& by, const LinearArgs& like) {
    if (by.extra != nullptr || by.bits == kW4A8) return 4 * quads_of(like.inputs);
    return integer_row_bytes(like.inputs);
  }

 private:
  static int64_t quads_of(int64_t inputs) { return (inputs + kQuad - 1) / kQuad; }

  W8A8Args rounding(const StepIntegers& by, const LinearArgs& like) {
    return {like.x, reinterpret_cast<const int8_t*>(by.panels), by.extra, by.scales, like.bias,
            like.y, reinterpret_cast<uint8_t*>(room_), row_scales_.data(), rows_,
            like.inputs, like.outputs, quads_of(like.inputs), like.wide, 0, like.stride};
  }

  IntegerArgs widening(const StepIntegers& by, const LinearArgs& like) const {
    return {like.x, by.panels, by.scales, like.bias, like.y, rows_, like.inputs, like.outputs,
            by.groups, by.bits, by.has_zeros, like.stride == 0 ? by.stride : like.stride, like.wide};
  }

  const int64_t rows_;
  float* const room_;  // RoundedRows, or 4 rounded numbers a quad, or the sum of each group
  std::vector<float> row_scales_;
};

}  // namespace baton

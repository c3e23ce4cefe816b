// The gated delta rule as others call it: delta_rule.h is compiled in rows.cpp alone.
#pragma once

#include <cstdint>

#include "team.h"
#include "vectors.h"

namespace baton {

struct DeltaArgs {
  const bf16* x;      // [rows, channels + values + 2 * value_heads]: row stride below
  bf16* y;            // [rows, values]
  bf16* conv;         // [slots, channels, taps]: slot stride below
  float* matrices;    // [slots, value_heads, key_dim, value_dim]: slot stride below
  const float* taps;  // [num_taps, channels], the convolution's weights
  const float *decay, *step_bias;  // [value_heads]
  const float* norm;               // [value_dim]
  const int64_t *rows, *sizes, *slots, *begins;  // [count] of each span; begins: it reads no state
  int64_t count, x_stride, conv_stride, matrix_stride;
  int64_t key_heads, value_heads, key_dim, value_dim, num_taps;
  float epsilon;
};

// What a thread of a team does.
void share_delta_rule(Team::Member& me, const DeltaArgs& args, Coming coming);

}  // namespace baton

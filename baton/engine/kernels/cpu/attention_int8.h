// Paged decode attention over int8 keys and values, and how they get into the pool.
//
// As attention.h: a row's keys in tiles of 16, in their order, softmax along the way. Numbers are
// widened to bfloat16, exactly, on their way into the products; a key's scale meets the score, a
// value's scale the weight. What a row computes depends on its own keys alone.
#pragma once

#include "attention.h"
#include "elementwise.h"

namespace baton {

// base: keys and values are bytes; strides in numbers.
struct Int8DecodeArgs {
  DecodeArgs base;
  const float *key_scales, *value_scales;  // [blocks, block_size, kv_heads]: strides below
  int64_t key_scale_block, key_scale_token, value_scale_block, value_scale_token;
};

// Keys and values in int8, a scale for each token and head.
struct Int8Pool {
  struct Token {
    const uint8_t *key, *value;
    const float *key_scale, *value_scale;
  };

  const Int8DecodeArgs& s;
  const DecodeArgs& a;

  Token at(int64_t block, int64_t token) const {
    const auto* keys = reinterpret_cast<const uint8_t*>(a.keys);
    const auto* values = reinterpret_cast<const uint8_t*>(a.values);
    return {keys + block * a.key_block + token * a.key_token,
            values + block * a.value_block + token * a.value_token,
            s.key_scales + block * s.key_scale_block + token * s.key_scale_token,
            s.value_scales + block * s.value_scale_block + token * s.value_scale_token};
  }

  static void ask_factors(const Token& token) {
    ask(token.key_scale);
    ask(token.value_scale);
  }

  static void ask_key(const Token& token, int64_t at) { ask_early(token.key + at); }
  static void ask_value(const Token& token, int64_t at) { ask_early(token.value + at); }

  Floats scales(const Token* tile, int64_t head) const {
    alignas(64) float each[kTile];
    BATON_UNROLL for (int i = 0; i < kTile; ++i) each[i] = tile[i].key_scale[head];
    return load(each) * broadcast(a.scale);
  }

  Floats weighed(const Token* tile, int64_t head, Floats weights) const {
    alignas(64) float each[kTile];
    BATON_UNROLL for (int i = 0; i < kTile; ++i) each[i] = tile[i].value_scale[head];
    return weights * load(each);
  }

  static Pairs key(const Token& token, int64_t at) { return pairs_of(widen_int8(token.key + at)); }
  static Line value(const Token& token, int64_t at) { return widen_int8(token.value + at); }
};

// Keys (or values) [rows, heads, dim] rounded to int8, a scale per head, into their slots.
struct Int8StoreArgs {
  const bf16* x;  // heads side by side, rows `stride` numbers apart
  int8_t* pool;   // [blocks, block_size, heads, dim], heads side by side
  float* scales;  // [blocks, block_size, heads]
  const int64_t* slots;
  int64_t rows, heads, dim, stride, block_size;
  int64_t pool_block, pool_token, scale_block, scale_token;
};

inline void store_int8(const Int8StoreArgs& a) {
#pragma omp parallel for if (a.rows * a.heads * a.dim > kFewNumbers)
  for (int64_t row = 0; row < a.rows; ++row) {
    const int64_t block = a.slots[row] / a.block_size, token = a.slots[row] % a.block_size;
    int8_t* to = a.pool + block * a.pool_block + token * a.pool_token;
    float* scales = a.scales + block * a.scale_block + token * a.scale_token;
    for (int64_t head = 0; head < a.heads; ++head)
      scales[head] = round_row(a.x + row * a.stride + head * a.dim, to + head * a.dim, a.dim);
  }
}

}  // namespace baton

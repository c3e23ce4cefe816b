// Int8 keys and values: how decode attention reads them, and how they get into the pool.
//
// A key's scale meets the score, a value's scale the weight: see attention.h. What a row computes
// depends on its own keys alone.
#pragma once

#include "attention.h"
#include "elementwise.h"

namespace baton {

// Keys and values in int8, a scale for each token and head.
struct Int8Pool {
  struct Token {
    const int8_t *key, *value;
    const float *key_scale, *value_scale;
  };

  static constexpr bool kQuick = false;  // half the bytes, and they must be widened

  const DecodeArgs& a;

  Token at(int64_t block, int64_t token) const {
    const PoolScales& s = a.scales;
    return {static_cast<const int8_t*>(a.keys) + block * a.key_block + token * a.key_token,
            static_cast<const int8_t*>(a.values) + block * a.value_block + token * a.value_token,
            s.keys + block * s.key_block + token * s.key_token,
            s.values + block * s.value_block + token * s.value_token};
  }

  static void ask_factors(const Token& token) {
    ask(token.key_scale);
    ask(token.value_scale);
  }

  Floats scales(const Token* tile, int64_t head) const {
    alignas(64) float each[kTile];
    BATON_UNROLL for (int i = 0; i < kTile; ++i) each[i] = tile[i].key_scale[head];
    return load(each) * broadcast(a.scale);
  }

  static Floats value_scales(const Token* tile, int64_t head) {
    alignas(64) float each[kTile];
    BATON_UNROLL for (int i = 0; i < kTile; ++i) each[i] = tile[i].value_scale[head];
    return load(each);
  }

  static Floats weighed(Floats weights, Floats scales) { return weights * scales; }

  static Int8s value(const Token& token, int64_t at) { return load_int8s(token.value + at); }
};

// Heads x [.., dim] of a token, rounded to its place in the pool: to [.., dim], a scale each.
inline void round_heads(const bf16* x, int8_t* to, float* scales, HeadRange heads, int64_t dim) {
  for (int64_t head = heads.first; head < heads.last; ++head)
    scales[head] = round_row(x + head * dim, to + head * dim, dim);
}

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
    round_heads(a.x + row * a.stride, a.pool + block * a.pool_block + token * a.pool_token,
                a.scales + block * a.scale_block + token * a.scale_token, {0, a.heads}, a.dim);
  }
}

}  // namespace baton

// Paged decode attention over int8 keys and values, and how they get into the pool.
//
// As attention.h: a row's keys in tiles of 16, in their order, softmax along the way. A key's
// numbers are widened to bfloat16, exactly, on their way into the products with the query; its
// scale meets the score, a value's scale the weight. What a row computes depends on its own keys
// alone.
#pragma once

#include "attention.h"
#include "w8a8.h"

namespace baton {

inline __m512 from_int8(const uint8_t* at) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers));
}

// 32 numbers as bfloat16, exactly, in their order.
inline __m512bh pairs_from_int8(const uint8_t* at) {
  return _mm512_cvtne2ps_pbh(from_int8(at + 16), from_int8(at));
}

// base: keys and values are bytes; strides in numbers.
struct Int8DecodeArgs {
  DecodeArgs base;
  const float *key_scales, *value_scales;  // [blocks, block_size, kv_heads]: strides below
  int64_t key_scale_block, key_scale_token, value_scale_block, value_scale_token;
};

class Int8DecodeRow {
 public:
  Int8DecodeRow(const Int8DecodeArgs& args, int64_t index, int64_t first_head, int64_t last_head,
                std::vector<Running>& running)
      : s_(args), a_(args.base), index_(index), first_head_(first_head), last_head_(last_head),
        group_(a_.query_heads / a_.kv_heads), running_(running) {}

  void run() {
    const int64_t end = a_.tokens[index_];
    const int64_t begin = a_.window > 0 ? std::max<int64_t>(0, end - a_.window) : 0;
    const int64_t heads = (last_head_ - first_head_) * group_;
    for (int64_t h = 0; h < heads; ++h) {
      Running& each = running_[h];
      each.most = a_.sinks ? a_.sinks[first_head_ * group_ + h] : -INFINITY;
      each.total = a_.sinks ? 1.0f : 0.0f;
      std::fill_n(each.sum, a_.v_dim, 0.0f);
    }
    for (int64_t at = begin; at < end; at += kTile) {
      const int count = static_cast<int>(std::min<int64_t>(kTile, end - at));
      for (int i = 0; i < count; ++i) tile_[i] = locate(at + i);
      for (int64_t next = at + kAhead * kTile; next < std::min(end, at + (kAhead + 1) * kTile); ++next)
        touch(locate(next));
      for (int64_t head = first_head_; head < last_head_; ++head) attend(head, count);
    }
    finish();
  }

 private:
  struct Token {
    const uint8_t *key, *value;
    const float *key_scale, *value_scale;
  };

  Token locate(int64_t at) const {
    const int64_t* table = a_.tables + a_.spans[index_] * a_.width;
    const int64_t block = table[at / a_.block_size - a_.first[index_]], token = at % a_.block_size;
    const auto* keys = reinterpret_cast<const uint8_t*>(a_.keys);
    const auto* values = reinterpret_cast<const uint8_t*>(a_.values);
    return {keys + block * a_.key_block + token * a_.key_token,
            values + block * a_.value_block + token * a_.value_token,
            s_.key_scales + block * s_.key_scale_block + token * s_.key_scale_token,
            s_.value_scales + block * s_.value_scale_block + token * s_.value_scale_token};
  }

  void touch(const Token& token) const {
    const int64_t keys = first_head_ * a_.key_head, values = first_head_ * a_.value_head;
    for (int64_t at = keys; at < last_head_ * a_.key_head; at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(token.key + at), _MM_HINT_T0);
    for (int64_t at = values; at < last_head_ * a_.value_head; at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(token.value + at), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(token.key_scale), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(token.value_scale), _MM_HINT_T0);
  }

  void attend(int64_t head, int count) {
    alignas(64) float key_scale[kTile] = {}, value_scale[kTile] = {};
    for (int i = 0; i < count; ++i) {
      key_scale[i] = tile_[i].key_scale[head];
      value_scale[i] = tile_[i].value_scale[head];
    }
    const __m512 keys = _mm512_mul_ps(_mm512_load_ps(key_scale), _mm512_set1_ps(a_.scale));
    const __m512 values = _mm512_load_ps(value_scale);
    for (int64_t g = 0; g < group_; g += 2) {
      Running* states = &running_[(head - first_head_) * group_ + g];
      const int64_t query_head = head * group_ + g;
      if (count < kTile)  // once per row: a loop that the compiler cannot unroll
        for (int64_t i = 0; i < std::min<int64_t>(2, group_ - g); ++i)
          attend<1, false>(states + i, head, query_head + i, count, keys, values);
      else if (g + 1 < group_)
        attend<2, true>(states, head, query_head, count, keys, values);
      else
        attend<1, true>(states, head, query_head, count, keys, values);
    }
  }

  template <int Heads, bool Full>
  void attend(Running* states, int64_t head, int64_t query_head, int count, __m512 key_scales,
              __m512 value_scales) {
    alignas(64) float weights[Heads][kTile];
    float kept[Heads];
    __m512 score[Heads];
    scores<Heads, Full>(head, query_head, count, key_scales, score);
    for (int h = 0; h < Heads; ++h) {
      Running& state = states[h];
      const float most = std::max(state.most, _mm512_reduce_max_ps(score[h]));
      const __m512 weight = exponential(_mm512_sub_ps(score[h], _mm512_set1_ps(most)));
      kept[h] = most == state.most ? 1.0f : std::exp(state.most - most);
      state.total = state.total * kept[h] + _mm512_reduce_add_ps(weight);
      state.most = most;
      _mm512_store_ps(weights[h], _mm512_mul_ps(weight, value_scales));
    }
    const int keys = Full ? kTile : count;
    for (int64_t d = 0; d < a_.v_dim; d += 16) {
      __m512 sum[Heads];
      BATON_UNROLL for (int h = 0; h < Heads; ++h)
        sum[h] = _mm512_mul_ps(_mm512_load_ps(states[h].sum + d), _mm512_set1_ps(kept[h]));
      BATON_UNROLL for (int i = 0; i < keys; ++i) {
        const __m512 value = from_int8(tile_[i].value + head * a_.value_head + d);
        BATON_UNROLL for (int h = 0; h < Heads; ++h)
          sum[h] = _mm512_fmadd_ps(_mm512_set1_ps(weights[h][i]), value, sum[h]);
      }
      BATON_UNROLL for (int h = 0; h < Heads; ++h) _mm512_store_ps(states[h].sum + d, sum[h]);
    }
  }

  // Query heads by the tile's keys, scaled and capped; -inf for keys that do not exist.
  template <int Heads, bool Full>
  void scores(int64_t head, int64_t query_head, int count, __m512 key_scales, __m512* score) const {
    const bf16* q = a_.q + a_.rows[index_] * a_.q_stride + query_head * a_.k_dim;
    __m512 sums[Heads][kTile];
    constexpr int half = kTile / 2;  // 16 accumulators of two heads stay in registers
    for (int from = 0; from < kTile; from += half) {
      __m512 part[Heads][half];
      BATON_UNROLL for (int h = 0; h < Heads; ++h)
        BATON_UNROLL for (int i = 0; i < half; ++i) part[h][i] = _mm512_setzero_ps();
      for (int64_t d = 0; d < a_.k_dim; d += 32) {
        __m512bh query[Heads];
        BATON_UNROLL for (int h = 0; h < Heads; ++h) query[h] = load_pairs(q + h * a_.k_dim + d);
        BATON_UNROLL for (int i = 0; i < half; ++i) {
          if (!Full && from + i >= count) break;
          const __m512bh key = pairs_from_int8(tile_[from + i].key + head * a_.key_head + d);
          BATON_UNROLL for (int h = 0; h < Heads; ++h)
            part[h][i] = _mm512_dpbf16_ps(part[h][i], query[h], key);
        }
      }
      BATON_UNROLL for (int h = 0; h < Heads; ++h)
        BATON_UNROLL for (int i = 0; i < half; ++i) sums[h][from + i] = part[h][i];
    }
    const __mmask16 exist = static_cast<__mmask16>((1u << count) - 1);
    for (int h = 0; h < Heads; ++h) {
      __m512 each = _mm512_mul_ps(sum_each(sums[h]), key_scales);
      if (a_.softcap > 0.0f) each = capped(each);
      score[h] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), exist, each);
    }
  }

  __m512 capped(__m512 scores) const {
    alignas(64) float each[kTile];
    _mm512_store_ps(each, scores);
    for (float& one : each) one = a_.softcap * std::tanh(one / a_.softcap);
    return _mm512_load_ps(each);
  }

  void finish() const {
    bf16* out = a_.out + a_.rows[index_] * a_.query_heads * a_.v_dim;
    for (int64_t h = first_head_ * group_; h < last_head_ * group_; ++h) {
      const Running& each = running_[h - first_head_ * group_];
      const __m512 share = _mm512_set1_ps(1.0f / each.total);
      for (int64_t d = 0; d < a_.v_dim; d += 16)
        store_rounded(out + h * a_.v_dim + d, _mm512_mul_ps(_mm512_load_ps(each.sum + d), share));
    }
  }

  const Int8DecodeArgs& s_;
  const DecodeArgs& a_;
  const int64_t index_, first_head_, last_head_, group_;
  std::vector<Running>& running_;
  Token tile_[kTile];
};

// Rows are shared out among the threads; when there are few, also the KV heads of each.
inline void decode_attention_int8(const Int8DecodeArgs& args) {
  const DecodeArgs& a = args.base;
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads();
    const int64_t parts =
        std::min(a.kv_heads, a.count >= 4 * threads ? 1 : (threads + a.count - 1) / a.count);
    std::vector<Running> running((a.kv_heads / parts + 1) * (a.query_heads / a.kv_heads));
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < a.count * parts; ++task) {
      const int64_t part = task % parts;
      Int8DecodeRow(args, task / parts, a.kv_heads * part / parts, a.kv_heads * (part + 1) / parts,
                    running)
          .run();
    }
  }
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
    int8_t* to = a.pool + block * a.pool_block + token * a.pool_token;
    float* scales = a.scales + block * a.scale_block + token * a.scale_token;
    for (int64_t head = 0; head < a.heads; ++head)
      scales[head] = round_row(a.x + row * a.stride + head * a.dim, to + head * a.dim, a.dim);
  }
}

}  // namespace baton

// A decode step of a dense decoder: every layer in one call, one parallel region, a barrier after
// each phase of a layer.
//
//   norm | qkv | rotate, store | attend | output | norm | gate, up | gate | down       x layers, norm
//
// The phases are the other headers' own functions over the same units: a step's numbers are those
// of their calls one by one, bit for bit. What is constant lies in StepLayer (the model's) and
// StepPool (the pool's), made once. One new token per row; no LoRA, no experts, no hooks.
#pragma once

#include <omp.h>

#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace baton {

struct StepLinear {
  const bf16* panels;
  const bf16* bias;  // or null
};

struct StepLayer {
  const bf16 *input_norm, *mlp_norm, *query_norm, *key_norm;  // the last two may be null
  StepLinear qkv, output, gate_up, down;
};

// One layer's part of the pool, strides in numbers, and how it attends: see DecodeArgs.
struct StepPool {
  bf16 *keys, *values;
  const float* sinks;
  int64_t key_block, key_token, key_head, value_block, value_token, value_head;
  int64_t window, group;
  float scale, softcap;
};

// Where a layer group's KV lies: slots [rows], blocks [rows, width], first [rows].
struct StepTable {
  const int64_t *slots, *blocks, *first;
  int64_t width;
};

struct StepArgs {
  const StepLayer* layers;
  const StepPool* pools;    // [layers]
  const StepTable* tables;  // by layer group
  const bf16* final_norm;
  const bf16 *cos, *sin;     // [rows, dim / 2]
  const int64_t* positions;  // [rows]
  bf16* residual;            // [rows, hidden]: embeddings, overwritten
  bf16* out;                 // [rows, hidden]: the final norm's
  bf16* scratch;             // [rows, hidden + max(qkv, 2 * inner) + max(attended, inner)]
  int64_t num_layers, rows, hidden, inner, heads, kv_heads, dim, block_size;
  float epsilon;
};

class Step {
 public:
  explicit Step(const StepArgs& args)
      : a_(args), width_((a_.heads + 2 * a_.kv_heads) * a_.dim), wide_(a_.scratch),
        narrow_(wide_ + a_.rows * std::max(width_, 2 * a_.inner)),
        delta_(narrow_ + a_.rows * std::max(a_.heads * a_.dim, a_.inner)), rows_(a_.rows),
        tokens_(a_.rows) {
    for (int64_t row = 0; row < a_.rows; ++row) {
      rows_[row] = row;
      tokens_[row] = a_.positions[row] + 1;
    }
  }

  // What each of `threads` threads runs.
  void run(int64_t threads) {
    const int64_t parts = parts_of(attention(0), threads);
    std::vector<Running> running = running_for(attention(0), parts);
    const bf16* delta = nullptr;
    for (int64_t index = 0; index < a_.num_layers; ++index) {
      const StepLayer& layer = a_.layers[index];
      norm(threads, delta, layer.input_norm);
      delta = delta_;
      product(threads, layer.qkv, a_.out, wide_, a_.hidden, width_);
      team_.share(threads, a_.rows, [&](int64_t row, int64_t) { place(index, row); });
      const DecodeArgs attending = attention(index);
      const PlainPool pool{attending};
      team_.share(threads, a_.rows * parts,
                  [&](int64_t task, int64_t) { attend_part(pool, task, parts, running); });
      product(threads, layer.output, narrow_, delta_, a_.heads * a_.dim, a_.hidden);
      norm(threads, delta, layer.mlp_norm);
      product(threads, layer.gate_up, a_.out, wide_, a_.hidden, 2 * a_.inner);
      gate(threads);
      product(threads, layer.down, narrow_, delta_, a_.inner, a_.hidden);
    }
    norm(threads, delta, a_.final_norm);
  }

 private:
  // residual += delta; out = its norm.
  void norm(int64_t threads, const bf16* delta, const bf16* weight) {
    team_.share(threads, a_.rows, [&](int64_t row, int64_t) {
      const int64_t at = row * a_.hidden;
      add_norm_row(a_.residual + at, delta == nullptr ? nullptr : delta + at, weight, a_.out + at,
                   a_.hidden, a_.epsilon);
    });
  }

  void product(int64_t threads, const StepLinear& by, const bf16* x, bf16* y, int64_t inputs,
               int64_t outputs) {
    const LinearArgs args{x, by.panels, by.bias, y, a_.rows, inputs, outputs};
    const int64_t panels = (outputs + kPanel - 1) / kPanel, slab = slab_of(inputs);
    const int64_t units = (a_.rows + slab - 1) / slab * panels;
    team_.share(threads, units, [&](int64_t unit, int64_t next) {
      const int64_t from = unit / panels * slab;
      multiply_panel(args, unit % panels, from, std::min(a_.rows, from + slab),
                     next < units ? args.w + next % panels * inputs * kPanel : nullptr);
    });
  }

  // Queries and keys of a row rotated, its keys and values to their slot.
  void place(int64_t index, int64_t row) {
    const StepLayer& layer = a_.layers[index];
    const StepPool& pool = a_.pools[index];
    rotate_row({wide_, a_.cos, a_.sin, layer.query_norm, layer.key_norm, a_.rows, a_.heads,
                a_.kv_heads, a_.dim, a_.epsilon},
               row);
    const int64_t slot = a_.tables[pool.group].slots[row], numbers = a_.kv_heads * a_.dim;
    const int64_t block = slot / a_.block_size, token = slot % a_.block_size;
    const bf16* keys = wide_ + row * width_ + a_.heads * a_.dim;
    std::memcpy(pool.keys + block * pool.key_block + token * pool.key_token, keys, 2 * numbers);
    std::memcpy(pool.values + block * pool.value_block + token * pool.value_token, keys + numbers,
                2 * numbers);
  }

  DecodeArgs attention(int64_t index) const {
    const StepPool& pool = a_.pools[index];
    const StepTable& table = a_.tables[pool.group];
    DecodeArgs args{};
    args.q = wide_;
    args.out = narrow_;
    args.keys = pool.keys;
    args.values = pool.values;
    args.tables = table.blocks;
    args.rows = args.spans = rows_.data();
    args.tokens = tokens_.data();
    args.first = table.first;
    args.sinks = pool.sinks;
    args.count = a_.rows;
    args.width = table.width;
    args.q_stride = width_;
    args.key_block = pool.key_block;
    args.key_token = pool.key_token;
    args.key_head = pool.key_head;
    args.value_block = pool.value_block;
    args.value_token = pool.value_token;
    args.value_head = pool.value_head;
    args.query_heads = a_.heads;
    args.kv_heads = a_.kv_heads;
    args.k_dim = args.v_dim = a_.dim;
    args.block_size = a_.block_size;
    args.window = pool.window;
    args.scale = pool.scale;
    args.softcap = pool.softcap;
    return args;
  }

  void gate(int64_t threads) {
    constexpr int64_t part = 512;  // numbers
    const int64_t parts = (a_.inner + part - 1) / part;
    team_.share(threads, a_.rows * parts, [&](int64_t unit, int64_t) {
      const int64_t row = unit / parts, from = unit % parts * part;
      const bf16* each = wide_ + row * 2 * a_.inner;
      swiglu_part(each, each + a_.inner, narrow_ + row * a_.inner, from,
                  std::min(a_.inner, from + part));
    });
  }

  const StepArgs& a_;
  const int64_t width_;  // of qkv
  bf16 *const wide_, *const narrow_, *const delta_;
  std::vector<int64_t> rows_, tokens_;
  Team team_;
};

inline void decode_step(const StepArgs& args) {
  Step step(args);
#pragma omp parallel
  step.run(omp_get_num_threads());
}

}  // namespace baton

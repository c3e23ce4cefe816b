// A decode step of a dense decoder: every layer in one call, one parallel region, its phases shared
// out among a team.
//
//   norm | qkv | rotate, store, attend | output | norm | gate, up | gate | down       x layers, norm
//
// The phases are the other headers' own functions over the same units: a step's numbers are those
// of their calls one by one, bit for bit. What is constant lies in StepLayer (the model's) and
// StepPool (the pool's), made once. One new token per row; no LoRA, no experts, no hooks.
#pragma once

#include <omp.h>

#include <deque>
#include <vector>

#include "attention_tasks.h"
#include "elementwise.h"
#include "linear.h"
#include "step_integers.h"
#include "team.h"

namespace baton {

struct StepLayer {
  // The last four may be null; those of outputs lie between a product and its sum with the residual.
  const bf16 *input_norm, *mlp_norm, *query_norm, *key_norm, *attention_output_norm,
      *mlp_output_norm;
  StepLinear qkv, output, gate_up, down;
  int64_t rotation;  // which of StepArgs' it takes
};

// cos, sin [rows, rotated / 2].
struct StepRotation {
  const bf16 *cos, *sin;
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
  StepRotation rotations[2];
  const int64_t* positions;  // [rows]
  bf16* residual;            // [rows, hidden]: embeddings, overwritten
  bf16* out;                 // [rows, hidden]: the final norm's
  bf16* scratch;             // [rows, hidden + max(qkv, 2 * inner) + max(attended, inner)]
  int64_t num_layers, rows, hidden, inner, heads, kv_heads, dim, block_size;
  int64_t rotated, neighbours, gelu;  // see RotateArgs; whether gates are GELU's
  NormRule norms;
};

class Step {
 public:
  Step(const StepArgs& args, int64_t threads)
      : a_(args), width_((a_.heads + 2 * a_.kv_heads) * a_.dim), wide_(a_.scratch),
        narrow_(wide_ + a_.rows * std::max(width_, 2 * a_.inner)),
        delta_(narrow_ + a_.rows * std::max(a_.heads * a_.dim, a_.inner)), rows_(a_.rows),
        tokens_(a_.rows), team_(threads),
        integers_(a_.rows, std::max({a_.hidden, a_.heads * a_.dim, a_.inner})) {
    for (int64_t row = 0; row < a_.rows; ++row) {
      rows_[row] = row;
      tokens_[row] = a_.positions[row] + 1;
    }
    int64_t states = 0;
    for (int64_t layer = 0; layer < a_.num_layers; ++layer) {
      const DecodeArgs attending = attention(layer);
      if (tasks_of(attending.window) != nullptr) continue;
      tasks_.emplace_back(attending, threads);
      states = std::max(states, tasks_.back().num_states());
    }
    states_ = kept_room<DecodeTasks, Running>(states);
  }

  // What each thread of the team runs.
  void run(int64_t thread) {
    Team::Member me(team_, thread);
    int64_t num_own = 0;
    for (const DecodeTasks& tasks : tasks_) num_own = std::max(num_own, tasks.num_own());
    std::vector<Running> own(num_own);
    Delta delta{};
    for (int64_t index = 0; index < a_.num_layers; ++index) {
      const StepLayer& layer = a_.layers[index];
      const Product qkv{layer.qkv, a_.out, wide_, a_.hidden, width_};
      const Product output{layer.output, narrow_, delta_, a_.heads * a_.dim, a_.hidden};
      const Product gate_up{layer.gate_up, a_.out, wide_, a_.hidden, 2 * a_.inner};
      const Product down{layer.down, narrow_, delta_, a_.inner, a_.hidden};
      norm(me, delta, layer.input_norm, coming(me, qkv));
      multiply(me, qkv);
      attend(me, index, own.data(), coming(me, output));
      multiply(me, output);
      norm(me, {delta_, layer.attention_output_norm}, layer.mlp_norm, coming(me, gate_up));
      delta = {delta_, layer.mlp_output_norm};
      multiply(me, gate_up);
      gate(me, coming(me, down));
      multiply(me, down);
    }
    norm(me, delta, a_.final_norm, {});
  }

 private:
  // y [rows, outputs] of x [rows, inputs].
  struct Product {
    const StepLinear& by;
    const bf16* x;
    bf16* y;
    int64_t inputs, outputs;

    const bf16* panel(int64_t index) const { return by.panels + index * inputs * kPanel; }
  };

  // What is added to the residual, none before the first layer; `norm`, unless null, of it first.
  struct Delta {
    bf16* rows;
    const bf16* norm;
  };

  // residual += delta; out = its norm.
  void norm(Team::Member& me, Delta delta, const bf16* weight, Coming coming) {
    const auto work = [&](int64_t row, int64_t) {
      const int64_t at = row * a_.hidden;
      bf16* added = delta.rows == nullptr ? nullptr : delta.rows + at;
      if (delta.norm != nullptr) normalize(added, delta.norm, added, a_.hidden, a_.norms);
      add_norm_row(a_.residual + at, added, weight, a_.out + at, a_.hidden, a_.norms);
    };
    me.share(a_.rows, work, coming);
  }

  void multiply(Team::Member& me, const Product& of) {
    LinearArgs args{of.x, of.by.panels, of.by.bias, of.y, a_.rows, of.inputs, of.outputs};
    if (of.by.integers == nullptr) return share_linear(me, args);
    for (const StepIntegers* by = of.by.integers; by != nullptr; by = by->next) {
      args.outputs = by->outputs;
      integers_.multiply(me, *by, args);
      args.y += by->outputs;
      if (args.bias != nullptr) args.bias += by->outputs;
    }
  }

  // The panel that this thread multiplies first.
  static Coming coming(const Team::Member& me, const Product& of) {
    if (of.by.integers != nullptr) return {};  // its rows come first
    const bf16* panel = of.panel(me.first_of(panels_of(of.outputs)));
    return {reinterpret_cast<const char*>(panel), 2 * of.inputs * kPanel};
  }

  // Some KV heads of a row and their query heads: rotated, stored, attended. Of a row that several
  // threads attend, the first two before the third.
  void attend(Team::Member& me, int64_t index, Running* own, Coming coming) {
    const DecodeArgs attending = attention(index);
    const PlainPool pool{attending};
    DecodeTasks& tasks = *tasks_of(attending.window);
    const auto place_part = [&](int64_t row, int64_t part) {
      place(index, row, tasks.heads(part));
    };
    if (tasks.split())
      me.share(a_.rows * tasks.parts(), [&](int64_t unit, int64_t) {
        place_part(unit / tasks.parts(), unit % tasks.parts());
      });
    const auto work = [&](int64_t task, int64_t next) {
      if (!tasks.split()) {
        const DecodeTasks::Task of = tasks.at(task);
        place_part(of.row, of.part);
      }
      tasks.run(pool, task, next, states_, own);
    };
    me.share(tasks.count(), work, coming);
  }

  DecodeTasks* tasks_of(int64_t window) {
    for (DecodeTasks& tasks : tasks_)
      if (tasks.window() == window) return &tasks;
    return nullptr;
  }

  // Queries and keys of a row rotated, its keys and values to their slot.
  void place(int64_t index, int64_t row, HeadRange kv) {
    const StepLayer& layer = a_.layers[index];
    const StepPool& pool = a_.pools[index];
    const StepRotation& rotation = a_.rotations[layer.rotation];
    const RotateArgs rotating{wide_, rotation.cos, rotation.sin, layer.query_norm, layer.key_norm,
                              a_.rows, a_.heads, a_.kv_heads, a_.dim, a_.rotated, a_.neighbours,
                              a_.norms};
    const int64_t group = a_.heads / a_.kv_heads;
    rotate_heads(rotating, row, {kv.first * group, kv.last * group});
    rotate_heads(rotating, row, {a_.heads + kv.first, a_.heads + kv.last});
    const int64_t slot = a_.tables[pool.group].slots[row];
    const int64_t block = slot / a_.block_size, token = slot % a_.block_size;
    const int64_t from = kv.first * a_.dim, bytes = 2 * (kv.last - kv.first) * a_.dim;
    const bf16* keys = wide_ + row * width_ + a_.heads * a_.dim + from;
    std::memcpy(pool.keys + block * pool.key_block + token * pool.key_token + from, keys, bytes);
    std::memcpy(pool.values + block * pool.value_block + token * pool.value_token + from,
                keys + a_.kv_heads * a_.dim, bytes);
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

  void gate(Team::Member& me, Coming coming) {
    if (a_.gelu)
      share_gated<true>(me, wide_, narrow_, a_.rows, a_.inner, coming);
    else
      share_gated(me, wide_, narrow_, a_.rows, a_.inner, coming);
  }

  const StepArgs& a_;
  const int64_t width_;  // of qkv
  bf16 *const wide_, *const narrow_, *const delta_;
  std::vector<int64_t> rows_, tokens_;
  Team team_;
  std::deque<DecodeTasks> tasks_;  // by window
  Running* states_;
  IntegerProducts integers_;
};

inline void decode_step(const StepArgs& args) {
  Step step(args, omp_get_max_threads());
#pragma omp parallel
  step.run(omp_get_thread_num());
}

}  // namespace baton

// The rows of a step, and what its phases do with them but attend: norms, products, gates, and keys and
// values to the pool. What attends, and in which order, is in step.h and layer_part.h.
#pragma once

#include <omp.h>

#include <vector>

#include "elementwise.h"
#include "linear.h"
#include "step_args.h"
#include "step_integers.h"
#include "team.h"

namespace baton {

class StepRows {
 protected:
  StepRows(const StepArgs& args, int64_t threads)
      : a_(args), width_((a_.heads + 2 * a_.kv_heads) * a_.dim), wide_(a_.scratch),
        narrow_(wide_ + a_.rows * a_.wide), delta_(narrow_ + a_.rows * a_.narrow),
        turned_(a_.gated ? delta_ + a_.rows * a_.hidden : wide_), team_(threads),
        integers_(a_.rows, kept_room<StepRows, float>(room_of(args))) {
    for (int i = 0; i < 2; ++i) {
      rotations_[i] = a_.rotations[i];
      if (a_.by_position > 0) pick(rotations_[i], turns_[i]);
    }
  }

  // y [rows, outputs] of x [rows, inputs]; `wide`: see LinearArgs.
  struct Product {
    const StepLinear& by;
    const bf16* x;
    bf16* y;
    int64_t inputs, outputs;
    float* wide = nullptr;
  };

  // What is added to the residual, none before the first layer; `norm`, unless null, of it first.
  struct Delta {
    bf16* rows;
    const bf16* norm;
  };

  // residual += delta; out = its norm.
  void norm(Team::Member& me, Delta delta, const bf16* weight, Coming coming) {
    const auto work = [&](int64_t row) {
      const int64_t at = row * a_.hidden;
      bf16* added = delta.rows == nullptr ? nullptr : delta.rows + at;
      if (delta.norm != nullptr) normalize(added, delta.norm, added, a_.hidden, a_.norms);
      add_norm_row(a_.residual + at, added, weight, a_.out + at, a_.hidden, a_.norms);
    };
    me.share_rows(a_.rows, work, coming);
  }

  void multiply(Team::Member& me, const Product& of) {
    LinearArgs args{of.x,    of.by.panels, of.by.bias, of.y,
                    a_.rows, of.inputs,    of.outputs, of.wide};
    if (of.by.integers == nullptr) return share_linear(me, args);
    for (const StepIntegers* by = of.by.integers; by != nullptr; by = by->next) {
      args.outputs = by->outputs;
      integers_.multiply(me, *by, args);
      if (args.wide != nullptr)
        args.wide += by->outputs;
      else
        args.y += by->outputs;
      if (args.bias != nullptr) args.bias += by->outputs;
    }
  }

  // The panel that this thread multiplies first.
  static Coming coming(const Team::Member& me, const bf16* panels, int64_t inputs,
                       int64_t outputs) {
    const bf16* panel = panels + me.first_of(panels_of(outputs)) * inputs * kPanel;
    return {reinterpret_cast<const char*>(panel), 2 * inputs * kPanel};
  }

  static Coming coming(const Team::Member& me, const Product& of) {
    if (of.by.integers != nullptr) return {};  // its rows come first
    return coming(me, of.by.panels, of.inputs, of.outputs);
  }

  // Queries and keys of a row rotated, its keys and values to their slot.
  void place(int64_t index, int64_t row, HeadRange kv) {
    const StepLayer& layer = a_.layers[index];
    const StepPool& pool = a_.pools[index];
    const StepRotation& rotation = rotations_[layer.rotation];
    if (a_.gated) take_queries(row, kv);
    const RotateArgs rotating{turned_, rotation.cos, rotation.sin, layer.query_norm, layer.key_norm,
                              a_.rows, a_.heads, a_.kv_heads, a_.dim, a_.rotated, a_.neighbours,
                              a_.norms};
    const int64_t group = a_.heads / a_.kv_heads;
    rotate_heads(rotating, row, {kv.first * group, kv.last * group});
    rotate_heads(rotating, row, {a_.heads + kv.first, a_.heads + kv.last});
    const bf16 *keys = turned_ + row * width_ + a_.heads * a_.dim, *values = keys + a_.kv_heads * a_.dim;
    const Place at = place_of(pool, row);
    const PoolScales& scales = pool.scales;
    if (scales.keys != nullptr) {
      round_heads(keys, static_cast<int8_t*>(pool.keys) + at.of(pool.key_block, pool.key_token),
                  scales.keys + at.of(scales.key_block, scales.key_token), kv, a_.dim);
      round_heads(values, static_cast<int8_t*>(pool.values) + at.of(pool.value_block, pool.value_token),
                  scales.values + at.of(scales.value_block, scales.value_token), kv, a_.dim);
      return;
    }
    const int64_t from = kv.first * a_.dim, bytes = 2 * (kv.last - kv.first) * a_.dim;
    std::memcpy(static_cast<bf16*>(pool.keys) + at.of(pool.key_block, pool.key_token) + from,
                keys + from, bytes);
    std::memcpy(static_cast<bf16*>(pool.values) + at.of(pool.value_block, pool.value_token) + from,
                values + from, bytes);
  }

  // Of a token in a pool.
  struct Place {
    int64_t block, token;

    int64_t of(int64_t block_stride, int64_t token_stride) const {
      return block * block_stride + token * token_stride;
    }
  };

  Place place_of(const StepPool& pool, int64_t row) const {
    const int64_t slot = a_.tables[pool.group].slots[row];
    return {slot / a_.block_size, slot % a_.block_size};
  }

  // Where a row's keys in bfloat16 lie.
  bf16* key_of(int64_t index, int64_t row) const {
    const StepPool& pool = a_.pools[index];
    return static_cast<bf16*>(pool.keys) + place_of(pool, row).of(pool.key_block, pool.key_token);
  }

  // Those KV heads of a row and their query heads without the gates between them.
  void take_queries(int64_t row, HeadRange kv) {
    const int64_t dim = a_.dim, group = a_.heads / a_.kv_heads, bytes = 2 * dim;
    const bf16* from = wide_ + row * a_.qkv;
    bf16* to = turned_ + row * width_;
    for (int64_t head = kv.first * group; head < kv.last * group; ++head)
      std::memcpy(to + head * dim, from + 2 * head * dim, bytes);
    for (int64_t head = a_.heads; head < a_.heads + 2 * a_.kv_heads; head += a_.kv_heads)
      std::memcpy(to + (head + kv.first) * dim, from + (a_.heads + head + kv.first) * dim,
                  bytes * (kv.last - kv.first));
  }

  void gate(Team::Member& me, int64_t inner, Coming coming) {
    if (a_.gelu)
      share_gated<true>(me, wide_, narrow_, a_.rows, inner, coming);
    else
      share_gated(me, wide_, narrow_, a_.rows, inner, coming);
  }

  const StepArgs& a_;
  const int64_t width_;  // of queries, keys and values without gates
  bf16 *const wide_, *const narrow_, *const delta_, *const turned_;
  StepRotation rotations_[2];  // of the rows
  std::vector<bf16> turns_[2];
  Team team_;
  IntegerProducts integers_;

 private:
  // Numbers that products by integers need.
  static int64_t room_of(const StepArgs& a) {
    int64_t most = 0;
    const auto add = [&](const StepLinear* by) {
      if (by == nullptr) return;
      const int64_t inputs = std::max(a.hidden, a.narrow);
      most = std::max(most, IntegerProducts::room_of(a.rows, inputs, *by));
    };
    add(a.head);
    for (const StepLayer* of = a.layers; of != a.layers + a.num_layers; ++of) {
      for (const StepLinear* by : {&of->qkv, &of->output, &of->gate_up, &of->down}) add(by);
      if (of->latent != nullptr) add(of->latent->query_up);
    }
    return most;
  }

  // Those of the rows' positions, to `room`.
  void pick(StepRotation& rotation, std::vector<bf16>& room) const {
    if (rotation.cos == nullptr) return;
    const int64_t half = a_.rotated / 2;
    room.resize(2 * a_.rows * half);
    bf16 *const cos = room.data(), *const sin = cos + a_.rows * half;
    for (int64_t row = 0; row < a_.rows; ++row) {
      std::copy_n(rotation.cos + a_.positions[row] * half, half, cos + row * half);
      std::copy_n(rotation.sin + a_.positions[row] * half, half, sin + row * half);
    }
    rotation = {cos, sin};
  }
};

}  // namespace baton

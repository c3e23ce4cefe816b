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

  static constexpr int64_t kUnitsOfThread = 4;  // at least, of a product in pieces

  // What a unit takes of a product's outputs: `count` pieces, number unit * step + i * apart.
  struct Pieces {
    int64_t units, count, step, apart;
  };

  // Outputs of a piece.
  static int64_t piece_of(const StepLinear& by) {
    return by.integers == nullptr ? kPanel : 2 * kNarrow;
  }

  // Whether a product is taken in pieces by so many units, `outputs` being whole pieces. Few rows take
  // long to read weights, which are best read in their order; few units leave threads without work.
  bool in_pieces(const StepLinear& by, int64_t outputs, int64_t units) const {
    const bool one_format = by.integers == nullptr || by.integers->next == nullptr;
    const bool many = a_.rows >= kManyRowsOfPhase && units >= kUnitsOfThread * team_.size();
    return many && one_format && outputs % piece_of(by) == 0;
  }

  // A product whose outputs are used where they are made, while they lie in the cache, and stay nowhere:
  // use(from, until, unit, made): rows [from, until) of a unit's outputs, made [.., count * piece].
  template <class Use>
  void multiply_pieces(Team::Member& me, const Product& of, const Pieces& pieces, const Use& use,
                       Coming coming = {}) {
    const int64_t size = piece_of(of.by), none = of.outputs / size;
    LinearArgs args{of.x,    of.by.panels, of.by.bias, nullptr,
                    a_.rows, of.inputs,    of.outputs};
    args.stride = pieces.count * size;
    const auto share = [&](int64_t height, const auto& multiply_piece) {
      auto* const made = reinterpret_cast<bf16*>(kept_lines<Pieces>(2 * height * args.stride));
      const auto work = [&](int64_t from, int64_t until, int64_t unit, int64_t next) {
        const int64_t following = next < pieces.units ? next * pieces.step : none;
        for (int64_t i = 0, at = unit * pieces.step; i < pieces.count; ++i, at += pieces.apart) {
          args.y = made - from * args.stride + (i - at) * size;
          multiply_piece(from, until, at, i + 1 < pieces.count ? at + pieces.apart : following);
        }
        use(from, until, unit, made);
      };
      share_slabs(me, a_.rows, height, pieces.units, work, coming);
    };
    if (of.by.integers == nullptr) {
      Rows rows(of.x, of.inputs);
      const int64_t panel = of.inputs * kPanel;
      return share(linear_slab(of.inputs, a_.rows),
                   [&](int64_t from, int64_t until, int64_t at, int64_t next) {
                     multiply_panel(args, rows, from, until, at,
                                    next < none ? args.w + next * panel : nullptr);
                   });
    }
    const StepIntegers& by = *of.by.integers;
    integers_.prepare(me, by, args);
    IntegerRows rows = integers_.rows_of(by, args);
    share(integers_.height(by, args), [&](int64_t from, int64_t until, int64_t at, int64_t next) {
      integers_.multiply_unit(by, args, rows, {from, until, at, next});
    });
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

  // Of a token in a pool.
  struct Place {
    int64_t block, token;

    int64_t of(int64_t block_stride, int64_t token_stride) const {
      return block * block_stride + token * token_stride;
    }
  };

  // The keys or the values of a pool: strides in numbers; `scales` null: they are in bfloat16.
  struct PoolSide {
    void* numbers;
    int64_t block, token;
    float* scales;
    int64_t scale_block, scale_token;
  };

  static PoolSide keys_of(const StepPool& pool) {
    const PoolScales& by = pool.scales;
    return {pool.keys, pool.key_block, pool.key_token, by.keys, by.key_block, by.key_token};
  }

  static PoolSide values_of(const StepPool& pool) {
    const PoolScales& by = pool.scales;
    return {pool.values, pool.value_block, pool.value_token,
            by.values,   by.value_block,   by.value_token};
  }

  // Queries and keys of a row rotated, its keys and values to their slot.
  void place(int64_t index, int64_t row, HeadRange kv) {
    if (a_.gated) take_queries(row, kv);
    const RotateArgs rotating = rotation(index, turned_);
    const int64_t group = a_.heads / a_.kv_heads;
    rotate_heads(rotating, row, {kv.first * group, kv.last * group});
    rotate_heads(rotating, row, {a_.heads + kv.first, a_.heads + kv.last});
    const bf16 *keys = turned_ + row * width_ + a_.heads * a_.dim, *values = keys + a_.kv_heads * a_.dim;
    const StepPool& pool = a_.pools[index];
    const Place at = place_of(pool, row);
    store_heads(keys_of(pool), at, keys, kv);
    store_heads(values_of(pool), at, values, kv);
  }

  // The same of one head, counted over query, key and value heads, of rows [from, until): x [.., dim].
  // Queries go to `turned_`.
  void place_head(int64_t index, int64_t head, int64_t from, int64_t until, bf16* x) {
    const int64_t kv = head - a_.heads, value = kv - a_.kv_heads, half = a_.rotated / 2;
    if (value < 0) {
      const RotateArgs by = rotation(index, x);
      const bf16* const norm = kv < 0 ? by.query_norm : by.key_norm;
      rotate_each(by, x, until - from, [&](int64_t) { return norm; }, [&](int64_t i, bf16* each) {
        rotate_halves(each, by.cos + (from + i) * half, by.sin + (from + i) * half, half);
      });
    }
    const StepPool& pool = a_.pools[index];
    const PoolSide side = value < 0 ? keys_of(pool) : values_of(pool);
    const int64_t kept = value < 0 ? kv : value;  // the KV head
    for (int64_t row = from; row < until; ++row, x += a_.dim)
      if (kv < 0)
        copy_numbers(turned_ + row * width_ + head * a_.dim, x, a_.dim);
      else
        store_heads(side, place_of(pool, row), x - kept * a_.dim, {kept, kept + 1});
  }

  RotateArgs rotation(int64_t index, bf16* qkv) const {
    const StepLayer& layer = a_.layers[index];
    const StepRotation& by = rotations_[layer.rotation];
    return {qkv, by.cos, by.sin, layer.query_norm, layer.key_norm, a_.rows, a_.heads, a_.kv_heads,
            a_.dim, a_.rotated, a_.neighbours, a_.norms};
  }

  // Those KV heads of a row to its slot, keys or values x [kv_heads, dim]: rounded, with their scales, if
  // the pool has any.
  void store_heads(const PoolSide& side, const Place& at, const bf16* x, HeadRange kv) const {
    const int64_t to = at.of(side.block, side.token), from = kv.first * a_.dim;
    if (side.scales == nullptr)
      return copy_numbers(static_cast<bf16*>(side.numbers) + to + from, x + from,
                          (kv.last - kv.first) * a_.dim);
    float* const scales = side.scales + at.of(side.scale_block, side.scale_token);
    round_heads(x, static_cast<int8_t*>(side.numbers) + to, scales, kv, a_.dim);
  }

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

  // narrow_ [rows, inner] = activation(gate) * up, of `out`.
  void multiply_gated(Team::Member& me, const StepLayer& layer, Coming coming) {
    a_.gelu ? multiply_gated<true>(me, layer, coming) : multiply_gated<false>(me, layer, coming);
  }

  bool gates_in_pieces(const StepLayer& layer) const {
    return in_pieces(layer.gate_up, layer.inner, layer.inner / piece_of(layer.gate_up));
  }

  // The panel with which this thread begins there.
  Coming coming_gated(const Team::Member& me, const StepLayer& layer) const {
    const int64_t outputs = gates_in_pieces(layer) ? layer.inner : 2 * layer.inner;
    return coming(me, {layer.gate_up, a_.out, nullptr, a_.hidden, outputs});
  }

  template <bool kGelu>
  void multiply_gated(Team::Member& me, const StepLayer& layer, Coming coming) {
    const int64_t inner = layer.inner, size = piece_of(layer.gate_up), pieces = inner / size;
    const Product gate_up{layer.gate_up, a_.out, wide_, a_.hidden, 2 * inner};
    if (!gates_in_pieces(layer)) {
      multiply(me, gate_up);
      return share_gated<kGelu>(me, wide_, narrow_, a_.rows, inner, coming);
    }
    const auto use = [&](int64_t from, int64_t until, int64_t piece, const bf16* made) {
      bf16* to = narrow_ + from * inner + piece * size;
      for (int64_t row = from; row < until; ++row, made += 2 * size, to += inner)
        gated_part<kGelu>(made, made + size, to, 0, size);
    };
    multiply_pieces(me, gate_up, {pieces, 2, 1, pieces}, use, coming);
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

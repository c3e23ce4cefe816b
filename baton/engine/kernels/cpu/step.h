// A decode step of a dense decoder: every layer in one call, one parallel region, its phases shared
// out among a team.
//
//   norm | qkv | rotate, store, attend | output | norm | gate, up | gate | down       x layers, norm
//
// Where every row's logits are wanted, the head's product is one phase more. Of many rows, gate is a
// part of the phase before it.
//
// Gated attention has a phase more: what heads attended to, by their gates. In a layer with linear
// attention the delta rule over the sequences' states takes the place of heads; in one with latent
// attention queries are made to meet latents, and heads of these (latent.h). In a mixture the
// router and the choice of experts stand behind the second norm; then the products are those of the
// expert that all rows share, if there is one, and those of the experts that rows choose.
//
// The phases are the other headers' own functions over the same units: a step's numbers are those
// of their calls one by one, bit for bit. What is constant lies in StepLayer (the model's) and
// StepPool (the pool's), made once. One new token per row; no LoRA, no hooks.
#pragma once

#include <omp.h>

#include <deque>
#include <vector>

#include "attention_tasks.h"
#include "delta_args.h"
#include "elementwise.h"
#include "experts.h"
#include "gates.h"
#include "latent.h"
#include "linear.h"
#include "step_args.h"
#include "step_rows.h"
#include "team.h"

namespace baton {

class Step : StepRows {
 public:
  Step(const StepArgs& args, int64_t threads)
      : StepRows(args, threads), values_(a_.value_heads * a_.value_dim),
        inputs_(2 * (a_.key_heads * a_.key_dim + values_ + a_.value_heads)), rows_(a_.rows),
        tokens_(a_.rows), ones_(a_.rows, 1),
        chosen_(a_.rows * a_.choice.per_token), weights_(chosen_.size()),
        experts_{nullptr, nullptr, a_.out, chosen_.data(), weights_.data(), delta_,
                 a_.expert_scratch, a_.rows, a_.hidden, a_.expert_inner, a_.choice.per_token},
        mixture_(experts_), choices_(a_.num_layers),
        latents_(a_.latent, a_.rows, a_.latent_scratch),
        queries_(a_.latent_scratch + a_.rows * a_.latent.heads * a_.latent.nope),
        attended_(queries_ + a_.rows * a_.latent.heads * (a_.latent.rank + a_.latent.rope)),
        low_(attended_ + a_.rows * a_.latent.heads * a_.latent.rank) {
    for (int64_t row = 0; row < a_.rows; ++row) {
      rows_[row] = row;
      tokens_[row] = a_.positions[row] + 1;
      if (a_.embedding != nullptr)
        std::copy_n(a_.embedding + a_.ids[row] * a_.hidden, a_.hidden,
                    a_.residual + row * a_.hidden);
    }
    int64_t states = 0;
    for (int64_t layer = 0; layer < a_.num_layers; ++layer) {
      if (a_.layers[layer].delta != nullptr) continue;
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
      const bool attends = layer.delta == nullptr;
      const Product qkv{layer.qkv, a_.out, wide_, a_.hidden, attends ? a_.qkv : inputs_};
      const Product output{layer.output, narrow_, delta_, attends ? a_.attended : values_,
                           a_.hidden};
      const Product down{layer.down, narrow_, delta_, layer.inner, a_.hidden};
      norm(me, delta, layer.input_norm, coming(me, qkv));
      multiply(me, qkv);
      if (!attends) {
        share_delta_rule(me, rule(index), coming(me, output));
      } else if (layer.latent != nullptr) {
        attend_latents(me, index, own.data());
      } else if (a_.gated) {
        attend(me, index, own.data(), {});
        gate_attended(me, coming(me, output));
      } else {
        attend(me, index, own.data(), coming(me, output));
      }
      multiply(me, output);
      const Delta attended{delta_, layer.attention_output_norm};
      delta = {delta_, layer.mlp_output_norm};
      const StepMixture* mixture = layer.mixture;
      if (mixture == nullptr) {
        norm(me, attended, layer.mlp_norm, coming_gated(me, layer));
      } else {
        const LinearArgs router = routing(*mixture);
        norm(me, attended, layer.mlp_norm, coming(me, router.w, router.inputs, router.outputs));
        share_linear(me, router);
        choose(me, router.wide, mixture->bias, choices_[index]);
      }
      if (layer.inner > 0) {
        multiply_gated(me, layer, coming(me, down));
        multiply(me, down);
      }
      if (mixture != nullptr)
        mixture_.run(me, choices_[index], mixture->gate_ups, mixture->downs,
                     {layer.inner > 0 ? delta_ : nullptr, mixture->shared_gate});
    }
    if (a_.head == nullptr) return norm(me, delta, a_.final_norm, {});
    const Product head{*a_.head, a_.out, nullptr, a_.hidden, a_.vocabulary, a_.logits};
    norm(me, delta, a_.final_norm, coming(me, head));
    multiply(me, head);
  }

 private:
  // The product that makes a mixture's logits, in float32.
  LinearArgs routing(const StepMixture& mixture) const {
    return {a_.out, mixture.router, nullptr, nullptr, a_.rows, a_.hidden, a_.choice.experts,
            reinterpret_cast<float*>(wide_)};
  }

  void choose(Team::Member& me, const float* logits, const float* bias, Choices& choices) {
    me.share(1, [&](int64_t, int64_t) {
      const ChoiceArgs choosing{logits, bias, weights_.data(), chosen_.data(), a_.rows, a_.choice};
      for (int64_t row = 0; row < a_.rows; ++row) choose_of_row(choosing, row);
      choices.sort(chosen_.data(), a_.rows * a_.choice.per_token);
    });
  }

  // Some KV heads of a row and their query heads: rotated, stored, attended. Where several tasks
  // attend with the same heads, the first two before the third.
  void attend(Team::Member& me, int64_t index, Running* own, Coming coming) {
    const DecodeArgs attending = attention(index);
    DecodeTasks& tasks = *tasks_of(attending.window);
    const auto place_part = [&](int64_t row, int64_t part) {
      place(index, row, tasks.heads(part));
    };
    if (tasks.split())
      me.share(a_.rows * tasks.parts(), [&](int64_t unit, int64_t) {
        place_part(unit / tasks.parts(), unit % tasks.parts());
      });
    with_pool(attending, [&](const auto& pool) {
      const auto work = [&](int64_t task, int64_t next) {
        if (!tasks.split()) {
          const DecodeTasks::Task of = tasks.at(task);
          place_part(of.row, of.part);
        }
        tasks.run(pool, task, next, states_, own);
      };
      me.share(tasks.count(), work, coming);
    });
  }

  // Queries that meet latents, a row's latent to its slot; what the heads attend to, and their values
  // of it.
  void attend_latents(Team::Member& me, int64_t index, Running* own) {
    const StepLatent& latent = *a_.layers[index].latent;
    const StepRotation& rotation = rotations_[a_.layers[index].rotation];
    const int64_t first = a_.qkv - a_.latent.rank - a_.latent.rope;
    LatentRows from{wide_, wide_ + first, rotation.cos, rotation.sin, a_.rows, a_.qkv, a_.qkv};
    if (latent.query_norm != nullptr) {
      from.q = low_;
      from.q_stride = a_.latent.heads * (a_.latent.nope + a_.latent.rope);
      const Product up{*latent.query_up, narrow_, low_, first, from.q_stride};
      const auto work = [&](int64_t row, int64_t) {
        normalize(wide_ + row * a_.qkv, latent.query_norm, narrow_ + row * first, first,
                  {latent.by.epsilon, 0.0f});
      };
      me.share(a_.rows, work, coming(me, up));
      multiply(me, up);
    }
    latents_.before(me, from, latent.by, queries_, [&](int64_t row) { return key_of(index, row); });
    const DecodeArgs attending = attention(index);
    const PlainPool pool{attending};
    DecodeTasks& tasks = *tasks_of(attending.window);
    me.share(tasks.count(), [&](int64_t task, int64_t next) {
      tasks.run(pool, task, next, states_, own);
    });
    latents_.after(me, attended_, latent.by, narrow_);
  }

  DecodeTasks* tasks_of(int64_t window) {
    for (DecodeTasks& tasks : tasks_)
      if (tasks.window() == window) return &tasks;
    return nullptr;
  }

  void gate_attended(Team::Member& me, Coming coming) {
    const GateHeadsArgs gating{narrow_, wide_ + a_.dim, a_.rows,  a_.heads,
                               a_.dim,  a_.qkv,         2 * a_.dim};
    const int64_t group = a_.heads / a_.kv_heads;
    const auto work = [&](int64_t unit, int64_t) {
      const int64_t first = unit % a_.kv_heads * group;
      gate_some_heads(gating, unit / a_.kv_heads, {first, first + group});
    };
    me.share(a_.rows * a_.kv_heads, work, coming);
  }

  // A row is a span of one token.
  DeltaArgs rule(int64_t index) const {
    const StepDelta& by = *a_.layers[index].delta;
    const StepState& state = a_.states[index];
    return {wide_, narrow_, state.conv, state.matrices, by.taps, by.decay, by.step_bias, by.norm,
            rows_.data(), ones_.data(), a_.slots, a_.begins, a_.rows, inputs_, state.conv_stride,
            state.matrix_stride, a_.key_heads, a_.value_heads, a_.key_dim, a_.value_dim,
            a_.num_taps, by.epsilon};
  }

  DecodeArgs attention(int64_t index) const {
    const StepPool& pool = a_.pools[index];
    const StepTable& table = a_.tables[pool.group];
    DecodeArgs args{};
    const bool latents = a_.latent.heads > 0;
    args.q = latents ? queries_ : turned_;
    args.out = latents ? attended_ : narrow_;
    args.keys = pool.keys;
    args.values = pool.values;
    args.tables = table.blocks;
    args.rows = args.spans = rows_.data();
    args.tokens = tokens_.data();
    args.first = table.first;
    args.sinks = pool.sinks;
    args.count = a_.rows;
    args.width = table.width;
    args.q_stride = latents ? a_.heads * a_.dim : width_;
    // What a head attends to of latents lies row by row: its values are made of that.
    args.v_dim = latents ? a_.latent.rank : a_.dim;
    args.out_row = latents ? args.v_dim : a_.heads * a_.dim;
    args.out_head = latents ? a_.rows * args.v_dim : a_.dim;
    args.key_block = pool.key_block;
    args.key_token = pool.key_token;
    args.key_head = pool.key_head;
    args.value_block = pool.value_block;
    args.value_token = pool.value_token;
    args.value_head = pool.value_head;
    args.query_heads = a_.heads;
    args.kv_heads = a_.kv_heads;
    args.k_dim = a_.dim;
    args.block_size = a_.block_size;
    args.window = pool.window;
    args.scale = pool.scale;
    args.softcap = pool.softcap;
    args.scales = pool.scales;
    return args;
  }

  const int64_t values_, inputs_;  // of linear attention: what it makes of a row, and takes
  std::vector<int64_t> rows_, tokens_, ones_;
  std::deque<DecodeTasks> tasks_;  // by window
  Running* states_;
  std::vector<int64_t> chosen_;  // of a mixture's rows, with their weights
  std::vector<bf16> weights_;
  const ExpertsArgs experts_;
  Mixture mixture_;
  std::vector<Choices> choices_;  // of each layer: late threads still read those of layers before
  Latents latents_;
  // Queries that meet latents, what these attended to by head, and the queries of a low rank.
  bf16 *const queries_, *const attended_, *const low_;
};

// False, and nothing is done, if an id is none of the embedding's, or a position none of the rotations'.
inline bool decode_step(const StepArgs& args) {
  const auto inside = [&](const int64_t* numbers, int64_t end) {
    return std::all_of(numbers, numbers + args.rows, [&](int64_t n) { return 0 <= n && n < end; });
  };
  if (args.embedding != nullptr && !inside(args.ids, args.embedded)) return false;
  if (args.by_position > 0 && !inside(args.positions, args.by_position)) return false;
  Step step(args, omp_get_max_threads());
#pragma omp parallel
  step.run(omp_get_thread_num());
  return true;
}

}  // namespace baton

// What a dense decoder does with rows between the attention of two layers, in one call:
//
//   output | norm | gate, up and their gate | down   of one layer, then
//   norm | qkv, rotated and stored                   of the next one, or the last norm
//
// For steps that step.h does not attend: those with prompts, and those of which somebody waits for each
// layer's keys and values. The phases are those of step.h.
#pragma once

#include <omp.h>

#include "step_rows.h"

namespace baton {

class LayerPart : StepRows {
 public:
  LayerPart(const PartArgs& args, int64_t threads) : StepRows(args.step, threads), part_(args) {}

  // What each thread of the team runs.
  void run(int64_t thread) {
    Team::Member me(team_, thread);
    Delta delta{};
    if (part_.after >= 0) delta = end(me, a_.layers[part_.after]);
    if (part_.before >= 0)
      begin(me, part_.before, delta);
    else
      norm(me, delta, a_.final_norm, {});
  }

 private:
  // A layer behind its attention.
  Delta end(Team::Member& me, const StepLayer& layer) {
    const Product output{layer.output, part_.attended, delta_, a_.attended, a_.hidden};
    const Product down{layer.down, narrow_, delta_, layer.inner, a_.hidden};
    multiply(me, output);
    norm(me, {delta_, layer.attention_output_norm}, layer.mlp_norm, coming_gated(me, layer));
    multiply_gated(me, layer, coming(me, down));
    multiply(me, down);
    return {delta_, layer.mlp_output_norm};
  }

  // A layer up to its attention.
  void begin(Team::Member& me, int64_t index, Delta delta) {
    const StepLayer& layer = a_.layers[index];
    const Product qkv{layer.qkv, a_.out, wide_, a_.hidden, a_.qkv};
    norm(me, delta, layer.input_norm, coming(me, qkv));
    const int64_t heads = a_.heads + 2 * a_.kv_heads;
    if (!a_.neighbours && !a_.gated && in_pieces(layer.qkv, a_.dim, heads)) {
      const int64_t count = a_.dim / piece_of(layer.qkv);
      const auto use = [&](int64_t from, int64_t until, int64_t head, bf16* made) {
        place_head(index, head, from, until, made);
      };
      return multiply_pieces(me, qkv, {heads, count, count, 1}, use);
    }
    multiply(me, qkv);
    me.share_rows(a_.rows, [&](int64_t row) { place(index, row, {0, a_.kv_heads}); });
  }

  const PartArgs& part_;
};

inline void layer_part(const PartArgs& args) {
  LayerPart part(args, omp_get_max_threads());
#pragma omp parallel
  part.run(omp_get_thread_num());
}

}  // namespace baton

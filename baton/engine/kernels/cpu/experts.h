// A mixture's experts over rows, in one call: what each choice of each row says, or the weighted sum
// of a row's choices, and of what an expert says that all rows share.
//
//   gather, sorted by expert | gate, up | gate | down | back to (row, choice), or to the row
//
// A phase's units are those of linear.h, quantized.h and w8a8.h by the experts met, one after the
// other: a thread that is through with an expert goes on with the next. A choice's numbers are those
// of its expert's products called alone, bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "elementwise.h"
#include "linear.h"
#include "step_integers.h"
#include "team.h"

namespace baton {

// What the expert says that all rows share, [rows, hidden], or null; and, unless null, the weight
// [hidden] of its gate: the answers count sigmoid(x . gate) times.
struct SharedAnswers {
  const bf16 *rows, *gate;
};

struct ExpertsArgs {
  const StepLinear* gate_ups;  // [experts], of one format, as are `downs`
  const StepLinear* downs;
  const bf16* x;          // [rows, hidden]
  const int64_t* chosen;  // [rows, per_token]
  const bf16* weights;    // [rows, per_token], or null
  bf16* y;                // [rows, per_token, hidden]; with weights [rows, hidden]
  bf16* scratch;          // [rows * per_token, 2 * hidden + 3 * inner]
  int64_t rows, hidden, inner, per_token;
  float limit, alpha;  // clamped_part's; alpha 0: SwiGLU
  SharedAnswers shared;  // added to the weighted sums
};

// Numbers [from, until) of (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit` and up within
// it, all [size]. A NaN stays one.
inline void clamped_part(const ExpertsArgs& a, const bf16* gate, const bf16* up, bf16* y,
                         int64_t from, int64_t until) {
  const Floats one = broadcast(1.0f), most = broadcast(a.limit), least = broadcast(-a.limit);
  for (int64_t i = from; i < until; i += 16) {
    const Floats g = min(most, load_wide(gate + i));
    const Floats u = max(least, min(most, load_wide(up + i)));
    store_rounded(y + i, g / (one + exponential(broadcast(-a.alpha) * g)) * (u + one));
  }
}

// The choices of one mixture's rows, sorted by expert: written once, before any thread of the team
// reads it. A thread that is late still reads it when the others are layers ahead.
struct Choices {
  // An expert that some choices, [from, until) as they are sorted, have met.
  struct Met {
    int64_t expert, from, until;
  };

  void sort(const int64_t* chosen, int64_t count) {
    order.resize(count);
    places.resize(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t one, int64_t other) { return chosen[one] < chosen[other]; });
    for (int64_t at = 0; at < count; ++at) {
      const int64_t expert = chosen[order[at]];
      if (met.empty() || met.back().expert != expert) met.push_back({expert, at, at});
      met.back().until = at + 1;
      places[order[at]] = at;
    }
  }

  std::vector<int64_t> order, places;  // choices by expert, and where each of them is
  std::vector<Met> met;
};

class Mixture {
 public:
  explicit Mixture(const ExpertsArgs& args)
      : a_(args), choices_(a_.rows * a_.per_token), gathered_(a_.scratch),
        wide_(gathered_ + choices_ * a_.hidden), narrow_(wide_ + choices_ * 2 * a_.inner),
        sorted_(narrow_ + choices_ * a_.inner),
        integers_(choices_, std::max(a_.hidden, a_.inner)) {}

  // What each thread of a team runs, by experts' weights like those of the arguments.
  void run(Team::Member& me, const Choices& by, const StepLinear* gate_ups, const StepLinear* downs,
           const SharedAnswers& shared) {
    me.share(choices_, [&](int64_t at, int64_t) {
      std::copy_n(a_.x + by.order[at] / a_.per_token * a_.hidden, a_.hidden,
                  gathered_ + at * a_.hidden);
    });
    multiply(me, by, gate_ups, {gathered_, nullptr, nullptr, wide_, choices_, a_.hidden,
                            2 * a_.inner});
    if (a_.alpha == 0.0f)
      share_gated(me, wide_, narrow_, choices_, a_.inner);
    else
      share_clamped(me);
    multiply(me, by, downs, {narrow_, nullptr, nullptr, sorted_, choices_, a_.inner, a_.hidden});
    if (a_.weights != nullptr) return sum_choices(me, by, shared);
    me.share(choices_, [&](int64_t at, int64_t) {
      std::copy_n(sorted_ + at * a_.hidden, a_.hidden, a_.y + by.order[at] * a_.hidden);
    });
  }

 private:
  // Rows [from, until) by panels `index` of an expert's weights.
  struct Unit {
    const StepLinear* by;
    int64_t from, until, index;
  };

  // In the order of a row's choices, then what is shared, rounded once.
  void sum_choices(Team::Member& me, const Choices& by, const SharedAnswers& shared) {
    constexpr int64_t part = 512;  // numbers
    const int64_t parts = (a_.hidden + part - 1) / part;
    const auto work = [&](int64_t unit, int64_t) {
      const int64_t row = unit / parts, from = unit % parts * part;
      const bf16* weights = a_.weights + row * a_.per_token;
      Floats worth = broadcast(1.0f);
      if (shared.gate != nullptr) worth = broadcast(gate_of(row, shared.gate));
      for (int64_t i = from; i < std::min(a_.hidden, from + part); i += 16) {
        Floats sum = broadcast(0.0f);
        for (int64_t k = 0; k < a_.per_token; ++k)
          sum = multiply_add(broadcast(widened(weights[k])),
                             load_wide(sorted_ + by.places[row * a_.per_token + k] * a_.hidden + i),
                             sum);
        if (shared.rows != nullptr)
          sum = multiply_add(worth, load_wide(shared.rows + row * a_.hidden + i), sum);
        store_rounded(a_.y + row * a_.hidden + i, sum);
      }
    };
    me.share(a_.rows * parts, work);
  }

  float gate_of(int64_t row, const bf16* gate) const {
    const bf16* x = a_.x + row * a_.hidden;
    Floats sum = broadcast(0.0f);
    for (int64_t i = 0; i < a_.hidden; i += 16)
      sum = multiply_add(load_wide(x + i), load_wide(gate + i), sum);
    return 1.0f / (1.0f + std::exp(-sum_of(sum)));
  }

  void share_clamped(Team::Member& me) {
    constexpr int64_t part = 512;  // numbers
    const int64_t parts = (a_.inner + part - 1) / part;
    me.share(choices_ * parts, [&](int64_t unit, int64_t) {
      const int64_t row = unit / parts, from = unit % parts * part;
      const bf16* gate = wide_ + row * 2 * a_.inner;
      clamped_part(a_, gate, gate + a_.inner, narrow_ + row * a_.inner, from,
                   std::min(a_.inner, from + part));
    });
  }

  // y = x W^T + b, each row by its expert's weights.
  void multiply(Team::Member& me, const Choices& sorted, const StepLinear* by,
                const LinearArgs& like) {
    if (by->integers != nullptr) {
      integers_.prepare(me, *by->integers, like);
      IntegerRows rows = integers_.rows_of(*by->integers, like);
      const int64_t height = slab_of(IntegerProducts::row_bytes(*by->integers, like), kBlockRows);
      return share(me, sorted, by, twos_of(like.outputs), height, [&](const Unit& unit, const Unit*) {
        // What follows is the same expert's, where there is more of it.
        LinearArgs args = like;
        args.bias = unit.by->bias;
        integers_.multiply_unit(*unit.by->integers, args, rows,
                                {unit.from, unit.until, unit.index, unit.index + 1});
      });
    }
    Rows rows(like.x, like.inputs);
    share(me, sorted, by, panels_of(like.outputs), linear_slab(like.inputs),
          [&](const Unit& unit, const Unit* next) {
            LinearArgs args = like;
            args.w = unit.by->panels;
            args.bias = unit.by->bias;
            multiply_panel(args, rows, unit.from, unit.until, unit.index,
                           next ? next->by->panels + next->index * like.inputs * kPanel : nullptr);
          });
  }

  // work(unit, the next one or null) for units of so many panels, slabs of at most `height` rows.
  template <class Work>
  void share(Team::Member& me, const Choices& sorted, const StepLinear* by, int64_t panels,
             int64_t height, const Work& work) {
    std::vector<int64_t> ends;  // of the units of each expert met
    for (const Choices::Met& met : sorted.met)
      ends.push_back((ends.empty() ? 0 : ends.back()) +
                     (met.until - met.from + height - 1) / height * panels);
    const auto unit_at = [&](int64_t at) {
      const int64_t which = std::upper_bound(ends.begin(), ends.end(), at) - ends.begin();
      const Choices::Met& met = sorted.met[which];
      const int64_t within = which == 0 ? at : at - ends[which - 1];
      const int64_t from = met.from + within / panels * height;
      return Unit{by + met.expert, from, std::min(met.until, from + height), within % panels};
    };
    const int64_t units = ends.empty() ? 0 : ends.back();
    me.share(units, [&](int64_t at, int64_t next) {
      if (next >= units) return work(unit_at(at), nullptr);
      const Unit following = unit_at(next);
      work(unit_at(at), &following);
    });
  }

  const ExpertsArgs& a_;
  const int64_t choices_;
  bf16 *const gathered_, *const wide_, *const narrow_, *const sorted_;
  IntegerProducts integers_;
};

inline void mix_experts(const ExpertsArgs& args) {
  Mixture mixture(args);
  Choices choices;
  choices.sort(args.chosen, args.rows * args.per_token);
  in_team(worth(args.rows * args.per_token * args.hidden * args.inner),
          [&](Team::Member& me) {
            mixture.run(me, choices, args.gate_ups, args.downs, args.shared);
          });
}

}  // namespace baton

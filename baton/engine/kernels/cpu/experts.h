// A mixture's experts over rows, in one call: what each choice of each row says, or the weighted sum
// of a row's choices, and of what an expert says that all rows share.
//
//   gather, sorted by expert | gate, up | gate | down | back to (row, choice), or to the row
//
// The products are grouped.h's: a choice's numbers are those of its expert alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "elementwise.h"
#include "grouped.h"
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
  const Floats most = broadcast(a.limit), least = broadcast(-a.limit);
  for (int64_t i = from; i < until; i += 16) {
    const Floats g = min(most, load_wide(gate + i));
    const Floats u = max(least, min(most, load_wide(up + i)));
    store_rounded(y + i, by_sigmoid(g, broadcast(a.alpha) * g) * (u + broadcast(1.0f)));
  }
}

// The choices of one mixture's rows, sorted by expert: written once, before any thread of the team
// reads it. A thread that is late still reads it when the others are layers ahead.
struct Choices {
  void sort(const int64_t* chosen, int64_t count) {
    order.resize(count);
    places.resize(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t one, int64_t other) { return chosen[one] < chosen[other]; });
    for (int64_t at = 0; at < count; ++at) {
      const int64_t expert = chosen[order[at]];
      if (met.empty() || met.back().which != expert) met.push_back({expert, at, at});
      met.back().until = at + 1;
      places[order[at]] = at;
    }
  }

  std::vector<int64_t> order, places;  // choices by expert, and where each of them is
  std::vector<Met> met;           // experts, by choices as they are sorted
};

class Mixture {
 public:
  explicit Mixture(const ExpertsArgs& args)
      : a_(args), choices_(a_.rows * a_.per_token), gathered_(a_.scratch),
        wide_(gathered_ + choices_ * a_.hidden), narrow_(wide_ + choices_ * 2 * a_.inner),
        sorted_(narrow_ + choices_ * a_.inner),
        products_(choices_, std::max(a_.hidden, a_.inner)) {}

  // What each thread of a team runs, by experts' weights like those of the arguments.
  void run(Team::Member& me, const Choices& by, const StepLinear* gate_ups, const StepLinear* downs,
           const SharedAnswers& shared) {
    me.share(choices_, [&](int64_t at, int64_t) {
      std::copy_n(a_.x + by.order[at] / a_.per_token * a_.hidden, a_.hidden,
                  gathered_ + at * a_.hidden);
    });
    products_.multiply(me, by.met, gate_ups, {gathered_, nullptr, nullptr, wide_, choices_,
                                              a_.hidden, 2 * a_.inner});
    if (a_.alpha == 0.0f)
      share_gated(me, wide_, narrow_, choices_, a_.inner);
    else
      share_clamped(me);
    products_.multiply(me, by.met, downs, {narrow_, nullptr, nullptr, sorted_, choices_, a_.inner,
                                           a_.hidden});
    if (a_.weights != nullptr) return sum_choices(me, by, shared);
    me.share(choices_, [&](int64_t at, int64_t) {
      std::copy_n(sorted_ + at * a_.hidden, a_.hidden, a_.y + by.order[at] * a_.hidden);
    });
  }

 private:
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

  const ExpertsArgs& a_;
  const int64_t choices_;
  bf16 *const gathered_, *const wide_, *const narrow_, *const sorted_;
  GroupedProducts products_;
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

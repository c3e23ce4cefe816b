// A mixture's experts over rows: what each choice of each row says, in one call.
//
//   gather, sorted by expert | gate, up | gate | down, back to (row, choice)
//
// A phase's units are those of linear.h, quantized.h and w8a8.h by the experts met, one after the
// other: a thread that is through with an expert goes on with the next. A choice's numbers are those
// of its expert's products called alone, bit for bit.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "elementwise.h"
#include "linear.h"
#include "quantized.h"
#include "step_integers.h"
#include "team.h"
#include "w8a8.h"

namespace baton {

struct ExpertsArgs {
  const StepLinear* gate_ups;  // [experts], of one format, as are `downs`; no biases
  const StepLinear* downs;
  const bf16* x;          // [rows, hidden]
  const int64_t* chosen;  // [rows, per_token]
  bf16* y;                // [rows, per_token, hidden]
  bf16* scratch;          // [rows * per_token, 2 * hidden + 3 * inner]
  int64_t rows, hidden, inner, experts, per_token;
};

class Mixture {
 public:
  Mixture(const ExpertsArgs& args, int64_t threads)
      : a_(args), choices_(a_.rows * a_.per_token), gathered_(a_.scratch),
        wide_(gathered_ + choices_ * a_.hidden), narrow_(wide_ + choices_ * 2 * a_.inner),
        sorted_(narrow_ + choices_ * a_.inner), order_(choices_), team_(threads) {
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t one, int64_t other) {
      return a_.chosen[one] < a_.chosen[other];
    });
    for (int64_t at = 0; at < choices_; ++at) {
      const int64_t expert = a_.chosen[order_[at]];
      if (met_.empty() || met_.back().expert != expert) met_.push_back({expert, at, at});
      met_.back().until = at + 1;
    }
    const int64_t most = std::max(a_.hidden, a_.inner);
    row_scales_.resize(choices_);
    room_.resize(choices_ * ((most + kQuad - 1) / kQuad));
  }

  // What each thread of the team runs.
  void run(int64_t thread) {
    Team::Member me(team_, thread);
    me.share(choices_, [&](int64_t at, int64_t) {
      std::copy_n(a_.x + order_[at] / a_.per_token * a_.hidden, a_.hidden,
                  gathered_ + at * a_.hidden);
    });
    multiply(me, a_.gate_ups, {gathered_, nullptr, nullptr, wide_, choices_, a_.hidden,
                               2 * a_.inner});
    share_swiglu(me, wide_, narrow_, choices_, a_.inner);
    multiply(me, a_.downs, {narrow_, nullptr, nullptr, sorted_, choices_, a_.inner, a_.hidden});
    me.share(choices_, [&](int64_t at, int64_t) {
      std::copy_n(sorted_ + at * a_.hidden, a_.hidden, a_.y + order_[at] * a_.hidden);
    });
  }

 private:
  // An expert that some choices, [from, until) as they are sorted, have met.
  struct Met {
    int64_t expert, from, until;
  };

  // Rows [from, until) by panels `index` of an expert's weights.
  struct Unit {
    const StepLinear* by;
    int64_t from, until, index;
  };

  // y = x W^T, each row by its expert's weights.
  void multiply(Team::Member& me, const StepLinear* by, const LinearArgs& like) {
    if (by->integers == nullptr)
      multiply_plain(me, by, like);
    else if (by->integers->extra != nullptr)
      multiply_rounded(me, by, like);
    else
      multiply_integers(me, by, like);
  }

  void multiply_plain(Team::Member& me, const StepLinear* by, const LinearArgs& like) {
    Factors factors(like.x, like.inputs);
    const int64_t panels = (like.outputs + kPanel - 1) / kPanel;
    share(me, by, panels, slab_of(like.inputs), [&](const Unit& unit, const Unit* next) {
      LinearArgs args = like;
      args.w = unit.by->panels;
      multiply_panel(args, {factors.of(unit.from, unit.until), unit.from, unit.until}, unit.index,
                     next ? next->by->panels + next->index * like.inputs * kPanel : nullptr);
    });
  }

  void multiply_integers(Team::Member& me, const StepLinear* by, const LinearArgs& like) {
    Factors factors(like.x, like.inputs);
    const auto args_of = [&](const StepIntegers& of) {
      return IntegerArgs{like.x, of.panels, of.scales, nullptr, like.y, choices_, like.inputs,
                         like.outputs, of.groups, of.bits, of.has_zeros};
    };
    const StepIntegers& first = *by->integers;  // of the others' groups
    if (first.has_zeros)
      me.share(choices_, [&](int64_t row, int64_t) {
        sum_groups(args_of(first), row, room_.data() + row * first.groups);
      });
    const int64_t height = integer_slab(sizeof(Factor) * like.inputs);
    share(me, by, twos_of(like.outputs), height, [&](const Unit& unit, const Unit*) {
      const IntegerArgs args = args_of(*unit.by->integers);
      multiply_unit({args, IntegerLayout(args), room_.data()}, factors, panels_of(unit));
    });
  }

  void multiply_rounded(Team::Member& me, const StepLinear* by, const LinearArgs& like) {
    const int64_t quads = (like.inputs + kQuad - 1) / kQuad;
    const auto args_of = [&](const StepIntegers& of) {
      return W8A8Args{like.x, reinterpret_cast<const int8_t*>(of.panels), of.extra, of.scales,
                      nullptr, like.y, reinterpret_cast<uint8_t*>(room_.data()),
                      row_scales_.data(), choices_, like.inputs, like.outputs, quads};
    };
    me.share(choices_,
             [&](int64_t row, int64_t) { round_unsigned(args_of(*by->integers), row); });
    share(me, by, twos_of(like.outputs), integer_slab(4 * quads),
          [&](const Unit& unit, const Unit*) {
            multiply_int8_unit(args_of(*unit.by->integers), panels_of(unit));
          });
  }

  // What follows is the same expert's, where there is more of it.
  static IntegerUnit panels_of(const Unit& unit) {
    return {unit.from, unit.until, unit.index, unit.index + 1};
  }

  // work(unit, the next one or null) for units of so many panels, slabs of at most `height` rows.
  template <class Work>
  void share(Team::Member& me, const StepLinear* by, int64_t panels, int64_t height,
             const Work& work) {
    std::vector<int64_t> ends;  // of the units of each expert met
    for (const Met& met : met_)
      ends.push_back((ends.empty() ? 0 : ends.back()) +
                     (met.until - met.from + height - 1) / height * panels);
    const auto unit_at = [&](int64_t at) {
      const int64_t which = std::upper_bound(ends.begin(), ends.end(), at) - ends.begin();
      const Met& met = met_[which];
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
  std::vector<int64_t> order_;  // choices by expert
  std::vector<Met> met_;
  std::vector<float> room_, row_scales_;  // see IntegerProducts
  Team team_;
};

inline void mix_experts(const ExpertsArgs& args) {
  Mixture mixture(args, omp_get_max_threads());
#pragma omp parallel if (args.rows * args.per_token * args.hidden * args.inner > kFewProducts)
  mixture.run(omp_get_thread_num());
}

}  // namespace baton

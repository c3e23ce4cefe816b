// Products of rows that lie sorted by whose weights they meet: a mixture's experts', or heads'.
//
// A phase's units are those of linear.h, quantized.h and w8a8.h by the weights met, one after the
// other: a thread that is through with one goes on with the next. A row's numbers are those of its
// weights' product called alone, bit for bit.
#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"
#include "step_integers.h"
#include "team.h"

namespace baton {

// Rows [from, until) meet weights number `which`.
struct Met {
  int64_t which, from, until;
};

class GroupedProducts {
 public:
  // `most`: inputs of a product by integers.
  GroupedProducts(int64_t rows, int64_t most)
      : room_(IntegerProducts::room_of(rows, most)), integers_(rows, room_.data()) {}

  GroupedProducts(const GroupedProducts&) = delete;  // its products know where its room lies

  // What each thread of a team runs for y = x W^T + b, by weights of one format. By panels, y of
  // weights `which` lies `which * apart` numbers further.
  void multiply(Team::Member& me, const std::vector<Met>& met, const StepLinear* by,
                const LinearArgs& like, int64_t apart = 0) {
    if (by->integers != nullptr) {
      integers_.prepare(me, *by->integers, like);
      IntegerRows rows = integers_.rows_of(*by->integers, like);
      const int64_t height = slab_of(IntegerProducts::row_bytes(*by->integers, like), kBlockRows);
      return share(me, met, twos_of(like.outputs), height, [&](const Unit& unit, const Unit*) {
        // What follows is the same weights', where there is more of them.
        LinearArgs args = like;
        args.bias = by[unit.which].bias;
        integers_.multiply_unit(*by[unit.which].integers, args, rows,
                                {unit.from, unit.until, unit.index, unit.index + 1});
      });
    }
    Rows rows(like.x, like.inputs);
    share(me, met, panels_of(like.outputs), linear_slab(like.inputs),
          [&](const Unit& unit, const Unit* next) {
            LinearArgs args = like;
            args.w = by[unit.which].panels;
            args.bias = by[unit.which].bias;
            args.y += unit.which * apart;
            multiply_panel(args, rows, unit.from, unit.until, unit.index,
                           next ? by[next->which].panels + next->index * like.inputs * kPanel
                                : nullptr);
          });
  }

 private:
  // Rows [from, until) by panels `index` of weights `which`.
  struct Unit {
    int64_t which, from, until, index;
  };

  // work(unit, the next one or null) for units of so many panels, slabs of at most `height` rows.
  template <class Work>
  static void share(Team::Member& me, const std::vector<Met>& met, int64_t panels, int64_t height,
                    const Work& work) {
    std::vector<int64_t> ends;  // of the units of each of the weights met
    for (const Met& each : met)
      ends.push_back((ends.empty() ? 0 : ends.back()) +
                     (each.until - each.from + height - 1) / height * panels);
    const auto unit_at = [&](int64_t at) {
      const int64_t nth = std::upper_bound(ends.begin(), ends.end(), at) - ends.begin();
      const int64_t within = nth == 0 ? at : at - ends[nth - 1];
      const int64_t from = met[nth].from + within / panels * height;
      return Unit{met[nth].which, from, std::min(met[nth].until, from + height), within % panels};
    };
    const int64_t units = ends.empty() ? 0 : ends.back();
    me.share(units, [&](int64_t at, int64_t next) {
      const bool more = next < units;
      const Unit following = more ? unit_at(next) : Unit{};
      work(unit_at(at), more ? &following : nullptr);
    });
  }

  std::vector<float> room_;
  IntegerProducts integers_;
};

}  // namespace baton

// Latent attention (MLA) on both sides of attention itself: queries that meet latents, and heads of
// the latents that they attended to. models/mla.py has the algebra.
//
//   gather, rotate, norm | queries by each head's keys | attention | by each head's values
//
// The rows of a head lie side by side while they meet the head's weights, as an expert's rows do. What
// a head and a row make depends on no other.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "elementwise.h"
#include "grouped.h"
#include "team.h"

namespace baton {

// Which dims rotate together, and where they are written: dim i with dim i + rope / 2 in place,
// neighbours in place, neighbours as halves.
enum LatentPairs : int64_t { kHalves, kNeighbours, kRegrouped };

struct LatentSizes {
  int64_t heads, nope, rope, rank, value_dim, pairs;
};

struct LatentWeights {
  const bf16* norm;                 // [rank]
  const StepLinear *keys, *values;  // of each head: [nope] -> [rank], [rank] -> [value_dim]
  float epsilon;
};

// The rows before attention. Strides in numbers, from a row to the next.
struct LatentRows {
  const bf16* q;          // [rows, heads, nope + rope]
  const bf16* latent;     // [rows, rank + rope]
  const bf16 *cos, *sin;  // [rows, rope / 2]
  int64_t rows, q_stride, latent_stride;
};

class Latents {
 public:
  // `parts`: scratch, [heads, rows, nope].
  Latents(const LatentSizes& sizes, int64_t rows, bf16* parts)
      : s_(sizes), rows_(rows), parts_(parts), products_(0, 0) {
    for (int64_t head = 0; head < s_.heads; ++head)
      heads_.push_back({head, head * rows, (head + 1) * rows});
  }

  // What each thread of a team runs to make queries [rows, heads, rank + rope] and a key of each
  // row, [rank + rope], where `key_of(row)` says.
  template <class KeyOf>
  void before(Team::Member& me, const LatentRows& from, const LatentWeights& by, bf16* queries,
              const KeyOf& key_of) {
    const int64_t groups = (s_.heads + kHeads - 1) / kHeads, width = s_.rank + s_.rope;
    me.share(rows_ * (groups + 1), [&](int64_t unit, int64_t) {
      const int64_t row = unit / (groups + 1), group = unit % (groups + 1);
      const Turn turn(s_, from, row);
      if (group == groups) {
        const bf16* latent = from.latent + row * from.latent_stride;
        bf16* key = key_of(row);
        normalize(latent, by.norm, key, s_.rank, {by.epsilon, 0.0f});
        return turn(latent + s_.rank, key + s_.rank);
      }
      for (int64_t head = group * kHeads; head < std::min(s_.heads, (group + 1) * kHeads); ++head) {
        const bf16* q = from.q + row * from.q_stride + head * (s_.nope + s_.rope);
        std::copy_n(q, s_.nope, parts_ + (head * rows_ + row) * s_.nope);
        turn(q + s_.nope, queries + (row * s_.heads + head) * width + s_.rank);
      }
    });
    products_.multiply(me, heads_, by.keys, product(parts_, queries, s_.nope, s_.rank, width),
                       by_head(width));
  }

  // And to make y [rows, heads, value_dim] of what each head attended to, [heads, rows, rank].
  void after(Team::Member& me, const bf16* attended, const LatentWeights& by, bf16* y) {
    products_.multiply(me, heads_, by.values,
                       product(attended, y, s_.rank, s_.value_dim, s_.value_dim),
                       by_head(s_.value_dim));
  }

 private:
  static constexpr int64_t kHeads = 4;  // of a unit

  // Rotates a part of a row's query or key.
  class Turn {
   public:
    Turn(const LatentSizes& sizes, const LatentRows& from, int64_t row)
        : s_(sizes), half_(s_.rope / 2), cos_(from.cos + row * half_), sin_(from.sin + row * half_),
          by_(cos_, sin_, half_) {}

    void operator()(const bf16* x, bf16* to) const {
      if (s_.pairs != kRegrouped) {
        std::copy_n(x, s_.rope, to);
        if (s_.pairs == kHalves) return rotate_halves(to, cos_, sin_, half_);
        return rotate_neighbours(to, by_, s_.rope);
      }
      bf16 turned[kMostRotated];
      std::copy_n(x, s_.rope, turned);
      rotate_neighbours(turned, by_, s_.rope);
      for (int64_t i = 0; i < half_; ++i) {
        to[i] = turned[2 * i];
        to[half_ + i] = turned[2 * i + 1];
      }
    }

   private:
    const LatentSizes& s_;
    const int64_t half_;
    const bf16 *const cos_, *const sin_;
    NeighbourFactors by_;
  };

  // Of the rows sorted by head; y's lie `width` numbers a head apart, of all heads.
  LinearArgs product(const bf16* x, bf16* y, int64_t inputs, int64_t outputs, int64_t width) const {
    return {x, nullptr, nullptr, y, s_.heads * rows_, inputs, outputs, nullptr, s_.heads * width};
  }

  // From where a head's rows would lie to where they do.
  int64_t by_head(int64_t width) const { return width - rows_ * s_.heads * width; }

  const LatentSizes s_;
  const int64_t rows_;
  bf16* const parts_;
  GroupedProducts products_;
  std::vector<Met> heads_;
};

// Queries and keys of rows, in one call.
struct LatentQueriesArgs {
  LatentSizes sizes;
  LatentWeights by;
  LatentRows from;
  bf16 *parts, *queries, *keys;  // [heads, rows, nope], [rows, heads, rank + rope], [rows, rank + rope]
};

inline void latent_queries(const LatentQueriesArgs& a) {
  Latents latents(a.sizes, a.from.rows, a.parts);
  const int64_t products = a.from.rows * a.sizes.heads * a.sizes.nope * a.sizes.rank;
  in_team(worth(products), [&](Team::Member& me) {
    latents.before(me, a.from, a.by, a.queries, [&](int64_t row) {
      return a.keys + row * (a.sizes.rank + a.sizes.rope);
    });
  });
}

// The heads' values [rows, heads, value_dim] of what they attended to, [heads, rows, rank].
struct LatentValuesArgs {
  LatentSizes sizes;
  LatentWeights by;
  const bf16* attended;
  bf16* y;
  int64_t rows;
};

inline void latent_values(const LatentValuesArgs& a) {
  Latents latents(a.sizes, a.rows, nullptr);
  const int64_t products = a.rows * a.sizes.heads * a.sizes.rank * a.sizes.value_dim;
  in_team(worth(products),
          [&](Team::Member& me) { latents.after(me, a.attended, a.by, a.y); });
}

}  // namespace baton

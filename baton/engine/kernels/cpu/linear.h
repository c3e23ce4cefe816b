// y = x W^T + b for bfloat16, accumulated in float32, from weights packed in panels.
//
// A panel holds 64 outputs, with AVX2 32: [inputs / 2][64][2], so one vector holds a pair of inputs of
// 16 outputs and no sum runs across lanes. An output adds its inputs in their order, two at a time (in
// tiles 32), whatever the number of rows: what a row computes depends on no other row.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>

#include "factors.h"
#include "team.h"
#include "tiles.h"
#include "vectors.h"

namespace baton {

constexpr int64_t kPanel = 16 * kPanelVectors;  // outputs of a panel
constexpr int64_t kCached = 384 << 10;  // bytes of x that stay in a core's cache beside a panel
constexpr int64_t kFewProducts = 1 << 16;  // below, waking a second thread takes longer

struct LinearArgs {
  const bf16* x;     // [rows, inputs]
  const bf16* w;     // panels
  const bf16* bias;  // [outputs], or null
  bf16* y;           // [rows, outputs]
  int64_t rows, inputs, outputs;
  float* wide = nullptr;  // [rows, outputs], instead of y
  int64_t stride = 0;     // numbers from a row of y to the next; 0: outputs
};

// The step where one group of rows asks alone, as asking.py has measured it.
inline std::atomic<int> asking_step{1};

// Weights that come next, asked of memory while these are multiplied: `lines` cache lines with
// every pair of inputs, from `from` on, each `step`-th of them; `near`: to the core's first cache.
struct Ahead {
  const char* from = nullptr;
  int lines = 0, step = 1;
  bool near = false;

  // What one of several passes asks of the inputs from `next` on, if any: an even share.
  static Ahead of(const bf16* next, int64_t inputs, int64_t pass, int64_t passes, bool near) {
    if (next == nullptr) return {};
    const int64_t first = kPanelVectors * pass / passes;
    Ahead ahead{reinterpret_cast<const char*>(next) + first * 32 * inputs,
                static_cast<int>(kPanelVectors * (pass + 1) / passes - first), 1, near};
    if (passes == 1)
      ahead.step = std::min<int>(asking_step.load(std::memory_order_relaxed), kPanelVectors);
    return ahead;
  }
};

// Inputs [from, until) of a panel. Between parts the sums of each row wait in memory: [rows][V][16].
struct Part {
  int64_t from, until;
  float* sums;
};

alignas(64) inline constexpr float kZeros[16] = {};
constexpr int64_t kPartInputs = 64;  // of a part, times passes: 8 KB each with AVX-512
// Rows of a slab that is taken in parts, at most.
constexpr int64_t kPartRows = kPartPasses * std::max(kRows, kHalfRows / 2);

// The rows of a product as one thread takes them.
struct Rows {
  Factors factors;
  TiledRows tiled;

  // x [.., inputs].
  Rows(const bf16* x, int64_t inputs) : factors(x, inputs), tiled(x, 2 * inputs) {}
};

// Rows that meet panels together, and the first one's factors.
struct Slab {
  const Factor* x;
  int64_t from, until;
};

// 16 outputs from `at` on, of any row: sums with their bias.
struct Outputs {
  const LinearArgs& a;
  const int64_t at, stride;
  const Lanes lanes;
  const Floats bias;

  Outputs(const LinearArgs& args, int64_t first)
      : a(args), at(first), stride(a.stride == 0 ? a.outputs : a.stride),
        lanes(lanes_of(std::max<int64_t>(0, a.outputs - at))),
        bias(a.bias != nullptr ? load_wide(a.bias + at, lanes) : broadcast(0.0f)) {}

  void store(int64_t row, Floats sum) const {
    store_output(a, row * stride + at, sum + bias, lanes);
  }
};

// M rows of a slab by V times 16 outputs of a panel, from output `from` of all on.
template <int M, int V>
inline void multiply(const LinearArgs& a, const Slab& slab, int64_t row, int64_t from, Ahead ahead,
                     const Part& part) {
  const bf16* w = a.w + (from / kPanel * a.inputs + part.from) * kPanel + 2 * (from % kPanel);
  float* const kept = part.sums + (row - slab.from) * V * 16;
  // Every fourth row: what lies between is within reach of an address.
  const Factor* x[(M + 3) / 4];
  for (int m = 0; m < M; m += 4) x[m / 4] = slab.x + (row - slab.from + m) * a.inputs;
  Floats sum[M][V];
  // One way for the first part and the others: of two, the compiler keeps the sums in memory.
  const float* const before = part.from > 0 ? kept : kZeros;
  const int64_t step = part.from > 0 ? 16 : 0;
  BATON_UNROLL for (int m = 0; m < M; ++m)
    BATON_UNROLL for (int j = 0; j < V; ++j) sum[m][j] = load(before + step * (m * V + j));
  for (int64_t k = part.from; k < part.until; k += 2, w += 2 * kPanel) {
    for (int line = 0; line < ahead.lines; line += ahead.step, ahead.from += 64 * ahead.step)
      ahead.near ? ask(ahead.from) : ask_early(ahead.from);
    dot_rows<M>(sum, [&](int m) { return x[m / 4] + m % 4 * a.inputs + k; }, w);
  }
  if (kPartPasses > 0 && part.until < a.inputs) {
    BATON_UNROLL for (int m = 0; m < M; ++m)
      BATON_UNROLL for (int j = 0; j < V; ++j) store(kept + 16 * (m * V + j), sum[m][j]);
    return;
  }
  for (int j = 0; j < V; ++j) {
    const Outputs outputs(a, from + 16 * j);
    BATON_UNROLL for (int m = 0; m < M; ++m) outputs.store(row + m, sum[m][j]);
  }
}

// Up to M rows by V vectors of a panel.
template <int M, int V>
inline void multiply_rows(const LinearArgs& a, const Slab& slab, int64_t row, int64_t rows,
                          int64_t from, const Ahead& ahead, const Part& part) {
  if constexpr (M > 1)
    if (rows < M) return multiply_rows<M - 1, V>(a, slab, row, rows, from, ahead, part);
  multiply<M, V>(a, slab, row, from, ahead, part);
}

#ifdef BATON_TILES
// Rows [from, until), tiled, by a panel: halves of it, whose weights 32 rows after the other meet.
inline void multiply_tiled(const LinearArgs& a, const uint8_t* rows, int64_t from, int64_t until,
                           int64_t panel, const bf16* next) {
  constexpr int64_t kLine = 4 * kPanel;  // bytes of a pair of inputs
  const TilesInUse tiles;
  const int64_t steps = a.inputs / kTilePairs;
  const auto* panels = reinterpret_cast<const uint8_t*>(a.w + panel * a.inputs * kPanel);
  for (int64_t half = 0; half < kPanel / kTiledRows; ++half)
    each_tiled_rows(rows, steps * kTileSize, from, until, [&](const uint8_t* x, int64_t groups,
                                                              int64_t row, int64_t count) {
      const auto weights = [&](int64_t step, int which) {
        const int64_t at = step * kTileRows * kLine + (2 * half + which) * kTileBytes;
        if (next != nullptr && row == from)
          for (int64_t line = 0; line < kTileRows; ++line)
            _mm_prefetch(reinterpret_cast<const char*>(next) + at + line * kLine, _MM_HINT_T1);
        return TiledWeights{panels + at, kLine};
      };
      alignas(64) float sums[4][16][16];
      multiply_steps<TileProduct::kPairs>(x, groups, steps * kTileSize, 0, steps, weights, sums);
      for (int64_t j = 0; j < 2; ++j) {
        const Outputs outputs(a, panel * kPanel + half * kTiledRows + 16 * j);
        for (int64_t m = 0; m < count; ++m)
          outputs.store(row + m, load(sums[m / 16 * 2 + j][m % 16]));
      }
    });
}
#endif

// Whether tiles take products of so many inputs.
inline bool tiles_take(int64_t inputs) { return kTiles && inputs % kTilePairs == 0; }

// Groups of up to kRows rows take a panel at once. A few more, and twice as many, may take its halves
// instead: its weights come from afar and are read half as often. Beyond, arithmetic is what takes
// time, and kManyRows is what does most of it.
//
// A panel does not fit the core's first cache. Where few passes go over it, all go over a part of it
// before the next one, which is asked into the first cache meanwhile. Passes over whole rows of a
// part find it there after the first one; two halves have lines of their own.
inline void multiply_slab(const LinearArgs& a, const Slab& slab, int64_t panel,
                          const bf16* next) {
  const int64_t rows = slab.until - slab.from;
  const int64_t most = rows <= 2 * kHalfRows ? kHalfRows : kManyRows;
  // Evenly: 10 rows are 5 and 5, not 6 and 4.
  const int64_t groups = (rows + most - 1) / most;
  const int64_t halves = (rows + groups - 1) / groups > kRows ? 2 : 1;
  const int64_t passes = groups * halves;
  const bool in_parts = passes > 1 && passes <= kPartPasses;
  const int64_t parts = in_parts ? (a.inputs - 1) / (kPartInputs * passes) + 1 : 1;
  alignas(64) float sums[kPartRows * kPanel + 1];
  for (int64_t i = 0, from = 0, until; i < parts; ++i, from = until) {
    until = a.inputs / 2 * (i + 1) / parts * 2;
    const bf16* const then = i + 1 < parts ? a.w + (panel * a.inputs + until) * kPanel : next;
    for (int64_t half = 0, pass = 0; half < halves; ++half) {
      const Part part{from, until, sums + half * rows * (kPanel / 2)};
      int64_t left = groups;
      for (int64_t row = slab.from; row < slab.until; --left, ++pass) {
        const int64_t count = (slab.until - row + left - 1) / left;
        const Ahead ahead = Ahead::of(then, until - from, pass, passes, in_parts);
        if (halves == 1)
          multiply_rows<kRows, kPanelVectors>(a, slab, row, count, panel * kPanel, ahead, part);
        else if constexpr (kHalfRows > kRows)
          multiply_rows<kHalfRows, kPanelVectors / 2>(
              a, slab, row, count, panel * kPanel + half * (kPanel / 2), ahead, part);
        row += count;
      }
    }
  }
}

// Rows [from, until) by a panel; `next`: the one after it, or null. In products.cpp: what calls it
// is compiled beside it.
void multiply_panel(const LinearArgs& a, Rows& rows, int64_t from, int64_t until, int64_t panel,
                    const bf16* next);

// How many rows of so many bytes meet one panel after the other while they stay in the cache; of
// those that are multiplied `block` at once. Of `rows` in all (0: not known) all if they fit, else
// even parts: no pass over the weights is for a few rows that are left.
inline int64_t slab_of(int64_t row_bytes, int64_t block, int64_t rows = 0) {
  const int64_t most = std::max(block, kCached / row_bytes);
  if (rows == 0) return most / block * block;
  const int64_t slabs = (rows + most - 1) / most;
  return slabs <= 1 ? rows : (rows + slabs * block - 1) / (slabs * block) * block;
}

// What a thread of a team does for a product of rows in slabs of `height`: work(from, until, panel,
// next) for its units, rows [from, until) by a panel; next: the panel after it, `panels` = none.
template <class Work>
void share_slabs(Team::Member& me, int64_t rows, int64_t height, int64_t panels,
                 const Work& work, Coming coming = {}) {
  const int64_t units = (rows + height - 1) / height * panels;
  const auto some = [&](int64_t unit, int64_t next) {
    const int64_t from = unit / panels * height;
    work(from, std::min(rows, from + height), unit % panels, next < units ? next % panels : panels);
  };
  me.share(units, some, coming);
}

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

inline int64_t linear_slab(int64_t inputs, int64_t rows = 0) {
  if (tiles_take(inputs)) return slab_of(2 * inputs, kTiledRows, rows);
  return slab_of(sizeof(Factor) * inputs, kManyRows, rows);
}

inline void share_linear(Team::Member& me, const LinearArgs& a) {
  const int64_t panels = panels_of(a.outputs);
  Rows rows(a.x, a.inputs);
  share_slabs(me, a.rows, linear_slab(a.inputs, a.rows), panels,
              [&](int64_t from, int64_t until, int64_t panel, int64_t next) {
                multiply_panel(a, rows, from, until, panel,
                               next < panels ? a.w + next * a.inputs * kPanel : nullptr);
              });
}

// Whether so many products of numbers are worth a team.
inline bool worth(int64_t products) { return products > kFewProducts; }

inline void linear(const LinearArgs& a) {
  in_team(worth(a.rows * a.inputs * a.outputs), [&](Team::Member& me) { share_linear(me, a); });
}

// weight [outputs, inputs] -> panels, the last one filled up with zeros.
inline void pack(const bf16* weight, bf16* panels, int64_t outputs, int64_t inputs) {
  const int64_t count = (outputs + kPanel - 1) / kPanel;
#pragma omp parallel for
  for (int64_t panel = 0; panel < count; ++panel) {
    bf16* to = panels + panel * inputs * kPanel;
    for (int64_t j = 0; j < kPanel; ++j) {
      const int64_t output = panel * kPanel + j;
      for (int64_t k = 0; k < inputs; k += 2) {
        int32_t pair = 0;
        if (output < outputs) std::memcpy(&pair, weight + output * inputs + k, sizeof pair);
        std::memcpy(to + k * kPanel + 2 * j, &pair, sizeof pair);
      }
    }
  }
}

}  // namespace baton

// Integer weights by AMX's tiles: a unit widens its panels to bfloat16 once, for all its rows.
#pragma once

#include "integer_units.h"
#include "tiles.h"

namespace baton {

#ifdef BATON_TILES
// A panel's integers as bfloat16: [pairs of inputs][32 outputs][2].
template <class Source>
BATON_VNNI void widen_panel(const IntegerWork& work, int64_t panel, uint8_t* to) {
  const IntegerLayout& at = work.at;
  const Source source = Source::make(work.a.bits);
  const uint8_t* from = work.a.panels + panel * at.panel;
  for (int64_t g = 0; g < work.a.groups; ++g, from += at.group) {
    ask(from + kFarAhead, at.header);
    for (int64_t quad = 0; quad < at.quads; ++quad) {
      const uint8_t* line = from + at.header + quad * Source::bytes;
      ask(line + kFarAhead, Source::bytes);
      for (int pair = 0; pair < 2; ++pair, to += 2 * kTileBytes) {
        Pairs w[2];
        source.template load<2>(line, 0, pair, w);
        store_line(to, joined(w[0]));
        store_line(to + kTileBytes, joined(w[1]));
      }
    }
  }
}

// The rows of a unit, tiled, by its panels.
template <class Source>
void multiply_integers_tiled(const IntegerWork& work, const uint8_t* rows,
                             const IntegerUnit& unit) {
  const IntegerArgs& a = work.a;
  const TilesInUse tiles;
  const int64_t size = a.inputs / a.groups, group = a.inputs / kTilePairs * kTileSize;
  constexpr int64_t kLine = 2 * kTileBytes;  // of a pair of inputs
  uint8_t* const widened = kept_room<IntegerWork, uint8_t>(a.inputs / 2 * kLine);
  for (int64_t panel = 2 * unit.two; panel < 2 * unit.two + 2; ++panel) {
    widen_panel<Source>(work, panel, widened);
    const auto weights = [&](int64_t step, int which) {
      return TiledWeights{widened + step * kTileRows * kLine + which * kTileBytes, kLine};
    };
    each_tiled_rows(rows, group, unit.from, unit.until, [&](const uint8_t* x, int64_t groups,
                                                            int64_t row, int64_t count) {
      alignas(64) float total[kTiledRows][kNarrow] = {};
      for (int64_t g = 0; g < a.groups; ++g) {
        alignas(64) float sums[4][16][16];
        const int64_t first = g * size / kTilePairs, until = (g + 1) * size / kTilePairs;
        multiply_steps<TileProduct::kPairs>(x, groups, group, first, until, weights, sums);
        const uint8_t* head = work.head(panel, g);
        for (int64_t j = 0; j < 2; ++j) {
          const Floats scale = load_half(head + 32 * j), zero = work.zero(head, j);
          for (int64_t m = 0; m < count; ++m) {
            Floats part = load(sums[m / 16 * 2 + j][m % 16]);
            if (a.has_zeros)
              part = subtract_product(part, broadcast(work.sums[(row + m) * a.groups + g]), zero);
            float* to = total[m] + 16 * j;
            store(to, multiply_add(part, scale, load(to)));
          }
        }
      }
      for (int64_t m = 0; m < count; ++m)
        for (int64_t j = 0; j < 2; ++j)
          store_outputs(a, row + m, panel * kNarrow + 16 * j, load(total[m] + 16 * j));
    });
  }
}
#endif

}  // namespace baton

// AMX: products of whole tiles, eight registers of 16 rows of 64 bytes each.
//
// A product's sums are 16 rows by 16 outputs. One tile of rows holds 64 bytes of each: 32 bfloat16, or
// 64 bytes unsigned; one of weights the same inputs of 16 outputs, a line for every pair of them (or
// for every four bytes), as panels have them. All tiles are of full size: rows that are lacking are
// zeros. A row's sums depend on no other row.
//
// -DBATON_EMULATED_TILES spells the same in plain C++, as the manual defines the instructions (Intel
// SDM, TDPBF16PS and TDPBUSD), for tests on processors without AMX.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "factors.h"
#include "vectors.h"

#if defined(__AMX_BF16__) || defined(BATON_EMULATED_TILES)
#define BATON_TILES
#endif

namespace baton {

#ifdef BATON_TILES
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;                 // of a row
constexpr int64_t kTileSize = kTileRows * kTileBytes;
constexpr int64_t kTilePairs = kTileBytes / 2;     // numbers of a row in bfloat16
constexpr int64_t kTiledRows = 2 * kTileRows;      // rows, and outputs, at once: four tiles of sums

// Rows as tiles take them: 16 together, [bytes / 64][16][64], those that are lacking zeros.
class TiledRows {
 public:
  // Rows of so many bytes, a multiple of 64, side by side.
  TiledRows(const void* rows, int64_t bytes)
      : rows_(static_cast<const uint8_t*>(rows)), bytes_(bytes) {}

  // Of rows [from, until), until others are asked for.
  const uint8_t* of(int64_t from, int64_t until) {
    const int64_t groups = (until - from + kTileRows - 1) / kTileRows;
    uint8_t* const to = kept_room<TiledRows, uint8_t>(groups * kTileRows * bytes_);
    if (from_ != from || until_ != until) tile(to, from, until);
    return to;
  }

 private:
  void tile(uint8_t* at, int64_t from, int64_t until) {
    for (int64_t group = from; group < until; group += kTileRows)
      for (int64_t byte = 0; byte < bytes_; byte += kTileBytes)
        for (int64_t row = group; row < group + kTileRows; ++row, at += kTileBytes) {
          if (row < until)
            std::memcpy(at, rows_ + row * bytes_ + byte, kTileBytes);
          else
            std::memset(at, 0, kTileBytes);
        }
    from_ = from;
    until_ = until;
  }

  const uint8_t* rows_;
  int64_t bytes_;
  int64_t from_ = 0, until_ = 0;
};

#ifdef BATON_TILES

enum class TileProduct { kPairs, kBytes };  // sums are float32, int32

#ifdef BATON_EMULATED_TILES

struct Tile {
  alignas(64) uint8_t bytes[kTileRows][kTileBytes];
};

inline Tile& tile(int index) {
  static thread_local Tile tiles[8];
  return tiles[index];
}

struct TilesInUse {
  TilesInUse() {}  // as one that does something
};

template <int T>
inline void load_tile(const void* from, int64_t stride) {
  for (int64_t row = 0; row < kTileRows; ++row)
    std::memcpy(tile(T).bytes[row], static_cast<const uint8_t*>(from) + row * stride, kTileBytes);
}

template <int T>
inline void store_tile(void* to) {
  std::memcpy(to, tile(T).bytes, kTileSize);
}

template <int T>
inline void clear_tile() {
  std::memset(tile(T).bytes, 0, kTileSize);
}

inline float emulated_wide(const uint8_t* number) {
  uint16_t upper;
  std::memcpy(&upper, number, sizeof upper);
  const uint32_t bits = static_cast<uint32_t>(upper) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Sums by rows by weights: even and odd products added up apart, then both to the sum.
template <TileProduct Kind, int Sums, int Rows, int Weights>
inline void multiply_tiles() {
  for (int64_t row = 0; row < kTileRows; ++row)
    for (int64_t output = 0; output < kTileRows; ++output) {
      const uint8_t* x = tile(Rows).bytes[row];
      uint8_t* sum = tile(Sums).bytes[row] + 4 * output;
      if constexpr (Kind == TileProduct::kPairs) {
        float even = 0.0f, odd = 0.0f, total;
        for (int64_t k = 0; k < kTileRows; ++k) {
          const uint8_t* w = tile(Weights).bytes[k] + 4 * output;
          even = std::fma(emulated_wide(x + 4 * k), emulated_wide(w), even);
          odd = std::fma(emulated_wide(x + 4 * k + 2), emulated_wide(w + 2), odd);
        }
        std::memcpy(&total, sum, sizeof total);
        total += even + odd;
        std::memcpy(sum, &total, sizeof total);
      } else {
        int32_t total;
        std::memcpy(&total, sum, sizeof total);
        for (int64_t k = 0; k < kTileBytes; ++k)
          total += x[k] * static_cast<int8_t>(tile(Weights).bytes[k / 4][4 * output + k % 4]);
        std::memcpy(sum, &total, sizeof total);
      }
    }
}

#else

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// While one lives, this thread's tiles hold what they are given.
class TilesInUse {
 public:
  TilesInUse() {
    TileShapes shapes;
    std::fill_n(shapes.row_bytes, 8, kTileBytes);
    std::fill_n(shapes.rows, 8, kTileRows);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TilesInUse() { asm volatile("tilerelease"); }
  TilesInUse(const TilesInUse&) = delete;
};

template <int T>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(kTileBytes), "i"(T) : "memory");
}

template <int T>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <TileProduct Kind, int Sums, int Rows, int Weights>
inline void multiply_tiles() {
  if constexpr (Kind == TileProduct::kPairs)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Weights));
  else
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Weights));
}

#endif

// A tile of weights: lines `stride` bytes apart.
struct TiledWeights {
  const void* at;
  int64_t stride;
};

// Up to 32 rows, which TiledRows has at `rows` in `groups` of 16, `group` bytes apart, by 32 outputs:
// steps [first, until) of 64 bytes. weights(step, which) is the tile of 16 outputs. `sums`: four
// tiles of float or int32, [16 rows][16 outputs]: the first rows' two, then the others'.
template <TileProduct Kind, class Number, class Weights>
inline void multiply_steps(const uint8_t* rows, int64_t groups, int64_t group, int64_t first,
                           int64_t until, const Weights& weights, Number (*sums)[16][16]) {
  static_assert(sizeof(Number) == 4);
  clear_tile<0>();
  clear_tile<1>();
  clear_tile<2>();
  clear_tile<3>();
  for (int64_t step = first; step < until; ++step) {
    const TiledWeights one = weights(step, 0), other = weights(step, 1);
    load_tile<4>(rows + step * kTileSize, kTileBytes);
    load_tile<6>(one.at, one.stride);
    load_tile<7>(other.at, other.stride);
    multiply_tiles<Kind, 0, 4, 6>();
    multiply_tiles<Kind, 1, 4, 7>();
    if (groups == 1) continue;
    load_tile<5>(rows + group + step * kTileSize, kTileBytes);
    multiply_tiles<Kind, 2, 5, 6>();
    multiply_tiles<Kind, 3, 5, 7>();
  }
  store_tile<0>(sums[0]);
  store_tile<1>(sums[1]);
  if (groups == 1) return;
  store_tile<2>(sums[2]);
  store_tile<3>(sums[3]);
}

// Rows [from, until) of TiledRows at `rows`, 32 at once: work(rows, number of 16s, the first row, how
// many).
template <class Work>
inline void each_tiled_rows(const uint8_t* rows, int64_t group, int64_t from, int64_t until,
                            const Work& work) {
  for (int64_t row = from; row < until; row += kTiledRows, rows += 2 * group) {
    const int64_t count = std::min(kTiledRows, until - row);
    work(rows, count > kTileRows ? 2 : 1, row, count);
  }
}

#endif

}  // namespace baton

// The highest logits of each row, and who wins a keyed draw from it: one pass over the vocabulary.
//
// A draw is Gumbel-max: the highest s + g wins, where s = (logit - max) / temperature and g is the
// noise of (key, id), sampler.py's. The same token has the lowest E exp(-s), E = -log(u): a race of
// exponential clocks. Since E >= 1 - u, a token cannot win unless
//
//     1 - u <= T exp(s)      T = the lowest E exp(-s) met so far
//
// and that is asked of every token with a hash, and of exp(s) only an upper bound that is linear in
// the exponent's fraction: no logarithm. Few pass (about ln V of them lower T); for those the clock
// is computed in double. If at the end one token's clock is the lowest by more than rounding, it has
// won; else (once in a billion rows) sampler.py decides as it does without a kernel.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.h"

namespace baton {

constexpr int64_t kBlock = 1024;  // logits that are looked at together for their maximum
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kMix1 = 0xBF58476D1CE4E5B9ull, kMix2 = 0x94D049BB133111EBull;
constexpr double kSlack = 1e-9;  // clocks that differ by less may be equal in sampler.py's numbers

struct HighestArgs {
  const float* logits;  // [rows, size], `stride` apart
  float* values;        // [rows]: NaN if any is
  int64_t* ids;         // [rows]: the lowest id that has it
  int64_t rows, size, stride;
};

struct RaceArgs {
  const float* logits;       // [rows, size], `stride` apart
  const float* highest;      // [rows]: finite
  const float* temperatures; // [rows]
  const uint64_t* keys;      // [rows]
  int64_t* ids;              // [rows]: who has won, -1 if that cannot be told
  int64_t rows, size, stride;
};

struct TopArgs {
  const float* logits;  // [rows, size], `stride` apart, no NaN
  float* values;        // [rows, count]: the highest, in no order; -inf where there are no more
  int64_t* ids;         // [rows, count]: whose they are, 0 for those
  int64_t rows, size, stride, count;
};

// The maximum of n numbers, NaN if one is.
inline float highest_of(const float* from, int64_t n) {
  const Floats lowest = broadcast(-std::numeric_limits<float>::infinity());
  Floats most[4] = {lowest, lowest, lowest, lowest};
  Lanes odd = 0;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    BATON_UNROLL for (int j = 0; j < 4; ++j) {
      const Floats x = load(from + i + 16 * j);
      odd |= unordered(x);
      most[j] = max(most[j], x);
    }
  for (; i < n; i += 16) {
    const Lanes lanes = lanes_of(n - i);
    const Floats x = select(lanes, load(from + i, lanes), lowest);
    odd |= unordered(x);
    most[0] = max(most[0], x);
  }
  if (odd) return std::numeric_limits<float>::quiet_NaN();
  return most_of(max(max(most[0], most[1]), max(most[2], most[3])));
}

inline void highest_of_row(const HighestArgs& a, int64_t row) {
  const float* logits = a.logits + row * a.stride;
  float best = -std::numeric_limits<float>::infinity();
  int64_t block = 0;
  for (int64_t at = 0; at < a.size; at += kBlock) {
    const float most = highest_of(logits + at, std::min(kBlock, a.size - at));
    if (std::isnan(most)) {
      a.values[row] = most;
      a.ids[row] = at;
      return;
    }
    if (most > best) best = most, block = at;
  }
  while (block + 1 < a.size && logits[block] != best) ++block;
  a.values[row] = best;
  a.ids[row] = block;
}

// SplitMix64's output function.
inline Longs mixed(Longs z) {
  z = (z ^ (z >> 30)) * kMix1;
  z = (z ^ (z >> 27)) * kMix2;
  return z ^ (z >> 31);
}

inline uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * kMix1;
  z = (z ^ (z >> 27)) * kMix2;
  return z ^ (z >> 31);
}

// E exp(-s) of one token.
inline double clock_of(uint64_t key, int64_t id, float s) {
  const uint64_t bits = mixed(key + (static_cast<uint64_t>(id) + 1) * kGolden) >> 12;
  const double u = (static_cast<double>(bits) + 0.5) * 0x1p-52;
  return -std::log(u) * std::exp(-static_cast<double>(s));
}

// The lowest clock, and the lowest but one.
struct Leaders {
  double best = std::numeric_limits<double>::infinity(), second = best;
  int64_t id = -1;

  void meet(int64_t token, double clock) {
    if (clock < best) {
      second = best;
      best = clock;
      id = token;
    } else if (clock < second) {
      second = clock;
    }
  }

  int64_t winner() const { return second > best * (1 + kSlack) ? id : -1; }
};

inline void race_of_row(const RaceArgs& a, int64_t row) {
  const float* logits = a.logits + row * a.stride;
  const float highest = a.highest[row], temperature = a.temperatures[row];
  const uint64_t key = a.keys[row];
  const Floats top = broadcast(highest), divisor = broadcast(temperature);
  const Floats inverse = broadcast(1.0f / temperature);
  // 2^x as its own bits: x + 127 in the exponent, and 1 + fraction >= 2^fraction.
  const Floats scale = broadcast(1.44269504f * 0x1p23f), one = broadcast(127 * 0x1p23f);
  Longs counters;  // of the first tokens of 16; what the hashes are of
  for (int i = 0; i < kLongs; ++i) counters[i] = key + (static_cast<uint64_t>(i) + 1) * kGolden;
  Leaders found;
  // T, rounded up, in units of 2^-32; the bound's own rounding is less than its last factor.
  Floats limit = broadcast(std::numeric_limits<float>::infinity());
  for (int64_t at = 0; at < a.size; at += 16, counters += 16 * kGolden) {
    const Lanes lanes = lanes_of(a.size - at);
    const Floats x = load(logits + at, lanes);
    const Floats s = (x - top) * inverse;
    const Floats bound = power_bound(max(multiply_add(s, scale, one), broadcast(0.0f)));
    // The upper half of each hash: u in [h, h + 1) / 2^32.
    Longs hashes[16 / kLongs];
    BATON_UNROLL for (int i = 0; i < 16 / kLongs; ++i)
      hashes[i] = mixed(counters + static_cast<uint64_t>(i * kLongs) * kGolden);
    const Floats rest = upper_complements(hashes);  // <= (1 - u) 2^32
    unsigned passed = lanes & less_equal(rest, limit * bound);
    if (passed == 0) continue;
    alignas(64) float exact[16];
    store(exact, (x - top) / divisor);
    for (; passed; passed &= passed - 1) {
      const int lane = __builtin_ctz(passed);
      if (std::isinf(exact[lane])) continue;
      found.meet(at + lane, clock_of(key, at + lane, exact[lane]));
    }
    limit = broadcast(static_cast<float>(found.best) * 0x1p32f * 1.001f);
  }
  a.ids[row] = found.winner();
}

// What is above the lowest of the `count` best so far is gathered; when there is too much of it, all
// but the best leave. So most vectors of a row are read and compared, no more.
inline void top_of_row(const TopArgs& a, int64_t row) {
  const float* logits = a.logits + row * a.stride;
  const int64_t room = a.count + std::max<int64_t>(a.count, 1024);
  std::vector<float> values(room + 16);
  std::vector<int32_t> ids(room + 16);
  std::vector<std::pair<float, int32_t>> all;
  int64_t held = 0;
  float lowest = -std::numeric_limits<float>::infinity();
  const auto leave = [&] {
    all.resize(held);
    for (int64_t i = 0; i < held; ++i) all[i] = {values[i], ids[i]};
    std::nth_element(all.begin(), all.begin() + (a.count - 1), all.end(),
                     [](const auto& one, const auto& other) { return one.first > other.first; });
    held = a.count;
    for (int64_t i = 0; i < held; ++i) values[i] = all[i].first, ids[i] = all[i].second;
    lowest = all[a.count - 1].first;
  };
  for (int64_t at = 0; at < a.size; at += 16) {
    const Lanes lanes = lanes_of(a.size - at);
    const Floats x = load(logits + at, lanes);
    const Lanes above = lanes & greater(x, broadcast(lowest));
    if (above == 0) continue;
    store_selected(values.data() + held, above, x);
    store_selected_ids(ids.data() + held, above, static_cast<int32_t>(at));
    held += __builtin_popcount(above);
    if (held > room) leave();
  }
  if (held > a.count) leave();
  for (int64_t i = 0; i < a.count; ++i) {
    const bool there = i < held;
    a.values[row * a.count + i] = there ? values[i] : -std::numeric_limits<float>::infinity();
    a.ids[row * a.count + i] = there ? ids[i] : 0;
  }
}

inline void top(const TopArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.size > (1 << 18))
  for (int64_t row = 0; row < a.rows; ++row) top_of_row(a, row);
}

inline void highest(const HighestArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.size > (1 << 18))
  for (int64_t row = 0; row < a.rows; ++row) highest_of_row(a, row);
}

inline void race(const RaceArgs& a) {
#pragma omp parallel for schedule(static) if (a.rows > 1 && a.rows * a.size > (1 << 16))
  for (int64_t row = 0; row < a.rows; ++row) race_of_row(a, row);
}

}  // namespace baton

// y = x W^T + b for bfloat16, accumulated in float32, from weights packed in panels.
//
// A panel holds 64 outputs: [inputs / 2][64][2], so one vector holds a pair of inputs of 16 outputs
// and no sum runs across lanes. An output adds its inputs in their order, two at a time, whatever
// the number of rows: what a row computes depends on no other row.
#pragma once

#include <omp.h>

#include <algorithm>

#include "vectors.h"

namespace baton {

constexpr int64_t kPanel = 64;     // outputs of a panel
constexpr int kRows = 6;           // rows at once: 24 of 32 vector registers accumulate
constexpr int64_t kCached = 384 << 10;  // bytes of x that stay in a core's cache beside a panel
constexpr int64_t kFewProducts = 1 << 16;  // below, waking a second thread takes longer

struct LinearArgs {
  const bf16* x;     // [rows, inputs]
  const bf16* w;     // panels
  const bf16* bias;  // [outputs], or null
  bf16* y;           // [rows, outputs]
  int64_t rows, inputs, outputs;
};

// M rows of x by one panel. `width`: outputs that exist, fewer than 64 in the last panel.
template <int M>
inline void multiply(const LinearArgs& a, int64_t row, int64_t panel, int64_t width) {
  const bf16* w = a.w + panel * a.inputs * kPanel;
  const bf16* x[M];
  __m512 sum[M][4];
  for (int m = 0; m < M; ++m) {
    x[m] = a.x + (row + m) * a.inputs;
    for (int j = 0; j < 4; ++j) sum[m][j] = _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < a.inputs; k += 2, w += 2 * kPanel) {
    const __m512bh w0 = load_pairs(w), w1 = load_pairs(w + 32);
    const __m512bh w2 = load_pairs(w + 64), w3 = load_pairs(w + 96);
    if (M <= 2)  // the weights come from memory, and nothing else takes time
      for (int line = 0; line < 4; ++line)
        _mm_prefetch(reinterpret_cast<const char*>(w + 512 + 32 * line), _MM_HINT_T0);
    for (int m = 0; m < M; ++m) {
      const __m512bh pair = broadcast_pair(x[m] + k);
      sum[m][0] = _mm512_dpbf16_ps(sum[m][0], pair, w0);
      sum[m][1] = _mm512_dpbf16_ps(sum[m][1], pair, w1);
      sum[m][2] = _mm512_dpbf16_ps(sum[m][2], pair, w2);
      sum[m][3] = _mm512_dpbf16_ps(sum[m][3], pair, w3);
    }
  }
  for (int j = 0; j < 4; ++j) {
    const int64_t left = std::clamp<int64_t>(width - 16 * j, 0, 16);
    const __mmask16 lanes = static_cast<__mmask16>((1u << left) - 1);
    const int64_t at = panel * kPanel + 16 * j;
    __m512 bias = _mm512_setzero_ps();
    if (a.bias != nullptr) bias = widen(_mm256_maskz_loadu_epi16(lanes, a.bias + at));
    for (int m = 0; m < M; ++m)
      store_rounded(a.y + (row + m) * a.outputs + at, _mm512_add_ps(sum[m][j], bias), lanes);
  }
}

inline void multiply_rows(const LinearArgs& a, int64_t row, int64_t rows, int64_t panel,
                          int64_t width) {
  switch (rows) {
    case 1: return multiply<1>(a, row, panel, width);
    case 2: return multiply<2>(a, row, panel, width);
    case 3: return multiply<3>(a, row, panel, width);
    case 4: return multiply<4>(a, row, panel, width);
    case 5: return multiply<5>(a, row, panel, width);
    default: return multiply<kRows>(a, row, panel, width);
  }
}

// Panels are shared out among the threads; a slab of rows that fits the cache meets them in turn.
inline void linear(const LinearArgs& a) {
  const int64_t panels = (a.outputs + kPanel - 1) / kPanel;
  const int64_t slab = std::max<int64_t>(kRows, kCached / (2 * a.inputs) / kRows * kRows);
#pragma omp parallel if (a.rows * a.inputs * a.outputs > kFewProducts)
  {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
    for (int64_t from = 0; from < a.rows; from += slab) {
      const int64_t until = std::min(a.rows, from + slab);
      for (int64_t panel = first; panel < last; ++panel) {
        const int64_t width = std::min(kPanel, a.outputs - panel * kPanel);
        // Evenly: 8 rows are 4 and 4, not 6 and 2.
        int64_t parts = (until - from + kRows - 1) / kRows;
        for (int64_t row = from; row < until; --parts) {
          const int64_t count = (until - row + parts - 1) / parts;
          multiply_rows(a, row, count, panel, width);
          row += count;
        }
      }
    }
  }
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

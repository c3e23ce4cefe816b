// What quantized.h and w8a8.h ask of AVX-512 beyond vectors.h: four bytes at once meet four bytes. How
// integers become pairs is in integers_bf16.h or integers_wide.h, by what products take.
#pragma once

#include "vectors.h"

namespace baton {

// What these functions need beyond the library's flags; quantized.py asks the processor for it.
#ifdef __AVX512BF16__
#define BATON_VNNI __attribute__((target("avx512vnni,avx512vbmi")))
#else
#define BATON_VNNI __attribute__((target("avx512vnni")))
#endif

constexpr int kBlockRows = 12;  // rows at once by one panel: 24 registers accumulate
constexpr int kBothRows = 6;    // up to here two panels go together
constexpr int halves_of(int) { return 2; }  // of a panel that some rows take at once

using Ints = __m512i;  // 16 int32
using Quad = __m512i;  // four uint8, the same in every lane

inline Ints load_ints(const int32_t* from, Lanes lanes) {
  return _mm512_maskz_loadu_epi32(lanes, from);
}

inline Floats difference(Ints a, Ints b) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, b)); }

inline Quad broadcast_quad(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

// sum + the products of each lane's four uint8 and four int8, exactly.
BATON_VNNI inline Ints dot(Ints sum, Quad x, Line w) { return _mm512_dpbusd_epi32(sum, x, w); }

}  // namespace baton

#ifdef __AVX512BF16__
#include "integers_bf16.h"
#else
#include "integers_wide.h"
#endif

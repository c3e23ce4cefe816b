// vectors.h's vocabulary in AVX2 with FMA: a vector is two registers, of 16.
//
// There is no product of bfloat16: pairs are widened, the even numbers and the odd ones apart, and
// meet in two float32 additions, the even product's first. Widening what a register holds is a shift
// and a mask, which the compiler does once for all that use it.
#pragma once

namespace baton {

// Lanes 0-7 and 8-15.
struct Floats {
  __m256 low, high;

  friend Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
  friend Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
  friend Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
  friend Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }
};

struct Line {
  __m256i low, high;
};

struct Int8s {
  __m128i low, high;
};

struct Pairs {
  Floats even, odd;
};

struct Pair {
  __m256 even, odd;
};

using FoldedPairs = Pair;

using Factor = float;
using Longs = uint64_t __attribute__((vector_size(32)));
constexpr int kLongs = 4;

// linear.h
constexpr int kPanelVectors = 2;      // of a panel
constexpr int kRows = 1;              // by a panel at once
constexpr int kHalfRows = 6;          // by half a panel: 12 registers accumulate
constexpr int kManyRows = kHalfRows;  // at once where there are many
constexpr int kPartPasses = 0;        // panels are taken whole
// attention.h
constexpr int kKeysAtOnce = 4;  // by two query heads: 8 registers accumulate
constexpr bool kQuickProducts = false;  // of decode attention: they take longer than reading keys
constexpr int kValueParts = 1;  // of 32 numbers at once, by two query heads: as many do
// prefill.h
constexpr int64_t kManyQueries = 384;  // with their sums 0.3 MB
// delta_rule.h
constexpr int kStateVectors = 2;  // columns of a matrix at once: 8 registers accumulate
// prefill.h
constexpr int kQueries = 6;  // at once by kQueryVectors: 12 registers accumulate
constexpr int kQueryVectors = 1;

// A vector that is only combined along itself from now on: its halves together, which leaves half the work.
using Folded = __m256;

template <class Combine>
inline Folded folded(Floats values, const Combine& combine) {
  return combine(values.low, values.high);
}

inline Floats broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

inline void store(float* to, Floats values) {
  _mm256_storeu_ps(to, values.low);
  _mm256_storeu_ps(to + 8, values.high);
}

inline Line load_line(const void* from) {
  const auto* halves = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

inline void store_line(void* to, Line line) {
  auto* halves = static_cast<__m256i*>(to);
  _mm256_storeu_si256(halves, line.low);
  _mm256_storeu_si256(halves + 1, line.high);
}

// All bits of those lanes.
inline Line mask_of(Lanes lanes) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i low = _mm256_and_si256(_mm256_set1_epi32(lanes), bits);
  const __m256i high = _mm256_and_si256(_mm256_set1_epi32(lanes >> 8), bits);
  return {_mm256_cmpeq_epi32(low, bits), _mm256_cmpeq_epi32(high, bits)};
}

inline Lanes lanes_of(__m256 low, __m256 high) {
  return static_cast<Lanes>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
}

// Of those lanes only.
inline void store(float* to, Floats values, Lanes lanes) {
  const Line mask = mask_of(lanes);
  _mm256_maskstore_ps(to, mask.low, values.low);
  _mm256_maskstore_ps(to + 8, mask.high, values.high);
}

// Zeros in the other lanes, which are not read.
inline Floats load(const float* from, Lanes lanes) {
  if (lanes == 0xffff) return load(from);
  const Line mask = mask_of(lanes);
  return {_mm256_maskload_ps(from, mask.low), _mm256_maskload_ps(from + 8, mask.high)};
}

inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline Floats multiply_subtract(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}

// c - a * b
inline Floats subtract_product(Floats c, Floats a, Floats b) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}

// 1 0 3 2 5 4 ...
inline Floats swap_neighbours(Floats values) {
  return {_mm256_permute_ps(values.low, 0xb1), _mm256_permute_ps(values.high, 0xb1)};
}

inline Floats square_root(Floats values) {
  return {_mm256_sqrt_ps(values.low), _mm256_sqrt_ps(values.high)};
}

inline Floats absolute(Floats values) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, values.low), _mm256_andnot_ps(sign, values.high)};
}

inline __m256 max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }

inline Floats max(Floats a, Floats b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

inline Floats min(Floats a, Floats b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}

inline float sum_of(Floats values) {
  const __m256 eight = values.low + values.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}

inline float most_of(Floats values) {
  const __m256 eight = _mm256_max_ps(values.low, values.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Lanes unordered(Floats x) {
  return lanes_of(_mm256_cmp_ps(x.low, x.low, _CMP_UNORD_Q),
                  _mm256_cmp_ps(x.high, x.high, _CMP_UNORD_Q));
}

inline Lanes less_equal(Floats a, Floats b) {
  return lanes_of(_mm256_cmp_ps(a.low, b.low, _CMP_LE_OQ),
                  _mm256_cmp_ps(a.high, b.high, _CMP_LE_OQ));
}

inline Lanes greater(Floats a, Floats b) {
  return lanes_of(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ),
                  _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
}

// `a` in those lanes, `b` in the others.
inline Floats select(Lanes lanes, Floats a, Floats b) {
  const Line mask = mask_of(lanes);
  return {_mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(mask.high))};
}

// Those lanes side by side; nothing is written behind them.
inline void store_selected(float* to, Lanes lanes, Floats values) {
  float each[16];
  store(each, values);
  for (unsigned left = lanes; left; left &= left - 1) *to++ = each[__builtin_ctz(left)];
}

// Likewise the lanes' numbers, counted from `first` on.
inline void store_selected_ids(int32_t* to, Lanes lanes, int32_t first) {
  for (unsigned left = lanes; left; left &= left - 1) *to++ = first + __builtin_ctz(left);
}

inline __m256 even_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

inline __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

inline Floats even_of(Line line) { return {even_of(line.low), even_of(line.high)}; }
inline Floats odd_of(Line line) { return {odd_of(line.low), odd_of(line.high)}; }

inline Int8s load_int8s(const void* from) {
  const auto* halves = static_cast<const __m128i*>(from);
  return {_mm_loadu_si128(halves), _mm_loadu_si128(halves + 1)};
}

inline __m256 even_of(__m128i int8s) {
  const __m256i even = _mm256_set1_epi32(1);  // times one, the odd ones times zero
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_cvtepi8_epi16(int8s), even));
}

inline __m256 odd_of(__m128i int8s) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_cvtepi8_epi16(int8s), 16));
}

inline Floats even_of(Int8s numbers) { return {even_of(numbers.low), even_of(numbers.high)}; }
inline Floats odd_of(Int8s numbers) { return {odd_of(numbers.low), odd_of(numbers.high)}; }

constexpr int kFoldedNumbers = 16;  // of FoldedPairs

inline FoldedPairs load_folded(const bf16* from) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {even_of(pairs), odd_of(pairs)};
}

inline FoldedPairs load_folded(const int8_t* from) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {even_of(numbers), odd_of(numbers)};
}

inline Pairs pairs_of(Line line) { return {even_of(line), odd_of(line)}; }

// Two neighbouring numbers of one row, in every pair of lanes.
inline Pair broadcast_pair(const Factor* from) {
  return {_mm256_set1_ps(from[0]), _mm256_set1_ps(from[1])};
}

// sum + *x * w, in the registers of the sum and one more: a compiler that orders these instructions by
// itself keeps a sum of twelve in memory.
inline Floats add_products(Floats sum, const float* x, Floats w) {
  __m256 each;
  asm volatile(
      "vbroadcastss %3, %2\n\t"
      "vfmadd231ps %4, %2, %0\n\t"
      "vfmadd231ps %5, %2, %1"
      : "+x"(sum.low), "+x"(sum.high), "=&x"(each)
      : "m"(*x), "x"(w.low), "x"(w.high));
  return sum;
}

// The odd numbers of 8 pairs, read from memory behind the products that stand before.
inline __m256 odd_in(const bf16* from) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  __m256 odd;
  asm volatile("vandps %1, %2, %0"
               : "=x"(odd)
               : "m"(*reinterpret_cast<const __m256_u*>(from)), "x"(upper));
  return odd;
}

#define BATON_MANY_ROWS 4

// vectors.h's `dot_rows` of many rows: all rows' even products before the odd ones, so that one vector of
// the weights is in registers at a time, beside the sums.
template <int M, int V, class Row>
inline void dot_many_rows(Floats (*sum)[V], const Row& x, const bf16* w) {
  BATON_UNROLL for (int j = 0; j < V; ++j) {
    const Line line = load_line(w + 32 * j);
    const Floats even = {even_of(line.low), even_of(line.high)};
    BATON_UNROLL for (int m = 0; m < M; ++m) sum[m][j] = add_products(sum[m][j], x(m), even);
    const Floats odd = {odd_in(w + 32 * j), odd_in(w + 32 * j + 16)};
    BATON_UNROLL for (int m = 0; m < M; ++m) sum[m][j] = add_products(sum[m][j], x(m) + 1, odd);
  }
}

inline Floats dot(Floats sum, Pairs a, Pairs b) {
  return multiply_add(a.odd, b.odd, multiply_add(a.even, b.even, sum));
}

inline Folded dot(Folded sum, FoldedPairs a, FoldedPairs b) {
  return _mm256_fmadd_ps(a.odd, b.odd, _mm256_fmadd_ps(a.even, b.even, sum));
}

inline Floats dot(Floats sum, Pair a, Pairs b) {
  return dot(sum, Pairs{{a.even, a.even}, {a.odd, a.odd}}, b);
}

// 32 numbers of `even` and `odd` as pairs, half of them each: the even numbers, the odd ones.
template <class Numbers>
inline Pairs interleave_first(Numbers even, Numbers odd) {
  return {even_of(even), even_of(odd)};
}

template <class Numbers>
inline Pairs interleave_second(Numbers even, Numbers odd) {
  return {odd_of(even), odd_of(odd)};
}

inline __m256 widen(__m128i numbers) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
}

inline Floats load_wide(const bf16* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {widen(_mm_loadu_si128(halves)), widen(_mm_loadu_si128(halves + 1))};
}

inline Floats load_wide(const bf16* from, Lanes lanes) {
  if (lanes == 0xffff) return load_wide(from);
  bf16 each[16] = {};
  std::memcpy(each, from, sizeof(bf16) * __builtin_popcount(lanes));
  return load_wide(each);
}

// From float16.
inline Floats load_half(const void* from) {
  const auto* halves = static_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

// 32 int8 as bfloat16, exactly.
inline Line widen_int8(const void* from) {
  const auto* halves = static_cast<const __m128i*>(from);
  const auto wide = [](__m128i numbers) {
    const __m256i words = _mm256_cvtepi8_epi16(numbers);
    const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(words, 16), 16);
    const __m256i odd = _mm256_srai_epi32(words, 16);
    const __m256i low = _mm256_castps_si256(_mm256_cvtepi32_ps(even));
    return _mm256_or_si256(_mm256_srli_epi32(low, 16),
                           _mm256_castps_si256(_mm256_cvtepi32_ps(odd)));
  };
  return {wide(_mm_loadu_si128(halves)), wide(_mm_loadu_si128(halves + 1))};
}

// To nearest even, as int8, of those lanes only, which are the first ones.
inline void store_int8(int8_t* to, Floats values, Lanes lanes) {
  int32_t each[16];
  store_line(each, {_mm256_cvtps_epi32(values.low), _mm256_cvtps_epi32(values.high)});
  for (int i = 0; i < __builtin_popcount(lanes); ++i) to[i] = static_cast<int8_t>(each[i]);
}

// Rounded to nearest even, as torch rounds, into the lower half of each lane; what is no number
// stays none.
inline __m256i rounded(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
  const __m256 none = _mm256_set1_ps(__builtin_nanf(""));
  const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(near), none,
                                       _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
}

inline void store_rounded(bf16* to, Floats values) {
  // Packed by halves of a register: lanes 0-3, 8-11, 4-7, 12-15.
  const __m256i all = _mm256_packus_epi32(rounded(values.low), rounded(values.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(all, 0xd8));
}

// Of those lanes only, which are the first ones.
inline void store_rounded(bf16* to, Floats values, Lanes lanes) {
  if (lanes == 0xffff) return store_rounded(to, values);
  bf16 each[16];
  store_rounded(each, values);
  std::memcpy(to, each, sizeof(bf16) * __builtin_popcount(lanes));
}

// 32 sums as `interleave_first` and `interleave_second` order them, rounded, in the numbers' order.
inline void store_interleaved(bf16* to, Floats first, Floats second) {
  const auto both = [](__m256 even, __m256 odd) {
    return _mm256_or_si256(rounded(even), _mm256_slli_epi32(rounded(odd), 16));
  };
  store_line(to, {both(first.low, second.low), both(first.high, second.high)});
}

// As factors of a product, which need no rounding.
inline void store_factors(Factor* to, Floats values) { store(to, values); }

inline __m256 exponential(__m256 x) {
  const auto of = [](float value) { return _mm256_set1_ps(value); };
  const __m256 tiny = _mm256_cmp_ps(x, of(-87.0f), _CMP_LT_OQ);
  x = _mm256_min_ps(of(89.0f), x);  // infinite from there on
  const __m256 whole =
      _mm256_round_ps(x * of(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // x - whole * ln 2, in two parts: the first is exact.
  __m256 rest = _mm256_fnmadd_ps(whole, of(0.693359375f), x);
  rest = _mm256_fnmadd_ps(whole, of(-2.12194440e-4f), rest);
  __m256 sum = of(1.9875691500e-4f);
  for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                     5.0000001201e-1f})
    sum = _mm256_fmadd_ps(sum, rest, of(term));
  sum = _mm256_fmadd_ps(sum, rest * rest, rest + of(1.0f));
  // By 2^whole, in two halves: 128 is beyond an exponent.
  const __m256i power = _mm256_cvtps_epi32(whole), half = _mm256_srai_epi32(power, 1);
  const auto scale = [](__m256i by) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(by, _mm256_set1_epi32(127)), 23));
  };
  const __m256 scaled = sum * scale(half) * scale(_mm256_sub_epi32(power, half));
  return _mm256_andnot_ps(tiny, scaled);
}

// e^x to about 2 ulp; 0 below -87 (also for -inf).
inline Floats exponential(Floats x) { return {exponential(x.low), exponential(x.high)}; }

inline __m256 power_of_two(__m256 x) {
  const __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
  x = _mm256_min_ps(_mm256_set1_ps(128.0f), x);  // x if it is no number
  const __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 rest = x - whole;
  __m256 sum = _mm256_set1_ps(kPowerTerms[0]);
  for (int term = 1; term < 5; ++term)
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(kPowerTerms[term]));
  const __m256i exponent =
      _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  return _mm256_andnot_ps(tiny, sum * scale);
}

// 2^x to 3e-6 of it; 0 below -126 (also for -inf), infinite from 127.5 on.
inline Floats power_of_two(Floats x) { return {power_of_two(x.low), power_of_two(x.high)}; }

// 2^(x - 127) or a little more, for x >= 0 in units of 2^-23: x as its own bits.
inline Floats power_bound(Floats x) {
  return {_mm256_castsi256_ps(_mm256_cvtps_epi32(x.low)),
          _mm256_castsi256_ps(_mm256_cvtps_epi32(x.high))};
}

// 2^32 - 1 - the upper half of each of 8 numbers, less its last bit, to float32's precision.
inline __m256 upper_complements(Longs first, Longs second) {
  const __m256 odd = _mm256_shuffle_ps((__m256)first, (__m256)second, 0xdd);
  const __m256i upper = _mm256_permute4x64_epi64(_mm256_castps_si256(odd), 0xd8);
  const __m256i rest = _mm256_xor_si256(upper, _mm256_set1_epi32(-1));
  return _mm256_cvtepi32_ps(_mm256_srli_epi32(rest, 1)) * _mm256_set1_ps(2.0f);
}

inline Floats upper_complements(const Longs each[16 / kLongs]) {
  return {upper_complements(each[0], each[1]), upper_complements(each[2], each[3])};
}

// A quarter of a sum along each of 16 rows: of 4 rows, four numbers of each that are left to add.
template <class Combine>
inline Folded across_four(const Folded* rows, const Combine& combine) {
  __m256d half[2];
  BATON_UNROLL for (int i = 0; i < 2; ++i)
    half[i] = _mm256_castps_pd(combine(_mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                                       _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1])));
  return combine(_mm256_castpd_ps(_mm256_unpacklo_pd(half[0], half[1])),
                 _mm256_castpd_ps(_mm256_unpackhi_pd(half[0], half[1])));
}

// Four quarters -> lane i: the whole of row i.
template <class Combine>
inline Floats across_quarters(const Folded* quarters, const Combine& combine) {
  __m256 half[2];
  BATON_UNROLL for (int i = 0; i < 2; ++i)
    half[i] = combine(_mm256_permute2f128_ps(quarters[2 * i], quarters[2 * i + 1], 0x20),
                      _mm256_permute2f128_ps(quarters[2 * i], quarters[2 * i + 1], 0x31));
  return {half[0], half[1]};
}

// 32 numbers of `even` and `odd` as pairs, in their order, to `to`.
inline void store_pairs(bf16* to, const bf16* even, const bf16* odd) {
  for (int i = 0; i < 32; i += 8) {
    const auto wide = [i](const bf16* from) {
      return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    };
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i),
                        _mm256_or_si256(wide(even), _mm256_slli_epi32(wide(odd), 16)));
  }
}

// 8 registers of 8 pairs each -> pair by pair.
[[gnu::always_inline]] inline void transpose_pairs(__m256i rows[8]) {
  __m256i a[8], b[8];
  BATON_UNROLL for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  BATON_UNROLL for (int i = 0; i < 2; ++i)
    BATON_UNROLL for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = _mm256_unpacklo_epi64(a[4 * i + j], a[4 * i + 2 + j]);
      b[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a[4 * i + j], a[4 * i + 2 + j]);
    }
  BATON_UNROLL for (int j = 0; j < 4; ++j) {
    rows[j] = _mm256_permute2x128_si256(b[j], b[4 + j], 0x20);
    rows[4 + j] = _mm256_permute2x128_si256(b[j], b[4 + j], 0x31);
  }
}

// 16 vectors of 16 pairs each -> pair by pair.
[[gnu::always_inline]] inline void transpose_pairs(Line rows[16]) {
  __m256i quarter[2][2][8];  // of which lines, of which lanes
  BATON_UNROLL for (int i = 0; i < 16; ++i) {
    quarter[i / 8][0][i % 8] = rows[i].low;
    quarter[i / 8][1][i % 8] = rows[i].high;
  }
  for (auto& lines : quarter)
    for (auto& each : lines) transpose_pairs(each);
  BATON_UNROLL for (int i = 0; i < 16; ++i) rows[i] = {quarter[0][i / 8][i % 8], quarter[1][i / 8][i % 8]};
}

}  // namespace baton

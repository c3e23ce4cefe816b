// Rows of bfloat16 as products take them: where these are of float32, widened once for all the weights
// that they meet.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace baton {

// Rows as numbers of that kind: themselves, or a copy of one thread's.
template <class Number>
class RowsAs {
 public:
  // x [.., size], an even number.
  RowsAs(const bf16* x, int64_t size) : x_(x), size_(size) {}

  // Those of row `from` on; rows [from, until) may be read, until others are asked for.
  const Number* of(int64_t from, int64_t until) {
    if constexpr (std::is_same_v<Number, bf16>) {
      return x_ + from * size_;
    } else {
      if (from_ != from || until_ != until) widen(from, until);
      return room().data();
    }
  }

 private:
  // Kept for the next ones: memory of this size comes from the kernel, page by page.
  static std::vector<Number>& room() {
    static thread_local std::vector<Number> numbers;
    return numbers;
  }

  void widen(int64_t from, int64_t until) {
    const int64_t count = (until - from) * size_;
    std::vector<Number>& to = room();
    if (static_cast<int64_t>(to.size()) < count + 15) to.resize(count + 15);
    for (int64_t i = 0; i < count; i += 16)
      store_factors(to.data() + i, load_wide(x_ + from * size_ + i, lanes_of(count - i)));
    from_ = from;
    until_ = until;
  }

  const bf16* const x_;
  const int64_t size_;
  int64_t from_ = 0, until_ = 0;
};

using Factors = RowsAs<Factor>;

}  // namespace baton

// Rows of bfloat16 as products take them: where these are of float32, widened once for all the weights
// that they meet.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace baton {

// Room for `count` numbers, of the calling thread, for one use, which `Use` names. Kept for the next
// call: memory of this size comes from the kernel, page by page.
template <class Use, class Number>
inline Number* kept_room(int64_t count) {
  static thread_local std::vector<Number> room;
  if (static_cast<int64_t>(room.size()) < count) room.resize(count);
  return room.data();
}

// The same of bytes from a line's beginning on.
template <class Use>
inline uint8_t* kept_lines(int64_t bytes) {
  uint8_t* const room = kept_room<Use, uint8_t>(bytes + sizeof(Line));
  return room + (-reinterpret_cast<uintptr_t>(room) & (sizeof(Line) - 1));
}

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
      Number* const to = kept_room<RowsAs, Number>((until - from) * size_ + 15);
      if (from_ != from || until_ != until) widen(to, from, until);
      return to;
    }
  }

 private:
  void widen(Number* to, int64_t from, int64_t until) {
    const int64_t count = (until - from) * size_;
    for (int64_t i = 0; i < count; i += 16)
      store_factors(to + i, load_wide(x_ + from * size_ + i, lanes_of(count - i)));
    from_ = from;
    until_ = until;
  }

  const bf16* const x_;
  const int64_t size_;
  int64_t from_ = 0, until_ = 0;
};

using Factors = RowsAs<Factor>;

}  // namespace baton

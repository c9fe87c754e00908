#pragma once
// Fill value of rows that a map does not name.

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

namespace gyre {

/// Fill pattern of rows that a map does not name: one element, repeated.
struct RowFill {
  alignas(16) unsigned char bytes[16] = {};  ///< the element repeated
  /// Fills with `value`. T has 1, 2, 4, 8 or 16 bytes; row sizes must be multiples of it.
  template <class T>
  static RowFill of(const T& value) {
    static_assert(std::is_trivially_copyable_v<T> && 16 % sizeof(T) == 0);
    RowFill fill;
    for (size_t at = 0; at < 16; at += sizeof(T)) std::memcpy(fill.bytes + at, &value, sizeof(T));
    return fill;
  }
  /// Fills with an element's bytes; empty: zeros. Their number divides 16, and row sizes.
  static RowFill of_bytes(std::span<const std::byte> element) {
    RowFill fill;
    if (element.empty()) return fill;
    for (size_t at = 0; at < 16; at += element.size())
      std::memcpy(fill.bytes + at, element.data(), element.size());
    return fill;
  }
};

}  // namespace gyre

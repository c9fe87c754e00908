#pragma once
// Arrays that accompany a batch of a data loader without being read.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace gyre {

/// The bytes of an element of padding: `fill`, or, if that is empty, a zero.
inline std::span<const std::byte> padding_element(std::span<const std::byte> fill) {
  static constexpr std::byte zero{0};
  return fill.empty() ? std::span(&zero, 1) : fill;
}
/// Byte `i` of padding that repeats such an element.
inline std::byte padding_byte(std::span<const std::byte> fill, size_t i) {
  const std::span<const std::byte> element = padding_element(fill);
  return element[i % element.size()];
}

/// An array that accompanies a batch without being read. Its bytes are shared; they are copied only
/// where a batch is cut.
struct Extra {
  enum class Aligned {
    none,   ///< passed on unchanged
    rows,   ///< [rows, ...]: cut with the rows
    slots,  ///< [rows, slots, ...]: cut with the rows, sharded with the tokens
  };
  Aligned aligned = Aligned::none;
  int64_t item_bytes = 0;  ///< bytes of a row or of a slot; not used by Aligned::none
  std::shared_ptr<const std::vector<std::byte>> bytes;
  std::vector<std::byte> fill = {};  ///< of Aligned::slots: an element of padding; empty: zeros
};
using Extras = std::map<std::string, Extra>;

/// Name of the extra that shards omit, because no mask with one value per slot fits a shard.
inline constexpr const char* attention_mask_extra = "attention_mask";

/// Returns an extra that holds a copy of `values`, `width` values per row or slot.
template <class T>
Extra make_extra(std::span<const T> values, Extra::Aligned aligned = Extra::Aligned::none,
                 int64_t width = 1) {
  const auto bytes = std::as_bytes(values);
  return {aligned, width * static_cast<int64_t>(sizeof(T)),
          std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end())};
}

}  // namespace gyre

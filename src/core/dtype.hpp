#pragma once
// Element types that cross an interface as a value (communication, files).

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/bf16.hpp"

namespace gyre {

enum class DType { f32, bf16, f64, i32, i64 };

/// Element types of queries, keys, values, hidden states and logits.
inline constexpr DType activation_types[] = {DType::f32, DType::bf16};

constexpr int64_t size_of(DType type) {
  if (type == DType::bf16) return 2;
  return type == DType::f32 || type == DType::i32 ? 4 : 8;
}
constexpr std::string_view name_of(DType type) {
  switch (type) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
  }
  return "?";
}

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::i64;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

}  // namespace gyre

#pragma once
// Infinity and NaN of a floating-point type.

#include <limits>

namespace gyre {

template <class T>
inline constexpr T infinity_of = std::numeric_limits<T>::infinity();

/// A quiet NaN: a result that was not written, or an unknown value.
template <class T>
inline constexpr T nan_of = std::numeric_limits<T>::quiet_NaN();

}  // namespace gyre

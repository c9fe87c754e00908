#pragma once
// Infinity and not-a-number of a floating-point type.

#include <limits>

namespace gyre {

template <class T>
inline constexpr T infinity_of = std::numeric_limits<T>::infinity();

/// A quiet NaN: a result that was not written, or a figure that is not known.
template <class T>
inline constexpr T nan_of = std::numeric_limits<T>::quiet_NaN();

}  // namespace gyre

#pragma once
// The element types of computations as an option of apps: --dtype.

#include <string>
#include <vector>

#include "core/dtype.hpp"

namespace gyre {

/// Names of activation_types.
inline std::vector<std::string> activation_type_names() {
  std::vector<std::string> names;
  for (const DType type : activation_types) names.emplace_back(name_of(type));
  return names;
}

}  // namespace gyre

#include "apps/logprobs/result_array.hpp"

#include <fmt/format.h>

namespace gyre {

int64_t ResultArray::width() const {
  int64_t elements = 1;
  for (size_t d = 1; d < shape.size(); ++d) elements *= shape[d];
  return elements;
}

std::string ResultArray::place(size_t row, int64_t column, bool answered) const {
  std::string array = name.empty() ? check : name;
  if (answered) array = "/reference/" + array;
  if (shape.size() == 1) return fmt::format("{}[{}]", array, rows[row]);
  return fmt::format("{}[{}, {}]", array, rows[row], column);
}

}  // namespace gyre

#include "apps/common/layout_options.hpp"

#include <fmt/format.h>

#include "sharding/layouts.hpp"

namespace gyre {

std::string layout_help() {
  std::string text = "Layouts:\n";
  for (const LayoutKind& kind : layout_kinds())
    text += fmt::format("  {:17}{}\n", kind.name, kind.summary);
  return text;
}

}  // namespace gyre

#include "attention/masks/list.hpp"

namespace gyre {
namespace {

MaskRule make_full(std::span<const int64_t>, std::span<const int64_t>) {
  return MaskKind::full;
}

}  // namespace

NamedMask full_mask() {
  return {"full", "a query sees its whole document", {}, make_full};
}

}  // namespace gyre

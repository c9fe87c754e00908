#include "sharding/layouts.hpp"

#include <fmt/ranges.h>

#include <numeric>

#include "core/error.hpp"
#include "sharding/layouts/list.hpp"

namespace gyre {

std::string multiple_text(int64_t chunks) {
  return chunks > 1 ? fmt::format("{} cp", chunks) : "cp";
}

std::optional<OwnedSlots> no_owned_slots(const Layout&, const EqualSequences&, int) {
  return std::nullopt;
}

std::optional<double> no_needed_share(const Layout&, int64_t) {
  return std::nullopt;
}

const std::vector<LayoutKind>& layout_kinds() {
#define GYRE_CALL_LAYOUT(name) name##_layout(),
  static const std::vector<LayoutKind> kinds = {GYRE_LAYOUTS(GYRE_CALL_LAYOUT)};
#undef GYRE_CALL_LAYOUT
  return kinds;
}

const LayoutKind& default_layout() {
  static const LayoutKind& kind = find_layout(GYRE_DEFAULT_LAYOUT().name);
  return kind;
}

const LayoutKind& default_recurrent_layout() {
  static const LayoutKind& kind = find_layout(GYRE_RECURRENT_LAYOUT().name);
  return kind;
}

const LayoutKind& find_layout(const std::string& name) {
  std::vector<std::string> names;
  for (const LayoutKind& kind : layout_kinds()) {
    if (kind.name == name) return kind;
    names.push_back(kind.name);
  }
  throw_usage("there is no layout '{}'; there are {}", name, fmt::join(names, ", "));
}

const LayoutKind* kind_of(const Layout& layout) {
  for (const LayoutKind& kind : layout_kinds())
    if (kind.name == layout.name) return &kind;
  return nullptr;
}

int chunks_for_all_layouts() {
  int chunks = 1;
  for (const LayoutKind& kind : layout_kinds())
    chunks = std::lcm(chunks, std::max(1, kind.chunks_per_rank));
  return chunks;
}

const std::vector<OptionField<LayoutOptions>>& layout_option_fields() {
  static const std::vector<OptionField<LayoutOptions>> fields = {
      {"stripe", "Consecutive slots that a rank gets at a time", &LayoutOptions::stripe, 1, {}},
      {"chunk", "Slots of a chunk; 0: chosen by the length", &LayoutOptions::chunk, 0, {}},
      {"pairs-per-key",
       "Visible pairs that a rank computes in the time in which it receives the keys and values of "
       "a token; 0: 1, or in gyre-shard what --tflops and --gbps say",
       &LayoutOptions::pairs_per_key,
       0,
       {}},
      {"groups",
       "Ranks of a document: any number that evens out the work, or the least power of two that "
       "holds it, as Megatron-LM chooses",
       &LayoutOptions::groups,
       0,
       {"any", "power-of-two"}}};
  return fields;
}

}  // namespace gyre

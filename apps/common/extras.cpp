#include "apps/common/extras.hpp"

#include <fmt/format.h>

#include <set>

namespace gyre {
namespace {

template <class Map>
void add_names(std::set<std::string>& names, const Map& map) {
  for (const auto& entry : map) names.insert(entry.first);
}

std::span<const std::byte> bytes_of(const PackedSlots& slots, const std::string& name) {
  const auto extra = slots.extras.find(name);
  if (extra == slots.extras.end()) return {};
  return extra->second.bytes;
}

}  // namespace

void compare_bytes(Check& check, std::span<const std::byte> actual,
                   std::span<const std::byte> expected, const std::string& name) {
  if (actual.size() != expected.size())
    return check.add_failure(
        fmt::format("{}: {} bytes, not {}", name, actual.size(), expected.size()));
  for (size_t i = 0; i < actual.size(); ++i)
    check.add(static_cast<double>(actual[i]), static_cast<double>(expected[i]),
              [&] { return fmt::format("{} byte {}", name, i); });
}

void compare_extras(Check& check, const StoredExtras& actual, const StoredExtras& expected) {
  std::set<std::string> names;
  add_names(names, actual);
  add_names(names, expected);
  for (const std::string& name : names) {
    const auto a = actual.find(name), b = expected.find(name);
    if (a == actual.end() || b == expected.end()) {
      check.add_failure(fmt::format("extra {} is in one of the two", name));
      continue;
    }
    const StoredExtra &x = a->second, &y = b->second;
    if (x.extra.aligned != y.extra.aligned || x.item != y.item || !(x.type == y.type))
      check.add_failure(fmt::format("extra {} is of another type, shape or alignment", name));
    else if (x.extra.aligned != Extra::Aligned::slots)
      compare_bytes(check, *x.extra.bytes, *y.extra.bytes, "extra " + name);
  }
}

void compare_slot_extras(Check& check, const PackedSlots& actual, const PackedSlots& expected,
                         const std::string& where) {
  std::set<std::string> names;
  add_names(names, actual.extras);
  add_names(names, expected.extras);
  for (const std::string& name : names)
    compare_bytes(check, bytes_of(actual, name), bytes_of(expected, name),
                  fmt::format("{} extra {}", where, name));
}

std::string extras_text(const StoredExtras& extras, bool of_shards) {
  std::string names, left_out;
  for (const auto& [name, stored] : extras) {
    if (of_shards && name == attention_mask_extra)
      left_out = fmt::format("# extra {} is left out: no mask by slots describes a shard\n", name);
    else
      names += fmt::format("{}{} ({})", names.empty() ? "# extras: " : ", ", name,
                           name_of(stored.extra.aligned));
  }
  return names + (names.empty() ? "" : "\n") + left_out;
}

}  // namespace gyre

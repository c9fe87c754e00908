#include "attention/masks/registry.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/masks/list.hpp"
#include "core/error.hpp"
#include "core/nearest.hpp"
#include "core/quantity.hpp"

namespace gyre {
namespace {

/// Syntax of a mask, such as "causal[,window=N][,keep=N]".
std::string usage_of(const NamedMask& mask) {
  std::string text = mask.name;
  for (const MaskKey& key : mask.keys)
    text += fmt::format(fmt::runtime(key.required ? ",{}=N" : "[,{}=N]"), key.name);
  return text;
}

const NamedMask& find_mask(std::string_view name) {
  std::vector<std::string> names;
  for (const NamedMask& mask : named_masks()) {
    if (mask.name == name) return mask;
    names.push_back(mask.name);
  }
  const std::string near = nearest(name, names);
  throw_usage("--mask {}: there is no such mask; {}wanted: {}", name,
              near.empty() ? "" : fmt::format("nearest: {}; ", near), mask_choices());
}

int64_t number_of(std::string_view text, const Setting& setting, const MaskKey& key) {
  constexpr Unit units[] = {{"", 1}, {"K", 1 << 10}, {"M", 1 << 20}};
  const std::optional<double> number = parse_quantity(setting.value, units);
  if (!number || *number != std::floor(*number) || *number > max_slots)
    throw_usage("--mask {}: {}={} is not a whole number, such as 512 or 4K", text, setting.key,
                setting.value);
  if (*number < key.minimum)
    throw_usage("--mask {}: {}={}; at least {}", text, setting.key, setting.value, key.minimum);
  return static_cast<int64_t>(*number);
}

}  // namespace

const std::vector<NamedMask>& named_masks() {
#define GYRE_CALL_MASK(name) name##_mask(),
  static const std::vector<NamedMask> all = {GYRE_MASKS(GYRE_CALL_MASK)};
#undef GYRE_CALL_MASK
  return all;
}

std::string mask_choices() {
  std::vector<std::string> all;
  for (const NamedMask& mask : named_masks()) all.push_back(usage_of(mask));
  return fmt::format("{}", fmt::join(all, "; "));
}

std::vector<int64_t> MaskChoice::documents_of(std::span<const int64_t> lengths) const {
  if (!mask->joins) return {lengths.begin(), lengths.end()};
  return {std::accumulate(lengths.begin(), lengths.end(), int64_t{0})};
}

MaskChoice parse_mask(std::string_view text) {
  const size_t comma = std::min(text.find(','), text.size());
  const NamedMask& mask = find_mask(text.substr(0, comma));
  MaskChoice choice{&mask, std::vector<int64_t>(mask.keys.size(), 0)};
  std::vector<std::string_view> names;
  for (const MaskKey& key : mask.keys) names.push_back(key.name);
  std::vector<Setting> settings;
  if (comma < text.size())
    settings = parse_settings(fmt::format("--mask {}", text), text.substr(comma + 1), names,
                              usage_of(mask));
  for (size_t i = 0; i < mask.keys.size(); ++i) {
    const MaskKey& key = mask.keys[i];
    const auto given = std::find_if(settings.begin(), settings.end(),
                                    [&](const Setting& s) { return s.key == key.name; });
    if (given != settings.end())
      choice.values[i] = number_of(text, *given, key);
    else if (key.required)
      throw_usage("--mask {}: needs {}; wanted: {}", text, key.name, usage_of(mask));
  }
  return choice;
}

}  // namespace gyre

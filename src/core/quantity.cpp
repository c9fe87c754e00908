#include "core/quantity.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/error.hpp"

namespace gyre {

std::vector<Setting> parse_settings(std::string_view what, std::string_view text,
                                    std::span<const std::string_view> keys,
                                    std::string_view choices) {
  std::vector<Setting> settings;
  for (size_t at = 0; at <= text.size();) {
    const std::string_view item = text.substr(at, std::min(text.find(',', at), text.size()) - at);
    at += item.size() + 1;
    const size_t equals = item.find('=');
    const std::string_view key = item.substr(0, equals);
    if (equals == std::string_view::npos || std::find(keys.begin(), keys.end(), key) == keys.end())
      throw_usage("{}: '{}' is none of {}", what, item, choices);
    const auto same = [&](const Setting& other) { return other.key == key; };
    if (std::any_of(settings.begin(), settings.end(), same))
      throw_usage("{}: {} is given twice in '{}'", what, key, text);
    settings.push_back({key, item.substr(equals + 1)});
  }
  return settings;
}

std::optional<double> parse_quantity(std::string_view text, std::span<const Unit> units) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || !std::isfinite(number) || std::signbit(number)) return {};
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  for (const Unit& known : units)
    if (unit == known.name) return number * known.factor;
  return {};
}

double parse_time(std::string_view what, const Setting& setting) {
  static constexpr Unit units[] = {{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};
  if (setting.value == "0") return 0;
  if (const std::optional<double> seconds = parse_quantity(setting.value, units)) return *seconds;
  throw_usage("{}: {} is '{}'; it must be a number of us, ms or s, as in {}=10us", what,
              setting.key, setting.value, setting.key);
}

}  // namespace gyre

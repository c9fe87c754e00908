#pragma once
// Options that hold several settings: "alpha=10us,beta=5G".

#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace gyre {

/// A key and its value, as views of the parsed text.
struct Setting {
  std::string_view key, value;
};

/// Splits `text` into settings, at commas. Throws a usage error that begins with `what` if a key is
/// repeated, or if an item is not KEY=VALUE with one of `keys`; the message then names `choices`
/// ("alpha=TIME and beta=RATE").
std::vector<Setting> parse_settings(std::string_view what, std::string_view text,
                                    std::span<const std::string_view> keys,
                                    std::string_view choices);

struct Unit {
  std::string_view name;
  double factor;
};

/// Parses a finite, non-negative number followed by one of `units`; empty for other texts.
std::optional<double> parse_quantity(std::string_view text, std::span<const Unit> units);

/// Value of a setting in seconds: a number with the unit us, ms or s (0 needs none). Throws a usage
/// error that begins with `what` for other values.
double parse_time(std::string_view what, const Setting& setting);

}  // namespace gyre

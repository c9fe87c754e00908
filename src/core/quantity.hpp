#pragma once
// Options that hold several settings: "alpha=10us,beta=5G".

#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace gyre {

/// A key and its value, in the text that was read.
struct Setting {
  std::string_view key, value;
};

/// The settings of `text`, separated by commas. Usage errors, which begin with `what`: an item that
/// is no setting of one of `keys`, then `choices` tells them ("alpha=TIME and beta=RATE"); a key
/// that is given twice.
std::vector<Setting> parse_settings(std::string_view what, std::string_view text,
                                    std::span<const std::string_view> keys,
                                    std::string_view choices);

struct Unit {
  std::string_view name;
  double factor;
};

/// A finite number that is not negative, followed by one of `units`; nothing for other texts.
std::optional<double> parse_quantity(std::string_view text, std::span<const Unit> units);

/// The value of a setting in seconds: a number with the unit us, ms or s (0 needs none). Usage
/// error, which begins with `what`, for another.
double parse_time(std::string_view what, const Setting& setting);

}  // namespace gyre

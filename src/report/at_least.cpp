#include "report/at_least.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "core/nearest.hpp"
#include "core/quantity.hpp"
#include "report/value.hpp"

namespace gyre {
namespace {

struct Threshold {
  std::string metric;
  double value;
};

Threshold parse_threshold(const std::string& text) {
  constexpr Unit units[] = {{"", 1}};
  const size_t equals = std::min(text.find('='), text.size());
  const std::optional<double> value =
      parse_quantity(equals < text.size() ? text.substr(equals + 1) : "", units);
  if (equals == 0 || !value)
    throw_usage("--at-least '{}' is not METRIC=VALUE, such as attention_rate=0.1", text);
  return {text.substr(0, equals), *value};
}

/// "there is no figure x; nearest: y; there are: y, z"
std::string missing_text(const std::string& metric, const std::vector<std::string>& metrics) {
  const std::string near = nearest(metric, metrics);
  return fmt::format("there is no figure {}; {}there are: {}", metric,
                     near.empty() ? "" : fmt::format("nearest: {}; ", near),
                     metrics.empty() ? "none" : fmt::format("{}", fmt::join(metrics, ", ")));
}

}  // namespace

void check_at_least(const std::string& text, const std::vector<std::string>& metrics) {
  if (text.empty()) return;
  const std::string metric = parse_threshold(text).metric;
  if (std::ranges::find(metrics, metric) == metrics.end())
    throw_usage("--at-least {}: {}", text, missing_text(metric, metrics));
}

AtLeast compare_at_least(const std::string& text, const std::vector<Fom>& foms) {
  AtLeast result;
  if (text.empty()) return result;
  const Threshold least = parse_threshold(text);
  std::vector<std::string> metrics;
  for (const Fom& fom : foms) {
    if (std::ranges::find(metrics, fom.metric) == metrics.end()) metrics.push_back(fom.metric);
    if (fom.metric != least.metric || fom.value >= least.value) continue;
    result.code = ExitCode::verification_failed;
    result.text += fmt::format("# below --at-least {}: {:.6g} {} {}\n", text, fom.value, fom.unit,
                               to_text(fom.tags));
  }
  if (std::ranges::find(metrics, least.metric) != metrics.end()) return result;
  return {ExitCode::usage, fmt::format("# --at-least {}: in this run {}\n", text,
                                       missing_text(least.metric, metrics))};
}

}  // namespace gyre

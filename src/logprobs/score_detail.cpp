#include "logprobs/score_detail.hpp"

#include <cmath>

#include "comm/agree.hpp"
#include "core/error.hpp"

namespace gyre {

void check_tokens(int64_t tokens) {
  if (tokens < 0) throw_usage("{} tokens; the fewest are 0", tokens);
}

void check_temperature(double temperature) {
  const float scale = scale_of(temperature);
  if (!(std::isnormal(scale) && scale > 0))
    throw_usage("a temperature of {}; it must be positive and finite, and so its inverse in f32",
                temperature);
}

float scale_of(double temperature) {
  return static_cast<float>(1 / temperature);
}

void agree_on_number(Communicator& tp, std::string_view what, std::string_view name, double value) {
  const std::vector<double> all = all_gather_value(tp, value);
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw Error(ExitCode::usage,
                  fmt::format("{}: {} is {} on rank 0, but {} on rank {}; it must be the same on "
                              "all ranks of the group",
                              what, name, all[0], all[r], r),
                  true);
}

namespace {

/// Moments that count from a maximum of which `shift` (scaled) is theirs minus the new one.
void rescale(double& sum, double& weighted, double shift) {
  if (sum == 0 || shift == 0) return;
  const double factor = std::exp(shift);
  weighted = (weighted + shift * sum) * factor;
  sum *= factor;
}

}  // namespace

void RowTotal::add(const RowMoments& part, double scale) {
  if (part.sum == 0) return;
  const auto old_max = static_cast<double>(max), part_max = static_cast<double>(part.max);
  max = std::max(max, part.max);
  const auto new_max = static_cast<double>(max);
  rescale(sum, weighted, (old_max - new_max) * scale);
  auto part_sum = static_cast<double>(part.sum), part_weighted = static_cast<double>(part.weighted);
  rescale(part_sum, part_weighted, (part_max - new_max) * scale);
  sum += part_sum;
  weighted += part_weighted;
}

float RowTotal::logprob(float z, double scale, double log_sum) const {
  return static_cast<float>((static_cast<double>(z) - static_cast<double>(max)) * scale - log_sum);
}

float RowTotal::entropy(double log_sum) const {
  const double h = log_sum - weighted / sum;
  return static_cast<float>(h < 0 ? 0 : h);  // rounding may dip below 0; NaN stays
}

RowSlope slope_of(double g, double h, double entropy, double scale) {
  const double sum = h == 0 ? g : g + h * entropy;
  return {static_cast<float>(-scale * sum), static_cast<float>(-scale * h)};
}

}  // namespace gyre

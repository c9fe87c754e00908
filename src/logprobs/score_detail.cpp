#include "logprobs/score_detail.hpp"

#include <algorithm>
#include <cmath>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/special_values.hpp"

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

void check_temperatures(std::span<const double> temperatures, int64_t tokens) {
  if (!temperatures.empty() && std::ssize(temperatures) != tokens)
    throw_usage("{} temperatures of {} tokens; one for each, or none", temperatures.size(), tokens);
  for (const double temperature : temperatures) check_temperature(temperature);
}

Buffer<float> scales_of(std::span<const double> temperatures) {
  Buffer<float> scales(std::ssize(temperatures));
  std::ranges::transform(temperatures, scales.data(), scale_of);
  return scales;
}

void agree_on_number(Communicator& tp, std::string_view what, std::string_view name, double value) {
  const std::vector<double> all = all_gather_value(tp, value);
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw_to_all(tp, ExitCode::usage,
                   fmt::format("{}: {} is {} on rank 0, but {} on rank {}; it must be the same on "
                               "all ranks of the group",
                               what, name, all[0], all[r], r));
}

void check_arrays(const Communicator& tp, const Communicator& arrays, MemorySpace space) {
  GYRE_CHECK(arrays.rank() == tp.rank() && arrays.size() == tp.size() &&
                 (tp.size() == 1 || arrays.space() == space),
             "rank {} of {} in a group of {} memory, where {} of {} and {} memory are needed",
             arrays.rank(), arrays.size(), name_of(arrays.space()), tp.rank(), tp.size(),
             name_of(space));
}

GradientCoefficients ScoreSlopes::coefficients(double row_entropy, double scale,
                                               int64_t ids) const {
  double sum = logprobs + mean_logprob - log_sum_exp;
  if (entropy != 0) sum += entropy * row_entropy;
  const GradientCoefficients all{
      static_cast<float>(-scale * sum), static_cast<float>(-scale * entropy),
      static_cast<float>(scale * mean_logprob / static_cast<double>(ids))};
  // A gradient that leaves f32 is NaN at every id, not at those with p = 0 alone.
  if (std::isinf(all.a) || std::isinf(all.b)) return {nan_of<float>, nan_of<float>, nan_of<float>};
  return all;
}

}  // namespace gyre

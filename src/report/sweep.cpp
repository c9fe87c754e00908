#include "report/sweep.hpp"

#include <cmath>

namespace gyre {
namespace {

constexpr int most_sizes = 100;

void check_count(const TokenSweep& sweep, ConfigErrors& errors) {
  const double span =
      std::log(static_cast<double>(sweep.max)) - std::log(static_cast<double>(sweep.min));
  const double steps = span / std::log(sweep.factor);
  if (steps >= most_sizes)
    errors.add(
        "--factor {} makes {:.0f} sizes, and at most {} are run; the smallest that works is {:.4f}",
        sweep.factor, std::floor(steps) + 1, most_sizes, std::exp(span / (most_sizes - 1)));
}

}  // namespace

std::vector<int64_t> TokenSweep::sizes() const {
  if (!sweeps()) return {tokens};
  std::vector<int64_t> all;
  for (auto size = static_cast<double>(min); size <= static_cast<double>(max); size *= factor)
    if (const auto whole = static_cast<int64_t>(std::llround(size));
        all.empty() || whole > all.back())
      all.push_back(whole);
  return all;
}

void check_sweep(const TokenSweep& sweep, int64_t usual_tokens, ConfigErrors& errors) {
  if (!(sweep.factor > 1)) errors.add("--factor {} must be more than 1", sweep.factor);
  if (!sweep.sweeps() && sweep.max != 0) errors.add("--max {} needs --min", sweep.max);
  if (sweep.sweeps() && sweep.tokens != usual_tokens)
    errors.add("one of --tokens and --min, not both");
  if (sweep.sweeps() && sweep.max < sweep.min)
    errors.add("--max {} is less than --min {}", sweep.max, sweep.min);
  else if (sweep.sweeps() && sweep.factor > 1)
    check_count(sweep, errors);
}

}  // namespace gyre

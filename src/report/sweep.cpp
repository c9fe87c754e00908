#include "report/sweep.hpp"

#include <cmath>

#include "core/index.hpp"
#include "report/options.hpp"

namespace gyre {
namespace {

constexpr int max_sizes = 100;

void check_count(const TokenSweep& sweep, ConfigErrors& errors) {
  if (sweep.step > 0) {
    const int64_t count = (sweep.max - sweep.min) / sweep.step + 1;
    if (count > max_sizes)
      errors.add("--step {} makes {} sizes, and at most {} are run; the smallest that works is {}",
                 sweep.step, count, max_sizes,
                 ceil_div(sweep.max - sweep.min + 1, int64_t{max_sizes}));
    return;
  }
  const double span = std::log(sweep.max) - std::log(sweep.min);
  const double steps = span / std::log(sweep.factor);
  if (steps >= max_sizes)
    errors.add(
        "--factor {} makes {:.0f} sizes, and at most {} are run; the smallest that works is {:.4f}",
        sweep.factor, std::floor(steps) + 1, max_sizes, std::exp(span / (max_sizes - 1)));
}

}  // namespace

std::vector<int64_t> TokenSweep::sizes() const {
  if (!sweeps()) return {tokens};
  std::vector<int64_t> all;
  if (step > 0)
    for (int64_t size = min; size <= max; size += step) all.push_back(size);
  if (step > 0) return all;
  double size = min;
  while (size <= static_cast<double>(max)) {
    const int64_t whole = std::llround(size);
    if (all.empty() || whole > all.back()) all.push_back(whole);
    size *= factor;
  }
  return all;
}

void declare_sweep(CLI::App& app, const std::string& what, TokenSweep& sweep) {
  add_size_option(app, {"--tokens", what}, sweep.tokens, 1);
  add_size_option(app, {"-b,--min", "Sweep: the fewest; 0: no sweep"}, sweep.min);
  add_size_option(app, {"-e,--max", "Sweep: the most"}, sweep.max);
  add_option(app, {"-f,--factor", "Sweep: ratio of neighbours"}, sweep.factor);
  add_size_option(app, {"-i,--step", "Sweep: distance of neighbours, instead; 0: their ratio"},
                  sweep.step);
  add_option(app, {"-N,--cycles", "Run all rows so often"}, sweep.cycles, 1);
}

void check_sweep(const TokenSweep& sweep, int64_t usual_tokens, ConfigErrors& errors) {
  if (!(sweep.factor > 1)) errors.add("--factor {} must be more than 1", sweep.factor);
  if (!sweep.sweeps() && sweep.step != 0) errors.add("--step {} needs --min", sweep.step);
  if (sweep.step != 0 && sweep.factor != TokenSweep().factor)
    errors.add("one of --step and --factor, not both");
  if (!sweep.sweeps() && sweep.max != 0) errors.add("--max {} needs --min", sweep.max);
  if (sweep.sweeps() && sweep.tokens != usual_tokens)
    errors.add("one of --tokens and --min, not both");
  if (sweep.sweeps() && sweep.max < sweep.min)
    errors.add("--max {} is less than --min {}", sweep.max, sweep.min);
  else if (sweep.sweeps() && sweep.factor > 1)
    check_count(sweep, errors);
}

}  // namespace gyre

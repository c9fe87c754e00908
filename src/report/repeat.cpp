#include "report/repeat.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <span>

#include "comm/agree.hpp"
#include "report/options.hpp"

namespace gyre {
namespace {

constexpr double wanted_half_width = 0.02;  // of the median's interval, relative to the median
// From nine samples on, the median's interval excludes the least and the greatest sample, so one
// spike has no effect.
constexpr int64_t fewest_repetitions = 9, max_repetitions = 10000;
constexpr double growth = 1.25;  // factor on the number of repetitions between decisions

/// The parts of a broken rule's text: "noisy: CV 31.2 % in 3 of 12 rows, at most 20".
struct RuleText {
  const char* kind;
  const char* before;  ///< text before the value
  const char* after;
  double scale;
  bool at_least;
  double limit;
};

constexpr std::array<RuleText, 5> rule_texts{{
    {"too few repetitions", "", "", 1, true, least_repetitions},
    {"too short", "", " s measured", 1, true, least_measured_seconds},
    {"noisy", "CV ", " %", 100, false, max_variation},
    {"noisy", "median known to ", " %", 100, false, max_half_width},
    {"noisy", "a rank had ", " % of its core", 100, true, least_cpu_share},
}};

const RuleText& text_of(Rule rule) {
  return rule_texts.at(static_cast<size_t>(rule));
}

std::string text_of(const Breach& breach, const std::string& where) {
  const RuleText& rule = text_of(breach.rule);
  return fmt::format("{}{:.3g}{}{}, at {} {:g}", rule.before, breach.value * rule.scale, rule.after,
                     where, rule.at_least ? "least" : "most", rule.limit * rule.scale);
}

}  // namespace

void declare_repeats(OptionTable& table, const std::string& what, RepeatOptions& options) {
  const AddOptions add(table, "Measurement");
  add.count(
      "-n,--iters",
      what + "; auto: at least 9, until their median is known to 2 % or --max-seconds are over",
      options.iterations, "auto");
  add("--max-seconds", "With --iters auto: seconds that a row may take, from its 8th repetition on",
      options.max_seconds, positive);
}

Repeats::Repeats(const RepeatOptions& options, Communicator* world, bool owns_core)
    : options_(options), world_(world), owns_core_(owns_core) {
  total_ = options.iterations;
  decide_at_ = fewest_repetitions - 1;
}

bool Repeats::next() {
  if (index_ >= 0 && last()) return false;
  ++index_;
  if (total_ == 0 && index_ == decide_at_) decide();
  return true;
}

std::vector<double> Repeats::slowest_since_last_decision() {
  const auto recent = std::span<const double>(mine_ms_).subspan(slowest_ms_.size());
  if (world_ == nullptr) return {recent.begin(), recent.end()};
  return slowest_rank(gather_samples(*world_, recent));
}

void Repeats::decide() {
  const std::vector<double> recent = slowest_since_last_decision();
  slowest_ms_.insert(slowest_ms_.end(), recent.begin(), recent.end());
  double seconds = since_start_.seconds();
  if (world_ != nullptr) seconds = all_reduce_value(*world_, seconds, ReduceOp::max);
  const double measured = 1e-3 * std::accumulate(slowest_ms_.begin(), slowest_ms_.end(), 0.0);
  const bool known = summarize(slowest_ms_).half_width() <= wanted_half_width;
  if ((known && measured >= least_measured_seconds) || seconds >= options_.max_seconds ||
      index_ >= max_repetitions - 1) {
    total_ = index_ + 1;
    return;
  }
  const double count = index_;
  const double in_time = std::floor(count * options_.max_seconds / std::max(seconds, 1e-9));
  const double at = std::min({std::ceil(count * growth), in_time, double{max_repetitions - 1}});
  decide_at_ = std::max(index_ + 1, static_cast<int64_t>(at));
}

Timing Repeats::timing() const {
  constexpr double unknown = std::numeric_limits<double>::quiet_NaN();
  double share = wall_seconds_ > 0 ? std::min(1.0, cpu_seconds_ / wall_seconds_) : 1;
  if (world_ == nullptr) return {{mine_ms_}, owns_core_ ? share : unknown};
  share = all_reduce_value(*world_, share, ReduceOp::min);
  return {gather_samples(*world_, mine_ms_), owns_core_ ? share : unknown};
}

std::vector<Breach> breaches_of(const Timing& timing) {
  const std::vector<double> slowest = slowest_rank(timing.samples_ms);
  if (slowest.empty()) return {};
  const Statistics s = summarize(slowest);
  const double seconds = 1e-3 * std::accumulate(slowest.begin(), slowest.end(), 0.0);
  std::vector<Breach> breaches;
  if (s.count < least_repetitions)
    breaches.push_back({Rule::repetitions, static_cast<double>(s.count)});
  if (seconds < least_measured_seconds) breaches.push_back({Rule::duration, seconds});
  if (s.cv > max_variation) breaches.push_back({Rule::variation, s.cv});
  if (s.half_width() > max_half_width) breaches.push_back({Rule::interval, s.half_width()});
  if (timing.cpu_share < least_cpu_share) breaches.push_back({Rule::cpu_share, timing.cpu_share});
  return breaches;
}

std::string text_of(const Breach& breach) {
  return fmt::format("{}: {}", text_of(breach.rule).kind, text_of(breach, ""));
}

std::vector<std::string> breaches_text(const std::vector<const Timing*>& rows) {
  struct Worst {
    double value = 0;
    int64_t rows = 0;
  };
  std::map<Rule, Worst> broken;
  for (const Timing* row : rows)
    for (const Breach& breach : breaches_of(*row)) {
      Worst& worst = broken[breach.rule];
      const bool is_less = breach.value < worst.value;
      if (worst.rows++ == 0 || is_less == text_of(breach.rule).at_least) worst.value = breach.value;
    }
  std::vector<std::string> lines;
  for (const auto& [rule, worst] : broken)
    lines.push_back(fmt::format(
        "{}: {}", text_of(rule).kind,
        text_of({rule, worst.value}, fmt::format(" in {} of {} rows", worst.rows, rows.size()))));
  return lines;
}

std::string breach_text(const ForeignLoad& load) {
  if (!(load.cores > max_foreign_cores)) return "";
  return fmt::format("noisy: other processes kept {:.1f} of {} cores of {} busy, at most {}",
                     load.cores, load.of_cores, load.host, max_foreign_cores);
}

}  // namespace gyre

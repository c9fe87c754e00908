#include "report/noise.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

namespace gyre {
namespace {

/// Text of a broken rule: "noisy: CV 31.2 % in 3 of 12 rows, at most 20 %".
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

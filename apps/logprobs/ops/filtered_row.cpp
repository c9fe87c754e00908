#include "apps/logprobs/ops/filtered_row.hpp"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "apps/logprobs/operation.hpp"

namespace gyre {
namespace {

/// Expects `mine` of the run, and `other` of the file, where another number of ids survive.
ExpectedRow with_answer(ExpectedRow mine, ExpectedRow other) {
  mine.stored = std::move(other.values);
  mine.stored_scales = std::move(other.scales);
  return mine;
}

}  // namespace

FilteredRow::FilteredRow(std::vector<double> row, const SamplingFilter& filter, int32_t id,
                         double g)
    : row_(std::move(row)),
      filter_(filter),
      id_(id),
      g_(g),
      survivors_(row_, filter, logprob_tolerance()) {}

std::optional<int64_t> FilteredRow::survivors_of(const FilteredAnswers& answers) const {
  constexpr double least = 0x1p-120;  // larger numbers keep several bits in f32
  const std::span<const int32_t> doubtful = survivors_.doubtful();
  const int64_t most = survivors_.most();
  if (!answers.gradient.empty() && !doubtful.empty() &&
      std::abs(slope()) * std::exp(survivors_.logprob(at_rank(most - 1), most)) > least)
    return survivors_.with_doubtful(
        std::ranges::count_if(doubtful, [&](int32_t v) { return answers.gradient[v] != 0; }));
  if (answers.logprob) return survivors_.nearest(id_, *answers.logprob);
  if (!answers.gradient.empty()) return survivors_.usual();
  return std::nullopt;
}

ExpectedRow FilteredRow::score_of(int64_t survivors) const {
  const double want = survivors_.logprob(id_, survivors);
  return {{want}, {std::isfinite(want) ? logprob_scale(want) : 1}};
}

ExpectedRow FilteredRow::score(double got, const FilteredAnswers& answers) const {
  const int64_t mine = survivors_.nearest(id_, got), other = survivors_of(answers).value_or(mine);
  return other == mine ? score_of(mine) : with_answer(score_of(mine), score_of(other));
}

ExpectedRow FilteredRow::gradient_of(int64_t survivors) const {
  const double weight = slope();
  RowGradientTerms terms{survivors_.logprobs(survivors), -weight, 0, {}, {}};
  ExpectedRow want;
  for (const double x : terms.logprobs) want.values.push_back(-weight * std::exp(x));
  const size_t target = id_;
  if (id_ >= 0 && id_ < std::ssize(row_) && terms.logprobs[target] > -HUGE_VAL) {
    want.values[target] += weight;
    terms.ids = std::span(&id_, 1);
    terms.weights = std::span(&weight, 1);
  }
  want.scales = terms.scales();
  return want;
}

ExpectedRow FilteredRow::gradient(int64_t survivors, const FilteredAnswers& answers) const {
  const int64_t mine = std::clamp(survivors, survivors_.fewest(), survivors_.most()),
                other = survivors_of(answers).value_or(mine);
  return other == mine ? gradient_of(mine) : with_answer(gradient_of(mine), gradient_of(other));
}

void FilteredRow::compare_survivors(int64_t survivors, double got, bool any_of_ties,
                                    const std::string& place, Check& check) const {
  if (survivors < survivors_.fewest() || survivors > survivors_.most())
    return check.add_failure(fmt::format("{}: {} survive, not {} to {}", place, survivors,
                                         survivors_.fewest(), survivors_.most()));
  const ExpectedRow want = score_of(survivors);
  const bool other = any_of_ties && is_other_survivor(got, want.values[0]);
  const double expected = other ? got : want.values[0];
  check.add(
      got, expected, [&] { return fmt::format("{} of {} survivors", place, survivors); },
      want.scales[0], expected);
}

bool FilteredRow::is_at_boundary(int64_t column) const {
  if (column < 0 || column >= std::ssize(row_)) return false;
  return logit(column) <= logit(at_rank(survivors_.fewest() - 1)) &&
         logit(column) >= logit(at_rank(survivors_.most() - 1));
}

double FilteredRow::logprob_in_place(int64_t column, int64_t survivors) const {
  const int32_t first = at_rank(0);
  return survivors_.logprob(first, survivors) +
         (logit(column) - logit(first)) / filter_.temperature;
}

bool FilteredRow::is_other_survivor(double got, double want) const {
  if (std::isfinite(got) == std::isfinite(want) || !is_at_boundary(id_)) return false;
  const double finite = std::isfinite(got) ? got : want;
  const double low = logprob_in_place(id_, survivors_.most()),
               high = logprob_in_place(id_, survivors_.fewest());
  const double tolerance = logprob_tolerance() * logprob_scale(low);
  return finite >= low - tolerance && finite <= high + tolerance;
}

bool FilteredRow::is_other_gradient(DType stored, int64_t column, double got, double want) const {
  if (!is_at_boundary(column)) return false;
  const double weight = column == id_ ? slope() : 0, nonzero = got == 0 ? want : got;
  const auto value = [&](int64_t survivors) {
    return weight - slope() * std::exp(logprob_in_place(column, survivors));
  };
  const auto [low, high] = std::minmax({value(survivors_.fewest()), value(survivors_.most())});
  const double tolerance = logit_gradient_tolerance(DType::f32);
  const double scale = logit_gradient_scale(logprob_in_place(column, survivors_.fewest()), slope(),
                                            0, std::abs(weight)),
               slack = tolerance * (scale + storage_scale(stored, tolerance) * std::abs(nonzero));
  return nonzero >= low - slack && nonzero <= high + slack;
}

}  // namespace gyre

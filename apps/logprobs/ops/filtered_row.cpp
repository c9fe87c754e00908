#include "apps/logprobs/ops/filtered_row.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "apps/logprobs/op.hpp"
#include "core/special_values.hpp"

namespace gyre {
namespace {

/// log p of those of `row` that the filter keeps, -inf for the others.
std::vector<double> surviving(std::vector<double> row, const SamplingFilter& filter) {
  const std::vector<bool> kept = filter_reference(row, filter);
  for (size_t v = 0; v < row.size(); ++v)
    if (!kept[v]) row[v] = -HUGE_VAL;
  return log_softmax_reference(row, filter.temperature);
}

}  // namespace

FilteredRow::FilteredRow(std::vector<double> row, const SamplingFilter& filter)
    : row_(std::move(row)), filter_(filter), left_(surviving(row_, filter)) {}

bool FilteredRow::is_close() const {
  if (filter_.top_p == 1) return false;
  SamplingFilter largest = filter_;
  largest.top_p = 1;
  const std::vector<double> before = surviving(row_, largest);
  double kept = 0, least = HUGE_VAL;
  for (size_t v = 0; v < before.size(); ++v) {
    if (!(left_[v] > -HUGE_VAL)) continue;
    kept += std::exp(before[v]);
    least = std::min(least, std::exp(before[v]));
  }
  const double margin = logprob_tolerance();
  return std::abs(kept - filter_.top_p) < margin || std::abs(kept - least - filter_.top_p) < margin;
}

ExpectedRow FilteredRow::score(int32_t id) const {
  if (is_close()) return {};
  const double want = filtered_logprob_reference(row_, id, filter_);
  return {{want}, {std::isfinite(want) ? logprob_scale(want) : 1}};
}

ExpectedRow FilteredRow::gradient(int32_t id, double g) const {
  if (is_close()) return {};
  const double weight = g / filter_.temperature;
  RowGradientTerms terms{left_, -weight, 0, {}, {}};
  if (id >= 0 && id < std::ssize(left_) && left_[static_cast<size_t>(id)] > -HUGE_VAL) {
    terms.ids = std::span(&id, 1);
    terms.weights = std::span(&weight, 1);
  }
  return {filtered_gradient_reference(row_, id, filter_, g), terms.scales()};
}

double FilteredRow::boundary_logprob(int64_t id) const {
  size_t least = row_.size();
  for (size_t v = 0; v < row_.size(); ++v)
    if (left_[v] > -HUGE_VAL && (least == row_.size() || row_[v] < row_[least])) least = v;
  const bool ties = id >= 0 && id < std::ssize(row_) && least < row_.size() &&
                    row_[static_cast<size_t>(id)] == row_[least];
  return ties ? left_[least] : nan_of<double>;
}

bool FilteredRow::is_other_survivor(int32_t id, double got, double want) const {
  if (std::isfinite(got) == std::isfinite(want)) return false;
  const double logprob = boundary_logprob(id);
  const double finite = std::isfinite(got) ? got : want;
  return std::abs(finite - logprob) <= logprob_tolerance() * logprob_scale(logprob);
}

bool FilteredRow::is_other_gradient(int32_t id, double g, DType stored, int64_t column, double got,
                                    double want) const {
  if ((got == 0) == (want == 0)) return false;
  const double logprob = boundary_logprob(column);
  if (std::isnan(logprob)) return false;
  const double slope = g / filter_.temperature, weight = column == id ? slope : 0;
  const double nonzero = got == 0 ? want : got;
  return std::abs(nonzero - (weight - slope * std::exp(logprob))) <=
         logit_gradient_tolerance(stored) *
             logit_gradient_scale(logprob, slope, 0, std::abs(weight));
}

int64_t filter_list_bytes(const LogprobsContext& context) {
  const SamplingFilter& filter = context.problem.filter;
  const VocabPartition& vocab = context.problem.vocab;
  int64_t length = filter.top_p != 1 ? context.options.list_length : 1, longest = 1;
  if (filter.top_k > 0 && filter.top_k < vocab.vocab_size) length = filter.top_k;
  for (int r = 0; r < vocab.ranks(); ++r) longest = std::max(longest, vocab.valid(r));
  return std::min(length, longest) * static_cast<int64_t>(size_of(context.problem.type));
}

}  // namespace gyre

// Digit search of FilteredScores, for thresholds below the last value of an incomplete list.

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "core/error.hpp"
#include "core/index.hpp"
#include "logprobs/filtered_forward.hpp"

namespace gyre {
namespace {

/// Narrows the range to the bucket where the mass summed from above reaches top_p of the total.
void descend(const int64_t* masses, bool first, DigitRow& row) {
  if (first) {
    // The last sum is of values below the range, which min_p drops.
    const int64_t kept = digit_sums - (row.filter.min_p > 0 ? 1 : 0);
    for (int64_t i = 0; i < kept; ++i) row.total += masses[i];
    row.above = masses[digit_buckets];
  }
  if (row.filter.top_p == 1) {  // the threshold is the least value that min_p keeps
    row.above = row.total;
    row.bits = 0;
    return;
  }
  const double limit = row.filter.top_p * row.total;
  int64_t bucket = digit_buckets - 1;
  while (bucket >= 0 && (row.above + masses[bucket]) < limit) row.above += masses[bucket--];
  GYRE_CHECK(bucket >= 0, "token {}: no threshold from key {} in {} bits", row.token, row.low,
             row.bits);
  const int shift = row.bits - digit_bits;
  row.low += static_cast<uint32_t>(bucket) << shift;
  row.bits = shift;
  row.equal = masses[bucket];
}

}  // namespace

/// Returns the key range that contains a row's threshold. Its keys are below that of `bound`. The
/// lower limit is a value such that all columns, if they had it, would have half of the mass that
/// top_p excludes; with min_p, the least value that it keeps.
DigitRow FilteredScores::Forward::digit_row(int64_t t, float max, double total, float bound) const {
  using Limits = std::numeric_limits<float>;
  const double columns = s_.vocab_.vocab_size;
  const SamplingFilter& filter = this->filter(t);
  const double left_out = (1 - filter.top_p) * total / 2;
  const double rounding = columns * std::exp2(-fraction_bits_for(s_.vocab_.vocab_size));
  uint32_t low = 0;
  if (filter.min_p > 0) {
    low = least_likely_key(t, max);
  } else if (left_out > rounding) {
    const double least = max + std::log(left_out / columns) / scale(t);
    low = key_of(std::nextafter(static_cast<float>(std::max<double>(least, Limits::lowest())),
                                -Limits::infinity()),
                 s_.type_);
  }
  // The lists do not tell how much probability min_p keeps, so the search begins at the maximum.
  const uint32_t high = filter.min_p > 0 ? key_of(max, s_.type_) : key_of(bound, s_.type_) - 1;
  low = std::min(low, high);
  const int digits =
      static_cast<int>(std::max<int64_t>(1, ceil_div(std::bit_width(high - low), digit_bits)));
  return {t, max, low, digits * digit_bits, filter};
}

uint32_t FilteredScores::Forward::least_likely_key(int64_t t, float max) const {
  const SamplingFilter& filter = this->filter(t);
  const auto keeps = [&](uint32_t key) {
    return filter.is_likely(value_of_key(key, s_.type_), max);
  };
  const float lowest = std::numeric_limits<float>::lowest();
  const uint32_t first = key_of(lowest, s_.type_);
  const double near = max + std::log(filter.min_p) * filter.temperature;
  uint32_t key =
      std::max(first, key_of(static_cast<float>(std::max<double>(near, lowest)), s_.type_));
  while (key > first && keeps(key - 1)) --key;
  while (!keeps(key)) ++key;
  return key;
}

void FilteredScores::Forward::search() {
  std::vector<DigitRow*> active;
  for (DigitRow& row : rows_) active.push_back(&row);
  for (bool first = true; !active.empty(); first = false) {
    add_rounds(active, first);
    std::erase_if(active, [](const DigitRow* row) { return row->bits == 0; });
  }
  const Buffer<DigitCounts> counts = gather_counts();
  std::vector<int64_t> ties(ranks_);
  for (size_t i = 0; i < rows_.size(); ++i) finish_by_digits(rows_[i], i, counts, ties);
}

/// Runs one round of the search for all active rows.
void FilteredScores::Forward::add_rounds(std::vector<DigitRow*>& active, bool first) {
  const int64_t count = std::ssize(active);
  const int bits = fraction_bits_for(s_.vocab_.vocab_size);
  std::vector<MassRow> rows;
  for (const DigitRow* row : active)
    rows.push_back(
        {row->token,
         {row->max, s_.scale()[row->token], bits, row->low, row->bits - digit_bits, first}});
  Buffer<int64_t> masses(count * digit_sums);
  s_.kernels_.masses(logits_, own_columns(), rows, s_.options_.threads, masses.span());
  wait(s_.tp_.all_reduce(masses.data(), masses.size(), DType::i64, ReduceOp::sum, stream_,
                         "probabilities by digits"));
  for (int64_t i = 0; i < count; ++i) descend(masses.data() + i * digit_sums, first, *active[i]);
}

/// Gathers the counts of all ranks, [ranks, rows].
Buffer<DigitCounts> FilteredScores::Forward::gather_counts() {
  const int64_t count = std::ssize(rows_);
  Buffer<DigitCounts> own(count), all(ranks_ * count);
  std::vector<ColumnQuery> queries;
  for (const DigitRow& row : rows_)
    queries.push_back({row.token, 0, own_columns(), value_of_key(row.low, s_.type_)});
  std::vector<int64_t> asked;  // indices of rows whose target equals the threshold
  for (int64_t i = 0; i < count; ++i) {
    const ColumnQuery& whole = queries[i];
    if (owner(whole.row) != mine_ || records_.scalars(mine_, whole.row).target != whole.value)
      continue;
    asked.push_back(i);
    queries.push_back({whole.row, target_column(whole.row) + 1, own_columns(), whole.value});
  }
  std::vector<ColumnCounts> found(queries.size());
  s_.kernels_.count_columns(logits_, queries, s_.options_.threads, found);
  for (int64_t i = 0; i < count; ++i) {
    const ColumnCounts& mine = found[i];
    own[i] = {static_cast<int32_t>(mine.above), static_cast<int32_t>(mine.equal), 0};
  }
  for (size_t i = 0; i < asked.size(); ++i)
    own[asked[i]].behind = static_cast<int32_t>(found[rows_.size() + i].equal);
  wait(s_.tp_.all_gather(bytes_of(std::as_const(own).span()), writable_bytes_of(all.span()),
                         stream_, "counts of columns"));
  return all;
}

/// Writes a row's results from the counts of all ranks; `i` is its index in them.
void FilteredScores::Forward::finish_by_digits(const DigitRow& row, size_t i,
                                               const Buffer<DigitCounts>& counts,
                                               std::span<int64_t> ties) {
  const auto at = [&](int64_t rank) -> const DigitCounts& {
    return counts[rank * std::ssize(rows_) + i];
  };
  FilterCut cut;
  cut.max = row.max;
  ValueGroup group{value_of_key(row.low, s_.type_), 0};
  for (int64_t r = 0; r < ranks_; ++r) {
    cut.above += at(r).above;
    ties[r] = at(r).equal;
    group.count += at(r).equal;
  }
  cut.mass = row.above;
  if (row.filter.top_p == 1) {
    cut.threshold = group.value;
    cut.ties = cut.kept_ties = group.count;
  } else {
    GYRE_CHECK(group.count > 0 && row.equal % group.count == 0,
               "token {}: a mass of {} for {} columns of equal value", row.token, row.equal,
               group.count);
    add_group(group, row.equal / group.count, row.filter.top_p * row.total, cut);
  }
  cut.mass = std::ldexp(cut.mass, -fraction_bits_for(s_.vocab_.vocab_size));
  const int rank = owner(row.token);
  finish(
      row.token, cut, [&](int64_t r) { return ties[r]; }, rank < 0 ? 0 : at(rank).behind);
}

}  // namespace gyre

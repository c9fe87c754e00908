#include "logprobs/filtered_forward.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.hpp"
#include "core/special_values.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Calls body(token, scratch) for all tokens, distributed over threads; scratch [ranks]. A walk
/// reads up to `length` entries of each rank's list.
template <class Body>
void for_each_row(int threads, int64_t tokens, int ranks, int64_t length, Body body) {
  const double nanoseconds = 10.0 * (ranks * std::min<int64_t>(length, 32));
  for_each_part(threads, tokens, nanoseconds, [&](int64_t begin, int64_t end, int) {
    std::vector<int64_t> scratch(ranks);
    for (int64_t t = begin; t < end; ++t) body(t, std::span<int64_t>(scratch));
  });
}

}  // namespace

bool add_group(const ValueGroup& group, double weight, double limit, FilterCut& cut) {
  const double count = group.count;
  const double room = std::ceil((limit - cut.mass) / weight);
  cut.above += cut.ties;
  cut.threshold = group.value;
  cut.ties = group.count;
  cut.kept_ties = room < count ? static_cast<int64_t>(room) : group.count;
  const bool more = cut.mass + count * weight < limit;
  cut.mass += cut.kept_ties * weight;
  return more;
}

void FilteredScores::Forward::gather() {
  if (ranks_ == 1) {
    make_records(records_);
    return;
  }
  ListRecords own(s_.tokens_, s_.length_, s_.type_, 1);
  make_records(own);
  wait(s_.tp_.all_gather(std::as_const(own).bytes(), records_.bytes(), stream_,
                         "lists of the largest logits"));
}

void FilteredScores::Forward::make_records(ListRecords& own) {
  const int64_t tokens = s_.tokens_, length = s_.length_;
  const RowScan scan{own_columns(), s_.scale(), false, s_.options_.threads};
  const bool filtered = s_.any_filter([](const auto&filter) { return filter.active(); }),
             summed = s_.any_filter([](const auto&filter) { return filter.top_k == 0; }),
             cuts_ties = s_.any_filter([](const auto&filter) { return filter.top_p != 1; });
  Buffer<float> values(tokens * length);
  Buffer<SoftmaxPartial> partials(summed ? tokens : 0);
  Buffer<int32_t> last(filtered ? tokens : 0);
  // Only top-p keeps some of several equal elements, which needs their ids.
  ids_ = Buffer<int32_t>(cuts_ties ? tokens * length : 0);
  if (filtered) {
    s_.kernels_.top(logits_, scan, {values.span(), ids_.span(), last.span(), length},
                    partials.span());
  } else {
    s_.kernels_.partials(logits_, scan, partials.span());
    for (int64_t t = 0; t < tokens; ++t) values[t] = partials[t].max;
  }
  own.set_values(values.span());
  Buffer<float> target(tokens);
  std::fill_n(target.data(), tokens, -infinity_of<float>);
  s_.kernels_.gather_token_logits(logits_, targets_, 1, s_.vocab_.begin(mine_), own_columns(),
                                  target.span());
  for (int64_t t = 0; t < tokens; ++t)
    own.scalars(t) = {summed ? partials[t].sum : 0, filtered ? last[t] : 0, target[t], 0};
  if (cuts_ties) count_behind(own, values.span());
}

/// Sets `behind` for tokens with their target in this shard; values [tokens, length].
void FilteredScores::Forward::count_behind(ListRecords& own, std::span<const float> values) {
  const size_t length = s_.length_;
  std::vector<ColumnQuery> queries;  // for rows whose lists are too short
  for (int64_t t = 0; t < s_.tokens_; ++t) {
    if (owner(t) != mine_) continue;
    ListScalars& scalars = own.scalars(t);
    bool more = false;
    scalars.behind = behind_in_list(t, values.subspan(t * length, length), scalars, more);
    if (more) queries.push_back({t, target_column(t) + 1, own_columns(), scalars.target});
  }
  if (queries.empty()) return;
  std::vector<ColumnCounts> counts(queries.size());
  s_.kernels_.count_columns(logits_, queries, s_.options_.threads, counts);
  for (size_t i = 0; i < queries.size(); ++i)
    own.scalars(queries[i].row).behind = static_cast<int32_t>(counts[i].equal);
}

/// Number of this shard's columns after the target's that hold the target's value. Sets `more` if
/// the list does not contain all of them. Returns 0 if the target is -inf or below the list's last
/// value, where the number is not needed.
int32_t FilteredScores::Forward::behind_in_list(int64_t t, std::span<const float> list,
                                                const ListScalars& scalars, bool& more) const {
  const auto column = target_column(t);
  if (scalars.target < list.back() || scalars.target == -infinity_of<float>) return 0;
  int32_t in_list = 0, behind = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] != scalars.target) continue;
    ++in_list;
    behind += ids_[t * s_.length_ + i] > column ? 1 : 0;
  }
  more = scalars.target == list.back() && scalars.last != in_list;
  return behind;
}

void FilteredScores::Forward::walk() {
  std::vector<char> too_short(s_.tokens_);
  for_each_row(s_.options_.threads, s_.tokens_, ranks_, s_.length_,
               [&](int64_t t, auto scratch) { too_short[t] = walk_row(t, scratch) ? 0 : 1; });
  for (int64_t t = 0; t < s_.tokens_; ++t) {
    if (too_short[t] == 0) continue;
    std::vector<int64_t> heads(ranks_);
    const ListWalk lists(records_, t, columns_, heads);
    rows_.push_back(digit_row(t, lists.max(), total_mass(t, lists.max()), lists.bound()));
  }
}

/// Finishes the row; returns false if its lists are too short.
bool FilteredScores::Forward::walk_row(int64_t t, std::span<int64_t> scratch) {
  ListWalk lists(records_, t, columns_, scratch);
  FilterCut cut;
  cut.max = lists.max();
  const SamplingFilter& filter = this->filter(t);
  const double total = filter.top_k > 0 ? 1 : total_mass(t, cut.max);
  if (!std::isfinite(cut.max) || !std::isfinite(total)) {
    finish_nan(t);
    return true;
  }
  if (filter.top_k > 0 || filter.min_p > 0) {
    if (!cut_by_count(t, lists, cut)) return false;
  } else if (filter.top_p != 1) {
    const double limit = filter.top_p * total;
    ValueGroup group{};
    while (lists.next(group)) {
      const double x = (group.value - static_cast<double>(cut.max)) * scale(t);
      if (!add_group(group, std::exp(x), limit, cut)) break;
    }
    if (lists.too_short()) return false;
  } else {
    cut.above = s_.vocab_.vocab_size;
    cut.mass = total;
  }
  const int rank = owner(t);
  finish(
      t, cut, [&](int64_t r) { return ties_by_lists(r, t, cut.threshold); },
      rank < 0 ? 0 : records_.scalars(rank, t).behind);
  return true;
}

double FilteredScores::Forward::total_mass(int64_t t, float max) const {
  double total = 0;
  for (int64_t r = 0; r < ranks_; ++r) {
    const double sum = records_.scalars(r, t).sum;
    if (sum == 0) continue;
    const double first = records_.value(r, t, 0);
    total += sum * std::exp((first - max) * scale(t));
  }
  return total;
}

/// Keeps the top_k largest and all that equal the last of them; of these what min_p, then top_p
/// keep. Returns false if the lists end before that.
bool FilteredScores::Forward::cut_by_count(int64_t t, ListWalk& walk, FilterCut& cut) const {
  const SamplingFilter& filter = this->filter(t);
  const int64_t most = filter.top_k > 0 ? filter.top_k : s_.vocab_.vocab_size;
  std::vector<std::pair<ValueGroup, double>> groups;
  int64_t count = 0;
  double total = 0;
  bool unlikely = false;
  for (ValueGroup group{}; count < most && walk.next(group);) {
    unlikely = !filter.is_likely(group.value, cut.max);
    if (unlikely) break;
    const double x = (group.value - static_cast<double>(cut.max)) * scale(t);
    groups.emplace_back(group, std::exp(x));
    count += group.count;
    total += group.count * groups.back().second;
  }
  if (walk.too_short()) {
    GYRE_CHECK(filter.top_k == 0, "{} of {} largest", count, filter.top_k);
    return false;
  }
  if (filter.top_p != 1) {
    for (const auto& [group, weight] : groups)
      if (!add_group(group, weight, filter.top_p * total, cut)) break;
    return true;
  }
  cut.mass = total;
  if (count < most && filter.min_p <= 0) {  // the k-th largest is -inf, so all columns survive
    cut.above = s_.vocab_.vocab_size;
    return true;
  }
  cut.threshold = groups.back().first.value;
  cut.ties = cut.kept_ties = groups.back().first.count;
  cut.above = count - cut.ties;
  return true;
}

/// Number of a rank's columns with this value. If the rank's list is incomplete, the value must not
/// be below the list's last one.
int64_t FilteredScores::Forward::ties_by_lists(int64_t rank, int64_t t, float value) const {
  if (records_.value(rank, t, s_.length_ - 1) == value) return records_.scalars(rank, t).last;
  int64_t count = 0;
  for (int64_t i = 0; i < s_.length_ && records_.value(rank, t, i) >= value; ++i)
    count += records_.value(rank, t, i) == value ? 1 : 0;
  return count;
}

void FilteredScores::Forward::finish_nan(int64_t t) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  s_.normalizers_[t] = {nan, nan};
  s_.survivors_[t] = {std::numeric_limits<float>::lowest(), 0};
  s_.kept_[t] = 0;
  logprob_[t] = nan;
}

/// Column of this shard from which on ties survive. `own`: number of ties in the shard; `higher`:
/// on higher ranks. 0 for now if the list lacks ties of the shard: then find_cuts() sets it.
int32_t FilteredScores::Forward::column_of_cut(int64_t t, const FilterCut& cut, int64_t own,
                                               int64_t higher) {
  const int64_t kept = std::clamp<int64_t>(cut.kept_ties - higher, 0, own);
  if (kept == own) return 0;
  if (kept == 0) return static_cast<int32_t>(own_columns());
  // If the list has as many ties as the shard, it has all of them, by ascending id.
  int64_t in_list = 0, end = 0;
  for (int64_t i = 0; i < s_.length_; ++i)
    if (records_.value(mine_, t, i) == cut.threshold) ++in_list, end = i + 1;
  if (in_list == own) return ids_[t * s_.length_ + end - kept];
  cut_ties_[t] = kept;
  return 0;
}

void FilteredScores::Forward::find_cuts() {
  std::vector<TieQuery> queries;
  for (int64_t t = 0; t < s_.tokens_; ++t)
    if (const int64_t n = cut_ties_[t]; n > 0)
      queries.push_back({t, s_.survivors_[t].threshold, n});
  if (queries.empty()) return;
  std::vector<int64_t> found(queries.size());
  s_.kernels_.find_ties(logits_, own_columns(), queries, s_.options_.threads, found);
  for (size_t i = 0; i < queries.size(); ++i)
    s_.survivors_[queries[i].row].cut = static_cast<int32_t>(found[i]);
}

}  // namespace gyre

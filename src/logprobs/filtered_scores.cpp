#include "logprobs/filtered_scores.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "comm/agree.hpp"
#include "core/index.hpp"
#include "logprobs/filtered_lists.hpp"
#include "logprobs/row_digits.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/clock.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

constexpr std::string_view what = "filtered log-probabilities";
constexpr float infinity = std::numeric_limits<float>::infinity();
/// Below all that has a probability, and above -inf.
constexpr float lowest = std::numeric_limits<float>::lowest();

/// What of a row survives.
struct Cut {
  float max = 0;
  float threshold = lowest;
  int64_t above = 0;      ///< columns above the threshold
  int64_t ties = 0;       ///< columns equal to it
  int64_t kept_ties = 0;  ///< how many of them survive: those with the highest ids
  double mass = 0;        ///< Σ exp((z - max) · scale) of what survives
};

/// Adds a group to what survives, as far as less than `limit` lies before each of its columns.
/// False if that is the end.
bool add_group(const ValueGroup& group, double weight, double limit, Cut& cut) {
  const auto count = static_cast<double>(group.count);
  const double room = std::ceil((limit - cut.mass) / weight);
  cut.above += cut.ties;
  cut.threshold = group.value;
  cut.ties = group.count;
  cut.kept_ties = room < count ? static_cast<int64_t>(room) : group.count;
  const bool more = cut.mass + count * weight < limit;
  cut.mass += static_cast<double>(cut.kept_ties) * weight;
  return more;
}

/// A row whose threshold is searched by digits.
struct DigitRow {
  int64_t token;
  float max;
  uint32_t low;                             ///< the threshold's key is low .. low + 2^bits - 1
  int bits;                                 ///< a multiple of digit_bits
  int64_t total = 0, above = 0, equal = 0;  ///< masses: of all, above the range, in it
};

/// Cuts the range to the part in which the sum from above reaches the share top_p of the total.
void descend(const int64_t* masses, bool first, double top_p, DigitRow& row) {
  if (first) {
    for (int64_t i = 0; i < digit_sums; ++i) row.total += masses[i];
    row.above = masses[digit_buckets];
  }
  const double limit = top_p * static_cast<double>(row.total);
  int64_t bucket = digit_buckets - 1;
  while (bucket >= 0 && static_cast<double>(row.above + masses[bucket]) < limit)
    row.above += masses[bucket--];
  GYRE_CHECK(bucket >= 0, "token {}: no threshold from key {} in {} bits", row.token, row.low,
             row.bits);
  const int shift = row.bits - digit_bits;
  row.low += static_cast<uint32_t>(bucket) << shift;
  row.bits = shift;
  row.equal = masses[bucket];
}

/// What a rank says of a row at the end of its search.
struct Counts {
  int32_t above, equal, behind;
};

/// body(token, scratch) for all tokens, shared among threads; scratch [ranks]. `length` entries of
/// each rank's list may be walked.
template <class Body>
void for_each_row(int threads, int64_t tokens, int ranks, int64_t length, Body body) {
  const double nanoseconds = 10 * static_cast<double>(ranks * std::min<int64_t>(length, 32));
  for_each_part(threads, tokens, nanoseconds, [&](int64_t begin, int64_t end, int) {
    std::vector<int64_t> scratch(static_cast<size_t>(ranks));
    for (int64_t t = begin; t < end; ++t) body(t, std::span<int64_t>(scratch));
  });
}

void check_options(int64_t tokens, const VocabPartition& vocab, DType type,
                   const FilterOptions& options, int ranks) {
  const SamplingFilter& filter = options.filter;
  check_tokens(tokens);
  check_partition(vocab, ranks);
  if (type != DType::f32 && type != DType::bf16)
    throw_usage("logits of type {}; they must be f32 or bf16", name_of(type));
  if (filter.top_k < 0)
    throw_usage("top_k is {}; the smallest valid number is 0, for no such filter", filter.top_k);
  if (filter.top_k > vocab.vocab_size)
    throw_usage("top_k is {}; the largest valid number is {}, the size of the vocabulary",
                filter.top_k, vocab.vocab_size);
  if (!(filter.top_p > 0 && filter.top_p <= 1))
    throw_usage("top_p is {}; it must be above 0 and at most 1", filter.top_p);
  check_temperature(filter.temperature);
  if (options.list_length < 1)
    throw_usage("lists of {} logits; the smallest valid length is 1", options.list_length);
}

}  // namespace

FilteredScores::FilteredScores(int64_t tokens, const VocabPartition& vocab, DType type,
                               const FilterOptions& options, Communicator& tp)
    : tokens_(tokens),
      vocab_(vocab),
      type_(type),
      options_(options),
      tp_(tp),
      kernels_(kernels_or_cpu(options.kernels)) {
  SamplingFilter& filter = options_.filter;
  agree_on_arguments(tp, what, [&] { check_options(tokens, vocab, type, options, tp.size()); },
                     {{"the number of tokens", tokens},
                      {"the number of the logits' type", static_cast<int64_t>(type)},
                      {"top_k", filter.top_k},
                      {"the length of the lists", options.list_length}});
  agree_on_partition(tp, what, vocab);
  agree_on_number(tp, what, "top_p", filter.top_p);
  agree_on_number(tp, what, "the temperature", filter.temperature);
  if (filter.top_k == vocab.vocab_size) filter.top_k = 0;
  int64_t longest = 1;
  for (int r = 0; r < tp.size(); ++r) longest = std::max(longest, vocab.valid(r));
  if (by_mass()) length_ = options.list_length;
  if (by_count()) length_ = filter.top_k;
  length_ = std::min(length_, longest);
  normalizers_ = Buffer<RowNormalizer>(tokens);
  survivors_ = Buffer<RowSurvivors>(tokens);
  kept_ = Buffer<int32_t>(tokens);
}

/// One forward pass.
class FilteredScores::Forward {
 public:
  Forward(FilteredScores& scores, ConstMatrixRef logits, std::span<const int32_t> targets,
          Stream& stream, std::span<float> logprob)
      : s_(scores),
        logits_(logits),
        targets_(targets),
        stream_(stream),
        logprob_(logprob),
        ranks_(scores.tp_.size()),
        mine_(scores.tp_.rank()),
        records_(scores.tokens_, scores.length_, scores.type_, ranks_),
        cut_ties_(static_cast<size_t>(scores.tokens_)) {
    for (int r = 0; r < ranks_; ++r) columns_.push_back(s_.vocab_.valid(r));
  }

  double run() {
    gather();
    walk();
    s_.rows_by_digits_ = std::ssize(rows_);
    if (!rows_.empty()) search();
    find_cuts();
    return waited_;
  }

 private:
  int64_t own_columns() const { return columns_[static_cast<size_t>(mine_)]; }
  double scale() const { return static_cast<double>(s_.scale()); }
  int64_t target_column(int64_t t) const {
    return targets_[static_cast<size_t>(t)] - s_.vocab_.begin(mine_);
  }
  int owner(int64_t t) const { return s_.vocab_.owner(targets_[static_cast<size_t>(t)]); }
  void wait(const WorkPtr& work) {
    const Stopwatch watch;
    work->wait();
    waited_ += watch.seconds();
  }

  void gather();
  void make_records(ListRecords& own);
  void count_behind(ListRecords& own, std::span<const float> values);
  int32_t behind_in_list(int64_t t, std::span<const float> list, const ListScalars& scalars,
                         bool& more) const;
  void walk();
  bool walk_row(int64_t t, std::span<int64_t> scratch);
  double total_mass(int64_t t, float max) const;
  Cut cut_by_count(ListWalk& walk, float max) const;
  DigitRow digit_row(int64_t t, float max, double total, float bound) const;
  void search();
  void add_rounds(std::vector<DigitRow*>& active, bool first);
  Buffer<Counts> gather_counts();
  void finish_by_digits(const DigitRow& row, size_t i, const Buffer<Counts>& counts,
                        std::span<int64_t> ties);
  template <class Ties>
  void finish(int64_t t, const Cut& cut, Ties ties_of, int64_t behind);
  void finish_nan(int64_t t);
  int32_t column_of_cut(int64_t t, const Cut& cut, int64_t own, int64_t higher);
  void find_cuts();
  int64_t ties_by_lists(int64_t rank, int64_t t, float value) const;

  FilteredScores& s_;
  ConstMatrixRef logits_;
  std::span<const int32_t> targets_;
  Stream& stream_;
  std::span<float> logprob_;
  int ranks_, mine_;
  std::vector<int64_t> columns_;   // [ranks] valid ones
  ListRecords records_;            // of all ranks
  Buffer<int32_t> ids_;            // [tokens, length] columns of the own list, if by mass
  std::vector<DigitRow> rows_;     // that lists are too short for
  std::vector<int64_t> cut_ties_;  // [tokens] which tie from the end the cut is at; 0: it is known
  double waited_ = 0;
};

// ---- lists ----

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
  const bool filtered = s_.by_count() || s_.by_mass(), summed = !s_.by_count();
  Buffer<float> values(tokens * length);
  Buffer<RowMoments> moments(summed ? tokens : 0);
  Buffer<int32_t> last(filtered ? tokens : 0);
  // Ties are told apart at the boundary of top-p only.
  ids_ = Buffer<int32_t>(s_.by_mass() ? tokens * length : 0);
  if (filtered) {
    s_.kernels_.top(logits_, scan, {values.span(), ids_.span(), last.span(), length},
                    moments.span());
  } else {
    s_.kernels_.moments(logits_, scan, moments.span());
    for (int64_t t = 0; t < tokens; ++t) values[t] = moments[t].max;
  }
  own.set_values(values.span());
  Buffer<float> target(tokens);
  std::fill_n(target.data(), tokens, -infinity);
  s_.kernels_.gather_picks(logits_, targets_, 1, s_.vocab_.begin(mine_), own_columns(),
                           target.span());
  for (int64_t t = 0; t < tokens; ++t)
    own.scalars(t) = {summed ? moments[t].sum : 0, filtered ? last[t] : 0, target[t], 0};
  if (s_.by_mass()) count_behind(own, values.span());
}

/// Sets `behind` of the tokens whose target is here; values [tokens, length].
void FilteredScores::Forward::count_behind(ListRecords& own, std::span<const float> values) {
  const auto length = static_cast<size_t>(s_.length_);
  std::vector<ColumnQuery> queries;  // of rows whose lists do not tell
  for (int64_t t = 0; t < s_.tokens_; ++t) {
    if (owner(t) != mine_) continue;
    ListScalars& scalars = own.scalars(t);
    bool more = false;
    scalars.behind =
        behind_in_list(t, values.subspan(static_cast<size_t>(t) * length, length), scalars, more);
    if (more) queries.push_back({t, target_column(t) + 1, own_columns(), scalars.target});
  }
  if (queries.empty()) return;
  std::vector<ColumnCounts> counts(queries.size());
  s_.kernels_.count_columns(logits_, queries, s_.options_.threads, counts);
  for (size_t i = 0; i < queries.size(); ++i)
    own.scalars(queries[i].row).behind = static_cast<int32_t>(counts[i].equal);
}

/// Columns of the own shard behind the target's that equal it, if all of them are in the list;
/// otherwise there are `more`. 0 if the target is below the list's last value: then the list
/// decides nothing about it.
int32_t FilteredScores::Forward::behind_in_list(int64_t t, std::span<const float> list,
                                                const ListScalars& scalars, bool& more) const {
  const auto column = target_column(t);
  if (scalars.target < list.back() || scalars.target == -infinity) return 0;
  int32_t in_list = 0, behind = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] != scalars.target) continue;
    ++in_list;
    behind += ids_[t * s_.length_ + static_cast<int64_t>(i)] > column ? 1 : 0;
  }
  more = scalars.target == list.back() && scalars.last != in_list;
  return behind;
}

void FilteredScores::Forward::walk() {
  std::vector<char> too_short(static_cast<size_t>(s_.tokens_));
  for_each_row(s_.options_.threads, s_.tokens_, ranks_, s_.length_, [&](int64_t t, auto scratch) {
    too_short[static_cast<size_t>(t)] = walk_row(t, scratch) ? 0 : 1;
  });
  for (int64_t t = 0; t < s_.tokens_; ++t) {
    if (too_short[static_cast<size_t>(t)] == 0) continue;
    std::vector<int64_t> heads(static_cast<size_t>(ranks_));
    const ListWalk lists(records_, t, columns_, heads);
    rows_.push_back(digit_row(t, lists.max(), total_mass(t, lists.max()), lists.bound()));
  }
}

/// Finishes the row; false if its lists are too short.
bool FilteredScores::Forward::walk_row(int64_t t, std::span<int64_t> scratch) {
  ListWalk lists(records_, t, columns_, scratch);
  Cut cut;
  cut.max = lists.max();
  const double total = s_.by_count() ? 1 : total_mass(t, cut.max);
  if (!std::isfinite(cut.max) || !std::isfinite(total)) {
    finish_nan(t);
    return true;
  }
  if (s_.by_count()) {
    cut = cut_by_count(lists, cut.max);
  } else if (s_.by_mass()) {
    const double limit = s_.options_.filter.top_p * total;
    ValueGroup group{};
    while (lists.next(group)) {
      const double x = (static_cast<double>(group.value) - static_cast<double>(cut.max)) * scale();
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
    const auto sum = static_cast<double>(records_.scalars(r, t).sum);
    if (sum == 0) continue;
    const double first = static_cast<double>(records_.value(r, t, 0));
    total += sum * std::exp((first - static_cast<double>(max)) * scale());
  }
  return total;
}

/// The top_k largest and the ties of the last, and of them the share top_p.
Cut FilteredScores::Forward::cut_by_count(ListWalk& walk, float max) const {
  const SamplingFilter& filter = s_.options_.filter;
  std::vector<std::pair<ValueGroup, double>> groups;
  int64_t count = 0;
  double total = 0;
  for (ValueGroup group{}; count < filter.top_k && walk.next(group);) {
    const double x = (static_cast<double>(group.value) - static_cast<double>(max)) * scale();
    groups.emplace_back(group, std::exp(x));
    count += group.count;
    total += static_cast<double>(group.count) * groups.back().second;
  }
  GYRE_CHECK(!walk.too_short(), "{} of {} largest", count, filter.top_k);
  Cut cut;
  cut.max = max;
  if (s_.by_mass()) {
    for (const auto& [group, weight] : groups)
      if (!add_group(group, weight, filter.top_p * total, cut)) break;
    return cut;
  }
  cut.mass = total;
  if (count < filter.top_k) {  // the k-th largest is -inf, and with it all columns survive
    cut.above = s_.vocab_.vocab_size;
    return cut;
  }
  cut.threshold = groups.back().first.value;
  cut.ties = cut.kept_ties = groups.back().first.count;
  cut.above = count - cut.ties;
  return cut;
}

/// How often a rank has the value, which is no smaller than the last of its list if that left
/// columns out.
int64_t FilteredScores::Forward::ties_by_lists(int64_t rank, int64_t t, float value) const {
  if (records_.value(rank, t, s_.length_ - 1) == value) return records_.scalars(rank, t).last;
  int64_t count = 0;
  for (int64_t i = 0; i < s_.length_ && records_.value(rank, t, i) >= value; ++i)
    count += records_.value(rank, t, i) == value ? 1 : 0;
  return count;
}

// ---- digits ----

/// The threshold is below `bound`, and not below a value where even if all columns were there they
/// would not have half of what is to be left out.
DigitRow FilteredScores::Forward::digit_row(int64_t t, float max, double total, float bound) const {
  const auto columns = static_cast<double>(s_.vocab_.vocab_size);
  const double left_out = (1 - s_.options_.filter.top_p) * total / 2;
  const double rounding = columns * std::exp2(-fraction_bits_for(s_.vocab_.vocab_size));
  uint32_t low = 0;
  if (left_out > rounding) {
    const double least = static_cast<double>(max) + std::log(left_out / columns) / scale();
    low = key_of(std::nextafter(static_cast<float>(std::max<double>(least, lowest)), -infinity),
                 s_.type_);
  }
  const uint32_t high = key_of(bound, s_.type_) - 1;
  low = std::min(low, high);
  const int digits =
      static_cast<int>(std::max<int64_t>(1, ceil_div(std::bit_width(high - low), digit_bits)));
  return {t, max, low, digits * digit_bits};
}

void FilteredScores::Forward::search() {
  std::vector<DigitRow*> active;
  for (DigitRow& row : rows_) active.push_back(&row);
  for (bool first = true; !active.empty(); first = false) {
    add_rounds(active, first);
    std::erase_if(active, [](const DigitRow* row) { return row->bits == 0; });
  }
  const Buffer<Counts> counts = gather_counts();
  std::vector<int64_t> ties(static_cast<size_t>(ranks_));
  for (size_t i = 0; i < rows_.size(); ++i) finish_by_digits(rows_[i], i, counts, ties);
}

/// One round for all rows that are left.
void FilteredScores::Forward::add_rounds(std::vector<DigitRow*>& active, bool first) {
  const auto count = static_cast<int64_t>(active.size());
  const int bits = fraction_bits_for(s_.vocab_.vocab_size);
  std::vector<MassRow> rows;
  for (const DigitRow* row : active)
    rows.push_back(
        {row->token, {row->max, s_.scale(), bits, row->low, row->bits - digit_bits, first}});
  Buffer<int64_t> masses(count * digit_sums);
  s_.kernels_.masses(logits_, own_columns(), rows, s_.options_.threads, masses.span());
  wait(s_.tp_.all_reduce(masses.data(), masses.size(), DType::i64, ReduceOp::sum, stream_,
                         "probabilities by digits"));
  for (int64_t i = 0; i < count; ++i)
    descend(masses.data() + i * digit_sums, first, s_.options_.filter.top_p,
            *active[static_cast<size_t>(i)]);
}

/// [ranks, rows]
Buffer<Counts> FilteredScores::Forward::gather_counts() {
  const int64_t count = std::ssize(rows_);
  Buffer<Counts> own(count), all(ranks_ * count);
  std::vector<ColumnQuery> queries;
  for (const DigitRow& row : rows_)
    queries.push_back({row.token, 0, own_columns(), value_of_key(row.low, s_.type_)});
  std::vector<int64_t> asked;  // rows whose target is at the threshold
  for (int64_t i = 0; i < count; ++i) {
    const ColumnQuery& whole = queries[static_cast<size_t>(i)];
    if (owner(whole.row) != mine_ || records_.scalars(mine_, whole.row).target != whole.value)
      continue;
    asked.push_back(i);
    queries.push_back({whole.row, target_column(whole.row) + 1, own_columns(), whole.value});
  }
  std::vector<ColumnCounts> found(queries.size());
  s_.kernels_.count_columns(logits_, queries, s_.options_.threads, found);
  for (int64_t i = 0; i < count; ++i) {
    const ColumnCounts& mine = found[static_cast<size_t>(i)];
    own[i] = {static_cast<int32_t>(mine.above), static_cast<int32_t>(mine.equal), 0};
  }
  for (size_t i = 0; i < asked.size(); ++i)
    own[asked[i]].behind = static_cast<int32_t>(found[rows_.size() + i].equal);
  wait(s_.tp_.all_gather(bytes_of(std::as_const(own).span()), writable_bytes_of(all.span()),
                         stream_, "counts of columns"));
  return all;
}

/// `i`: place of the row in `counts`.
void FilteredScores::Forward::finish_by_digits(const DigitRow& row, size_t i,
                                               const Buffer<Counts>& counts,
                                               std::span<int64_t> ties) {
  const auto at = [&](int64_t rank) -> const Counts& {
    return counts[rank * std::ssize(rows_) + static_cast<int64_t>(i)];
  };
  Cut cut;
  cut.max = row.max;
  ValueGroup group{value_of_key(row.low, s_.type_), 0};
  for (int64_t r = 0; r < ranks_; ++r) {
    cut.above += at(r).above;
    ties[static_cast<size_t>(r)] = at(r).equal;
    group.count += at(r).equal;
  }
  GYRE_CHECK(group.count > 0 && row.equal % group.count == 0,
             "token {}: a mass of {} for {} columns of equal value", row.token, row.equal,
             group.count);
  cut.mass = static_cast<double>(row.above);
  add_group(group, static_cast<double>(row.equal / group.count),
            s_.options_.filter.top_p * static_cast<double>(row.total), cut);
  cut.mass = std::ldexp(cut.mass, -fraction_bits_for(s_.vocab_.vocab_size));
  const int rank = owner(row.token);
  finish(
      row.token, cut, [&](int64_t r) { return ties[static_cast<size_t>(r)]; },
      rank < 0 ? 0 : at(rank).behind);
}

// ---- results ----

void FilteredScores::Forward::finish_nan(int64_t t) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  s_.normalizers_[t] = {nan, nan};
  s_.survivors_[t] = {lowest, 0};
  s_.kept_[t] = 0;
  logprob_[static_cast<size_t>(t)] = nan;
}

/// ties_of(rank): columns of the rank that equal the threshold; asked for only if some of them do
/// not survive. `behind`: columns behind the target's, on its rank, that equal it.
template <class Ties>
void FilteredScores::Forward::finish(int64_t t, const Cut& cut, Ties ties_of, int64_t behind) {
  const double log_sum = std::log(cut.mass);
  s_.normalizers_[t] = {cut.max, static_cast<float>(log_sum)};
  s_.kept_[t] = static_cast<int32_t>(cut.above + cut.kept_ties);
  s_.survivors_[t] = {cut.threshold, 0};
  const int rank = owner(t);
  const float target = rank < 0 ? -infinity : records_.scalars(rank, t).target;
  bool survives = target >= cut.threshold;
  if (cut.kept_ties < cut.ties) {
    int64_t higher = 0;  // ties on higher ranks
    for (int64_t r = ranks_ - 1; r >= 0; --r) {
      const int64_t ties = ties_of(r);
      if (r == rank && target == cut.threshold) survives = higher + behind < cut.kept_ties;
      if (r == mine_) s_.survivors_[t].cut = column_of_cut(t, cut, ties, higher);
      higher += ties;
    }
  }
  const double x = (static_cast<double>(target) - static_cast<double>(cut.max)) * scale();
  logprob_[static_cast<size_t>(t)] = survives ? static_cast<float>(x - log_sum) : -infinity;
}

/// The first column of the own shard from which ties survive. `own`: ties in it; `higher`: ties on
/// higher ranks. Where the list does not tell, that is noted for find_cuts.
int32_t FilteredScores::Forward::column_of_cut(int64_t t, const Cut& cut, int64_t own,
                                               int64_t higher) {
  const int64_t kept = std::clamp<int64_t>(cut.kept_ties - higher, 0, own);
  if (kept == own) return 0;
  if (kept == 0) return static_cast<int32_t>(own_columns());
  // All of them are in the list, by ascending id, if they are as many there.
  int64_t in_list = 0, end = 0;
  for (int64_t i = 0; i < s_.length_; ++i)
    if (records_.value(mine_, t, i) == cut.threshold) ++in_list, end = i + 1;
  if (in_list == own) return ids_[t * s_.length_ + end - kept];
  cut_ties_[static_cast<size_t>(t)] = kept;
  return 0;
}

void FilteredScores::Forward::find_cuts() {
  std::vector<TieQuery> queries;
  for (int64_t t = 0; t < s_.tokens_; ++t)
    if (const int64_t n = cut_ties_[static_cast<size_t>(t)]; n > 0)
      queries.push_back({t, s_.survivors_[t].threshold, n});
  if (queries.empty()) return;
  std::vector<int64_t> found(queries.size());
  s_.kernels_.find_ties(logits_, own_columns(), queries, s_.options_.threads, found);
  for (size_t i = 0; i < queries.size(); ++i)
    s_.survivors_[queries[i].row].cut = static_cast<int32_t>(found[i]);
}

double FilteredScores::forward(ConstMatrixRef logits, std::span<const int32_t> targets,
                               Stream& stream, std::span<float> logprob) {
  GYRE_CHECK(
      logits.type == type_ && logits.rows == tokens_ && logits.cols == vocab_.columns(tp_.rank()),
      "a shard of {} x {} logits of {}, not {} x {} of {}", logits.rows, logits.cols,
      name_of(logits.type), tokens_, vocab_.columns(tp_.rank()), name_of(type_));
  GYRE_CHECK(std::ssize(targets) == tokens_ && std::ssize(logprob) == tokens_,
             "{} targets and {} log-probabilities of {} tokens", targets.size(), logprob.size(),
             tokens_);
  return Forward(*this, logits, targets, stream, logprob).run();
}

void FilteredScores::backward(ConstMatrixRef logits, std::span<const int32_t> targets,
                              std::span<const float> d_logprob, MatrixRef d_logits) const {
  GYRE_CHECK(std::ssize(targets) == tokens_ && std::ssize(d_logprob) == tokens_,
             "{} targets and {} gradients of {} tokens", targets.size(), d_logprob.size(), tokens_);
  const int rank = tp_.rank();
  Buffer<float> a(tokens_), weights(tokens_);
  for (int64_t t = 0; t < tokens_; ++t) {
    weights[t] = scale() * d_logprob[static_cast<size_t>(t)];
    a[t] = -weights[t];
  }
  kernels_.filtered_gradient(logits, {vocab_.valid(rank), scale(), options_.threads},
                             normalizers_.span(), survivors_.span(), std::as_const(a).span(),
                             {targets, std::as_const(weights).span(), 1, vocab_.begin(rank)},
                             d_logits);
}

}  // namespace gyre

// packed, packed-prerolled, packed-filtered: next tokens of packed sequences, end to end.
//
// Index arithmetic on the layout finds the targets. Each rank computes (filtered) log-probabilities
// of its slots, and all sequences are gathered to [sequences, longest - 1]. Padding slots hold NaN,
// which reaches no result. References: score_row_reference and score_gradient_reference, or
// filtered_logprob_reference and filtered_gradient_reference.
//
// --gather-gradient sets backward. With `split`, every rank has the gradient of the whole loss and
// takes its own part. With `sum`, the ranks' losses add up to the loss, and every prediction is in
// two of them. With `none`, the gathered log-probabilities are constants.
//
// A call compares arguments in two all-gathers of 8 and 40 bytes. Forward adds an all-gather over
// tensor-parallel ranks of 12 bytes per slot (filtered: 16, the lists of the largest logits, and
// more if these are too short) and one of 4 bytes per slot over context-parallel ranks. Backward
// adds a reduce-scatter of 4 bytes per slot of every rank, with `sum` only.

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "apps/logprobs/operation.hpp"
#include "apps/logprobs/ops/filtered_row.hpp"
#include "core/index.hpp"
#include "core/special_values.hpp"
#include "logprobs/filtered_scores.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/sequence_scores.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

/// Assigns sequences to slots under --layout.
struct PackedSequences {
  std::vector<int32_t> real{0}, padded{0};
  std::vector<int64_t> token_of_slot;  // negative for padding
  Layout layout;

  PackedSequences(const LogprobsWorkload& problem, const LogprobsOptions& o) {
    const LayoutKind& kind = find_layout(o.layout.name);
    const int64_t multiple = kind.segment_multiple(o.cp);
    for (int64_t i = 0; i < problem.sequences(); ++i) {
      const int64_t length = problem.length(i), first = problem.offsets[i];
      real.push_back(static_cast<int32_t>(first + length));
      padded.push_back(padded.back() + static_cast<int32_t>(round_up(length, multiple)));
      for (int64_t p = 0; p < round_up(length, multiple); ++p)
        token_of_slot.push_back(p < length ? first + p : -1);
    }
    layout = kind.make({real, padded}, o.layout_options());
  }
  std::vector<int64_t> tokens_of_rank(int rank) const {
    std::vector<int64_t> tokens;
    for (const int32_t slot : shard_index(layout, rank))
      tokens.push_back(slot < std::ssize(token_of_slot) ? token_of_slot[slot] : -1);
    return tokens;
  }
};

/// Variant of the packed operation.
struct Packing {
  bool prerolled = false;  ///< targets as NeMo RL precomputes them (rolled_targets)
  bool filtered = false;
};

const char* values_name(const Packing& packing) {
  return packing.filtered ? "next_token_filtered_logprob" : "next_token_logprob";
}
const char* gradient_name(const Packing& packing) {
  return packing.filtered ? "d_next_token_filtered_logprob" : "d_next_token_logprob";
}

class PackedOp final : public RowsOp {
 public:
  PackedOp(LogprobsContext& context, const Packing& packing)
      : PackedOp(context, packing, PackedSequences(context.problem, context.options)) {}
  PackedOp(LogprobsContext& context, const Packing& packing, PackedSequences packed)
      : RowsOp(context, context.by_layout(packed.tokens_of_rank(context.grid.cp_rank()))),
        packing_(packing),
        packed_(std::move(packed)),
        width_(std::max<int64_t>(0, context.problem.longest() - 1)),
        convention_(context.options.gather_convention()),
        targets_(packing.prerolled ? rolled() : shifted()),
        logprob_(rows_.rows()),
        d_predictions_(context.problem.sequences() * width_, 0.0F) {
    for_each_prediction([&](int64_t token, size_t at) {
      d_predictions_[at] = share(at) * context.inputs.gradient(token, 0);
    });
  }

  void start() override {
    if (packing_.filtered)
      start_filtered();
    else
      start_scores();
  }
  void poison() override {
    std::ranges::fill(predictions_, nan_of<float>);
    RowsOp::poison();
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    // Both passes compare arguments over ranks: first their validity, then five numbers.
    const Communicator& cp = c_.grid.cp();
    SentTraffic sent = all_gather_of(cp, 8) + all_gather_of(cp, 5 * 8);
    if (pass == Pass::forward && by_digits_ > 0) return std::nullopt;
    if (pass == Pass::forward) {
      const int64_t bytes = rows_.rows() * (packing_.filtered ? 16 + list_bytes_ : 12);
      sent += all_gather_of(tp(), round_up(bytes, 4)) + all_gather_of(cp, 4 * rows_.rows());
    } else if (convention_ == GatherGradient::sum) {
      sent += reduce_scatter_of(cp, 4 * rows_.rows() * cp.size());
    }
    return sent;
  }
  void verify(Pass pass, Verification& checks) override {
    RowsOp::verify(pass, checks);
    if (pass == Pass::backward) return check_padding(checks);
    if (packing_.filtered) {
      Check& survivors =
          check_of(label(pass), "survivors", logprob_tolerance(), c_.problem.tokens(), checks);
      if (c_.grid.tp_rank() == 0)
        compare_survivors(
            sample_of(rows_.tokens(), sample_rows()), rows_.tokens(), survivors_(), logprob_.span(),
            takes_any_of_ties(), [this](size_t r) { return filtered_row(token(r), targets_[r]); },
            survivors);
    }
    check_same_bits(predictions_, c_.grid.world(), checks);
  }

 private:
  bool has_gradient(int64_t r) const override { return gradient(token(r)) != 0; }
  std::vector<std::span<float>> outputs() override { return {logprob_.span()}; }
  void start_scores() {
    auto scores = std::make_shared<VocabScores>(rows_.rows(), vocab(),
                                                score_options(rows_.tokens(), 1), tp());
    forward_ = [this, scores] {
      scores->forward(rows_.logits(), targets_, stream(), logprob_.span(), {});
      gather();
    };
    backward_ = [this, scores] {
      scores->backward(rows_.logits(), targets_, {own_gradients()}, rows_.d_logits());
    };
  }
  void start_filtered() {
    const RowFilters filters(c_, rows_.tokens());
    list_bytes_ = filters.list_bytes();
    auto scores = std::make_shared<FilteredScores>(rows_.rows(), vocab(), c_.problem.type,
                                                   filters.options(kernels()), tp());
    forward_ = [this, scores] {
      scores->forward(rows_.logits(), targets_, stream(), logprob_.span());
      by_digits_ = scores->rows_by_digits();
      gather();
    };
    backward_ = [this, scores] {
      scores->backward(rows_.logits(), targets_, own_gradients(), rows_.d_logits());
    };
    survivors_ = [scores] { return scores->survivors(); };
  }
  void gather() {
    predictions_ = gather_predictions(packed_.layout, shape(), logprob_.span(), c_.grid.cp());
  }
  std::vector<float> own_gradients() const {
    return gather_predictions_backward(packed_.layout, shape(), d_predictions_, c_.grid.cp(),
                                       convention_);
  }
  PredictionShape shape() const { return {packed_.padded, width_, 1}; }
  /// Upstream gradient, over all ranks, of the log-probability of the token that follows `token`.
  float gradient(int64_t token) const {
    const bool constant = convention_ == GatherGradient::none || !has_next(token);
    return constant ? 0 : c_.inputs.gradient(token, 0);
  }
  /// Share of a prediction's gradient on this rank. With `sum`, two ranks have half each, so that
  /// the sum is exact and neither rank has all of it.
  float share(size_t place) const {
    const size_t ranks = c_.grid.cp().size();
    if (convention_ != GatherGradient::sum || ranks == 1) return 1;
    const size_t rank = c_.grid.cp_rank();
    return place % ranks == rank || (place + 1) % ranks == rank ? 0.5F : 0;
  }
  /// Whether a token of the same sequence follows.
  bool has_next(int64_t token) const {
    return token >= 0 && !std::ranges::binary_search(c_.problem.offsets, token + 1);
  }
  /// Calls body(token, place) for every token that has a next one.
  template <class Body>
  void for_each_prediction(Body body) const {
    for (int64_t i = 0; i < c_.problem.sequences(); ++i)
      for (int64_t p = 0; p + 1 < c_.problem.length(i); ++p)
        body(c_.problem.offsets[i] + p, static_cast<size_t>(i * width_ + p));
  }
  std::vector<int32_t> shifted() const {
    std::vector<int32_t> tokens;
    for (const int64_t token : packed_.token_of_slot)
      tokens.push_back(token < 0 ? 0 : c_.inputs.target(token));
    return next_token_targets(packed_.layout, packed_.padded, tokens, c_.grid.cp_rank());
  }
  std::vector<int32_t> rolled() const {
    const int64_t longest = c_.problem.longest();
    std::vector<int32_t> rows(c_.problem.sequences() * longest, 0);
    for (int64_t i = 0; i < c_.problem.sequences(); ++i)
      for (int64_t p = 0; p < c_.problem.length(i); ++p)
        rows[i * longest + p] = c_.inputs.target(c_.problem.offsets[i] + p);
    return rolled_targets(packed_.layout, {packed_.real, packed_.padded}, rows, longest,
                          c_.grid.cp_rank());
  }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::forward) return {predictions()};
    const bool constant = convention_ == GatherGradient::none;  // then the file gets no gradient
    ResultArray array = row_gradient(constant ? "" : gradient_name(packing_),
                                     [this](size_t r) { return expected_gradient(r); });
    if (packing_.filtered && takes_any_of_ties())
      array.is_as_right = [this](size_t r, int64_t column, double got, double want) {
        return (got == 0) != (want == 0) &&
               filtered_row(token(r)).is_other_gradient(c_.problem.type, column, got, want);
      };
    return {array};
  }
  /// Whether place p of sequence i belongs to a padding slot after its tokens, not a prediction.
  bool is_padding(size_t i, size_t p) const {
    const size_t length = c_.problem.length(i);
    const size_t slots = packed_.padded[i + 1] - packed_.padded[i];
    return p + 1 >= length && p + 1 < slots;
  }
  /// Predictions of all sequences, which all ranks hold. Without answers, only a sample is checked.
  ResultArray predictions() const {
    ResultArray array{values_name(packing_), {c_.problem.sequences(), width_}, "log-probabilities"};
    array.tolerance = logprob_tolerance();
    array.columns = width_;
    array.shown = c_.grid.world().rank() == 0;
    array.rows.resize(array.shown ? static_cast<size_t>(c_.problem.sequences()) : 0);
    std::iota(array.rows.begin(), array.rows.end(), 0);
    array.read = read_rows(width_, [this](size_t i, std::span<double> to) {
      for (size_t p = 0; p < to.size(); ++p)
        to[p] = is_padding(i, p) ? 0 : predictions_.at(i * to.size() + p);
    });
    const bool answered = c_.inputs.answers(array.name) != nullptr;
    const auto some =
        std::make_shared<std::vector<bool>>(static_cast<size_t>(c_.problem.tokens()), answered);
    std::vector<int64_t> predicting;
    for_each_prediction([&](int64_t token, size_t) { predicting.push_back(token); });
    const std::vector<size_t> sampled = sample_of(predicting, sample_rows());
    for (const size_t i : sampled) (*some)[predicting[i]] = true;
    array.sampled = answered ? std::pair<int64_t, int64_t>()
                             : std::pair<int64_t, int64_t>(sampled.size(), predicting.size());
    array.expect = expect_rows([this, some](size_t i) { return expected_sequence(i, *some); });
    if (packing_.filtered && takes_any_of_ties())
      array.is_as_right = [this](size_t i, int64_t p, double got, double want) {
        return p + 1 < c_.problem.length(i) &&
               filtered_row(c_.problem.offsets[i] + p).is_other_survivor(got, want);
      };
    return array;
  }
  /// Expected values of the tokens marked in `some`, and zeros after the end of the sequence.
  ExpectedRow expected_sequence(size_t i, const std::vector<bool>& some) const {
    const size_t width = width_;
    ExpectedRow want{std::vector<double>(width, 0), std::vector<double>(width, 1)};
    want.stored = want.stored_scales = std::vector<double>(width, nan_of<double>);
    const size_t length = c_.problem.length(i);
    for (size_t p = 0; p + 1 < length; ++p) {
      const int64_t token = c_.problem.offsets[i] + static_cast<int64_t>(p);
      want.scales[p] = -1;
      if (!some[token]) continue;
      const ExpectedRow one = expected_score(token, i * width + p);
      want.values[p] = one.values[0];
      want.scales[p] = one.scales[0];
      if (one.stored.empty()) continue;
      want.stored[p] = one.stored[0];
      want.stored_scales[p] = one.stored_scales[0];
    }
    return want;
  }
  FilteredRow filtered_row(int64_t token, int32_t next) const {
    return {whole_row(token), filter(token), next, gradient(token)};
  }
  FilteredRow filtered_row(int64_t token) const {
    return filtered_row(token, has_next(token) ? c_.inputs.target(token + 1) : 0);
  }
  FilteredAnswers filtered_answers(int64_t token) const {
    FilteredAnswers answers{std::nullopt, answer_row(gradient_name(packing_), token)};
    if (has_next(token)) answers.logprob = answer(values_name(packing_), place_of(token));
    return answers;
  }
  /// Index of the prediction by a token's row in the gathered array.
  int64_t place_of(int64_t token) const {
    const std::vector<int64_t>& offsets = c_.problem.offsets;
    const auto i = std::ranges::upper_bound(offsets, token) - offsets.begin() - 1;
    return i * width_ + token - offsets[i];
  }
  ExpectedRow expected_score(int64_t token, size_t place) const {
    if (packing_.filtered)
      return filtered_row(token).score(predictions_.at(place), filtered_answers(token));
    const int32_t next = c_.inputs.target(token + 1);
    return scored({score_row_reference(whole_row(token), next, temperature(token)).logprob});
  }
  ExpectedRow expected_gradient(size_t r) const {
    const int64_t token = rows_.tokens()[r];
    if (packing_.filtered)
      return filtered_row(token).gradient(survivors_()[r], filtered_answers(token));
    const int32_t id = has_next(token) ? c_.inputs.target(token + 1) : 0;
    return score_gradient(token, std::span(&id, 1), {gradient(token)});
  }
  /// Checks that the gradient of padding slots is 0.
  void check_padding(Verification& checks) {
    Check& check =
        check_of(label(Pass::backward), "d_logits of padding", 0, c_.problem.tokens(), checks);
    for (int64_t r = 0; r < rows_.rows(); ++r) {
      if (rows_.tokens()[r] >= 0) continue;
      const ConstMatrixRef row = host_row(rows_.d_logits(), r);
      for (int64_t c = 0; c < row.cols; ++c)
        check.add(row.at(0, c), 0,
                  [&] { return fmt::format("slot {} column {}", r, first_column() + c); });
    }
    if (c_.grid.world().rank() == 0) check.add_nothing();  // there may be no padding
  }

  Packing packing_;
  PackedSequences packed_;
  int64_t width_;
  GatherGradient convention_;
  std::vector<int32_t> targets_;
  Buffer<float> logprob_;
  std::vector<float> predictions_, d_predictions_;  // [sequences, width]
  int64_t by_digits_ = 0, list_bytes_ = 0;
  std::function<std::span<const int32_t>()> survivors_;  // filtered: counts by the last forward
};

std::string packable(const LogprobsWorkload& problem, const LogprobsOptions& o) {
  const int64_t multiple = find_layout(o.layout.name).segment_multiple(o.cp);
  int64_t slots = 0;
  for (int64_t i = 0; i < problem.sequences(); ++i) slots += round_up(problem.length(i), multiple);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (slots <= most) return "";
  return fmt::format("{} slots; the most are {}", slots, most);
}

LogprobsOperation packed_family(const char* name, const char* summary, const Packing& packing) {
  return {.name = name,
          .summary = summary,
          .definition = packing.filtered ? "filtered_logprob_reference, filtered_gradient_reference"
                                         : "score_row_reference, score_gradient_reference",
          .methods = {{"gyre", makes<PackedOp>(packing), 0, packable}},
          .backward = RowTraffic::updates,
          .own_options = {gather_gradient_option},
          .arrays = {{values_name(packing), "SP"},
                     {gradient_name(packing), "TV", false, gradient_inputs()}}};
}

}  // namespace

LogprobsOperation packed_operation() {
  return packed_family("packed", "next tokens of packed sequences under --layout", {});
}

LogprobsOperation packed_prerolled_operation() {
  return packed_family("packed-prerolled",
                       "next tokens of packed sequences, from targets rolled ahead of time",
                       {.prerolled = true});
}

LogprobsOperation packed_filtered_operation() {
  return packed_family("packed-filtered",
                       "next tokens of packed sequences under temperature, top-k, min-p and top-p",
                       {.filtered = true});
}

}  // namespace gyre

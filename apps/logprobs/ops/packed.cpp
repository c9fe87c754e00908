// packed, packed-prerolled: next tokens of packed sequences, end to end.
//
// Targets by index arithmetic of the layout; log-probabilities of the local slots; all sequences
// gathered to [sequences, longest - 1]. Slots of padding hold NaN, which nothing may read. Defined
// by score_row_reference and score_gradient_reference.
//
// Backward, by --gather-gradient: `split`, every rank has the gradient of the whole loss, and takes
// its own part; `sum`, the ranks' losses are parts of one sum, and every prediction is in two of
// them; `none`, the gathered log-probabilities are constants.
//
// A call is two all-gathers that compare arguments, of 8 and 40 bytes. Forward adds one of 12 bytes
// a slot over tensor-parallel and one of 4 over context-parallel ranks; backward adds, with `sum`
// alone, a reduce-scatter of 4 bytes a slot of every rank.

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "apps/logprobs/operation.hpp"
#include "core/index.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/sequence_scores.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

/// Sequences in slots, under the layout of the options.
struct PackedSequences {
  std::vector<int32_t> real{0}, padded{0};
  std::vector<int64_t> token_of_slot;  // negative: padding
  Layout layout;

  PackedSequences(const LogprobsWorkload& problem, const LogprobsOptions& o) {
    const LayoutKind& kind = find_layout(o.layout.name);
    const int64_t multiple = kind.segment_multiple(o.cp);
    for (int64_t i = 0; i < problem.sequences(); ++i) {
      const int64_t length = problem.length(i), first = problem.offsets[static_cast<size_t>(i)];
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
      tokens.push_back(slot < std::ssize(token_of_slot) ? token_of_slot[static_cast<size_t>(slot)]
                                                        : -1);
    return tokens;
  }
};

class PackedOp final : public LogprobsOp {
 public:
  PackedOp(LogprobsContext& context, bool prerolled)
      : LogprobsOp(context, false),
        packed_(context.problem, context.options),
        rows_(context.by_layout(packed_.tokens_of_rank(context.grid.cp_rank()))),
        width_(std::max<int64_t>(0, context.problem.longest() - 1)),
        convention_(context.options.gather_convention()),
        targets_(prerolled ? rolled() : shifted()),
        logprob_(rows_.rows()),
        d_predictions_(static_cast<size_t>(context.problem.sequences() * width_), 0.0F) {
    for_each_prediction([&](int64_t token, size_t at) {
      d_predictions_[at] = share(at) * context.inputs.gradient(token, 0);
    });
  }

  void start() override {
    const ScoreOptions options{1, false, temperature(), c_.options.threads, kernels()};
    auto scores = std::make_shared<VocabScores>(rows_.rows(), vocab(), options, tp());
    forward_ = [this, scores] {
      scores->forward(rows_.logits(), targets_, stream(), logprob_.span(), {});
      predictions_ = gather_predictions(packed_.layout, shape(), logprob_.span(), c_.grid.cp());
    };
    backward_ = [this, scores] {
      const std::vector<float> g = gather_predictions_backward(
          packed_.layout, shape(), d_predictions_, c_.grid.cp(), convention_);
      scores->backward(rows_.logits(), targets_, g, {}, rows_.d_logits());
    };
  }
  void prepare_backward() override { rows_.prepare_gradient(); }
  void restore() override { rows_.restore(); }
  void poison() override {
    std::ranges::fill(logprob_.span(), nan_of<float>);
    std::ranges::fill(predictions_, nan_of<float>);
    rows_.poison();
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    // Both directions compare their arguments: whether all are right, then five numbers.
    const Communicator& cp = c_.grid.cp();
    std::vector<SentTraffic> parts{all_gather_of(cp, 8), all_gather_of(cp, 5 * 8)};
    if (pass == Pass::forward) {
      parts.push_back(all_gather_of(tp(), 12 * rows_.rows()));
      parts.push_back(all_gather_of(cp, 4 * rows_.rows()));
    } else if (convention_ == GatherGradient::sum) {
      parts.push_back(reduce_scatter_of(cp, 4 * rows_.rows() * cp.size()));
    }
    SentTraffic sent;
    for (const SentTraffic& part : parts) {
      sent.messages += part.messages;
      sent.bytes += part.bytes;
    }
    return sent;
  }
  double ideal_bytes(Pass pass) const override {
    const double once = shard_bytes(rows_.rows());
    if (pass == Pass::forward) return once;
    const auto active =
        std::ranges::count_if(rows_.tokens(), [&](int64_t token) { return gradient(token) != 0; });
    return once + shard_bytes(active);
  }

  void verify(Pass pass, const std::string& label, Verification& checks) override {
    if (pass == Pass::backward) return verify_gradients(label, checks);
    Check& check = check_of(label, "log-probabilities", logprob_tolerance(), checks);
    std::vector<int64_t> tokens;
    std::vector<size_t> places;
    for_each_prediction([&](int64_t token, size_t at) {
      tokens.push_back(token);
      places.push_back(at);
    });
    if (tokens.empty()) check.add_nothing();
    std::vector<float> results;
    for (const size_t at : places) results.push_back(predictions_.at(at));
    for (const int64_t i : sample(tokens)) {
      const int64_t token = tokens[static_cast<size_t>(i)];
      const size_t at = places[static_cast<size_t>(i)];
      const int32_t next = c_.inputs.target(token + 1);
      const double want = reference() == nullptr
                              ? score_row_reference(whole_row(token), next, temperature()).logprob
                              : reference()->next_token_logprob[at];
      check.add(
          static_cast<double>(predictions_[at]), want,
          [&] { return fmt::format("token {} next {}", token, next); }, logprob_scale(want));
    }
    check_beyond(check);
    check_same_bits(label, results, c_.grid.world(), checks);
  }

 private:
  double temperature() const { return c_.problem.filter.temperature; }
  PredictionShape shape() const { return {packed_.padded, width_, 1}; }
  /// Of the log-probability of the token's next one, over all ranks.
  float gradient(int64_t token) const {
    const bool constant = convention_ == GatherGradient::none || !has_next(token);
    return constant ? 0 : c_.inputs.gradient(token, 0);
  }
  /// How much of a prediction's gradient is this rank's: of `sum`, half on each of two ranks, so
  /// that the sum is exact and neither rank has all of it.
  float share(size_t place) const {
    const auto ranks = static_cast<size_t>(c_.grid.cp().size());
    if (convention_ != GatherGradient::sum || ranks == 1) return 1;
    const auto rank = static_cast<size_t>(c_.grid.cp_rank());
    return place % ranks == rank || (place + 1) % ranks == rank ? 0.5F : 0;
  }
  /// Whether a token of the same sequence follows.
  bool has_next(int64_t token) const {
    return token >= 0 && !std::ranges::binary_search(c_.problem.offsets, token + 1);
  }
  /// body(token, place) for every token that another one follows.
  template <class Body>
  void for_each_prediction(Body body) const {
    for (int64_t i = 0; i < c_.problem.sequences(); ++i)
      for (int64_t p = 0; p + 1 < c_.problem.length(i); ++p)
        body(c_.problem.offsets[static_cast<size_t>(i)] + p, static_cast<size_t>(i * width_ + p));
  }
  std::vector<int32_t> shifted() const {
    std::vector<int32_t> tokens;
    for (const int64_t token : packed_.token_of_slot)
      tokens.push_back(token < 0 ? 0 : c_.inputs.target(token));
    return next_token_targets(packed_.layout, packed_.padded, tokens, c_.grid.cp_rank());
  }
  std::vector<int32_t> rolled() const {
    const int64_t longest = c_.problem.longest();
    std::vector<int32_t> rows(static_cast<size_t>(c_.problem.sequences() * longest), 0);
    for (int64_t i = 0; i < c_.problem.sequences(); ++i)
      for (int64_t p = 0; p < c_.problem.length(i); ++p)
        rows[static_cast<size_t>(i * longest + p)] =
            c_.inputs.target(c_.problem.offsets[static_cast<size_t>(i)] + p);
    return rolled_targets(packed_.layout, {packed_.real, packed_.padded}, rows, longest,
                          c_.grid.cp_rank());
  }
  /// Behind a sequence's slots there are zeros.
  void check_beyond(Check& check) const {
    for (int64_t i = 0; i < c_.problem.sequences(); ++i) {
      const auto s = static_cast<size_t>(i);
      const int64_t slots = packed_.padded[s + 1] - packed_.padded[s];
      for (int64_t p = std::max<int64_t>(0, slots - 1); p < width_; ++p)
        check.add(static_cast<double>(predictions_[static_cast<size_t>(i * width_ + p)]), 0,
                  [&] { return fmt::format("sequence {} place {}, behind it", i, p); });
    }
  }
  void verify_gradients(const std::string& label, Verification& checks) {
    Check& check = check_of(label, "d_logits", logit_gradient_tolerance(c_.problem.type), checks);
    for (const int64_t r : sample(rows_.tokens())) {
      const int64_t token = rows_.tokens()[static_cast<size_t>(r)];
      const std::vector<double> row = whole_row(token);
      const auto g = static_cast<double>(gradient(token));
      const int32_t id = has_next(token) ? c_.inputs.target(token + 1) : 0;
      const double weight = g / temperature();
      RowGradientTerms terms{log_softmax_reference(row, temperature()), -weight, 0};
      terms.ids = std::span(&id, 1);
      terms.weights = std::span(&weight, 1);
      add_gradient_row(
          check, host_row(rows_.d_logits(), r), 0, first_column(),
          score_gradient_reference(row, std::span(&id, 1), std::span(&g, 1), 0, temperature()),
          terms.scales(), token);
    }
    const std::vector<double> nothing(static_cast<size_t>(vocab().vocab_size), 0),
        scales(nothing.size(), 1);
    for (int64_t r = 0; r < rows_.rows(); ++r)
      if (rows_.tokens()[static_cast<size_t>(r)] < 0)
        add_gradient_row(check, host_row(rows_.d_logits(), r), 0, first_column(), nothing, scales,
                         -1);
    if (rows_.rows() * columns() == 0) check.add_nothing();
  }

  PackedSequences packed_;
  LogprobsRows& rows_;
  int64_t width_;
  GatherGradient convention_;
  std::vector<int32_t> targets_;
  Buffer<float> logprob_;
  std::vector<float> predictions_, d_predictions_;  // [sequences, width]
};

std::string packable(const LogprobsWorkload& problem, const LogprobsOptions& o, bool) {
  const int64_t multiple = find_layout(o.layout.name).segment_multiple(o.cp);
  int64_t slots = 0;
  for (int64_t i = 0; i < problem.sequences(); ++i) slots += round_up(problem.length(i), multiple);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (slots <= most) return "";
  return fmt::format("{} slots; the most are {}", slots, most);
}

LogprobsOperation packed_family(const char* name, const char* summary, bool prerolled) {
  return {.name = name,
          .summary = summary,
          .definition = "score_row_reference, score_gradient_reference",
          .backward = RowTraffic::updates,
          .own_options = {gather_gradient_option},
          .make = [prerolled](LogprobsContext& context,
                              bool) { return std::make_unique<PackedOp>(context, prerolled); },
          .why_not = packable};
}

}  // namespace

LogprobsOperation packed_operation() {
  return packed_family("packed", "next tokens of packed sequences under --layout", false);
}

LogprobsOperation packed_prerolled_operation() {
  return packed_family("packed-prerolled", "the same from targets that were rolled ahead of time",
                       true);
}

}  // namespace gyre

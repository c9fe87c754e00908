// logprob, entropy, logprob-entropy, gather: scores of given ids, from one pass over the rows.
//
// References: score_row_reference, log_softmax_reference and score_gradient_reference. Forward does
// one all-gather of 4 (2 + K) bytes per row with K ids, and 4 more with entropies. Backward sends
// nothing. NeMo RL does all-reduces of 4 bytes per row or value; see UpstreamScoreOp::expected.

#include <fmt/format.h>

#include <algorithm>

#include "apps/logprobs/operation.hpp"
#include "baselines/upstream.hpp"
#include "core/special_values.hpp"
#include "logprobs/reference.hpp"
#include "logprobs/vocab_parallel.hpp"

namespace gyre {
namespace {

/// The scores that an operation of this family computes for each row.
struct Scores {
  enum class Ids { none, target, picks } ids = Ids::none;
  bool entropy = false;
};

const char* gradient_name(const Scores& scores) {
  if (scores.ids == Scores::Ids::picks) return "d_gathered";
  if (scores.ids == Scores::Ids::none) return "d_entropy";
  return scores.entropy ? "d_logprob_entropy" : "d_logprob";
}

class ScoreOp : public RowsOp {
 public:
  ScoreOp(LogprobsContext& context, const Scores& scores)
      : RowsOp(context),
        gathers_(scores.ids == Scores::Ids::picks),
        gradient_(gradient_name(scores)),
        picks_(picks_of(scores, context.problem)),
        entropy_(scores.entropy),
        ids_(gathers_      ? rows_.ids()
             : picks_ == 1 ? rows_.targets()
                           : std::span<const int32_t>()),
        logprob_(rows_.rows() * picks_, results_space(*kernels())),
        entropies_(entropy_ ? rows_.rows() : 0, results_space(*kernels())),
        d_logprob_(rows_.gradients(gathers_ ? 2 : 0, picks_)),
        d_entropy_(rows_.gradients(1, entropy_ ? 1 : 0)) {}

  void start() override {
    auto scores = std::make_shared<VocabScores>(
        rows_.rows(), vocab(), score_options(rows_.tokens(), picks_, entropy_), tp());
    forward_ = [this, scores] {
      scores->forward(rows_.logits(), ids_, stream(), logprob_.span(), entropies_.span());
    };
    backward_ = [this, scores] {
      scores->backward(rows_.logits(), ids_, d_logprob_, d_entropy_, rows_.d_logits());
    };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    return all_gather_of(tp(), 4 * (2 + picks_ + (entropy_ ? 1 : 0)) * rows_.rows());
  }

 protected:
  std::vector<std::span<float>> outputs() override { return {logprob_.span(), entropies_.span()}; }
  /// Whether each term of a gradient is rounded. Gyre rounds only their sum.
  virtual bool rounds_terms() const { return false; }

  bool gathers_;
  const char* gradient_;  // name of the gradient array
  int64_t picks_;
  bool entropy_;
  std::span<const int32_t> ids_;
  Buffer<float> logprob_, entropies_;
  std::vector<float> d_logprob_, d_entropy_;

 private:
  static int64_t picks_of(const Scores& scores, const LogprobsWorkload& problem) {
    if (scores.ids == Scores::Ids::picks) return problem.picks;
    return scores.ids == Scores::Ids::target ? 1 : 0;
  }
  std::span<const int32_t> ids_of(int64_t r) const { return ids_.subspan(r * picks_, picks_); }
  std::vector<double> gradients_of(int64_t r) const {
    const auto first = d_logprob_.begin() + r * picks_;
    return {first, first + picks_};
  }
  bool has_gradient(int64_t r) const override {
    return std::ranges::any_of(gradients_of(r), [](double g) { return g != 0; }) ||
           (entropy_ && d_entropy_[r] != 0);
  }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::backward) {
      ResultArray gradient = row_gradient(gradient_, [this](size_t r) {
        return score_gradient(token(r), ids_of(r), gradients_of(r), entropy_ ? d_entropy_[r] : 0,
                              rounds_terms());
      });
      if (picks_ == 1 && entropy_) gradient.sum_of = {"d_logprob", "d_entropy"};
      return {gradient};
    }
    std::vector<ResultArray> arrays;
    if (picks_ > 0)
      arrays.push_back(row_values(gathers_ ? "gathered" : "logprob", "log-probabilities",
                                  logprob_.span(), gathers_ ? picks_ : 0,
                                  [this](size_t r) { return expected_scores(r); }));
    if (entropy_)
      arrays.push_back(row_values("entropy", "entropies", entropies_.span(), 0, [this](size_t r) {
        return ExpectedRow{{score_row_reference(row_of(r), -1, temperature(token(r))).entropy},
                           {entropy_scale(vocab().vocab_size)}};
      }));
    return arrays;
  }
  /// The expected score of an id that no rank has is 0.
  ExpectedRow expected_scores(size_t r) const {
    const std::vector<double> logprobs = log_softmax_reference(row_of(r), temperature(token(r)));
    std::vector<double> want;
    for (const int32_t id : ids_of(r))
      want.push_back(id >= 0 && id < std::ssize(logprobs) ? logprobs[id] : 0);
    return scored(std::move(want));
  }
};

/// NeMo RL's algorithm.
class UpstreamScoreOp final : public ScoreOp {
 public:
  using ScoreOp::ScoreOp;
  void start() override {
    const upstream::Shape shape{rows_.rows(), vocab(), c_.options.chunk, c_.options.threads};
    if (entropy_) {
      auto theirs = std::make_shared<upstream::Entropy>(shape, tp());
      forward_ = [this, theirs] { theirs->forward(rows_.logits(), stream(), entropies_.span()); };
      backward_ = [this, theirs] {
        theirs->backward(rows_.logits(), d_entropy_, stream(), rows_.d_logits());
      };
    } else if (gathers_) {
      start_with_ids(std::make_shared<upstream::GatherLogprob>(shape, picks_, tp()));
    } else {
      start_with_ids(std::make_shared<upstream::Logprob>(shape, tp()));
    }
  }
  /// A log-softmax takes two all-reduces of one number per row, and values take one more.
  std::optional<SentTraffic> expected(Pass pass) const override {
    const int64_t rows = rows_.rows(), chunk = c_.options.chunk;
    const bool recomputes = gathers_ || entropy_ || chunk > 0;
    if (pass == Pass::backward && !recomputes) return SentTraffic{};
    SentTraffic sent;
    const int64_t step = chunk > 0 ? chunk : std::max<int64_t>(rows, 1);
    for (int64_t at = 0; at < rows; at += step) {
      const int64_t n = std::min(step, rows - at);
      std::vector<int64_t> numbers{n, n};
      if (pass == Pass::forward) numbers.push_back(entropy_ ? n : n * picks_);
      if (pass == Pass::backward && entropy_) numbers.push_back(n);
      for (const int64_t count : numbers) sent += all_reduce_of(tp(), 4 * count);
    }
    return sent;
  }

 private:
  template <class Theirs>
  void start_with_ids(const std::shared_ptr<Theirs>& theirs) {
    forward_ = [this, theirs] { theirs->forward(rows_.logits(), ids_, stream(), logprob_.span()); };
    backward_ = [this, theirs] {
      theirs->backward(rows_.logits(), ids_, d_logprob_, stream(), rows_.d_logits());
    };
  }
  bool rounds_terms() const override { return true; }
};

std::string without_temperature(const LogprobsWorkload& problem, const LogprobsOptions&) {
  if (std::ranges::find(problem.of_tokens, "temperature") != problem.of_tokens.end())
    return "upstream has one temperature for all tokens";
  if (problem.filter.temperature == 1) return "";
  return fmt::format("upstream has no temperature but 1, not {}", problem.filter.temperature);
}

LogprobsOperation score_family(const char* name, const char* summary, const Scores& scores) {
  LogprobsOperation entry;
  entry.name = name;
  entry.summary = summary;
  if (scores.ids != Scores::Ids::none) entry.definition += "log_softmax_reference, ";
  if (scores.entropy) entry.definition += "score_row_reference, ";
  entry.definition += "score_gradient_reference";
  entry.backward = RowTraffic::updates;
  if (scores.ids == Scores::Ids::picks) entry.needs = {{"ids"}};
  if (scores.ids == Scores::Ids::picks) entry.arrays.push_back({"gathered", "TK"});
  if (scores.ids == Scores::Ids::target) entry.arrays.push_back({"logprob", "T"});
  if (scores.entropy) entry.arrays.push_back({"entropy", "T"});
  entry.arrays.push_back({gradient_name(scores), "TV", false, gradient_inputs()});
  entry.methods = {{"gyre", makes<ScoreOp>(scores)}};
  // NeMo RL computes log-probabilities or entropies, not both, through an f32 log-softmax.
  if (!scores.entropy || scores.ids == Scores::Ids::none)
    entry.methods.push_back({"upstream", makes<UpstreamScoreOp>(scores), 5, without_temperature});
  return entry;
}

}  // namespace

LogprobsOperation logprob_operation() {
  return score_family("logprob", "log-probability of each token's target",
                      {Scores::Ids::target, false});
}

LogprobsOperation entropy_operation() {
  return score_family("entropy", "entropy of each token's distribution", {Scores::Ids::none, true});
}

LogprobsOperation logprob_entropy_operation() {
  LogprobsOperation entry =
      score_family("logprob-entropy", "both in one pass", {Scores::Ids::target, true});
  entry.figure.shown = RateShown::headline;
  return entry;
}

LogprobsOperation gather_operation() {
  return score_family("gather", "log-probabilities of --picks ids a token",
                      {Scores::Ids::picks, false});
}

}  // namespace gyre

// rollouts: a prompt, stored once as the first sequence, and answers to it, the other sequences.
//
// The row before a token predicts it. The prompt's last row predicts the first token of every
// answer, and its gradient is the sum over the answers. No row predicts the prompt's first token.
// References: score_row_reference and score_gradient_reference. Forward does one all-gather of 12
// bytes per row and, if there are several answers, one of 4 (2 + answers) bytes on ranks that hold
// the last row of the prompt. Backward sends nothing.

#include <algorithm>
#include <memory>

#include "apps/logprobs/operation.hpp"
#include "core/special_values.hpp"
#include "logprobs/branching_scores.hpp"
#include "logprobs/reference.hpp"

namespace gyre {
namespace {

class RolloutsOp final : public RowsOp {
 public:
  explicit RolloutsOp(LogprobsContext& context) : RowsOp(context), ids_(rows_.tokens().size(), -1) {
    std::vector<int64_t> of_branches;
    for (int64_t r = 0; r < rows_.rows(); ++r) {
      const int64_t token = this->token(r);
      const std::vector<int64_t> next = predicted_by(token);
      predicted_.push_back(next.size() == 1 ? next.front() : -1);
      if (next.size() == 1) ids_[r] = c_.inputs.target(next.front());
      if (token >= 0 && predicting_row(token) < 0) unpredicted_.push_back(token);
      if (next.size() < 2) continue;
      Branch& branch = branches_.emplace_back();
      branch.row = r;
      for (const int64_t answer : next) branch.ids.push_back(c_.inputs.target(answer));
      of_branches.insert(of_branches.end(), next.begin(), next.end());
    }
    predicted_.insert(predicted_.end(), of_branches.begin(), of_branches.end());
    logprob_ = Buffer<float>(std::ssize(predicted_));
    for (const int64_t token : predicted_)
      d_logprob_.push_back(token < 0 ? 0 : c_.inputs.gradient(token, 0));
  }

  void start() override {
    auto scores = std::make_shared<BranchingScores>(rows_.rows(), branches_, vocab(),
                                                    score_options(rows_.tokens(), 1), tp());
    forward_ = [this, scores] { scores->forward(rows_.logits(), ids_, stream(), logprob_.span()); };
    backward_ = [this, scores] {
      scores->backward(rows_.logits(), ids_, d_logprob_, stream(), rows_.d_logits());
    };
  }
  std::optional<SentTraffic> expected(Pass pass) const override {
    if (pass == Pass::backward) return SentTraffic{};
    SentTraffic sent = all_gather_of(tp(), 12 * rows_.rows());
    for (const Branch& branch : branches_)
      sent += all_gather_of(tp(), 4 * (2 + std::ssize(branch.ids)));
    return sent;
  }

 private:
  bool has_gradient(int64_t r) const override { return !predicted_by(token(r)).empty(); }
  std::vector<std::span<float>> outputs() override { return {logprob_.span()}; }
  int64_t begin_of(int64_t i) const {
    return c_.problem.offsets[std::min(i, c_.problem.sequences())];
  }
  /// Whether a token of the same sequence follows.
  bool has_next(int64_t token) const {
    return token >= 0 && !std::ranges::binary_search(c_.problem.offsets, token + 1);
  }
  /// The token whose row predicts this one; -1 if there is none.
  int64_t predicting_row(int64_t token) const {
    if (token == 0) return -1;
    return has_next(token - 1) ? token - 1 : begin_of(1) - 1;
  }
  /// Tokens that the row of `token` predicts.
  std::vector<int64_t> predicted_by(int64_t token) const {
    if (has_next(token)) return {token + 1};
    std::vector<int64_t> answers;
    if (token >= 0 && token + 1 == begin_of(1))
      for (int64_t i = 1; i < c_.problem.sequences(); ++i)
        if (c_.problem.length(i) > 0) answers.push_back(begin_of(i));
    return answers;
  }
  std::vector<ResultArray> results(Pass pass) override {
    if (pass == Pass::forward) return {logprobs()};
    return {row_gradient("d_rollout_logprob",
                         [this](size_t r) { return expected_gradient(token(r)); })};
  }
  /// Log-probability of every token, on the rank whose row predicts it; 0 if no row does.
  ResultArray logprobs() {
    tokens_.clear();
    values_.clear();
    for (size_t i = 0; i < predicted_.size(); ++i) {
      if (predicted_[i] < 0) continue;
      tokens_.push_back(predicted_[i]);
      values_.push_back(logprob_[i]);
    }
    for (const int64_t token : unpredicted_) {
      tokens_.push_back(token);
      values_.push_back(0);
    }
    ResultArray array = shared_array<float>("rollout_logprob", "log-probabilities",
                                            logprob_tolerance(), tokens_, values_, 0);
    array.expect = expect_rows([this](size_t i) {
      const int64_t row = predicting_row(tokens_[i]);
      if (row < 0) return ExpectedRow{{0}, {1}};
      const int32_t id = c_.inputs.target(tokens_[i]);
      return scored({score_row_reference(whole_row(row), id, temperature(row)).logprob});
    });
    return array;
  }
  ExpectedRow expected_gradient(int64_t token) const {
    std::vector<int32_t> ids;
    std::vector<double> g;
    for (const int64_t next : predicted_by(token)) {
      ids.push_back(c_.inputs.target(next));
      g.push_back(c_.inputs.gradient(next, 0));
    }
    return score_gradient(token, ids, g);
  }

  std::vector<int32_t> ids_;          // [rows] the id that the row predicts; -1 if none or several
  std::vector<Branch> branches_;      // the prompt's last row, on the rank that has it
  std::vector<int64_t> predicted_;    // predicted tokens, of rows, then of branches; -1 if none
  std::vector<int64_t> unpredicted_;  // tokens of local rows that no row predicts
  Buffer<float> logprob_{0};          // [predicted]
  std::vector<float> d_logprob_;      // [predicted]
  std::vector<int64_t> tokens_;       // tokens of the result
  std::vector<float> values_;
};

}  // namespace

LogprobsOperation rollouts_operation() {
  return {
      .name = "rollouts",
      .summary = "next tokens of a prompt that is stored once, and of its answers",
      .definition = "score_row_reference, score_gradient_reference",
      .methods = {{"gyre", makes<RolloutsOp>()}},
      .backward = RowTraffic::updates,
      .arrays = {{"rollout_logprob", "T"}, {"d_rollout_logprob", "TV", false, gradient_inputs()}}};
}

}  // namespace gyre

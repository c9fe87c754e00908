#include "apps/logprobs/op.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "comm/agree.hpp"

namespace gyre {
namespace {

std::string always(const LogprobsWorkload&, const LogprobsOptions&, bool) {
  return "";
}

std::string without_temperature(const LogprobsWorkload& problem, const LogprobsOptions&,
                                bool upstream) {
  if (!upstream || problem.filter.temperature == 1) return "";
  return fmt::format("upstream has no temperature but 1, not {}", problem.filter.temperature);
}

std::string distinct_picks(const LogprobsWorkload& problem, const LogprobsOptions&, bool) {
  if (problem.picks <= problem.vocab.vocab_size) return "";
  return fmt::format("a teacher has no {} largest of {} logits; the most are {}", problem.picks,
                     problem.vocab.vocab_size, problem.vocab.vocab_size);
}

std::string packable(const LogprobsWorkload& problem, const LogprobsOptions& o, bool) {
  const int64_t multiple = find_layout(o.layout.name).segment_multiple(o.cp);
  int64_t slots = 0;
  for (int64_t i = 0; i < problem.sequences(); ++i) slots += round_up(problem.length(i), multiple);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (slots <= most) return "";
  return fmt::format("{} slots; the most are {}", slots, most);
}

uint64_t digest(std::span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a, of words
  for (const float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3U;
  return hash;
}

}  // namespace

// ---- rows --------------------------------------------------------------------------------------

LogprobsRows::LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
                           std::vector<int64_t> tokens, int tp_rank, bool in_place)
    : LogprobsRows(problem, inputs, std::move(tokens), tp_rank, in_place, nullptr) {}

LogprobsRows::LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
                           std::vector<int64_t> tokens, int tp_rank, bool in_place, Stream& stream)
    : LogprobsRows(problem, inputs, std::move(tokens), tp_rank, in_place, &stream) {}

LogprobsRows::LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
                           std::vector<int64_t> tokens, int tp_rank, bool in_place, Stream* stream)
    : stream_(stream == nullptr ? host_ : *stream),
      inputs_(inputs),
      tokens_(std::move(tokens)),
      first_column_(problem.vocab.begin(tp_rank)),
      in_place_(in_place),
      logits_(rows(), problem.vocab.columns(tp_rank), problem.type, stream_.space()),
      targets_(rows()),
      ids_(rows() * problem.picks) {
  fill_logits(inputs, TokenTensor::logits, tokens_, first_column_, logits_.ref(), stream_);
  const auto picks = static_cast<size_t>(problem.picks);
  for (int64_t r = 0; r < rows(); ++r) {
    const int64_t token = tokens_[static_cast<size_t>(r)];
    targets_[r] = token < 0 ? 0 : inputs.target(token);
    const auto own = ids_.span().subspan(static_cast<size_t>(r) * picks, picks);
    if (token < 0)
      std::ranges::fill(own, 0);
    else
      inputs.ids(token, own);
  }
}

void LogprobsRows::prepare_gradient() {
  const MatrixRef like = logits_.ref();
  const bool is_new = !has_second_;
  if (is_new) second_ = LogitMatrix(like.rows, like.cols, like.type, stream_.space());
  has_second_ = true;
  if (!in_place_) return;
  LogitMatrix &from = is_new ? logits_ : second_, &to = is_new ? second_ : logits_;
  stream_.copy(to.bytes().data(), from.bytes().data(), to.bytes().size());
}

void LogprobsRows::restore() {
  if (in_place_ && has_second_) prepare_gradient();
}

void LogprobsRows::poison() {
  if (!in_place_ && has_second_) second_.poison(stream_);
}

void LogprobsRows::clobber() {
  (in_place_ ? logits_ : second_).poison(stream_);
}

MatrixRef LogprobsRows::teacher() {
  const MatrixRef like = logits_.ref();
  if (!has_teacher_) {
    teacher_ = LogitMatrix(like.rows, like.cols, like.type, stream_.space());
    fill_logits(inputs_, TokenTensor::teacher, tokens_, first_column_, teacher_.ref(), stream_);
    has_teacher_ = true;
  }
  return teacher_.ref();
}

std::vector<float> LogprobsRows::gradients(int64_t i) const {
  std::vector<float> all;
  for (const int64_t token : tokens_) all.push_back(token < 0 ? 0 : inputs_.gradient(token, i));
  return all;
}

std::vector<int64_t> LogprobsContext::tokens_in_order() const {
  const int64_t cp = grid.shape().cp, rank = grid.cp_rank(), tokens = problem.tokens();
  std::vector<int64_t> own;
  for (int64_t t = tokens * rank / cp; t < tokens * (rank + 1) / cp; ++t) own.push_back(t);
  return own;
}

LogprobsRows& LogprobsContext::in_order() {
  if (!rows_ || !ordered_) {
    rows_ = nullptr;  // before the others are there
    rows_ = std::make_unique<LogprobsRows>(problem, inputs, tokens_in_order(), grid.tp_rank(),
                                           options.in_place, backend.stream());
    ordered_ = true;
  }
  rows_->restore();
  return *rows_;
}

LogprobsRows& LogprobsContext::by_layout(std::vector<int64_t> tokens) {
  rows_ = nullptr;
  rows_ = std::make_unique<LogprobsRows>(problem, inputs, std::move(tokens), grid.tp_rank(),
                                         options.in_place, backend.stream());
  ordered_ = false;
  return *rows_;
}

// ---- what operations share ---------------------------------------------------------------------

SentTraffic LogprobsOp::all_gather_of(const Communicator& group, int64_t bytes) {
  return {group.size() > 1 ? 1 : 0, (group.size() - 1) * bytes};
}

SentTraffic LogprobsOp::all_reduce_of(const Communicator& group, int64_t bytes) {
  return {group.size() > 1 ? 1 : 0, 2 * (group.size() - 1) * bytes / group.size()};
}

std::vector<double> LogprobsOp::whole_row(int64_t token, TokenTensor tensor) const {
  std::vector<float> row(static_cast<size_t>(vocab().vocab_size));
  c_.inputs.row(tensor, token, 0, row);
  return {row.begin(), row.end()};
}

std::vector<int64_t> LogprobsOp::sample(std::span<const int64_t> tokens) const {
  std::vector<int64_t> real, some;
  for (int64_t r = 0; r < std::ssize(tokens); ++r)
    if (tokens[static_cast<size_t>(r)] >= 0) real.push_back(r);
  const int64_t budget = std::max<int64_t>(1, c_.options.check_tokens / c_.grid.shape().cp);
  const int64_t count = std::ssize(real), step = std::max<int64_t>(1, ceil_div(count, budget));
  // Not every step-th one: kernels work in tiles, and a fault may sit in the same place of each.
  for (int64_t i = 0; i < count; ++i) {
    const auto block = static_cast<uint64_t>(i / step);
    const auto chosen =
        static_cast<int64_t>((block * splitmix64_golden >> 32) % static_cast<uint64_t>(step));
    if (i % step == chosen || i == 0 || i + 1 == count)
      some.push_back(real[static_cast<size_t>(i)]);
  }
  return some;
}

Check& LogprobsOp::check_of(const std::string& label, const char* what, double tolerance,
                            Verification& checks) const {
  Check& check = checks.check(fmt::format("{}: {}", label, what), tolerance);
  if (c_.problem.tokens() == 0) check.add_nothing();
  return check;
}

void LogprobsOp::check_same_bits(const std::string& label, std::span<const float> results,
                                 Communicator& group, Verification& checks) {
  const auto mine = static_cast<int64_t>(digest(results));
  const std::vector<int64_t> all = all_gather_value(group, mine);
  Check& check = checks.check(label + ": same bits on all ranks", 0);
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == all[0])
      check.add_nothing();
    else
      check.add_failure(fmt::format("rank {} of the group differs from rank 0", r));
  }
}

std::vector<double> RowGradientTerms::scales() const {
  std::vector<double> added(logprobs.size(), 0), all;
  for (size_t k = 0; k < ids.size(); ++k)
    if (ids[k] >= 0 && ids[k] < std::ssize(added))
      added[static_cast<size_t>(ids[k])] += std::abs(weights[k]);
  for (size_t v = 0; v < logprobs.size(); ++v)
    all.push_back(logit_gradient_scale(logprobs[v], a, b, added[v]));
  return all;
}

void add_gradient_row(Check& check, ConstMatrixRef d_logits, int64_t row, int64_t first_column,
                      std::span<const double> want, std::span<const double> scales, int64_t token) {
  for (int64_t c = 0; c < d_logits.cols; ++c) {
    const auto id = static_cast<size_t>(first_column + c);
    const bool padding = id >= want.size();
    add_value(
        check, d_logits.at(row, c), padding ? 0 : want[id],
        [&] { return fmt::format("token {} column {}", token, id); }, padding ? 1 : scales[id]);
  }
}

// ---- registry ----------------------------------------------------------------------------------

const std::vector<LogprobsOperation>& logprobs_operations() {
  // name, summary, upstream, backward, adaptor, condition, matrices
  static const std::vector<LogprobsOperation> all = {
      {"log-softmax", "log-probabilities of all ids, where the logits are", false, false,
       make_softmax_op, always, 1},
      {"softmax", "probabilities of all ids, where the logits are", false, false, make_softmax_op,
       always, 1},
      {"logprob", "log-probability of each token's target", true, true, make_score_op,
       without_temperature, 0, 5},
      {"entropy", "entropy of each token's distribution", true, true, make_score_op,
       without_temperature, 0, 5},
      {"logprob-entropy", "both in one pass", false, true, make_score_op, always},
      {"gather", "log-probabilities of --picks ids a token", true, true, make_score_op,
       without_temperature, 0, 5},
      {"raw-gather", "logits of --picks ids a token", false, true, make_raw_gather_op, always},
      {"soft-ce", "cross entropy with a teacher's distribution", true, true, make_soft_ce_op,
       always, 1, 6},
      {"distill", "log-probabilities of a teacher's --picks ids, and entropy", false, true,
       make_distillation_op, distinct_picks},
      {"distill-renormalised", "the same over those ids alone", false, true, make_distillation_op,
       distinct_picks},
      {"top-k", "the --picks largest logits and their ids", true, false, make_top_k_op, always, 0,
       2},
      {"argmax", "the largest logit and its id", false, false, make_top_k_op, always},
      {"filtered", "log-probability under temperature, top-k and top-p", true, true,
       make_filtered_op, always, 0, 6},
      {"exchange", "columns for rows (forward) and back (backward)", false, true, make_exchange_op,
       always, 1},
      {"fused-linear", "hidden states to log-probability and entropy, no logits", false, true,
       make_fused_linear_op, always},
      {"packed", "next tokens of packed sequences under --layout", false, true, make_packed_op,
       packable},
      {"packed-prerolled", "the same from targets that were rolled ahead of time", false, true,
       make_packed_op, packable},
  };
  return all;
}

const LogprobsOperation& find_operation(const std::string& name) {
  std::vector<std::string> names;
  for (const LogprobsOperation& operation : logprobs_operations()) {
    if (operation.name == name) return operation;
    names.push_back(operation.name);
  }
  throw_usage("operation '{}' is none of {}", name, fmt::join(names, ", "));
}

}  // namespace gyre

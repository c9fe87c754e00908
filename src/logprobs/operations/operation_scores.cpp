#include "logprobs/operations/operation_scores.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.hpp"
#include "core/special_values.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/parallel.hpp"

namespace gyre {

struct OperationScores::Room {
  std::vector<double> of_ids;
  std::vector<std::span<const float>> inputs;
  std::vector<double> values;  // results of a row, or their gradients
  std::vector<double> slopes;  // by the statistics of ids
};

OperationScores::OperationScores(const RowOperation& operation, int64_t tokens,
                                 const VocabPartition& vocab, const OperationOptions& options,
                                 Communicator& tp)
    : operation_(operation),
      tokens_(tokens),
      vocab_size_(vocab.vocab_size),
      options_(options),
      scales_(scales_of(options.temperatures)) {
  options_.temperatures = {};
  const int64_t ids = operation.ids.empty() ? 0 : options.ids_per_token;
  options_.ids_per_token = ids;
  if (operation.on_logits)
    gathered_ =
        std::make_unique<GatheredLogits>(tokens, vocab, ids, options.threads, tp, options.kernels);
  else
    scores_ = std::make_unique<VocabScores>(
        tokens, vocab,
        ScoreOptions{.ids_per_token = ids,
                     .entropy = operation.entropy,
                     .temperature = operation.at_temperature_1 ? 1 : options.temperature,
                     .threads = options.threads,
                     .kernels = options.kernels,
                     .arrays = options.arrays,
                     .temperatures = operation.at_temperature_1 ? std::span<const double>()
                                                                : options.temperatures,
                     .mean_logprob = operation.mean_logprob},
        tp);
  const MemorySpace space = results_space(kernels_or_cpu(options.kernels));
  of_ids_ = Buffer<float>(tokens * ids, space);
  entropy_ = Buffer<float>(operation.entropy ? tokens : 0);
  mean_logprob_ = Buffer<float>(operation.mean_logprob ? tokens : 0);
}

void OperationScores::check_call(const OperationInputs& inputs, size_t results) const {
  GYRE_CHECK(results == operation_.results.size() &&
                 inputs.arrays.size() == operation_.inputs.size() &&
                 std::ssize(inputs.ids) == tokens_ * options_.ids_per_token,
             "{}: {} results, {} inputs, {} ids of {} x {}", operation_.name, results,
             inputs.arrays.size(), inputs.ids.size(), tokens_, options_.ids_per_token);
  if (!operation_.ids_are_largest) return;
  for (const int32_t id : inputs.ids)
    GYRE_CHECK(id >= 0 && id < vocab_size_, "a teacher's id {} of a vocabulary of {}", id,
               vocab_size_);
}

OperationRow OperationScores::row(int64_t token, const OperationInputs& inputs, Room& room) const {
  const size_t ids = options_.ids_per_token, at = token * ids;
  const auto own = std::as_const(of_ids_).span().subspan(at, ids);
  room.of_ids.assign(own.begin(), own.end());
  room.inputs.clear();
  for (const std::span<const float> all : inputs.arrays) {
    const size_t width = all.size() / static_cast<size_t>(tokens_);
    room.inputs.push_back(all.subspan(token * width, width));
  }
  OperationRow row;
  row.vocab_size = vocab_size_;
  row.ids = inputs.ids.subspan(at, ids);
  row.inputs = room.inputs;
  row.parameters = options_.parameters;
  row.statistics.of_ids = room.of_ids;
  if (!scores_) return row;
  const RowNormalizer& n = scores_->normalizers()[token];
  const double scale = operation_.at_temperature_1 ? 1
                       : scales_.size() > 0        ? scales_[token]
                                                   : scale_of(options_.temperature);
  const bool usable = std::isfinite(n.max) && std::isfinite(n.log_sum);
  row.statistics.log_sum_exp =
      usable ? static_cast<double>(n.max) * scale + n.log_sum : nan_of<double>;
  if (operation_.entropy) row.statistics.entropy = entropy_[token];
  if (operation_.mean_logprob) row.statistics.mean_logprob = mean_logprob_[token];
  return row;
}

template <class Body>
void OperationScores::for_each_token(Body body) const {
  const double nanoseconds = 60.0 + 20.0 * options_.ids_per_token;
  for_each_part(options_.threads, tokens_, nanoseconds, [&](int64_t begin, int64_t end, int) {
    Room room;
    room.values.resize(operation_.width(options_.ids_per_token));
    for (int64_t t = begin; t < end; ++t) body(t, room);
  });
}

double OperationScores::forward(ConstMatrixRef logits, const OperationInputs& inputs,
                                Stream& stream, std::span<const std::span<float>> results) {
  check_call(inputs, results.size());
  const double waited = scores_ ? scores_->forward(logits, inputs.ids, stream, of_ids_.span(),
                                                   entropy_.span(), mean_logprob_.span())
                                : gathered_->forward(logits, inputs.ids, stream, of_ids_.span());
  for_each_token([&](int64_t t, Room& room) {
    operation_.values(row(t, inputs, room), room.values);
    auto value = room.values.begin();
    for (size_t i = 0; i < results.size(); ++i) {
      const int64_t width = operation_.width_of(operation_.results[i], options_.ids_per_token);
      std::transform(value, value + width, results[i].begin() + t * width,
                     [](double x) { return static_cast<float>(x); });
      value += width;
    }
  });
  return waited;
}

void OperationScores::backward(ConstMatrixRef logits, const OperationInputs& inputs,
                               std::span<const std::span<const float>> d_results,
                               MatrixRef d_logits) const {
  check_call(inputs, d_results.size());
  Buffer<float> of_ids(of_ids_.size()), log_sum_exp(tokens_), entropy(entropy_.size()),
      mean_logprob(mean_logprob_.size());
  for_each_token([&](int64_t t, Room& room) {
    auto g = room.values.begin();
    for (size_t i = 0; i < d_results.size(); ++i) {
      const int64_t width = operation_.width_of(operation_.results[i], options_.ids_per_token);
      if (d_results[i].empty())
        std::fill_n(g, width, 0.0);
      else
        std::copy_n(d_results[i].begin() + t * width, width, g);
      g += width;
    }
    room.slopes.assign(options_.ids_per_token, 0);
    RowSlopes slopes;
    slopes.of_ids = room.slopes;
    if (std::ranges::any_of(room.values, [](double x) { return x != 0; }))
      operation_.slopes(row(t, inputs, room), room.values, slopes);
    std::ranges::transform(room.slopes, of_ids.data() + t * options_.ids_per_token,
                           [](double x) { return static_cast<float>(x); });
    log_sum_exp[t] = static_cast<float>(slopes.log_sum_exp);
    if (operation_.entropy) entropy[t] = static_cast<float>(slopes.entropy);
    if (operation_.mean_logprob) mean_logprob[t] = static_cast<float>(slopes.mean_logprob);
  });
  if (scores_)
    scores_->backward(logits, inputs.ids,
                      {of_ids.span(), entropy.span(), log_sum_exp.span(), mean_logprob.span()},
                      d_logits);
  else
    gathered_->backward(inputs.ids, of_ids.span(), d_logits);
}

}  // namespace gyre

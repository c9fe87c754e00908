#include "logprobs/kept_scores.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "core/error.hpp"
#include "core/special_values.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

/// One rank's part of the statistics of a row's set.
struct KeptRecord {
  float max = -infinity_of<float>;     ///< of its ids
  float sum = 0;                       ///< Σ exp((z - max) / T) over its ids
  float target = -infinity_of<float>;  ///< the target's logit, on the rank that has it in the set
};

/// Rows that one call of a kernel takes: their ids are padded to the most of a row among them.
constexpr int64_t block_rows = 64;

void check_kept(const KeptIds& kept, int64_t tokens, const VocabPartition& vocab) {
  const auto count = std::ssize(kept.ids);
  if (std::ssize(kept.offsets) != tokens + 1 || kept.offsets.front() != 0 ||
      kept.offsets.back() != count || !std::ranges::is_sorted(kept.offsets))
    throw_usage("{} offsets of {} kept ids; they must run from 0 to {} over {} rows",
                kept.offsets.size(), count, count, tokens);
  const auto wrong = std::ranges::find_if_not(
      kept.ids, [&](int32_t id) { return id >= 0 && id < vocab.vocab_size; });
  if (wrong != kept.ids.end())
    throw_usage("kept id {} is {}; ids are 0 to {}", wrong - kept.ids.begin(), *wrong,
                vocab.vocab_size - 1);
  if (const std::string reason = too_many_kept(kept, vocab); !reason.empty())
    throw_usage("{}", reason);
}

}  // namespace

std::string too_many_kept(const KeptIds& kept, const VocabPartition& vocab) {
  for (int64_t t = 0; t + 1 < std::ssize(kept.offsets); ++t)
    for (int r = 0; r < vocab.ranks() && std::ssize(kept.of(t)) > most_kept_ids; ++r) {
      const auto own =
          std::ranges::count_if(kept.of(t), [&](int32_t id) { return vocab.owner(id) == r; });
      if (own > most_kept_ids)
        return fmt::format("row {} keeps {} ids of rank {}; at most {}", t, own, r, most_kept_ids);
    }
  return "";
}

KeptScores::KeptScores(int64_t tokens, const VocabPartition& vocab, const KeptIds& kept,
                       const KeptOptions& options, Communicator& tp)
    : tokens_(tokens),
      vocab_(vocab),
      tp_(tp),
      kernels_(kernels_or_cpu(options.kernels)),
      threads_(options.threads),
      scale_(scale_of(options.temperature)),
      own_offsets_{0} {
  constexpr std::string_view what = "log-probabilities among kept ids";
  const auto check = [&] {
    check_tokens(tokens);
    check_partition(vocab, tp.size());
    check_temperature(options.temperature);
    check_temperatures(options.temperatures, tokens);
    check_kept(kept, tokens, vocab);
  };
  const auto sum_of = [](auto values) {
    return static_cast<int64_t>(checksum_of(bytes_of(values)));
  };
  agree_on_arguments(tp, what, check,
                     {{"the number of tokens", tokens},
                      {"the checksum of the sets' offsets", sum_of(kept.offsets)},
                      {"the checksum of the sets' ids", sum_of(kept.ids)},
                      {"the checksum of the tokens' temperatures", sum_of(options.temperatures)}});
  agree_on_partition(tp, what, vocab);
  agree_on_number(tp, what, "the temperature", options.temperature);
  scales_ = scales_of(options.temperatures);
  for (int64_t t = 0; t < tokens; ++t) {
    for (const int32_t id : kept.of(t))
      if (vocab.owner(id) == tp.rank()) own_ids_.push_back(id);
    own_offsets_.push_back(std::ssize(own_ids_));
    is_empty_.push_back(kept.of(t).empty());
  }
  max_.resize(tokens);
  log_sum_.resize(tokens);
}

std::span<const int32_t> KeptScores::own_ids(int64_t row) const {
  return std::span(own_ids_).subspan(own_offsets_[row], own_offsets_[row + 1] - own_offsets_[row]);
}

template <class Body>
void KeptScores::for_each_block(Body body) const {
  for (int64_t begin = 0; begin < tokens_; begin += block_rows) {
    const int64_t count = std::min(block_rows, tokens_ - begin);
    int64_t width = 1;  // kernels take at least one id
    for (int64_t t = begin; t < begin + count; ++t)
      width = std::max<int64_t>(width, std::ssize(own_ids(t)));
    body(begin, count, width);
  }
}

double KeptScores::forward(ConstMatrixRef logits, std::span<const int32_t> targets, Stream& stream,
                           std::span<float> logprob) {
  GYRE_CHECK(logits.rows == tokens_ && logits.cols == vocab_.columns(tp_.rank()) &&
                 std::ssize(targets) == tokens_ && std::ssize(logprob) == tokens_,
             "{} x {} logits, {} targets and {} log-probabilities of {} tokens", logits.rows,
             logits.cols, targets.size(), logprob.size(), tokens_);
  const int64_t first = vocab_.begin(tp_.rank());
  values_.assign(own_ids_.size(), 0);
  for_each_block([&](int64_t begin, int64_t count, int64_t width) {
    std::vector<int32_t> ids(count * width, -1);
    std::vector<float> found(ids.size());
    for (int64_t i = 0; i < count; ++i)
      std::ranges::copy(own_ids(begin + i), ids.begin() + i * width);
    kernels_.gather_token_logits(logits.rows_from(begin, count), ids, width, first,
                                 vocab_.valid(tp_.rank()), found);
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(found.begin() + i * width, own_ids(begin + i).size(),
                  values_.begin() + own_offsets_[begin + i]);
  });
  Buffer<KeptRecord> own(tokens_), all(tokens_ * tp_.size());
  for (int64_t t = 0; t < tokens_; ++t) {
    KeptRecord& record = own[t] = {};
    double sum = 0;
    const auto ids = own_ids(t);
    const float* const z = values_.data() + own_offsets_[t];
    for (size_t k = 0; k < ids.size(); ++k) {
      if (ids[k] == targets[t]) record.target = z[k];
      record.max = std::max(record.max, z[k]);  // a NaN makes the sum NaN
    }
    for (size_t k = 0; k < ids.size(); ++k)
      if (z[k] != -infinity_of<float>)
        sum += std::exp((static_cast<double>(z[k]) - static_cast<double>(record.max)) * scale(t));
    record.sum = static_cast<float>(sum);
  }
  const Stopwatch watch;
  tp_.all_gather(bytes_of(std::as_const(own).span()), writable_bytes_of(all.span()), stream,
                 "sums over kept ids")
      ->wait();
  const double waited = tp_.size() == 1 ? 0 : watch.seconds();
  for (int64_t t = 0; t < tokens_; ++t) {
    double max = -infinity_of<double>, sum = 0, target = -infinity_of<double>;
    for (int r = 0; r < tp_.size(); ++r) {
      const KeptRecord& record = all[r * tokens_ + t];
      target = std::max(target, static_cast<double>(record.target));
      max = std::max(max, static_cast<double>(record.max));
    }
    for (int r = 0; r < tp_.size(); ++r)
      if (const KeptRecord& record = all[r * tokens_ + t]; record.sum != 0)
        sum += record.sum * std::exp((static_cast<double>(record.max) - max) * scale(t));
    max_[t] = max;
    log_sum_[t] = std::log(sum);
    if (is_empty_[t])
      logprob[t] = -infinity_of<float>;
    else if (!(sum > 0))
      logprob[t] = nan_of<float>;
    else  // -inf if no rank has the target in the set
      logprob[t] = static_cast<float>((target - max) * scale(t) - log_sum_[t]);
  }
  return waited;
}

void KeptScores::backward(std::span<const int32_t> targets, std::span<const float> d_logprob,
                          MatrixRef d_logits) const {
  GYRE_CHECK(d_logits.rows == tokens_ && d_logits.cols == vocab_.columns(tp_.rank()) &&
                 std::ssize(targets) == tokens_ && std::ssize(d_logprob) == tokens_,
             "{} x {} gradients, {} targets and {} gradients of {} tokens", d_logits.rows,
             d_logits.cols, targets.size(), d_logprob.size(), tokens_);
  for_each_block([&](int64_t begin, int64_t count, int64_t width) {
    std::vector<int32_t> ids(count * width, -1);
    std::vector<float> weights(ids.size(), 0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = begin + i;
      const double g = d_logprob[t] * scale(t);
      const auto mine = own_ids(t);
      for (size_t k = 0; k < mine.size() && g != 0; ++k) {
        const double x =
            (static_cast<double>(values_[own_offsets_[t] + static_cast<int64_t>(k)]) - max_[t]) *
            scale(t);
        const double p = std::exp(x - log_sum_[t]);
        const bool is_target = mine[k] == targets[t] && x != -infinity_of<double>;
        ids[i * width + static_cast<int64_t>(k)] = mine[k];
        weights[i * width + static_cast<int64_t>(k)] =
            static_cast<float>(g * ((is_target ? 1 : 0) - p));
      }
    }
    kernels_.scatter_token_weights({ids, weights, width, vocab_.begin(tp_.rank())},
                                   vocab_.valid(tp_.rank()), d_logits.rows_from(begin, count),
                                   threads_);
  });
}

}  // namespace gyre

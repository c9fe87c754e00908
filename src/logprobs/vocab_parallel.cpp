#include "logprobs/vocab_parallel.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "core/error.hpp"
#include "logprobs/records/gather_records.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/clock.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Calls body(token) for all tokens, distributed over threads; each call merges all ranks' records.
template <class Body>
void for_each_token(int threads, int64_t tokens, int64_t ranks, Body body) {
  const double nanoseconds = 30.0 * (ranks + 2);
  for_each_part(threads, tokens, nanoseconds, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

/// all <- `own` of all ranks, in rank order. Returns the seconds waited.
template <class T>
double gather_records(Communicator& tp, std::span<const T> own, std::span<T> all, Stream& stream,
                      std::string_view what) {
  const Stopwatch watch;
  tp.all_gather(bytes_of(own), writable_bytes_of(all), stream, what)->wait();
  return watch.seconds();
}

void check_shard(ConstMatrixRef logits, int64_t tokens, int64_t columns) {
  GYRE_CHECK(logits.rows == tokens && logits.cols == columns,
             "a shard of {} x {} logits, not {} x {}", logits.rows, logits.cols, tokens, columns);
}

}  // namespace

VocabScores::VocabScores(int64_t tokens, const VocabPartition& vocab, const ScoreOptions& options,
                         Communicator& tp)
    : tokens_(tokens),
      vocab_(vocab),
      options_(options),
      tp_(tp),
      arrays_(options.arrays == nullptr ? tp : *options.arrays),
      kernels_(kernels_or_cpu(options.kernels)) {
  constexpr std::string_view what = "log-probabilities";
  check_arrays(tp, arrays_, kernels_.space());
  const auto check = [&] {
    check_tokens(tokens);
    check_partition(vocab, tp.size());
    if (options.ids_per_token < 0)
      throw_usage("{} ids a token; the fewest are 0", options.ids_per_token);
    check_temperature(options.temperature);
    check_temperatures(options.temperatures, tokens);
  };
  agree_on_arguments(tp, what, check,
                     {{"the number of tokens", tokens},
                      {"the number of ids a token", options.ids_per_token},
                      {"whether entropies are wanted", options.entropy ? 1 : 0},
                      {"whether means of log p are wanted", options.mean_logprob ? 1 : 0},
                      {"the checksum of the tokens' temperatures",
                       static_cast<int64_t>(checksum_of(bytes_of(options.temperatures)))}});
  agree_on_partition(tp, what, vocab);
  agree_on_number(tp, what, "the temperature", options.temperature);
  scales_ = scales_of(options.temperatures);
  options_.temperatures = {};
  records_ = std::make_unique<ScoreRecords>(
      kernels_, RecordShape{vocab,
                            tp.rank(),
                            options.ids_per_token,
                            {.weighted = options.entropy, .total = options.mean_logprob},
                            scale(),
                            options.threads});
  resize(tokens);
}

void VocabScores::resize(int64_t tokens) {
  GYRE_CHECK(tokens >= 0 && (scales_.size() == 0 || scales_.size() == tokens),
             "{} tokens, {} temperatures of tokens", tokens, scales_.size());
  if (tokens == tokens_ && normalizers_.size() == tokens) return;
  tokens_ = tokens;
  normalizers_ = Buffer<RowNormalizer>(tokens, results_space(kernels_));
  entropy_ = Buffer<float>(options_.entropy ? tokens : 0, results_space(kernels_));
  mean_logprob_ = Buffer<float>(options_.mean_logprob ? tokens : 0, results_space(kernels_));
}

double VocabScores::forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                            std::span<float> logprob, std::span<float> entropy,
                            std::span<float> mean_logprob) {
  const int64_t ids_per_token = options_.ids_per_token;
  check_shard(logits, tokens_, vocab_.columns(tp_.rank()));
  GYRE_CHECK(
      std::ssize(ids) == tokens_ * ids_per_token && std::ssize(logprob) == tokens_ * ids_per_token,
      "{} ids and {} log-probabilities of {} x {}", ids.size(), logprob.size(), tokens_,
      ids_per_token);
  GYRE_CHECK(
      std::ssize(entropy) == entropy_.size() && std::ssize(mean_logprob) == mean_logprob_.size(),
      "{} entropies, not {}; {} means, not {}", entropy.size(), entropy_.size(),
      mean_logprob.size(), mean_logprob_.size());
  records_->start(tokens_, ids,
                  {normalizers_.span(), logprob, entropy_.span(), mean_logprob_.span()});
  records_->add(logits, 0, 0, vocab_.valid(tp_.rank()));
  const double waited = records_->merge(arrays_, stream, "partial sums and logits of ids");
  std::ranges::copy(entropy_.span(), entropy.data());
  std::ranges::copy(mean_logprob_.span(), mean_logprob.data());
  return waited;
}

void VocabScores::backward(ConstMatrixRef logits, std::span<const int32_t> ids,
                           const ScoreGradients& above, MatrixRef d_logits) const {
  const int64_t ids_per_token = options_.ids_per_token;
  const RowScale scale = this->scale();
  check_shard(logits, tokens_, vocab_.columns(tp_.rank()));
  GYRE_CHECK(std::ssize(ids) == tokens_ * ids_per_token && ids.size() == above.logprob.size(),
             "{} ids and {} gradients of {} x {}", ids.size(), above.logprob.size(), tokens_,
             ids_per_token);
  for (const auto& [of_rows, requested] : {std::pair(above.entropy, options_.entropy),
                                           {above.log_sum_exp, true},
                                           {above.mean_logprob, options_.mean_logprob}})
    GYRE_CHECK(of_rows.empty() || (requested && std::ssize(of_rows) == tokens_),
               "{} gradients of {} rows", of_rows.size(), tokens_);
  Buffer<GradientCoefficients> coefficients(tokens_);
  Buffer<float> weights(scale.is_one() ? 0 : tokens_ * ids_per_token);
  for_each_token(options_.threads, tokens_, tp_.size(), [&](int64_t i) {
    ScoreSlopes slopes;
    const double factor = scale[i];
    for (int64_t at = i * ids_per_token; at < (i + 1) * ids_per_token; ++at) {
      const double g = above.logprob[at];
      slopes.logprobs += g;
      if (!scale.is_one()) weights[at] = static_cast<float>(factor * g);
    }
    const auto own = [&](std::span<const float> values) {
      return values.empty() ? 0.0 : values[i];
    };
    slopes.entropy = own(above.entropy);
    slopes.log_sum_exp = own(above.log_sum_exp);
    slopes.mean_logprob = own(above.mean_logprob);
    coefficients[i] = slopes.coefficients(own(entropy_.span()), factor, vocab_.vocab_size);
  });
  kernels_.gradient(logits, pass(), normalizers_.span(), coefficients.span(),
                    {ids, scale.is_one() ? above.logprob : weights.span(), ids_per_token,
                     vocab_.begin(tp_.rank())},
                    d_logits);
}

void VocabScores::write_log_softmax(ConstMatrixRef logits, bool exponentiate, MatrixRef out) const {
  check_shard(logits, tokens_, vocab_.columns(tp_.rank()));
  kernels_.log_softmax(logits, pass(), normalizers_.span(), exponentiate, out);
}

double VocabScores::log_softmax_backward(ConstMatrixRef logits, ConstMatrixRef d_logprobs,
                                         Stream& stream, MatrixRef d_logits) const {
  const int64_t ranks = tp_.size();
  check_shard(logits, tokens_, vocab_.columns(tp_.rank()));
  check_shard(d_logprobs, tokens_, vocab_.columns(tp_.rank()));
  Buffer<double> all(ranks * tokens_), own(ranks == 1 ? 0 : tokens_);
  const std::span<double> mine = ranks == 1 ? all.span() : own.span();
  kernels_.sums(d_logprobs, vocab_.valid(tp_.rank()), options_.threads, mine);
  double waited = 0;
  if (ranks > 1)
    waited = gather_records<double>(tp_, mine, all.span(), stream, "sums of gradients");
  Buffer<float> sums(tokens_);
  for_each_token(options_.threads, tokens_, tp_.size(), [&](int64_t i) {
    double sum = 0;
    for (int64_t r = 0; r < ranks; ++r) sum += all[r * tokens_ + i];
    sums[i] = static_cast<float>(sum);
  });
  kernels_.log_softmax_gradient(logits, d_logprobs, pass(), normalizers_.span(), sums.span(),
                                d_logits);
  return waited;
}

RowPass VocabScores::pass() const {
  return {vocab_.valid(tp_.rank()), scale(), options_.threads};
}

SoftCrossEntropy::SoftCrossEntropy(int64_t tokens, const VocabPartition& vocab, int threads,
                                   Communicator& tp, RowKernels* kernels, Communicator* arrays)
    : tokens_(tokens),
      vocab_(vocab),
      threads_(threads),
      tp_(tp),
      arrays_(arrays == nullptr ? tp : *arrays),
      kernels_(kernels_or_cpu(kernels)) {
  constexpr std::string_view what = "soft cross entropies";
  check_arrays(tp, arrays_, kernels_.space());
  const auto check = [&] {
    check_tokens(tokens);
    check_partition(vocab, tp.size());
  };
  agree_on_arguments(tp, what, check, {{"the number of tokens", tokens}});
  agree_on_partition(tp, what, vocab);
  resize(tokens);
}

void SoftCrossEntropy::resize(int64_t tokens) {
  tokens_ = tokens;
  if (value_.size() == tokens) return;
  const MemorySpace space = results_space(kernels_);
  students_ = Buffer<RowNormalizer>(tokens, space);
  teachers_ = Buffer<RowNormalizer>(tokens, space);
  value_ = Buffer<float>(tokens, space);
}

double SoftCrossEntropy::forward(ConstMatrixRef student, ConstMatrixRef teacher, Stream& stream,
                                 std::span<float> value) {
  static_assert(sizeof(CrossPartial) == 20);
  check_shard(student, tokens_, vocab_.columns(tp_.rank()));
  check_shard(teacher, tokens_, vocab_.columns(tp_.rank()));
  GYRE_CHECK(std::ssize(value) == tokens_, "{} values of {} tokens", value.size(), tokens_);
  const int ranks = tp_.size();
  const std::span own(
      kernels_.cross_parts(student, teacher, vocab_.valid(tp_.rank()), threads_, own_memory_),
      value.size());
  const std::span<CrossPartial> all =
      ranks == 1 ? std::span<CrossPartial>()
                 : at_least<CrossPartial>(all_memory_, ranks * tokens_, kernels_.space());
  return merge_gathered<CrossPartial>(
      ranks, own, all, arrays_, stream, "cross sums", [&](std::span<const CrossPartial> records) {
        merge_crosses(kernels_.stream(), threads_, records, ranks,
                      {students_.span(), teachers_.span(), value_.span()});
        kernels_.stream().synchronize();
        std::ranges::copy(value_.span(), value.begin());
      });
}

void SoftCrossEntropy::backward(ConstMatrixRef student, ConstMatrixRef teacher,
                                std::span<const float> d_value, MatrixRef d_student) const {
  check_shard(student, tokens_, vocab_.columns(tp_.rank()));
  check_shard(teacher, tokens_, vocab_.columns(tp_.rank()));
  GYRE_CHECK(std::ssize(d_value) == tokens_, "{} gradients of {} tokens", d_value.size(), tokens_);
  kernels_.cross_gradient(student, teacher, {vocab_.valid(tp_.rank()), 1, threads_},
                          students_.span(), teachers_.span(), d_value, d_student);
}

GatheredLogits::GatheredLogits(int64_t tokens, const VocabPartition& vocab, int64_t ids_per_token,
                               int threads, Communicator& tp, RowKernels* kernels)
    : tokens_(tokens),
      vocab_(vocab),
      ids_per_token_(ids_per_token),
      threads_(threads),
      tp_(tp),
      kernels_(kernels_or_cpu(kernels)) {
  constexpr std::string_view what = "logits of ids";
  const auto check = [&] {
    check_tokens(tokens);
    check_partition(vocab, tp.size());
    if (ids_per_token < 0) throw_usage("{} ids a token; the fewest are 0", ids_per_token);
  };
  agree_on_arguments(
      tp, what, check,
      {{"the number of tokens", tokens}, {"the number of ids a token", ids_per_token}});
  agree_on_partition(tp, what, vocab);
}

double GatheredLogits::forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                               std::span<float> values) {
  check_shard(logits, tokens_, vocab_.columns(tp_.rank()));
  GYRE_CHECK(std::ssize(ids) == tokens_ * ids_per_token_ && values.size() == ids.size(),
             "{} ids and {} values of {} x {}", ids.size(), values.size(), tokens_, ids_per_token_);
  std::fill(values.begin(), values.end(), 0.0F);
  kernels_.gather_token_logits(logits, ids, ids_per_token_, vocab_.begin(tp_.rank()),
                               vocab_.valid(tp_.rank()), values);
  const Stopwatch watch;
  // One rank has the value, all others 0, so the sum is exact in any order.
  tp_.all_reduce(values.data(), std::ssize(values), DType::f32, ReduceOp::sum, stream,
                 "logits of ids")
      ->wait();
  return tp_.size() == 1 ? 0 : watch.seconds();
}

void GatheredLogits::backward(std::span<const int32_t> ids, std::span<const float> d_values,
                              MatrixRef d_logits) const {
  check_shard(d_logits, tokens_, vocab_.columns(tp_.rank()));
  GYRE_CHECK(std::ssize(ids) == tokens_ * ids_per_token_ && d_values.size() == ids.size(),
             "{} ids and {} gradients of {} x {}", ids.size(), d_values.size(), tokens_,
             ids_per_token_);
  kernels_.scatter_token_weights({ids, d_values, ids_per_token_, vocab_.begin(tp_.rank())},
                                 vocab_.valid(tp_.rank()), d_logits, threads_);
}

}  // namespace gyre

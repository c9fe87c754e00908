#include "logprobs/projected_probabilities.hpp"

#include <cmath>
#include <utility>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "core/error.hpp"
#include "core/special_values.hpp"
#include "logprobs/records/row_total.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

/// Softmax statistics of one row of a shard, as ranks exchange them.
struct ShardSum {
  float max = 0, sum = 0;
};

}  // namespace

ProjectedProbabilities::ProjectedProbabilities(int64_t tokens, const VocabPartition& vocab,
                                               const SparseMatrixRef& matrix,
                                               const ProjectionOptions& options, Communicator& tp)
    : tokens_(tokens),
      width_(matrix.width),
      vocab_(vocab),
      tp_(tp),
      arrays_(options.arrays == nullptr ? tp : *options.arrays),
      kernels_(kernels_or_cpu(options.kernels)),
      threads_(options.threads),
      scale_(scale_of(options.temperature)) {
  constexpr std::string_view what = "projected probabilities";
  check_arrays(tp, arrays_, kernels_.space());
  const auto sum_of = [](auto values) {
    return static_cast<int64_t>(checksum_of(bytes_of(values)));
  };
  const auto check = [&] {
    check_tokens(tokens);
    check_partition(vocab, tp.size());
    check_temperature(options.temperature);
    check_temperatures(options.temperatures, tokens);
  };
  agree_on_arguments(tp, what, check,
                     {{"the number of tokens", tokens},
                      {"the checksum of the tokens' temperatures", sum_of(options.temperatures)}});
  agree_on_partition(tp, what, vocab);
  agree_on_number(tp, what, "the temperature", options.temperature);
  const auto check_matrix = [&] {
    const std::string fault = fault_of(matrix, vocab.vocab_size, "projection_");
    if (!fault.empty()) throw_usage("{}", fault);
  };
  agree_on_arguments(tp, what, check_matrix,
                     {{"the number of columns of the projection", matrix.width},
                      {"the checksum of the projection's offsets", sum_of(matrix.offsets)},
                      {"the checksum of the projection's columns", sum_of(matrix.columns)},
                      {"the checksum of the projection's weights", sum_of(matrix.weights)}});
  scales_ = scales_of(options.temperatures);
  const int64_t valid = vocab.valid(tp.rank());
  const int64_t first = valid == 0 ? 0 : vocab.begin(tp.rank());
  projection_ = kernels_.make_projection(ProjectionShard(matrix, first, valid));
  normalizers_ = Buffer<RowNormalizer>(tokens);
}

double ProjectedProbabilities::forward(ConstMatrixRef logits, Stream& stream,
                                       MatrixView<float> out) {
  GYRE_CHECK(logits.rows == tokens_ && logits.cols == vocab_.columns(tp_.rank()) &&
                 out.rows == tokens_ && out.cols == width_ && out.stride == width_,
             "{} x {} logits and {} x {} results, {} apart, of {} tokens and {} columns",
             logits.rows, logits.cols, out.rows, out.cols, out.stride, tokens_, width_);
  Buffer<SoftmaxPartial> own(tokens_);
  projection_->forward(logits, {vocab_.valid(tp_.rank()), scale(), false, threads_}, own.span(),
                       out);
  Buffer<float> shares(tokens_);
  const Stopwatch watch;
  merge(own.span(), stream, shares.span());
  const double gathered = watch.seconds();
  projection_->multiply(out, shares.span());
  if (tp_.size() == 1) return 0;
  const MarkPtr before = stream.mark();
  const WorkPtr sum = arrays_.all_reduce(out.data, tokens_ * width_, DType::f32, ReduceOp::sum,
                                         stream, "projected probabilities");
  sum->wait_on_stream();
  const MarkPtr arrived = stream.mark();
  sum->wait();
  stream.synchronize();
  return gathered + arrived->seconds() - before->seconds();
}

void ProjectedProbabilities::merge(std::span<const SoftmaxPartial> own, Stream& stream,
                                   std::span<float> shares) {
  const int64_t ranks = tp_.size();
  Buffer<ShardSum> mine(tokens_), all(ranks * tokens_);
  for (int64_t t = 0; t < tokens_; ++t) mine[t] = {own[t].max, own[t].sum};
  tp_.all_gather(bytes_of(std::as_const(mine).span()), writable_bytes_of(all.span()), stream,
                 "maxima and sums of shards")
      ->wait();
  const RowScale scale = this->scale();
  for (int64_t t = 0; t < tokens_; ++t) {
    RowTotal total;
    for (int64_t r = 0; r < ranks; ++r)
      total.add({all[r * tokens_ + t].max, all[r * tokens_ + t].sum, 0}, scale[t]);
    normalizers_[t] = {total.max, static_cast<float>(std::log(total.sum))};
    const SoftmaxPartial& part = own[t];
    if (!(total.sum > 0))
      shares[t] = nan_of<float>;
    else if (part.sum == 0)
      shares[t] = 0;
    else
      shares[t] = static_cast<float>(
          part.sum *
          std::exp((static_cast<double>(part.max) - static_cast<double>(total.max)) * scale[t]) /
          total.sum);
  }
}

void ProjectedProbabilities::backward(ConstMatrixRef logits, MatrixView<const float> out,
                                      MatrixView<const float> d_out, MatrixRef d_logits) const {
  GYRE_CHECK(logits.rows == tokens_ && logits.cols == vocab_.columns(tp_.rank()) &&
                 d_logits.rows == tokens_ && d_logits.cols == logits.cols,
             "{} x {} logits and {} x {} gradients of {} tokens", logits.rows, logits.cols,
             d_logits.rows, d_logits.cols, tokens_);
  projection_->backward(logits, {vocab_.valid(tp_.rank()), scale(), threads_}, normalizers_.span(),
                        out, d_out, d_logits);
}

}  // namespace gyre

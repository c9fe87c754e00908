#include "logprobs/filtered_scores.hpp"

#include <algorithm>
#include <utility>

#include "comm/agree.hpp"
#include "logprobs/filtered_forward.hpp"
#include "logprobs/score_detail.hpp"

namespace gyre {
namespace {

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
  constexpr std::string_view what = "filtered log-probabilities";
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
    weights[t] = scale() * d_logprob[t];
    a[t] = -weights[t];
  }
  kernels_.filtered_gradient(logits, {vocab_.valid(rank), scale(), options_.threads},
                             normalizers_.span(), survivors_.span(), std::as_const(a).span(),
                             {targets, std::as_const(weights).span(), 1, vocab_.begin(rank)},
                             d_logits);
}

}  // namespace gyre

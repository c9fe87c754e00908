#include "logprobs/filtered_scores.hpp"

#include <algorithm>
#include <utility>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "logprobs/filtered_forward.hpp"
#include "logprobs/score_detail.hpp"

namespace gyre {
namespace {

void check_filter(const SamplingFilter& filter, const VocabPartition& vocab) {
  if (filter.top_k < 0)
    throw_usage("top_k is {}; the smallest valid number is 0, for no such filter", filter.top_k);
  if (filter.top_k > vocab.vocab_size)
    throw_usage("top_k is {}; the largest valid number is {}, the size of the vocabulary",
                filter.top_k, vocab.vocab_size);
  if (!(filter.top_p > 0 && filter.top_p <= 1))
    throw_usage("top_p is {}; it must be above 0 and at most 1", filter.top_p);
  if (!(filter.min_p >= 0 && filter.min_p <= 1))
    throw_usage("min_p is {}; it must be from 0, for no such filter, to 1", filter.min_p);
  check_temperature(filter.temperature);
}

void check_options(int64_t tokens, const VocabPartition& vocab, DType type,
                   const FilterOptions& options, int ranks) {
  check_tokens(tokens);
  check_partition(vocab, ranks);
  if (type != DType::f32 && type != DType::bf16)
    throw_usage("logits of type {}; they must be f32 or bf16", name_of(type));
  if (!options.filters.empty() && std::ssize(options.filters) != tokens)
    throw_usage("{} filters of {} tokens; one for each, or none", options.filters.size(), tokens);
  check_filter(options.filter, vocab);
  for (const SamplingFilter& filter : options.filters) check_filter(filter, vocab);
  if (options.list_length < 1)
    throw_usage("lists of {} logits; the smallest valid length is 1", options.list_length);
}

/// Whether the filter may keep more ids than a list has.
bool is_open_ended(const SamplingFilter& filter) {
  return filter.top_k == 0 && (filter.top_p != 1 || filter.min_p > 0);
}

std::vector<double> temperatures_of(std::span<const SamplingFilter> filters) {
  std::vector<double> temperatures;
  for (const SamplingFilter& filter : filters) temperatures.push_back(filter.temperature);
  return temperatures;
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
                      {"the length of the lists", options.list_length},
                      {"the checksum of the tokens' filters",
                       static_cast<int64_t>(checksum_of(bytes_of(options.filters)))}});
  agree_on_partition(tp, what, vocab);
  agree_on_number(tp, what, "top_p", filter.top_p);
  agree_on_number(tp, what, "min_p", filter.min_p);
  agree_on_number(tp, what, "the temperature", filter.temperature);
  filters_.assign(options.filters.begin(), options.filters.end());
  options_.filters = {};
  scales_ = scales_of(temperatures_of(filters_));
  length_ = filter_list_length(options, vocab);
  if (filter.top_k == vocab.vocab_size) filter.top_k = 0;
  for (SamplingFilter& one : filters_)
    if (one.top_k == vocab.vocab_size) one.top_k = 0;
  normalizers_ = Buffer<RowNormalizer>(tokens);
  survivors_ = Buffer<RowSurvivors>(tokens);
  kept_ = Buffer<int32_t>(tokens);
}

int64_t filter_list_length(const FilterOptions& options, const VocabPartition& vocab) {
  int64_t length = 1, longest = 1;
  const auto add = [&](SamplingFilter filter) {
    if (filter.top_k == vocab.vocab_size) filter.top_k = 0;
    length = std::max({length, filter.top_k, is_open_ended(filter) ? options.list_length : 1});
  };
  if (options.filters.empty()) add(options.filter);
  for (const SamplingFilter& filter : options.filters) add(filter);
  for (int r = 0; r < vocab.ranks(); ++r) longest = std::max(longest, vocab.valid(r));
  return std::min(length, longest);
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
    weights[t] = scale()[t] * d_logprob[t];
    a[t] = -weights[t];
  }
  kernels_.filtered_gradient(logits, {vocab_.valid(rank), scale(), options_.threads},
                             normalizers_.span(), survivors_.span(), std::as_const(a).span(),
                             {targets, std::as_const(weights).span(), 1, vocab_.begin(rank)},
                             d_logits);
}

}  // namespace gyre

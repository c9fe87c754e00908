#include "logprobs/distillation.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

/// Calls body(row) for all rows, on `threads` threads; a row costs `ids_per_token` exponentials.
template <class Body>
void for_each_row(int threads, int64_t rows, int64_t ids_per_token, Body body) {
  const double nanoseconds = 5.0 * ids_per_token;
  for_each_part(threads, rows, nanoseconds, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

/// out <- log-softmax of one row of logits.
void log_softmax(std::span<const float> logits, std::span<float> out) {
  float max = -std::numeric_limits<float>::infinity();
  for (const float z : logits) max = std::max(max, z);
  double sum = 0;
  for (const float z : logits) sum += std::exp(z - max);
  const double log_sum = std::log(sum);
  for (size_t k = 0; k < logits.size(); ++k)
    out[k] = static_cast<float>((logits[k] - max) - log_sum);
}

/// out <- log-softmax of each row of `ids_per_token` logits; may be in place.
void log_softmax_rows(int threads, int64_t ids_per_token, std::span<const float> logits,
                      std::span<float> out) {
  const size_t row = ids_per_token;
  for_each_row(threads, std::ssize(logits) / ids_per_token, ids_per_token, [&](int64_t i) {
    const size_t at = i * row;
    log_softmax(logits.subspan(at, row), out.subspan(at, row));
  });
}

void check_ids(std::span<const int32_t> ids, int64_t vocab_size) {
  for (const int32_t id : ids)
    GYRE_CHECK(id >= 0 && id < vocab_size, "a teacher's id {} of a vocabulary of {}", id,
               vocab_size);
}

}  // namespace

DistillationScores::DistillationScores(int64_t tokens, const VocabPartition& vocab,
                                       const DistillationOptions& options, Communicator& tp)
    : tokens_(tokens), vocab_size_(vocab.vocab_size), options_(options) {
  const auto check = [&] {
    if (options.ids_per_token < 1)
      throw_usage("{} ids a token; the fewest are 1", options.ids_per_token);
    if (options.renormalised && options.entropy)
      throw_usage(
          "an entropy needs the whole vocabulary, but the student is renormalised over {} ids",
          options.ids_per_token);
  };
  agree_on_arguments(
      tp, "distillation", check,
      {{"whether the student is renormalised over the ids", options.renormalised ? 1 : 0}});
  if (!options.renormalised) {
    scores_ = std::make_unique<VocabScores>(tokens, vocab,
                                            ScoreOptions{.ids_per_token = options.ids_per_token,
                                                         .entropy = options.entropy,
                                                         .threads = options.threads,
                                                         .kernels = options.kernels,
                                                         .arrays = options.arrays},
                                            tp);
    return;
  }
  gathered_ = std::make_unique<GatheredLogits>(tokens, vocab, options.ids_per_token,
                                               options.threads, tp, options.kernels);
  student_ = Buffer<float>(tokens * options.ids_per_token);
}

double DistillationScores::forward(ConstMatrixRef logits, std::span<const float> teacher_logits,
                                   std::span<const int32_t> ids, Stream& stream,
                                   std::span<float> student, std::span<float> teacher,
                                   std::span<float> entropy) {
  const int64_t ids_per_token = options_.ids_per_token;
  GYRE_CHECK(teacher_logits.size() == ids.size() && teacher.size() == ids.size(),
             "{} logits of the teacher and {} results for {} ids", teacher_logits.size(),
             teacher.size(), ids.size());
  check_ids(ids, vocab_size_);
  log_softmax_rows(options_.threads, ids_per_token, teacher_logits, teacher);
  if (scores_) return scores_->forward(logits, ids, stream, student, entropy);
  GYRE_CHECK(entropy.empty(), "{} entropies of a renormalised student", entropy.size());
  const double waited = gathered_->forward(logits, ids, stream, student);
  log_softmax_rows(options_.threads, ids_per_token, student, student);
  std::copy(student.begin(), student.end(), student_.data());
  return waited;
}

void DistillationScores::backward(ConstMatrixRef logits, std::span<const int32_t> ids,
                                  std::span<const float> d_student,
                                  std::span<const float> d_entropy, MatrixRef d_logits) const {
  if (scores_) {
    scores_->backward(logits, ids, d_student, d_entropy, d_logits);
    return;
  }
  GYRE_CHECK(std::ssize(d_student) == student_.size() && d_entropy.empty(),
             "{} gradients of {} x {}, {} of entropies", d_student.size(), tokens_,
             options_.ids_per_token, d_entropy.size());
  Buffer<float> d_values(student_.size());
  for_each_row(options_.threads, tokens_, options_.ids_per_token, [&](int64_t i) {
    const int64_t begin = i * options_.ids_per_token, end = begin + options_.ids_per_token;
    double sum = 0;
    bool some = false;
    for (int64_t k = begin; k < end; ++k) {
      const float g = d_student[k];
      sum += g;
      some = some || g != 0;
    }
    if (!some) {  // even if the row holds NaN
      std::fill(d_values.data() + begin, d_values.data() + end, 0.0F);
      return;
    }
    for (int64_t k = begin; k < end; ++k)
      d_values[k] =
          static_cast<float>(d_student[k] - sum * std::exp(static_cast<double>(student_[k])));
  });
  gathered_->backward(ids, d_values.span(), d_logits);
}

}  // namespace gyre

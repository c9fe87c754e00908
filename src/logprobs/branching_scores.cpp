#include "logprobs/branching_scores.hpp"

#include <utility>

#include "core/error.hpp"

namespace gyre {
namespace {

ScoreOptions with_ids_per_token(ScoreOptions options, int64_t ids_per_token) {
  options.ids_per_token = ids_per_token;
  options.entropy = false;
  return options;
}

/// Options of the scores of one branch.
ScoreOptions options_of(const Branch& branch, ScoreOptions options) {
  if (!options.temperatures.empty()) options.temperature = options.temperatures[branch.row];
  options.temperatures = {};
  return with_ids_per_token(options, std::ssize(branch.ids));
}

template <class Byte>
BasicMatrixRef<Byte> row_of(BasicMatrixRef<Byte> matrix, int64_t row) {
  const int64_t bytes = row * matrix.stride * size_of(matrix.type);
  return {matrix.data + bytes, matrix.type, 1, matrix.cols, matrix.stride};
}

}  // namespace

BranchingScores::BranchingScores(int64_t rows, std::vector<Branch> branches,
                                 const VocabPartition& vocab, const ScoreOptions& options,
                                 Communicator& tp)
    : rows_(rows),
      branches_(std::move(branches)),
      of_rows_(rows, vocab, with_ids_per_token(options, 1), tp) {
  for (const Branch& branch : branches_) {
    GYRE_CHECK(branch.row >= 0 && branch.row < rows, "a branch at row {} of {}", branch.row, rows);
    of_branches_.emplace_back(1, vocab, options_of(branch, options), tp);
    branch_ids_ += std::ssize(branch.ids);
  }
}

double BranchingScores::forward(ConstMatrixRef logits, std::span<const int32_t> ids, Stream& stream,
                                std::span<float> logprob) {
  GYRE_CHECK(std::ssize(logprob) == predictions(), "{} log-probabilities of {}", logprob.size(),
             predictions());
  size_t at = rows_;
  double waited = of_rows_.forward(logits, ids, stream, logprob.first(at), {});
  for (size_t b = 0; b < branches_.size(); ++b) {
    const Branch& branch = branches_[b];
    waited += of_branches_[b].forward(row_of(logits, branch.row), branch.ids, stream,
                                      logprob.subspan(at, branch.ids.size()), {});
    at += branch.ids.size();
  }
  return waited;
}

void BranchingScores::backward(ConstMatrixRef logits, std::span<const int32_t> ids,
                               std::span<const float> d_logprob, Stream& stream,
                               MatrixRef d_logits) const {
  GYRE_CHECK(std::ssize(d_logprob) == predictions(), "{} gradients of {}", d_logprob.size(),
             predictions());
  // Branch rows go to buffers first, because the pass over all rows may overwrite the logits.
  const auto columns = d_logits.cols, bytes = columns * size_of(d_logits.type);
  std::vector<Buffer<std::byte>> gradients;
  size_t at = rows_;
  for (size_t b = 0; b < branches_.size(); ++b) {
    const Branch& branch = branches_[b];
    gradients.emplace_back(bytes, stream.space());
    of_branches_[b].backward(row_of(logits, branch.row), branch.ids,
                             {d_logprob.subspan(at, branch.ids.size())},
                             {gradients[b].data(), d_logits.type, 1, columns, columns});
    at += branch.ids.size();
  }
  of_rows_.backward(logits, ids, {d_logprob.first(rows_)}, d_logits);
  for (size_t b = 0; b < branches_.size(); ++b)
    stream.copy(row_of(d_logits, branches_[b].row).data, gradients[b].data(), bytes);
  stream.synchronize();
}

}  // namespace gyre

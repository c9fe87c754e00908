#include <algorithm>
#include <utility>

#include "apps/logprobs/inputs.hpp"

namespace gyre {
LogprobsRows::LogprobsRows(const LogprobsWorkload& problem, const LogprobsInputs& inputs,
                           std::vector<int64_t> tokens, int tp_rank, bool in_place, Stream& stream)
    : stream_(stream),
      inputs_(inputs),
      tokens_(std::move(tokens)),
      first_column_(problem.vocab.begin(tp_rank)),
      output_type_(problem.output_type),
      in_place_(in_place),
      logits_(rows(), problem.vocab.columns(tp_rank), problem.type, stream_.space()),
      targets_(rows()),
      ids_(rows() * problem.picks) {
  fill_logits(inputs, TokenTensor::logits, tokens_, first_column_, logits_.ref(), stream_);
  const size_t picks = problem.picks;
  for (int64_t r = 0; r < rows(); ++r) {
    const int64_t token = tokens_[r];
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

MatrixRef LogprobsRows::d_logprobs() {
  const MatrixRef like = logits_.ref();
  if (!has_d_logprobs_) {
    d_logprobs_ = LogitMatrix(like.rows, like.cols, output_type_, stream_.space());
    fill_rows_of_tokens(
        tokens_, d_logprobs_.ref(), stream_,
        [&](int64_t token, std::span<float> to) { inputs_.d_logprobs(token, first_column_, to); });
    has_d_logprobs_ = true;
  }
  return d_logprobs_.ref();
}

std::vector<float> LogprobsRows::gradients(int64_t first, int64_t count) const {
  std::vector<float> all;
  for (const int64_t token : tokens_)
    for (int64_t i = first; i < first + count; ++i)
      all.push_back(token < 0 ? 0 : inputs_.gradient(token, i));
  return all;
}

LogprobsBackend::LogprobsBackend(ProcessGrid& grid)
    : grid_(grid),
      arrays_(grid),
      stream_(host_),
      row_kernels_(make_row_kernels(stream_)),
      linear_ops_(make_linear_ops(stream_, *row_kernels_)) {}

LogprobsBackend::LogprobsBackend(Backend& backend, const GridShape& shape)
    : own_grid_(std::make_unique<ProcessGrid>(backend.host_staging(), shape)),
      own_arrays_(backend.on_gpu() ? std::make_unique<ProcessGrid>(backend.world(), shape)
                                   : nullptr),
      grid_(*own_grid_),
      arrays_(backend.on_gpu() ? *own_arrays_ : *own_grid_),
      stream_(backend.stream()),
      row_kernels_(make_row_kernels(stream_)),
      linear_ops_(make_linear_ops(stream_, *row_kernels_)) {}

std::vector<int64_t> LogprobsContext::tokens_in_order() const {
  const int64_t cp = grid.shape().cp, rank = grid.cp_rank(), tokens = problem.tokens();
  std::vector<int64_t> own;
  for (int64_t t = tokens * rank / cp; t < tokens * (rank + 1) / cp; ++t) own.push_back(t);
  return own;
}

LogprobsRows& LogprobsContext::in_order() {
  if (!rows_ || !ordered_) {
    rows_ = nullptr;  // free the old rows before the new ones are allocated
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

}  // namespace gyre

#include "apps/logprobs/context.hpp"

#include <utility>

namespace gyre {

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

}  // namespace gyre

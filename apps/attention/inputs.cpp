#include "apps/attention/inputs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "apps/common/packed_streams.hpp"
#include "core/error.hpp"
#include "core/token_random.hpp"
#include "io/packed_file.hpp"

namespace gyre {
namespace {

TokenTensor token_tensor(InputTensor tensor) {
  switch (tensor) {
    case InputTensor::q:
      return TokenTensor::q;
    case InputTensor::k:
      return TokenTensor::k;
    case InputTensor::v:
      return TokenTensor::v;
    case InputTensor::d_out:
      break;
  }
  return TokenTensor::d_out;
}

class RandomRows final : public TensorRows {
 public:
  RandomRows(const AttentionWorkload& problem, uint64_t seed)
      : seed_(seed), round_(problem.type == DType::bf16) {}
  void row(InputTensor tensor, int64_t token, std::span<float> to) const override {
    fill_token_row({seed_, token_tensor(tensor), round_}, token, to);
  }

 private:
  uint64_t seed_;
  bool round_;
};

}  // namespace

int64_t AttentionWorkload::longest() const {
  int64_t most = 0;
  for (int64_t d = 0; d < documents(); ++d) most = std::max(most, length(d));
  return most;
}

int64_t AttentionWorkload::pairs() const {
  int64_t sum = 0;
  for (int64_t d = 0; d < documents(); ++d) sum += visible_pairs(length(d), mask);
  return sum * heads.heads;
}

double sampled_score_size(const AttentionWorkload& problem, const TensorRows& inputs) {
  constexpr int64_t most = 32;
  const auto stride = [](int64_t count) { return std::max<int64_t>(1, ceil_div(count, most)); };
  std::vector<float> q(static_cast<size_t>(problem.width(InputTensor::q)));
  std::vector<float> k(static_cast<size_t>(problem.width(InputTensor::k)));
  const auto dim = static_cast<size_t>(problem.heads.head_dim);
  const auto group = static_cast<size_t>(problem.heads.group());
  double squares = 0, scores = 0;
  for (int64_t d = 0; d < problem.documents(); d += stride(problem.documents())) {
    const int64_t first = problem.offsets[static_cast<size_t>(d)], length = problem.length(d);
    for (int64_t i = length - 1; i >= 0; i -= stride(length)) {
      inputs.row(InputTensor::q, first + i, q);
      // The pair of a token with itself is always visible, and often has the largest score.
      for (int64_t j = i; j >= 0; j -= stride(i + 1)) {
        if (problem.mask.window > 0 && i - j >= problem.mask.window) break;
        inputs.row(InputTensor::k, first + j, k);
        for (size_t h = 0; h < static_cast<size_t>(problem.heads.heads); ++h) {
          double score = 0;
          for (size_t e = 0; e < dim; ++e)
            score +=
                static_cast<double>(q[h * dim + e]) * static_cast<double>(k[h / group * dim + e]);
          score *= static_cast<double>(problem.heads.scale);
          squares += score * score;
          ++scores;
        }
      }
    }
  }
  return scores > 0 ? std::max(1.0, std::sqrt(squares / scores)) : 1;
}

std::unique_ptr<TensorRows> random_rows(const AttentionWorkload& problem, uint64_t seed) {
  return std::make_unique<RandomRows>(problem, seed);
}

std::vector<float> random_sinks(int64_t heads, uint64_t seed) {
  std::vector<float> sinks(static_cast<size_t>(heads));
  fill_token_row({seed, TokenTensor::sinks, false}, 0, sinks);
  return sinks;
}

WorkloadLayout::WorkloadLayout(const AttentionWorkload& problem, const LayoutKind& kind,
                               const LayoutOptions& options) {
  const int64_t multiple = kind.segment_multiple(options.cp);
  int64_t tokens = 0, slots = 0;
  for (int64_t d = 0; d < problem.documents(); ++d) {
    tokens += problem.length(d);
    slots += round_up(problem.length(d), multiple);
    if (slots > std::numeric_limits<int32_t>::max())
      throw_usage("document {} ends beyond slot 2^31 - 1 when documents take multiples of {} slots",
                  d, multiple);
    real.push_back(static_cast<int32_t>(tokens));
    padded.push_back(static_cast<int32_t>(slots));
  }
  layout = kind.make({real, padded}, options);
}

std::vector<TokenRow> token_rows(const AttentionWorkload& problem, const Shard& shard) {
  std::vector<TokenRow> rows;
  for (const Fragment& f : shard.fragments) {
    const int64_t document = f.segment.value();
    const int64_t first = problem.offsets[static_cast<size_t>(document)] + f.start.value();
    for (int64_t i = 0; i < f.length; ++i)
      rows.push_back({first + i * f.stride, f.local_begin.value() + i, document});
  }
  return rows;
}

void fill_rows(const AttentionWorkload& problem, const TensorRows& inputs, InputTensor tensor,
               const Shard& shard, MatrixRef to) {
  std::vector<float> row(static_cast<size_t>(to.cols), std::numeric_limits<float>::quiet_NaN());
  const auto put = [&](int64_t at) {
    for (int64_t c = 0; c < to.cols; ++c) {
      if (to.type == DType::f32)
        to.as<float>()(at, c) = row[static_cast<size_t>(c)];
      else
        to.as<bf16>()(at, c) = to_bf16(row[static_cast<size_t>(c)]);
    }
  };
  for (int64_t at = 0; at < to.rows; ++at) put(at);
  for (const TokenRow& own : token_rows(problem, shard)) {
    inputs.row(tensor, own.token, row);
    put(own.row);
  }
}

}  // namespace gyre

#include "apps/logprobs/op.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>

#include "comm/agree.hpp"

namespace gyre {
namespace {

uint64_t digest(std::span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a, of words
  for (const float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3U;
  return hash;
}

}  // namespace

SentTraffic LogprobsOp::all_gather_of(const Communicator& group, int64_t bytes) {
  return {group.size() > 1 ? 1 : 0, (group.size() - 1) * bytes};
}

SentTraffic LogprobsOp::all_reduce_of(const Communicator& group, int64_t bytes) {
  return {group.size() > 1 ? 1 : 0, 2 * (group.size() - 1) * bytes / group.size()};
}

SentTraffic LogprobsOp::reduce_scatter_of(const Communicator& group, int64_t bytes) {
  return {group.size() > 1 ? 1 : 0, (group.size() - 1) * bytes / group.size()};
}

std::vector<double> LogprobsOp::whole_row(int64_t token, TokenTensor tensor) const {
  std::vector<float> row(static_cast<size_t>(vocab().vocab_size));
  c_.inputs.row(tensor, token, 0, row);
  return {row.begin(), row.end()};
}

std::vector<int64_t> LogprobsOp::sample(std::span<const int64_t> tokens) const {
  std::vector<int64_t> real, some;
  for (int64_t r = 0; r < std::ssize(tokens); ++r)
    if (tokens[static_cast<size_t>(r)] >= 0) real.push_back(r);
  const int64_t budget = std::max<int64_t>(1, c_.options.check_tokens / c_.grid.shape().cp);
  const int64_t count = std::ssize(real), step = std::max<int64_t>(1, ceil_div(count, budget));
  // Not every step-th one: kernels work in tiles, and a fault may sit in the same place of each.
  for (int64_t i = 0; i < count; ++i) {
    const auto block = static_cast<uint64_t>(i / step);
    const auto chosen =
        static_cast<int64_t>((block * splitmix64_golden >> 32) % static_cast<uint64_t>(step));
    if (i % step == chosen || i == 0 || i + 1 == count)
      some.push_back(real[static_cast<size_t>(i)]);
  }
  return some;
}

Check& LogprobsOp::check_of(const std::string& label, const char* what, double tolerance,
                            Verification& checks) const {
  Check& check = checks.check(fmt::format("{}: {}", label, what), tolerance);
  if (c_.problem.tokens() == 0) check.add_nothing();
  return check;
}

void LogprobsOp::check_same_bits(const std::string& label, std::span<const float> results,
                                 Communicator& group, Verification& checks) {
  const auto mine = static_cast<int64_t>(digest(results));
  const std::vector<int64_t> all = all_gather_value(group, mine);
  Check& check = checks.check(label + ": same bits on all ranks", 0);
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == all[0])
      check.add_nothing();
    else
      check.add_failure(fmt::format("rank {} of the group differs from rank 0", r));
  }
}

std::vector<double> RowGradientTerms::scales() const {
  std::vector<double> added(logprobs.size(), 0), all;
  for (size_t k = 0; k < ids.size(); ++k)
    if (ids[k] >= 0 && ids[k] < std::ssize(added))
      added[static_cast<size_t>(ids[k])] += std::abs(weights[k]);
  for (size_t v = 0; v < logprobs.size(); ++v)
    all.push_back(logit_gradient_scale(logprobs[v], a, b, added[v]));
  return all;
}

void add_gradient_row(Check& check, ConstMatrixRef d_logits, int64_t row, int64_t first_column,
                      std::span<const double> want, std::span<const double> scales, int64_t token) {
  for (int64_t c = 0; c < d_logits.cols; ++c) {
    const auto id = static_cast<size_t>(first_column + c);
    const bool padding = id >= want.size();
    add_value(
        check, d_logits.at(row, c), padding ? 0 : want[id],
        [&] { return fmt::format("token {} column {}", token, id); }, padding ? 1 : scales[id]);
  }
}

}  // namespace gyre

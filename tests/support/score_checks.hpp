#pragma once
// Helpers of tests of sharded log-probabilities: ids and gradients of all kinds, and comparisons
// with the references of logprobs/reference.hpp.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "comm/agree.hpp"
#include "logprob_cases.hpp"
#include "logprobs/tolerance.hpp"
#include "mpi_test.hpp"

namespace gyre::test {

/// [tokens, picks] ids: every eighth belongs to no rank (negative, in the padding, far beyond),
/// every eighth repeats the previous one.
inline std::vector<int32_t> mixed_ids(int64_t tokens, int64_t picks, int64_t vocab_size,
                                      uint64_t seed = 1) {
  const auto size = static_cast<int32_t>(vocab_size);
  const std::vector<int32_t> nobodys = {-1, -100, size, size + 1, 1 << 30, -(1 << 30)};
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < picks; ++k) {
      const uint64_t bits = token_bits({seed, TokenTensor::ids}, t, k);
      const uint64_t kind = (bits >> 32) % 8;
      if (kind == 0)
        ids.push_back(nobodys[bits % nobodys.size()]);
      else if (kind == 1 && k > 0)
        ids.push_back(ids.back());
      else
        ids.push_back(static_cast<int32_t>(bits % static_cast<uint64_t>(vocab_size)));
    }
  return ids;
}

/// Normal numbers, [tokens, width]; every fifth token has zeros.
inline std::vector<float> gradients(int64_t tokens, int64_t width, uint64_t seed = 1) {
  std::vector<float> all(tokens * width, 0.0F);
  for (int64_t t = 0; t < tokens; ++t)
    if (t % 5 != 3)
      fill_token_row({seed, TokenTensor::gradient}, t, std::span(all).subspan(t * width, width));
  return all;
}

template <class T>
std::span<const T> row_of(const std::vector<T>& values, int64_t row, int64_t width) {
  return std::span<const T>(values).subspan(row * width, width);
}
inline std::vector<double> doubles(std::span<const float> values) {
  return {values.begin(), values.end()};
}

/// Expects `got` within `tolerance` of `want`. Infinities and NaN must be the same, and so must
/// values with a tolerance of 0.
inline void expect_near(double got, double want, double tolerance, const std::string& where) {
  if (got == want || (std::isnan(got) && std::isnan(want))) return;
  EXPECT_LE(std::abs(got - want) / tolerance, 1)
      << "err/tol of " << where << ": " << got << ", expected " << want;
}

inline void expect_logprob(float got, double want, const std::string& where) {
  expect_near(got, want, logprob_tolerance() * logprob_scale(want), where);
}
inline void expect_entropy(float got, double want, int64_t vocab_size, const std::string& where) {
  expect_near(got, want, logprob_tolerance() * entropy_scale(vocab_size), where);
}

/// Compares this rank's columns of a row of gradients, with errors relative to `scale`
/// [vocab_size], and expects exact zeros in the padding. got [tokens, this rank's columns], stored
/// as `type`.
inline void expect_gradient_row(const std::vector<float>& got, DType type, int64_t token,
                                const VocabPartition& vocab, int rank, std::span<const double> want,
                                std::span<const double> scale) {
  const auto row = row_of(got, token, vocab.columns(rank));
  for (size_t c = 0; c < row.size(); ++c) {
    const auto id = static_cast<size_t>(vocab.begin(rank)) + c;
    const std::string where = fmt::format("gradient of token {}, id {}", token, id);
    if (id >= want.size())
      EXPECT_EQ(row[c], 0) << where;
    else
      expect_near(row[c], want[id], logit_gradient_tolerance(type) * scale[id], where);
  }
}

/// A hash of the bits.
template <class T>
int64_t digest(std::span<const T> values) {
  uint64_t hash = 0;
  for (const std::byte byte : std::as_bytes(values))
    hash = splitmix64_mix(hash + splitmix64_golden + static_cast<uint64_t>(byte));
  return std::bit_cast<int64_t>(hash);
}
inline void expect_same_on_all_ranks(std::span<const float> values) {
  const std::vector<int64_t> all = all_gather_value(world(), digest(values));
  EXPECT_EQ(all, std::vector<int64_t>(all.size(), all[0])) << "digests of the ranks' results";
}
/// The elements of a matrix without its gaps.
inline std::vector<float> elements(ConstMatrixRef matrix) {
  std::vector<float> all;
  for (int64_t r = 0; r < matrix.rows; ++r)
    for (int64_t c = 0; c < matrix.cols; ++c) all.push_back(matrix.at(r, c));
  return all;
}

/// Traffic since its construction.
class TrafficSince {
 public:
  explicit TrafficSince(const Communicator& comm) : comm_(comm), start_(comm.traffic()) {}
  int64_t messages() const { return comm_.traffic().messages - start_.messages; }
  int64_t bytes() const { return comm_.traffic().bytes_sent - start_.bytes_sent; }

 private:
  const Communicator& comm_;
  Traffic start_;
};

/// " (found on rank r)" where only one rank of several erred.
inline std::string found_on(int rank) {
  return world().size() == 1 ? "" : fmt::format(" (found on rank {})", rank);
}
/// The message about an argument that is `mine` on all ranks but the last, where it is `other`;
/// none on one rank.
inline std::string differs(const std::string& what, const std::string& name,
                           const std::string& mine, const std::string& other) {
  if (world().size() == 1) return "no error";
  return fmt::format(
      "{}: {} is {} on rank 0, but {} on rank {}; it must be the same on all ranks "
      "of the group",
      what, name, mine, other, world().size() - 1);
}
inline bool on_last_rank() {
  return world().rank() == world().size() - 1;
}

}  // namespace gyre::test

#pragma once
// Logits for tests: whole rows in double precision, and any rank's shard of them. Padded columns
// and the gaps between rows of a shard are NaN.

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/matrix_ref.hpp"
#include "core/token_random.hpp"
#include "logprobs/vocab_partition.hpp"

namespace gyre::test {

/// A matrix of f32 or bf16 with a gap after each row.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, DType type)
      : type_(type), rows_(rows), cols_(cols), stride_(cols + 3) {
    const int64_t count = rows * stride_;
    if (type == DType::f32)
      floats_.assign(count, std::numeric_limits<float>::quiet_NaN());
    else
      halves_.assign(count, to_bf16(std::numeric_limits<float>::quiet_NaN()));
  }
  MatrixRef ref() {
    if (type_ == DType::f32) return MatrixView<float>(floats_.data(), rows_, cols_, stride_);
    return MatrixView<bf16>(halves_.data(), rows_, cols_, stride_);
  }
  ConstMatrixRef ref() const { return const_cast<Matrix*>(this)->ref(); }
  void set(int64_t row, int64_t col, double value) {
    const int64_t at = row * stride_ + col;
    if (type_ == DType::f32)
      floats_[at] = static_cast<float>(value);
    else
      halves_[at] = to_bf16(static_cast<float>(value));
  }
  double at(int64_t row, int64_t col) const { return static_cast<double>(ref().at(row, col)); }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

 private:
  DType type_;
  int64_t rows_, cols_, stride_;
  std::vector<float> floats_;
  std::vector<bf16> halves_;
};

/// Rows of vocab_size logits.
struct LogitRows {
  int64_t tokens = 0, vocab_size = 0;
  std::vector<double> values;  ///< [tokens, vocab_size]

  LogitRows(int64_t tokens_, int64_t vocab_size_)
      : tokens(tokens_), vocab_size(vocab_size_), values(tokens_ * vocab_size_) {}
  double& at(int64_t token, int64_t id) { return values[token * vocab_size + id]; }
  std::span<const double> row(int64_t token) const {
    return std::span(values).subspan(token * vocab_size, vocab_size);
  }
  /// The columns of one rank.
  Matrix shard(const VocabPartition& vocab, int rank, DType type) const {
    Matrix matrix(tokens, vocab.columns(rank), type);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t c = 0; c < vocab.valid(rank); ++c)
        matrix.set(t, c, row(t)[vocab.begin(rank) + c]);
    return matrix;
  }
};

/// Random rows of this standard deviation that `type` holds exactly.
inline LogitRows random_logits(int64_t tokens, int64_t vocab_size, DType type, double size = 2,
                               uint64_t seed = 1, TokenTensor tensor = TokenTensor::logits) {
  LogitRows rows(tokens, vocab_size);
  std::vector<float> row(vocab_size);
  for (int64_t t = 0; t < tokens; ++t) {
    fill_token_row({seed, tensor}, t, row);
    for (int64_t v = 0; v < vocab_size; ++v) {
      const float z = row[v] * static_cast<float>(size);
      rows.at(t, v) = static_cast<double>(type == DType::bf16 ? to_float(to_bf16(z)) : z);
    }
  }
  return rows;
}

/// Two batches of 8 rows of 64: ((row_factor · b + ...) mod 97) / 8 - 6, exact in bf16, no ties in
/// a row. The first tensor is the student's, or the only one; the second a teacher's.
inline LogitRows golden_logits() {
  LogitRows rows(16, 64);
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t s = 0; s < 8; ++s)
      for (int64_t v = 0; v < 64; ++v)
        rows.at(8 * b + s, v) = static_cast<double>((131 * b + 31 * s + 17 * v) % 97) / 8 - 6;
  return rows;
}
inline LogitRows golden_teacher() {
  LogitRows rows(16, 64);
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t s = 0; s < 8; ++s)
      for (int64_t v = 0; v < 64; ++v)
        rows.at(8 * b + s, v) = static_cast<double>((71 * b + 19 * s + 23 * v + 11) % 97) / 8 - 6;
  return rows;
}
/// Targets of the 16 golden rows, before any shift.
inline std::vector<int32_t> golden_targets() {
  std::vector<int32_t> targets;
  for (int32_t b = 0; b < 2; ++b)
    for (int32_t s = 0; s < 8; ++s) targets.push_back((7 * b + 13 * s + 5) % 64);
  return targets;
}

/// Partitions of a vocabulary of this size over `ranks` ranks: even with padding, as even as
/// possible without, and uneven, with an empty shard for more than two ranks.
inline std::vector<VocabPartition> partitions(int64_t vocab_size, int ranks) {
  const int64_t padded = (vocab_size / ranks + 2) * ranks;
  std::vector<int64_t> uneven(ranks, 0);
  int64_t left = vocab_size;
  for (int r = 0; r + 1 < ranks; ++r) {
    const int64_t share = r == 1 ? 0 : left / 3;
    uneven[r] = share;
    left -= share;
  }
  uneven.back() = left;
  return {even_partition(vocab_size, padded, ranks), balanced_partition(vocab_size, ranks),
          partition_of(uneven, vocab_size)};
}

/// A temperature for each token.
inline std::vector<double> own_temperatures(int64_t tokens) {
  std::vector<double> all;
  for (int64_t t = 0; t < tokens; ++t) all.push_back(std::array{1.0, 0.25, 3.0, 0.7}[t % 4]);
  return all;
}

}  // namespace gyre::test

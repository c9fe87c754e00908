#pragma once
// What gyre-attention works on: documents, and the rows of q, k, v and d_out of every token.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/plan.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

enum class InputTensor { q, k, v, d_out };

/// Documents in one row, and the attention over them. Token t of all documents is position
/// t - offsets[d] of document d.
struct AttentionWorkload {
  HeadShape heads;
  MaskRule mask;
  std::vector<int64_t> offsets;  ///< [documents + 1]
  std::vector<float> sinks;      ///< [heads], or empty
  DType type = DType::f32;       ///< of q, k, v, d_out: values are rounded to it
  double score_size = 1;         ///< rms of scaled scores, at least 1; normal inputs have 1
  std::string origin;            ///< what made it, for the report

  int64_t documents() const { return std::ssize(offsets) - 1; }
  int64_t tokens() const { return offsets.back(); }
  int64_t length(int64_t d) const {
    return offsets[static_cast<size_t>(d) + 1] - offsets[static_cast<size_t>(d)];
  }
  int64_t longest() const;
  /// Visible (query, key) pairs of all documents, times the query heads.
  int64_t pairs() const;
  /// Elements of a token's row.
  int64_t width(InputTensor tensor) const {
    const bool kv = tensor == InputTensor::k || tensor == InputTensor::v;
    return (kv ? heads.kv_heads : heads.heads) * heads.head_dim;
  }
};

/// Rows of the inputs, of which every rank can have any.
class TensorRows {
 public:
  virtual ~TensorRows() = default;
  /// to [heads · head_dim] <- a token's row.
  virtual void row(InputTensor tensor, int64_t token, std::span<float> to) const = 0;
};

/// The rms of scale · <q, k> over some of the visible pairs (up to 32 queries of each of up to 32
/// documents, with up to 32 keys each, all heads); at least 1.
double sampled_score_size(const AttentionWorkload& problem, const TensorRows& inputs);

/// Nearly normal numbers, a function of seed, tensor, token and element only
/// (core/token_random.hpp). Sinks, if there are to be any, come from the same.
std::unique_ptr<TensorRows> random_rows(const AttentionWorkload& problem, uint64_t seed);
std::vector<float> random_sinks(int64_t heads, uint64_t seed);

/// A case under a layout: every document in as many slots as the layout needs. Throws a usage error
/// when that is more than 2^31 - 1 slots.
struct WorkloadLayout {
  std::vector<int32_t> real = {0}, padded = {0};
  Layout layout;
  WorkloadLayout(const AttentionWorkload& problem, const LayoutKind& kind,
                 const LayoutOptions& options);
};

/// A token and its slot in a shard.
struct TokenRow {
  int64_t token, row, document;
};
/// The tokens of a shard (or of any rows of an array: shard_of), in the order of its fragments.
std::vector<TokenRow> token_rows(const AttentionWorkload& problem, const Shard& shard);

/// Puts the rows of a rank's tokens into `to` [slots, heads · head_dim]; NaN into padding, which
/// nothing may read.
void fill_rows(const AttentionWorkload& problem, const TensorRows& inputs, InputTensor tensor,
               const Shard& shard, MatrixRef to);

}  // namespace gyre

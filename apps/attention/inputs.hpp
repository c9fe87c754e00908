#pragma once
// The inputs of gyre-attention: rows of q, k, v and d_out of any token, random or from a file.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "apps/attention/workload.hpp"
#include "report/answers.hpp"

namespace gyre {

/// Rows of the inputs. Every rank can read any row.
class TensorRows {
 public:
  virtual ~TensorRows() = default;
  /// to [heads · head_dim] <- a token's row.
  virtual void row(InputTensor tensor, int64_t token, std::span<float> to) const = 0;
};

/// Nearly normal numbers, a function of seed, tensor, token and element only
/// (core/token_random.hpp), rounded to the type of the workload.
std::unique_ptr<TensorRows> random_rows(const AttentionWorkload& workload, uint64_t seed);
/// Random sinks [heads], by the same function.
std::vector<float> random_sinks(int64_t heads, uint64_t seed);
/// Rows of the file, which must outlive them, rounded to `type`.
std::unique_ptr<TensorRows> rows_of(const AttentionFile& file, DType type);
/// Removes the answers that depend on an input which the run rounds. Returns the use of every
/// answer.
std::vector<AnswerUse> keep_answers(AttentionFile& file, const AttentionOptions& o);

/// The rms of scale · <q, k> over a sample of the visible pairs (all heads; up to 32 documents, 32
/// queries per document, 32 keys per query); at least 1.
double sampled_score_size(const AttentionWorkload& workload, const TensorRows& inputs);

/// A token and its slot in a shard.
struct TokenRow {
  int64_t token, row, document;
};
/// The tokens of a shard (or of any rows of an array: shard_of), in the order of its fragments.
std::vector<TokenRow> token_rows(const AttentionWorkload& workload, const Shard& shard);

/// Fills `to` [slots, heads · head_dim] with the rows of a rank's tokens, and its padding, which
/// nothing may read, with NaN.
void fill_rows(const AttentionWorkload& workload, const TensorRows& inputs, InputTensor tensor,
               const Shard& shard, MatrixRef to);

}  // namespace gyre

#pragma once
// The records from which log-probabilities and entropies are made, in the memory that the logits
// lie in: on a device, nothing of them passes through the host but the results.
//
//     add      for each tile of logits: its moments join the totals of its rows, in f64, and the
//              logits of ids that it holds are kept
//     own      the totals in f32: max, sum and, with entropies, weighted of each row, [rows, 2] or
//              [rows, 3]; behind them the logits of its ids, [rows, K], 0 where another rank has
//              them
//     merge    one all-gather of own, 4 (2 + K + 1 if entropy) bytes a row; each rank merges all
//              ranks' records in rank order: the same bits everywhere
//
// A merge on a device ends with the one copy to the host for which the host waits.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/row_gradient.hpp"
#include "logprobs/vocab_partition.hpp"

namespace gyre {

class RowKernels;

struct RecordShape {
  VocabPartition vocab;
  int rank = 0;          ///< whose columns are added
  int64_t picks = 1;     ///< K: ids of each row
  bool entropy = false;  ///< whether entropies are asked for
  float scale = 1;       ///< 1 / temperature
  int threads = 1;       ///< of the host

  int64_t moments() const { return entropy ? 3 : 2; }     ///< floats of a row's moments
  int64_t width() const { return moments() + picks; }     ///< floats of a row's record
  int64_t first_id() const { return vocab.begin(rank); }  ///< of the first column
};

/// What is made of the records of all ranks, in host memory.
struct RowScores {
  std::span<RowNormalizer> normalizers;  ///< [rows]
  std::span<float> logprob;              ///< [rows, K]; 0 for ids that nobody owns
  std::span<float> entropy;              ///< [rows] (nats), or empty: not asked for
};

class ScoreRecords {
 public:
  explicit ScoreRecords(RecordShape shape) : shape_(std::move(shape)) {}
  virtual ~ScoreRecords() = default;

  /// From now on of `rows` rows, of which nothing is known yet; ids [rows, K] (global), which must
  /// stay as they are until merge().
  virtual void start(int64_t rows, std::span<const int32_t> ids) = 0;
  /// Rows [row, row + logits.rows) gain columns [column, column + columns) of the shard: the first
  /// ones of `logits`, which is read in the order of the kernels' stream. No column is added twice.
  virtual void add(ConstMatrixRef logits, int64_t row, int64_t column, int64_t columns) = 0;
  /// One all-gather over the ranks of the shape, by `arrays`, which is of the memory of the logits;
  /// not asked for on one rank. Results are complete on return. Returns the seconds that `stream`,
  /// the kernels', waited for other ranks. Collective.
  double merge(Communicator& arrays, Stream& stream, std::string_view what, const RowScores& out);

 protected:
  /// This rank's records, [rows, moments] and [rows, picks], in the order of the kernels' stream.
  virtual std::span<const float> own() = 0;
  /// Room for those of all ranks, [ranks, rows · width].
  virtual std::span<float> all() = 0;
  /// `records` are own(), or all() when they have arrived.
  virtual void merge_records(std::span<const float> records, const RowScores& out) = 0;

  RecordShape shape_;
};

/// On the host, of rows that `kernels`, the host's, read.
std::unique_ptr<ScoreRecords> make_host_score_records(RowKernels& kernels,
                                                      const RecordShape& shape);

}  // namespace gyre

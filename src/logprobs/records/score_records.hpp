#pragma once
// Per-row records for log-probabilities and entropies, in the memory space of the logits. On a
// device, only the results pass through the host.
//
//     add      for each tile of logits: adds its partials to the totals of its rows, in f64, and
//              keeps the logits of ids in the tile
//     own      the totals in f32: max, sum, weighted for entropies, total for means of log p, of
//              each row; then the logits of its ids, [rows, K], 0 for ids on other ranks
//     merge    one all-gather of own, 4 (2 + K) bytes per row, 4 more with entropies and with
//              means; each rank merges all ranks' records in rank order: the same bits everywhere
//
// On a device, the host waits once, at the end of the merge. Ids and results in pinned memory are
// read and written there by the kernels; the host copies others to or from pinned memory.

#include <cstdint>
#include <span>
#include <string_view>

#include "comm/communicator.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/records/row_total.hpp"
#include "logprobs/records/staged_arrays.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/vocab_partition.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

class RowKernels;

/// The numbers of a row's partials in a record: max and sum, then those that are wanted.
struct PartialFields {
  bool weighted = false, total = false;

  GYRE_HOST_DEVICE int64_t count() const { return 2 + (weighted ? 1 : 0) + (total ? 1 : 0); }
  GYRE_HOST_DEVICE SoftmaxPartial read(const float* from) const {
    return {from[0], from[1], weighted ? from[2] : 0, total ? from[count() - 1] : 0};
  }
  GYRE_HOST_DEVICE void write(const SoftmaxPartial& row, float* to) const {
    to[0] = row.max;
    to[1] = row.sum;
    if (weighted) to[2] = row.weighted;
    if (total) to[count() - 1] = row.total;
  }
  /// Total of a row over ranks, whose records are `block` numbers apart.
  GYRE_HOST_DEVICE RowTotal merged(const float* first, int64_t block, int ranks,
                                   double scale) const {
    RowTotal row;
    for (int r = 0; r < ranks; ++r) row.add(read(first + r * block), scale);
    return row;
  }
};

struct RecordShape {
  VocabPartition vocab;
  int rank = 0;               ///< the rank whose columns are added
  int64_t ids_per_token = 1;  ///< K: ids per row
  PartialFields fields;       ///< weighted: entropies are wanted; total: means of log p
  RowScale scale = 1;  ///< 1 / temperature: constant, in host memory that outlives the records
  int threads = 1;     ///< host threads

  int64_t partials() const { return fields.count(); }           ///< floats of a row's partials
  int64_t width() const { return partials() + ids_per_token; }  ///< floats of a row's record
  int64_t first_id() const { return vocab.begin(rank); }        ///< id of the first column
};

/// Results of merging the records of all ranks, in host memory.
struct RowScores {
  std::span<RowNormalizer> normalizers;  ///< [rows]
  std::span<float> logprob;              ///< [rows, K]; 0 for ids that no rank owns
  std::span<float> entropy;              ///< [rows] (nats), or empty: not requested
  std::span<float> mean_logprob = {};    ///< [rows] over the vocabulary, or empty
};

/// Memory space of results on the host that these kernels write without a copy.
MemorySpace results_space(const RowKernels& kernels);

class ScoreRecords {
 public:
  /// Keeps records in memory of the kernels, which must outlive this.
  ScoreRecords(RowKernels& kernels, const RecordShape& shape);

  /// Starts records of `rows` rows without columns. ids [rows, K] (global) must not change until
  /// merge(), which fills `out`.
  void start(int64_t rows, std::span<const int32_t> ids, const RowScores& out);
  /// Adds columns [column, column + columns) of the shard to rows [row, row + logits.rows): the
  /// first columns of `logits`, read in stream order of the kernels. No column may be added twice.
  /// Column 0 is in the first tile of a row.
  void add(ConstMatrixRef logits, int64_t row, int64_t column, int64_t columns);
  /// Merges by one all-gather over the shape's ranks by `arrays`, in the memory space of the logits
  /// (unused on one rank). Results are complete on return. Returns the seconds that `stream`, the
  /// kernels' stream, waited for other ranks. Collective.
  double merge(Communicator& arrays, Stream& stream, std::string_view what);

 private:
  template <class Merge>
  Merge merge_of(std::span<const float> records) const;

  RowKernels& kernels_;
  RecordShape shape_;
  int64_t rows_ = 0;
  bool added_ = false, scored_ = false;  // since start()
  StagedArrays staged_;
  // The kernels read ids and write results here.
  const int32_t* ids_ = nullptr;
  RowNormalizer* normalizers_ = nullptr;
  float *logprob_ = nullptr, *entropy_ = nullptr, *mean_logprob_ = nullptr;
  Buffer<int64_t> offsets_;  // of the partition
  Buffer<float> scales_;     // [rows], or empty: one for all
  Buffer<std::byte> parts_memory_, totals_memory_, own_memory_, all_memory_;
  std::span<RowTotal> totals_;  // [rows]
  std::span<float> own_;        // [rows, partials], then [rows, ids_per_token]
};

}  // namespace gyre

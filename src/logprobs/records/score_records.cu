// Records of scores on hosts and devices: one source, whose loops run in the memory space of a
// stream (record_loops.cuh).

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.hpp"
#include "logprobs/records/gather_records.hpp"
#include "logprobs/records/record_loops.cuh"
#include "logprobs/records/score_records.hpp"
#include "logprobs/rows/row_kernels.hpp"

namespace gyre {
namespace {

/// Points to ids and results in memory that the kernels read and write.
struct ScoresAt {
  const int32_t* ids = nullptr;                       // [rows, ids of a row]
  RowNormalizer* normalizers = nullptr;               // [rows]
  float* logprob = nullptr;                           // [rows, ids of a row]
  float *entropy = nullptr, *mean_logprob = nullptr;  // [rows], or null: not requested
};

/// Merges all ranks' records of a row into its results; the lanes of the row share its ids.
struct MergeRow {
  const float* records = nullptr;  // [ranks, rows · (fields + ids of a row)]
  int64_t rows = 0, per_row = 0;
  PartialFields fields;
  int ranks = 0;
  RowScale scale;
  const int64_t* offsets = nullptr;  // of the partition, [ranks + 1]
  int64_t vocab_size = 0;
  ScoresAt to;

  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t row, const Lanes& lanes) const {
    const int64_t block = rows * (fields.count() + per_row);
    const double factor = scale[row];
    const RowTotal total = fields.merged(records + row * fields.count(), block, ranks, factor);
    const double log_sum = std::log(total.sum);
    if (lanes.first == 0) {
      to.normalizers[row] = {total.max, static_cast<float>(log_sum)};
      if (to.entropy != nullptr) to.entropy[row] = total.entropy(log_sum);
      if (to.mean_logprob != nullptr)
        to.mean_logprob[row] = total.mean_logprob(vocab_size, factor, log_sum);
    }
    const float* const logits = records + rows * fields.count();
    for (int64_t i = lanes.first; i < per_row; i += lanes.count) {
      const int64_t k = row * per_row + i;
      const int owner = owner_of(offsets, vocab_size, to.ids[k]);
      to.logprob[k] = owner < 0 ? 0 : total.logprob(logits[owner * block + k], factor, log_sum);
    }
  }
};

/// Adds the partials of a tile of logits to the totals of its rows, and keeps the logits of ids.
/// Pointers are those of the tile's first row.
template <class T>
struct AddTile {
  MatrixView<const T> logits;
  int64_t columns = 0;
  int64_t first_id = 0;   // id of the first column
  bool is_first = false;  // the tile has column 0: the records are empty
  bool is_all = false;    // one rank, and the tile is its whole shard: the results are known
  RowParts parts;
  RowTotal* totals = nullptr;
  float *partials = nullptr, *id_logits = nullptr;
  const int32_t* ids = nullptr;
  MergeRow merge;  // of all rows

  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t row, const Lanes& lanes) const {
    const float factor = merge.scale[row];
    RowTotal total;
    if (!is_first) total = totals[row];
    total.add(parts.partial(row, factor, merge.fields.weighted), factor);
    lanes.wait_for_others();  // all lanes have read the total
    if (lanes.first == 0) {
      totals[row] = total;
      merge.fields.write(total.partials(), partials + row * merge.fields.count());
    }
    const int64_t per_row = merge.per_row;
    const T* const z = logits.data + row * logits.stride;
    for (int64_t i = lanes.first; i < per_row; i += lanes.count) {
      const int64_t k = row * per_row + i;
      if constexpr (Lanes::count == 1) prefetch_id(z, i + ids_ahead, k + ids_ahead);
      const int64_t column = rows::column_of(ids[k], first_id, columns);
      if (column >= 0)
        id_logits[k] = to_float(z[column]);
      else if (is_first)
        id_logits[k] = 0;  // unless another tile has it
    }
    if (!is_all) return;
    lanes.wait_for_others();
    merge(row, lanes);
  }

 private:
  static constexpr int64_t ids_ahead = 16;
  /// Each id is a cache miss of the host.
  GYRE_HOST_DEVICE void prefetch_id(const T* z, int64_t i, int64_t k) const {
#ifndef __CUDA_ARCH__
    if (i >= merge.per_row) return;
    const int64_t column = rows::column_of(ids[k], first_id, columns);
    if (column >= 0) __builtin_prefetch(z + column);
#endif
  }
};

}  // namespace

MemorySpace results_space(const RowKernels& kernels) {
  return kernels.space() == MemorySpace::device ? MemorySpace::pinned : MemorySpace::host;
}

ScoreRecords::ScoreRecords(RowKernels& kernels, const RecordShape& shape)
    : kernels_(kernels), shape_(shape), staged_(kernels.stream()) {
  offsets_ = in_space_of(kernels.stream(), std::span<const int64_t>(shape_.vocab.offsets));
}

void ScoreRecords::start(int64_t rows, std::span<const int32_t> ids, const RowScores& out) {
  GYRE_CHECK(std::ssize(ids) == rows * shape_.ids_per_token, "{} ids of {} x {}", ids.size(), rows,
             shape_.ids_per_token);
  rows_ = rows;
  added_ = scored_ = false;
  staged_.begin();
  ids_ = staged_.input(ids);
  normalizers_ = staged_.output(out.normalizers);
  logprob_ = staged_.output(out.logprob);
  entropy_ = staged_.output(out.entropy);
  mean_logprob_ = staged_.output(out.mean_logprob);
  const MemorySpace space = kernels_.space();
  own_ = at_least<float>(own_memory_, rows * shape_.width(), space);
  totals_ = at_least<RowTotal>(totals_memory_, rows, space);
  const float* const factors = shape_.scale.of_rows();
  if (factors != nullptr && scales_.size() != rows)
    scales_ = in_space_of(kernels_.stream(), std::span(factors, static_cast<size_t>(rows)));
}

/// The merge of these records, in this rank's memory.
template <class Merge>
Merge ScoreRecords::merge_of(std::span<const float> records) const {
  return {records.data(),
          rows_,
          shape_.ids_per_token,
          shape_.fields,
          shape_.vocab.ranks(),
          shape_.scale.at(scales_.data()),
          offsets_.data(),
          shape_.vocab.vocab_size,
          {ids_, normalizers_, logprob_, entropy_, mean_logprob_}};
}

void ScoreRecords::add(ConstMatrixRef logits, int64_t row, int64_t column, int64_t columns) {
  GYRE_CHECK(0 <= row && row + logits.rows <= rows_ && columns <= logits.cols,
             "rows {} to {} of {}, {} of {} columns", row, row + logits.rows, rows_, columns,
             logits.cols);
  added_ = true;
  const int64_t partials = shape_.partials(), first = row * shape_.ids_per_token;
  auto merge = merge_of<MergeRow>(own_);
  const RowScale scale = merge.scale.from(row);
  scored_ = shape_.vocab.ranks() == 1 && logits.rows == rows_ &&
            columns == shape_.vocab.valid(shape_.rank);
  if (!scored_) merge.scale = scale;  // of the tile's rows
  const RowParts parts = kernels_.parts(
      logits, {columns, scale, shape_.fields.weighted, shape_.threads, shape_.fields.total},
      parts_memory_);
  const auto run = [&]<class T>(MatrixView<const T> view) {
    const AddTile<T> add{view,
                         columns,
                         shape_.first_id() + column,
                         column == 0,
                         scored_,
                         parts,
                         totals_.data() + row,
                         own_.data() + row * partials,
                         own_.data() + rows_ * partials + first,
                         ids_ + first,
                         merge};
    for_record_rows(kernels_.stream(), shape_.threads, logits.rows, 1, add);
  };
  if (logits.type == DType::f32)
    run(logits.as<float>());
  else
    run(logits.as<bf16>());
}

double ScoreRecords::merge(Communicator& arrays, Stream& stream, std::string_view what) {
  if (!added_) add({nullptr, DType::f32, rows_, 0, 0}, 0, 0, 0);  // a shard without columns
  const int ranks = shape_.vocab.ranks();
  const std::span<float> all =
      ranks == 1 ? std::span<float>()
                 : at_least<float>(all_memory_, ranks * std::ssize(own_), kernels_.space());
  return merge_gathered<float>(ranks, own_, all, arrays, stream, what,
                               [&](std::span<const float> records) {
                                 if (!scored_)
                                   for_record_rows(kernels_.stream(), shape_.threads, rows_, ranks,
                                                   merge_of<MergeRow>(records));
                                 staged_.finish();
                               });
}

}  // namespace gyre

#pragma once
// Device data that the ragged kernel keeps for a list of rectangles: the tables that a library
// reads for each batch (attention_library.hpp), and the pieces by which scratch rows are folded
// into the results (cuda_merge.hpp).

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "attention/kernels/attention_library.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "attention/kernels/cuda_merge.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

struct TablePlace {
  int64_t begin = 0;  ///< byte offset in a plan's tables
  int64_t base = 0;   ///< element of the array from which the table counts
  int64_t first = 0;  ///< the first value of the table
};
using TablePlaces = std::map<AttentionTensor, TablePlace>;

/// A batch with its library tables: built once and kept.
struct PreparedBatch {
  RaggedBatch batch;
  // Sizes of filled_up(batch).
  int64_t entries = 0;
  int64_t q_rows = 0, k_rows = 0;  // of scratch arrays
  RaggedLimits limits;
  std::optional<EvenBatch> even;  // set if it may be used as an even batch
  TablePlaces tables;             // of inputs, and of results in scratch
  TablePlaces in_place;           // of arrays that may be the caller's
  TablePlaces gathered;           // of keys and values in scratch rows
  std::vector<DeviceRound> q_rounds, k_rounds;
  DeviceRound gathered_keys;              // pairs of key rows and scratch rows
  bool first_q = false, first_k = false;  // see FirstWriters
};

/// Key of the tables: pass, numbers of rows, and strides in elements.
struct TableSizes {
  bool backward = false;
  int64_t rows = 0, keys = 0;
  int64_t q = 0, k = 0, v = 0, d_out = 0, out = 0, lse = 0, d_q = 0;
  int64_t q_columns = 0, k_columns = 0, v_columns = 0, out_columns = 0, heads = 0;
  friend bool operator==(const TableSizes&, const TableSizes&) = default;
};

/// The call on reversed rows that computes the inverse rectangles (reversed_rows.hpp).
struct ReversedCall {
  std::vector<Rectangle> rectangles;
  int64_t q_rows = 0, k_rows = 0;  // of the scratch arrays
  DeviceRound q_reads, k_reads;    // pieces: scratch rows, and the rows that they are read from
  DeviceRound q_writes, k_writes;  // pieces: rows of results, and the scratch rows added to them
};

struct ReadyPlan {
  std::vector<Rectangle> rectangles;
  TableSizes sizes;
  bool fixed_tiles = false;
  Buffer<std::byte> pinned, device;  // all tables and pieces; the copy may be in progress
  std::vector<PreparedBatch> batches;
  DeviceRound q_rest, k_rest;        // rows that no batch is the first to write
  DeviceRound q_touched;             // rows in any batch
  DeviceRound q_outside, k_outside;  // rows in no batch
  ReversedCall reversed;
  std::vector<Rectangle> others;
  std::array<int64_t, not_ragged_reasons> reasons{};
};

/// Addresses of the arrays of one batch run: of first_row, with tables of the entries, or for an
/// even batch of its first entry.
class BatchArrays {
 public:
  BatchArrays(const ReadyPlan& plan, const PreparedBatch& ready, bool even);
  void add(AttentionTensor id, ConstMatrixRef m, AttentionTensor table, const TablePlaces& tables);
  /// Adds an array without a table.
  void add(AttentionTensor id, void* address) { addresses_[id] = address; }
  void add_inputs(ConstMatrixRef q, ConstMatrixRef k, ConstMatrixRef v);
  const AttentionAddresses& addresses() const { return addresses_; }

 private:
  void* table(AttentionTensor id, const TablePlaces& tables) const;
  const ReadyPlan& plan_;
  const PreparedBatch& ready_;
  bool even_;
  AttentionAddresses addresses_;
};

/// Plans the rectangles in batches and submits the upload of the tables to `stream`.
std::unique_ptr<ReadyPlan> make_ready(std::span<const Rectangle> rectangles,
                                      const TableSizes& sizes, bool fixed_tiles,
                                      const AttentionLibrary& library, Stream& stream);

}  // namespace gyre

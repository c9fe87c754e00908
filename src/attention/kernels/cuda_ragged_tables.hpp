#pragma once
// What the kernel around a library's attention keeps of a list of rectangles in device memory: the
// tables that a library reads of each batch (attention_library.hpp), and the pieces in which its
// scratch rows are folded into the results (cuda_merge.hpp).

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
  int64_t begin = 0;  ///< bytes from the begin of a plan's tables
  int64_t first = 0;  ///< what the table begins with
};
using TablePlaces = std::map<AttentionTensor, TablePlace>;

/// What the library was given of a list of rectangles: built once, and kept.
struct ReadyBatch {
  RaggedBatch batch;
  RaggedLimits limits;
  std::optional<EvenBatch> even;  // if it may be taken as such
  TablePlaces tables;             // where what it writes lies in scratch arrays
  TablePlaces in_place;           // the tables of arrays that may be the caller's instead
  TablePlaces gathered;           // of keys and values in scratch rows
  std::vector<DeviceRound> q_rounds, k_rounds;
  DeviceRound gathered_keys;              // keys from the rows of scratch arrays, to these
  bool first_q = false, first_k = false;  // see FirstWriters
};

/// What tables depend on: the direction, rows, and elements between them.
struct TableSizes {
  bool backward = false;
  int64_t rows = 0, keys = 0;
  int64_t q = 0, k = 0, v = 0, d_out = 0, out = 0, lse = 0, d_q = 0;
  int64_t q_columns = 0, k_columns = 0, heads = 0;
  friend bool operator==(const TableSizes&, const TableSizes&) = default;
};

struct ReadyPlan {
  std::vector<Rectangle> rectangles;
  TableSizes sizes;
  bool fixed_tiles = false;
  Buffer<std::byte> pinned, device;  // all tables and pieces; the copy may be under way
  std::vector<ReadyBatch> batches;
  DeviceRound q_rest, k_rest;        // rows that no batch is the first to write
  DeviceRound q_touched;             // rows of all batches
  DeviceRound q_outside, k_outside;  // rows of none
  std::vector<Rectangle> others;
  std::array<int64_t, not_ragged_reasons> reasons{};
};

/// The arrays of one run of a batch, and where their entries are: by tables, or, of an even batch,
/// the address of the first.
class BatchArrays {
 public:
  BatchArrays(const ReadyPlan& plan, const ReadyBatch& ready, bool even);
  void add(AttentionTensor id, ConstMatrixRef m, AttentionTensor table, const TablePlaces& tables);
  /// Without a table.
  void add(AttentionTensor id, void* address) { addresses_[id] = address; }
  void add_inputs(ConstMatrixRef q, ConstMatrixRef k, ConstMatrixRef v);
  const AttentionAddresses& addresses() const { return addresses_; }

 private:
  void* table(AttentionTensor id, const TablePlaces& tables) const;
  const ReadyPlan& plan_;
  const ReadyBatch& ready_;
  bool even_;
  AttentionAddresses addresses_;
};

/// Plans the rectangles in batches and submits the tables to `stream`.
std::unique_ptr<ReadyPlan> make_ready(std::span<const Rectangle> rectangles,
                                      const TableSizes& sizes, bool fixed_tiles,
                                      const AttentionLibrary& library, Stream& stream);

}  // namespace gyre

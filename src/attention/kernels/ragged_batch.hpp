#pragma once
// Rectangles as batches of sequences, the input of fused attention libraries. Entry b attends query
// rows [q_begin, q_begin + q_length) to key rows [k_begin, k_begin + k_length). All entries of a
// batch have the same mask, one of three:
//
//     causal       query i sees key j <= i                          (diagonal from the first key)
//     causal_end   query i sees key j <= i + k_length - q_length    (diagonal to the last key)
//     full         query i sees every key
//
// The first two may have a window: a query then sees the last `window` of those keys.
//
// A causal rectangle becomes at most two entries. With equal strides s of queries and keys, query i
// sees j <= i + o, o = floor(offset / s). The first max(0, -o) queries see nothing. Queries from
// k_length - o on see all keys: a full entry; with a window, they are an inverse rectangle
// (reversed_rows.hpp). The queries between are a causal entry. Example, 8 queries, 6 keys, offset 2
// (x: visible):
//
//       0 x x x
//       1 x x x x                    entry   rows 0..3, keys 0..5, causal_end
//       2 x x x x x
//       3 x x x x x x
//       4 x x x x x x                entry   rows 4..7, keys 0..5, full
//      ...
//
// Entries of a batch may share queries and keys, so the library writes each entry to its own rows
// of scratch arrays. These rows are folded into the results in rounds. The pieces of a round are
// disjoint, so that sums are reproducible.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/rectangle.hpp"

namespace gyre {

enum class RaggedMask { causal, causal_end, full };
constexpr const char* name_of(RaggedMask mask) {
  if (mask == RaggedMask::full) return "full";
  return mask == RaggedMask::causal ? "causal" : "causal-end";
}

struct RaggedEntry {
  int64_t q_begin = 0, q_length = 0;
  int64_t k_begin = 0, k_length = 0;
  int64_t q_row = 0, k_row = 0;  ///< first row in the scratch arrays of queries and keys
  friend bool operator==(const RaggedEntry&, const RaggedEntry&) = default;
};

/// Rows of entries in the queries or keys, or in their scratch arrays.
enum class RaggedRows { q, k, scratch_q, scratch_k };

/// Scratch row scratch + i · step belongs to row row + i of the result, 0 <= i < length.
struct RowPiece {
  int64_t row = 0, scratch = 0, length = 0;
  int64_t step = 1;  ///< or -1
  friend bool operator==(const RowPiece&, const RowPiece&) = default;
};
/// Pieces with disjoint rows.
using Round = std::vector<RowPiece>;

struct RaggedBatch {
  RaggedMask mask = RaggedMask::full;
  int64_t window = 0;  ///< largest number of keys per query, up to the diagonal; 0: all
  /// Sorted by q_begin; scratch rows are assigned in this order, without gaps.
  std::vector<RaggedEntry> entries;
  int64_t q_rows = 0, k_rows = 0;  ///< total numbers of scratch rows
  int64_t longest_q = 0, longest_k = 0;
  int64_t q_end = 0;  ///< end of the query rows of all entries
};

/// Why a rectangle cannot be an entry.
enum class NotRagged { fixed_tiles, window, strides };
inline constexpr int not_ragged_reasons = 3;
const char* name_of(NotRagged reason);

struct RaggedPlan {
  std::vector<RaggedBatch> batches;
  std::vector<Rectangle> inverse;  ///< whole or cut, for another plan, of reversed_rows
  std::vector<Rectangle> others;   ///< whole or cut, in order, for another kernel to compute
  std::array<int64_t, not_ragged_reasons> reasons{};  ///< [NotRagged] number of `others`
};

/// Splits rectangles into batches of at most `max_entries` entries. Chunks of keys are joined, then
/// staircases become layers (staircase.hpp), and no batch has entries of two layers. Libraries
/// launch as many blocks, and use as much workspace, for every entry as for the longest. Therefore
/// entries of a batch have similar lengths (length_class), and their number times the longest, for
/// queries and for keys, is at most `max_rows` (unless there is one entry). At the end of a layer,
/// causal batches precede full ones: they have each row of a shard once. Every visible pair is in
/// exactly one entry or rectangle of the result, and no hidden pair is in an entry. An inverse
/// rectangle whose queries see `least_inverse_keys` keys on average goes to `inverse`. With
/// `fixed_tiles` (see BlockInput) all rectangles go to `others`, since the bits of a library's
/// results may depend on the batch.
RaggedPlan plan_ragged(std::span<const Rectangle> rectangles, bool fixed_tiles, int64_t max_entries,
                       int64_t max_rows, int64_t least_inverse_keys);
/// Returns plan_ragged with the limits of a call: 1024 entries; max(16384, 2 · rows) rows, where
/// `rows` is the number of query rows or of key rows, whichever is larger; 256 keys. At that number
/// a library saves as much time over the kernel for the rest as the reversal takes, which moves 1
/// KB (forward) to 3 KB (backward) for each query and head of dimension 128.
RaggedPlan plan_of_call(std::span<const Rectangle> rectangles, bool fixed_tiles, int64_t rows);

/// Class 0: up to 512 queries. Class c > 0: 512 · 4^(c-1) < queries <= 512 · 4^c, so that lengths
/// of a class differ at most by a factor of four.
int length_class(int64_t q_length);

/// The entries as rectangles, sorted by q_begin.
std::vector<Rectangle> rectangles_of(const RaggedBatch& batch);

/// Rounds of the query rows, and of the key rows, of a batch.
std::vector<Round> query_rounds(const RaggedBatch& batch);
std::vector<Round> key_rounds(const RaggedBatch& batch);

/// Returns for each batch, in the order in which they run, whether it may overwrite its rows of a
/// result: no row is in two of its entries or in an earlier batch. Other batches add to their rows.
/// `side`: RaggedRows::q or k.
std::vector<bool> overwriting_batches(std::span<const RaggedBatch> batches, RaggedRows side);

struct FirstWriters {
  std::vector<bool> first;  ///< result of overwriting_batches
  Round rest;               ///< rows in no batch that may overwrite
  Round touched;            ///< rows in any batch
  Round outside;            ///< all other rows
};
/// In the rounds, `scratch` is the row of the result, and pieces have at most `longest_piece` rows.
inline constexpr int64_t longest_piece = 512;
FirstWriters first_writers(std::span<const RaggedBatch> batches, RaggedRows side, int64_t rows);

/// The row that a library gets as the first one of an array: at most the first row of an entry, and
/// a multiple of 4, so that f32 values of one head are 16-byte aligned. 0 for scratch arrays.
int64_t first_row(const RaggedBatch& batch, RaggedRows rows);

/// The batch with further entries of one query and one key, so that few graphs serve all numbers of
/// entries; libraries may not take empty ones. There are as many entries as before up to 8, then a
/// power of two. The new ones repeat the first query and key; their scratch rows follow those of
/// all others, and are not used.
RaggedBatch filled_up(const RaggedBatch& batch);

/// Largest rows of an entry with which a batch is passed to a library. A library may check accesses
/// against entries · longest, as if entries were contiguous, and drop those beyond. That product
/// must therefore exceed every query and key row of an entry, counted from first_row. Example:
/// entries of 300 queries from rows 0 and 50000 on: ceil(50300 / 2) = 25150, longest 32768.
struct RaggedLimits {
  int64_t longest_q = 0, longest_k = 0;  ///< powers of two, at least 128
  friend bool operator==(const RaggedLimits&, const RaggedLimits&) = default;
};
RaggedLimits limits_of(const RaggedBatch& batch);

/// Tables that the library reads for a batch: lengths [entries]; offsets [entries + 1] in elements,
/// rows from first_row on x `stride`. The last offset is the largest end of an entry.
std::vector<int32_t> ragged_lengths(const RaggedBatch& batch, RaggedRows rows);
std::vector<int64_t> ragged_offsets(const RaggedBatch& batch, RaggedRows rows, int64_t stride);

/// Rows between the starts of consecutive entries of an even batch. Its entries have the same
/// number of queries, and of keys: a library reads arrays [entries, rows], without tables.
struct EvenBatch {
  int64_t q_distance = 0, k_distance = 0;
  friend bool operator==(const EvenBatch&, const EvenBatch&) = default;
};
/// Returns nullopt for other batches, and if entries share rows.
std::optional<EvenBatch> even_batch(const RaggedBatch& batch);

/// The smallest power of two that is at least n and `least`, itself a power of two.
int64_t rounded_up(int64_t n, int64_t least);

}  // namespace gyre

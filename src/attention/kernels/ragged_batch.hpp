#pragma once
// Rectangles as batches of sequences, the form in which fused attention libraries take them: entry
// b is rows [q_begin, q_begin + q_length) of the queries against [k_begin, k_begin + k_length) of
// the keys, under one of three masks that is the same for the whole batch.
//
//     causal       query i sees key j <= i                          (diagonal from the first key)
//     causal_end   query i sees key j <= i + k_length - q_length    (diagonal to the last key)
//     full         query i sees every key
//
// The first two may have a window: of those keys a query then sees the last `window`.
//
// A causal rectangle is at most two of them. With equal strides s of queries and keys, query i sees
// j <= i + o, o = floor(offset / s): its first max(0, -o) queries see nothing, the queries from
// k_length - o on see everything, and those between end on the diagonal; what of a window is behind
// the diagonal is left to another kernel. Example, 8 queries, 6 keys, offset 2 (x: visible):
//
//       0 x x x
//       1 x x x x                    entry   rows 0..3, keys 0..5, causal_end
//       2 x x x x x
//       3 x x x x x x
//       4 x x x x x x                entry   rows 4..7, keys 0..5, full
//      ...
//
// Each entry has rows of its own in scratch arrays, which hold what the library writes: entries of
// a batch may share queries, and keys. `rounds` say in which order those rows are folded into the
// results: within a round no two touch the same row, so that sums come out the same in every run.

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
  int64_t q_row = 0, k_row = 0;  ///< first row in the scratch arrays of queries and of keys
  friend bool operator==(const RaggedEntry&, const RaggedEntry&) = default;
};

/// Rows of entries: of the queries and the keys, or of the scratch arrays for them.
enum class RaggedRows { q, k, scratch_q, scratch_k };

/// Scratch rows [scratch, scratch + length) belong to rows [row, row + length) of the result.
struct RowPiece {
  int64_t row = 0, scratch = 0, length = 0;
  friend bool operator==(const RowPiece&, const RowPiece&) = default;
};
/// Pieces of one round are of disjoint rows.
using Round = std::vector<RowPiece>;

struct RaggedBatch {
  RaggedMask mask = RaggedMask::full;
  int64_t window = 0;  ///< keys that a query sees at most, up to the diagonal; 0: all
  /// Sorted by q_begin; scratch rows are dealt in this order, without gaps.
  std::vector<RaggedEntry> entries;
  int64_t q_rows = 0, k_rows = 0;  ///< scratch rows in all
  int64_t longest_q = 0, longest_k = 0;
  int64_t q_end = 0;  ///< behind the last row of the queries
};

/// Why a rectangle cannot be an entry.
enum class NotRagged { fixed_tiles, window, strides };
inline constexpr int not_ragged_reasons = 3;
const char* name_of(NotRagged reason);

struct RaggedPlan {
  std::vector<RaggedBatch> batches;
  std::vector<Rectangle>
      others;  ///< and rests of some, in their order; for a kernel that takes any
  std::array<int64_t, not_ragged_reasons> reasons{};  ///< rectangles in `others`
};

/// Splits rectangles into batches of at most `most_entries` entries. Libraries start as many
/// blocks, and have as much workspace, for each entry as for the longest: entries of a batch are of
/// similar length, see length_class, and their number times the longest, of queries and of keys,
/// stays within `most_rows` (a single entry may be longer). Diagonals come before full entries:
/// those of a shard have each of its rows once. Every visible pair is in exactly one entry or
/// rectangle of the result, and no pair that is not visible is in an entry. `fixed_tiles` (see
/// BlockInput): everything is in `others`, since a library promises nothing about the bits of rows.
RaggedPlan plan_ragged(std::span<const Rectangle> rectangles, bool fixed_tiles,
                       int64_t most_entries, int64_t most_rows);

/// Entries of one class have up to 512 queries, or at most four times as many as each other: class
/// c > 0 has 512 · 4^(c-1) < queries <= 512 · 4^c.
int length_class(int64_t q_length);

/// Every entry as a rectangle, sorted by q_begin.
std::vector<Rectangle> rectangles_of(const RaggedBatch& batch);

/// The rounds of the query rows of a batch, and of its key rows.
std::vector<Round> query_rounds(const RaggedBatch& batch);
std::vector<Round> key_rounds(const RaggedBatch& batch);

/// Of a result of `rows` rows that holds nothing yet, to which batches are added in their order.
struct FirstWriters {
  std::vector<bool> first;  ///< [batches] whether every row of the batch has nothing before, from
                            ///< no earlier batch and from no other entry: it may just be written
  Round rest;               ///< rows in none of those batches
  Round touched;            ///< rows in any batch
  Round outside;            ///< all other rows
};
/// `side`: RaggedRows::q or k. In the rounds, scratch rows are those of the result, and pieces have
/// at most `longest_piece` rows.
inline constexpr int64_t longest_piece = 512;
FirstWriters first_writers(std::span<const RaggedBatch> batches, RaggedRows side, int64_t rows);

/// The sizes for which a library is asked to take a batch. A library may hold accesses to rows
/// below capacity · longest, as if entries lay behind each other, and drop those beyond. So that
/// product reaches past every row of the queries, and of the keys, that an entry touches, and what
/// is missing is made up by empty entries. Example: one entry of 300 queries from row 50000 on; the
/// longest is 512, ceil(50300 / 512) = 99, capacity 128. For a library that takes no empty entries,
/// the longest is made longer instead: capacity 1, longest 65536.
struct RaggedLimits {
  int64_t capacity = 0;                  ///< entries; with empty ones, a power of two
  int64_t longest_q = 0, longest_k = 0;  ///< rows of an entry; powers of two, at least 128
  friend bool operator==(const RaggedLimits&, const RaggedLimits&) = default;
};
enum class EmptyEntries { taken, refused };
RaggedLimits limits_of(const RaggedBatch& batch, EmptyEntries empty = EmptyEntries::taken);

/// What the library reads about a batch, padded with empty entries to `capacity`: lengths
/// [capacity], offsets [capacity + 1], which count elements: rows x `stride`. Empty entries begin,
/// and the last offset is, where the furthest entry ends.
std::vector<int32_t> ragged_lengths(const RaggedBatch& batch, RaggedRows rows, int64_t capacity);
std::vector<int64_t> ragged_offsets(const RaggedBatch& batch, RaggedRows rows, int64_t stride,
                                    int64_t capacity);

/// Entries of one length each of queries and of keys, which begin so many rows apart: an array
/// [entries, rows], which a library takes without tables.
struct EvenBatch {
  int64_t q_distance = 0, k_distance = 0;
  friend bool operator==(const EvenBatch&, const EvenBatch&) = default;
};
/// Nothing for other batches, and where entries share rows.
std::optional<EvenBatch> even_batch(const RaggedBatch& batch);

/// The smallest power of two that is not smaller than n, and at least `least`.
int64_t rounded_up(int64_t n, int64_t least);

}  // namespace gyre

#pragma once
// Conversion of the rows of a gyre/bshd file to the batch that packing and sharding take.

#include <cstdint>
#include <string>

#include "io/schemas/batch_file.hpp"
#include "packing/thd.hpp"

namespace gyre {

/// The batch of the file's arrays, including extras. Tables of lengths that the file lacks are
/// absent. Positions that it lacks, or has once for all rows, are given to every row
/// (broadcast_positions). Throws a usage error if a row then holds more than one segment with
/// tokens, because its documents would merge.
BshdBatch batch_of(const BshdArrays& arrays);

/// Adds tables of lengths to the batch of a file without them. Each row is one document, with the
/// real length that the padding mask of its stream, one of `chunks`, shows (to_thd). A row of only
/// padding has no segment. Throws the usage errors of split_into_chunks, which name row and slot of
/// a pad id among content.
void add_tables_of_rows(BshdBatch& batch, const BshdArrays& arrays, int64_t chunks);

/// Throws a usage error that names row and slot if a row of a file without tables holds the pad id
/// between other ids: padding can be recognized only at the ends of a row.
void check_padding_of_rows(const BshdArrays& arrays);

/// Parses how padding at the end of a row is packed: own-segment, keep or absorb. Without slot
/// lengths, absorb means keep (ThdOptions::tail).
Tail tail_of(const BshdArrays& arrays, const std::string& name);

/// Mask of real tokens, [rows, slots]: 1 for the first seq_lens slots of each segment, from the
/// tables of lengths alone; without tables, 1 for ids other than the pad id. Precondition: the
/// tables fit the rows (to_thd checks them).
std::vector<uint8_t> real_slots(const BshdArrays& arrays);

/// Throws a usage error that names row and slot if padding has another document's token as its
/// label. Precondition: the tables of lengths are valid.
void check_labels(const BshdArrays& arrays);

/// Maximum number of segments with tokens in a row.
int64_t max_documents_of_row(const BshdArrays& arrays);

/// The slot of the segment [begin, begin + slots) that `rank` holds as local slot `local`. A rank
/// holds chunk `rank`, then chunk 2·cp - 1 - rank, of slots / (2·cp) each.
inline int64_t swapped_slot(int64_t begin, int64_t slots, int cp, int rank, int64_t local) {
  const int64_t chunk = slots / (2 * cp);
  if (local < chunk) return begin + rank * chunk + local;
  return begin + (2 * cp - 1 - rank) * chunk + (local - chunk);
}

}  // namespace gyre

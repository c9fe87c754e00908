#pragma once
// Rows of a gyre/bshd file as the batch that packing and sharding convert.

#include <string>

#include "io/batch_file.hpp"
#include "packing/thd.hpp"

namespace gyre {

/// The batch of the file's arrays, extras included; tables of lengths that the file has not are
/// absent. Positions that it has not, or has once for all rows, are given to every row
/// (broadcast_positions); throws a usage error when a row then holds more than one segment with
/// tokens, because its documents would merge.
BshdBatch batch_of(const BshdArrays& arrays);

/// Gives a batch_of a file without tables those of its rows: each is one document. Its real length
/// ends where the padding of its stream, one of `chunks`, begins (to_thd); a row of nothing but
/// padding has no segment. Throws the usage errors of split_into_chunks: the pad id is among
/// content, by row and slot.
void add_tables_of_rows(BshdBatch& batch, const BshdArrays& arrays, int64_t chunks);

/// Throws a usage error, by row and slot, where the rows of a file without tables hold the pad id
/// between other ids: padding is only known at the ends of a row.
void check_padding_of_rows(const BshdArrays& arrays);

/// The tail of this name: own-segment, keep or absorb; the last without slot lengths is to keep
/// (ThdOptions::tail).
Tail tail_of(const BshdArrays& arrays, const std::string& name);

/// Real tokens of every slot, [rows, slots]: 1 for the first seq_lens slots of each segment, read
/// from the tables of lengths alone; without tables, for ids that do not pad. Precondition: the
/// tables fit the rows (to_thd checks them).
std::vector<uint8_t> real_slots(const BshdArrays& arrays);

/// Usage error, by row and slot: padding that has another document's token as its label. Tables of
/// lengths must be sound.
void check_labels(const BshdArrays& arrays);

/// The most segments with tokens that a row has.
int64_t most_documents_of_row(const BshdArrays& arrays);

}  // namespace gyre

#pragma once
// Rows of a gyre/bshd file as the batch that packing and sharding convert.

#include "io/batch_file.hpp"
#include "packing/thd.hpp"

namespace gyre {

/// The batch of the file's arrays. Positions that the file has not, or has once for all rows, are
/// given to every row (broadcast_positions); throws a usage error when a row then holds more than
/// one segment with tokens, because its documents would merge.
BshdBatch batch_of(const BshdArrays& arrays);

/// Real tokens of every slot, [rows, slots]: 1 for the first seq_lens slots of each segment, read
/// from the tables of lengths alone. Precondition: the tables fit the rows (to_thd checks them).
std::vector<uint8_t> real_slots(const BshdArrays& arrays);

/// The most segments with tokens that a row has.
int64_t most_documents_of_row(const BshdArrays& arrays);

}  // namespace gyre

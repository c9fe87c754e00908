#pragma once
// Packs documents into rectangular rows of segments, like data loaders: a gyre/bshd file.

#include "apps/common/packed_streams.hpp"
#include "apps/pack/report.hpp"
#include "io/batch_file.hpp"
#include "io/outputs.hpp"
#include "packing/padding.hpp"

namespace gyre {

/// Rows of documents, and the packing that made them.
struct DocumentRows {
  BshdArrays arrays;
  RowPacking packing;
  PackingResult row;  ///< row of the table
};

/// Packs documents of `lengths` in order into rows of options.row slots (packing/padding.hpp:
/// pack_rows). Labels are the next tokens of the document. Positions continue through a segment's
/// padding up to at most options.row - 1. Throws the usage errors of pack_rows.
DocumentRows make_rows(std::span<const int64_t> lengths, const RowPackOptions& options,
                       const TokenSource& tokens, int64_t vocab_size);

/// Checks that every document that was not dropped is in one segment with its tokens, labels and
/// positions, that segments are multiples of 2·cp slots and fill their row, and that the batch
/// converts into a stream with these documents (to_thd).
void check_rows(const DocumentRows& rows, std::span<const int64_t> lengths,
                const RowPackOptions& options, const TokenSource& tokens, Verification& checks);

/// Writes the rows to `path`, one of the `outputs`. With `check`, reads them back and compares
/// them. Collective.
void write_rows(const std::string& path, const BshdArrays& arrays, const Provenance& provenance,
                Communicator& world, bool check, Verification& checks, Outputs& outputs);

}  // namespace gyre

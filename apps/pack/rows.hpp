#pragma once
// Documents as rectangular rows of packed segments: a gyre/bshd file, as data loaders make them.

#include "apps/common/packed_streams.hpp"
#include "apps/pack/report.hpp"
#include "io/batch_file.hpp"
#include "io/outputs.hpp"
#include "packing/padding.hpp"

namespace gyre {

/// Rows of documents, and how they came about.
struct DocumentRows {
  BshdArrays arrays;
  RowPacking packing;
  PackingResult row;  ///< of the table
};

/// Documents of `lengths` in order in rows of options.row slots (packing/padding.hpp: pack_rows);
/// labels are the next tokens of the document, positions count on through a segment's padding, but
/// not above options.row - 1. Throws the usage errors of pack_rows.
DocumentRows make_rows(std::span<const int64_t> lengths, const RowPackOptions& options,
                       const TokenSource& tokens, int64_t vocab_size);

/// Adds to `checks`: every document that was not dropped is in one segment, its tokens, labels and
/// positions in place; the segments of a row fill it in multiples of 2·cp slots; the batch converts
/// into a stream with these documents (to_thd).
void check_rows(const DocumentRows& rows, std::span<const int64_t> lengths,
                const RowPackOptions& options, const TokenSource& tokens, Verification& checks);

/// Writes the rows to `path`, one of the `outputs`; with `check` reads them back and compares them.
/// Collective.
void write_rows(const std::string& path, const BshdArrays& arrays, const Provenance& provenance,
                Communicator& world, bool check, Verification& checks, Outputs& outputs);

}  // namespace gyre

#pragma once
// Log-probabilities of documents: the reference beside the documents (group /reference), and the
// results of a run (file "gyre/results").
//
// Predictions are numbered document by document: prediction offsets[i] + p is that of token p + 1
// of document i, given tokens 0 to p.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/documents.hpp"
#include "io/packed_bins.hpp"
#include "io/schema.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Rows [begin, begin + count).
struct Rows {
  int64_t begin = 0;
  int64_t count = 0;
};

/// Reference values, computed elsewhere in double precision; all of them on every rank. Texts that
/// the file does not have are empty.
struct Reference {
  std::string model_sha256;  ///< of the model file's bytes
  std::string generator;
  std::optional<std::vector<double>> logprob;  ///< [P] of the next token
  std::optional<std::vector<double>> entropy;  ///< [P] of the distribution, nats
  bool has_hidden = false;
  std::vector<std::string> unknown;  ///< datasets of other names, which nobody compares
};

/// The hidden states of a model: entries (layers + 1) and elements of a token's.
struct HiddenShape {
  int64_t entries = 0;
  int64_t width = 0;
};

/// The reference in a documents file, checked against its documents and, where it has hidden
/// states, against the model's; std::nullopt if the file has none. Collective.
std::optional<Reference> read_reference(Communicator& comm, const std::string& path,
                                        const Documents& documents, const HiddenShape& model);

/// Hidden states [rows, width] of the tokens in `rows` (ascending, disjoint): entry 0 is the
/// embedding's output, entry l the residual stream after layer l. Collective; rows differ by rank.
Buffer<double> read_reference_hidden(Communicator& comm, const std::string& path, int64_t entry,
                                     std::span<const Rows> rows);

/// The part of the results that is the same on all ranks.
struct ResultsHeader {
  std::string model_sha256;
  std::string input_sha256;
  std::vector<int64_t> offsets;    ///< [n + 1], see prediction_offsets
  std::vector<std::string> names;  ///< [n], or empty
  int64_t cp = 0;                  ///< context-parallel ranks that the bins were made for
  PackedBins packed;
  Provenance provenance;
};

/// Predictions begin, begin + 1, ... as one rank computed them.
struct ResultPiece {
  int64_t begin = 0;
  std::span<const float> logprob;
  std::span<const float> entropy;
};

/// Writes the results of all ranks to the temporary file. Every prediction must be in exactly
/// one piece of one rank; anything else is a runtime error that names the prediction. Collective.
/// Adjacent pieces of a rank count as one. HDF5 takes time quadratic in the number of other pieces:
/// some thousands per rank are quick, tens of thousands are not.
void write_results(OutputFile& output, const ResultsHeader& header,
                   std::span<const ResultPiece> pieces);

struct Results {
  ResultsHeader header;
  std::vector<float> logprob;  ///< [P]
  std::vector<float> entropy;  ///< [P]
};

/// All of a results file on every rank, checked against the schema. Collective.
Results read_results(Communicator& comm, const std::string& path);

}  // namespace gyre

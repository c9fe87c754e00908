#pragma once
// Log-probabilities of documents: the reference in a documents file (group /reference), and the
// results of a run (file "gyre/results").
//
// Predictions are numbered document by document: of the P predictions, number offsets[i] + p is of
// token p + 1 of document i, given tokens 0 to p.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/schemas/documents.hpp"
#include "io/schemas/packed_bins.hpp"
#include "io/schemas/schema.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Rows [begin, begin + count).
struct Rows {
  int64_t begin = 0;
  int64_t count = 0;
};

/// Reference values, computed elsewhere in double precision, in full on every rank. Texts that the
/// file lacks are empty.
struct Reference {
  std::string model_sha256;  ///< SHA-256 of the model file
  std::string generator;
  std::optional<std::vector<double>> logprob;  ///< [P] of the next token
  std::optional<std::vector<double>> entropy;  ///< [P] of the distribution, nats
  bool has_hidden = false;
  std::vector<std::string> unknown;  ///< datasets of other names, which are not compared
};

/// Shape of a model's hidden states: entries (layers + 1), and elements per token.
struct HiddenShape {
  int64_t entries = 0;
  int64_t width = 0;
};

/// Reads a documents file's reference and checks it against the documents and, for hidden states,
/// the model; std::nullopt if the file has none. Collective.
std::optional<Reference> read_reference(Communicator& comm, const std::string& path,
                                        const Documents& documents, const HiddenShape& model);

/// Hidden states [rows, width] of the tokens in `rows` (ascending, disjoint): entry 0 is the
/// embedding's output, entry l the residual stream after layer l. Collective; rows may differ.
Buffer<double> read_reference_hidden(Communicator& comm, const std::string& path, int64_t entry,
                                     std::span<const Rows> rows);

/// The part of the results that is the same on all ranks.
struct ResultsHeader {
  std::string model_sha256;
  std::string input_sha256;
  std::string teacher_sha256;      ///< empty: there was no teacher, and there are no divergences
  std::vector<int64_t> offsets;    ///< [documents + 1], see prediction_offsets
  std::vector<std::string> names;  ///< [documents], or empty
  int64_t cp = 0;                  ///< number of ranks that each bin was divided among
  PackedBins packed;
  Provenance provenance;
};

/// Consecutive predictions from `begin` on, computed by one rank.
struct ResultPiece {
  int64_t begin = 0;
  std::span<const float> logprob;
  std::span<const float> entropy;
  std::span<const float> kl = {};  ///< not read without a teacher
};

/// Writes the pieces of all ranks to the temporary file. Every prediction must be in the piece of
/// exactly one rank; otherwise a runtime error names the prediction. Collective.
void write_results(OutputFile& output, const ResultsHeader& header, const ResultPiece& mine);

struct Results {
  ResultsHeader header;
  std::vector<float> logprob;  ///< [P]
  std::vector<float> entropy;  ///< [P]
  std::vector<float> kl;       ///< [P], or empty
};

/// Reads a whole results file onto every rank, and checks it against the schema. Collective.
Results read_results(Communicator& comm, const std::string& path);

}  // namespace gyre

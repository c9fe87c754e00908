#pragma once
// Writing results whose rows are tokens, which ranks hold in any order.

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/view.hpp"
#include "io/schemas/schema.hpp"

namespace gyre {

/// The part of the results that is the same on all ranks.
struct TokenResults {
  const char* schema = nullptr;
  std::vector<int64_t> offsets{0};  ///< [documents + 1]
  std::string input_sha256;         ///< SHA-256 of the input file, or "" for generated inputs
  Provenance provenance;
};

/// An array of results: its shape in the file, and the rows of one rank.
struct TokenArray {
  std::string path;
  h5::Shape shape;  ///< [tokens, ...]
  MatrixView<const float> rows;
  /// [rows] the token of each row of this rank; negative: padding. Arrays of the same tokens share
  /// the list.
  const std::vector<int64_t>* tokens = nullptr;
};

/// Writes the results of all ranks, in token order, to the temporary file. Every token of an array
/// must be in exactly one row of one rank; otherwise a runtime error names the token. Each row is
/// first sent to the rank that writes its block of tokens; the rows of one array on a rank must
/// take less than 2 GiB. `more` adds what else the file has, on rank 0. Collective.
void write_token_results(OutputFile& output, const TokenResults& results,
                         const std::vector<TokenArray>& arrays,
                         const std::function<void(h5::File&)>& more = {});

}  // namespace gyre

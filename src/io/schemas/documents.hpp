#pragma once
// Tokenised documents and their file, "gyre/documents".

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/ragged.hpp"
#include "io/schemas/schema.hpp"

namespace gyre {

/// The tokenizer of text_import: byte values 0 to 255, then begin, end and padding.
namespace byte_tokenizer {
inline constexpr const char* name = "byte-bos-eos";
inline constexpr int32_t bos = 256;
inline constexpr int32_t eos = 257;
inline constexpr int32_t pad = 258;
inline constexpr int64_t vocab_size = 259;
}  // namespace byte_tokenizer

struct Documents {
  std::vector<int32_t> tokens;      ///< one document after another
  std::vector<int64_t> offsets{0};  ///< [documents + 1]; document i ends before offsets[i + 1]
  std::vector<std::string> names;   ///< [documents], or empty if they have no names
  /// [documents], or empty if unknown: bytes of text that all tokens but the first stand for.
  std::vector<int64_t> text_bytes;
  /// [documents], or empty if all count: how many of the first predictions are context of the
  /// others and no part of the document's score.
  std::vector<int64_t> unscored;
  int64_t vocab_size = byte_tokenizer::vocab_size;  ///< tokens are in [0, vocab_size)
  std::string tokenizer = byte_tokenizer::name;

  int64_t count() const { return std::ssize(offsets) - 1; }
  int64_t total() const { return offsets.back(); }
  int64_t begin(int64_t i) const { return offsets[i]; }
  int64_t length(int64_t i) const { return offsets[i + 1] - begin(i); }
  int64_t longest() const;  ///< tokens of the longest document; 0 without documents
  std::span<const int32_t> document(int64_t i) const {
    return std::span(tokens).subspan(begin(i), length(i));
  }
  /// "document 3 ('src/main.cpp')", for messages.
  std::string label(int64_t i) const;
};

/// Adds all errors of `documents`, one message per kind of error.
void check_documents(ConfigErrors& errors, const Documents& documents);

/// All documents of a file, on every rank. Collective; every rank reads a share of the tokens.
/// A file that breaks the schema is a usage error, a damaged one a runtime error.
Documents read_documents(Communicator& comm, const std::string& path);

/// Writes documents, which every rank holds in full, to the temporary file. Collective; every rank
/// writes a share of the tokens.
void write_documents(OutputFile& output, const Documents& documents, const Provenance& provenance);

}  // namespace gyre

#pragma once
// Rectangular batches, as data loaders of training frameworks make them: files "gyre/bshd" (rows of
// packed segments) and "gyre/salm" (rows of text with placeholders for audio).

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/schemas/extras_file.hpp"

namespace gyre {

inline constexpr const char* bshd_schema = "gyre/bshd";
inline constexpr const char* salm_schema = "gyre/salm";

/// Datasets of a gyre/bshd file, unconverted. Absent optional ones are empty.
struct BshdArrays {
  int64_t rows = 0, slots = 0;
  int64_t hidden = 0;              ///< 0: rows hold ids; else embeddings of this width
  int64_t vocab_size = 0;          ///< ids and labels are below it
  std::optional<int64_t> pad_id;   ///< id in padding slots; required without seq_lens
  int64_t segments_per_row = 0;    ///< columns of the length tables
  int64_t sentinel = -1000;        ///< marks a cell of these tables without a segment
  std::vector<int64_t> ids;        ///< [rows, slots]
  std::vector<float> embeddings;   ///< [rows, slots, hidden]
  std::vector<int64_t> labels;     ///< [rows, slots]
  int64_t position_axes = 1;       ///< axes of the rotary embedding
  std::vector<int64_t> positions;  ///< [position_axes, rows, slots], or [slots], shared by rows
  std::optional<std::vector<int64_t>> seq_lens;         ///< [rows, segments_per_row]
  std::optional<std::vector<int64_t>> seq_lens_padded;  ///< never there without seq_lens
  StoredExtras extras;
};

/// Datasets of a gyre/salm file.
struct SalmArrays {
  int64_t rows = 0, width = 0, hidden = 0, vocab_size = 0;
  int64_t pad_id = 0, placeholder_id = 0;
  std::vector<int64_t> ids;            ///< [rows, width]
  std::vector<float> embeddings;       ///< [rows, width, hidden]
  std::vector<int64_t> targets;        ///< [rows, width]
  std::vector<float> samples;          ///< all audio, one item after another
  std::vector<int64_t> audio_offsets;  ///< [items + 1]
  int64_t window = 0;                  ///< samples per frame
  std::vector<float> encoder;          ///< [window, hidden]: a frame is samples · encoder
};

/// Reads the arrays onto every rank. Checks types, shapes and the range of every element except the
/// lengths, which the caller checks. Collective.
BshdArrays read_bshd(Communicator& comm, const std::string& path);
/// Writes the temporary file of `output` from rank 0's arrays; the caller commits it. The batch
/// must hold ids and both tables of lengths, and no extras. Collective.
void fill_bshd(OutputFile& output, const BshdArrays& batch, const Provenance& provenance);
SalmArrays read_salm(Communicator& comm, const std::string& path);

}  // namespace gyre

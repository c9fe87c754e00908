#pragma once
// Packs utterances of text and audio into one stream (speech-augmented language models; after NeMo
// Speech's SALM).
//
//     for each row: strip the padding on its left; replace each placeholder by the frames of the
//                   next audio; label -100 for frames and for the pad id;
//                   shift the labels left by one *inside the row*, -100 at its end
//     lay the rows one after the other, each in slots rounded up for context parallelism
//
// Two rows, pad id 0, placeholder A, audio of 4, 3 and 2 frames (f), cp = tp = 1; the last id of
// row 0 and the last two of row 1 have labels:
//
//     ids     7 A 1 2 A 1 | 0 0 3 A 4 5
//     slots   7 f f f f 1 2 f f f 1     3 f f 4 5          real lengths 11 and 5
//     labels  . . . . . . . . . 1 .     . . 4 5 .          . = -100
//
// If labels were shifted after laying the rows out, the last slot of a row would learn the first
// token of the next row. The tests compare with the unpacked path (splice, pad on the left, drop
// the last input and the first target): both have the same pairs of an embedding and its label, in
// the same order, for every cp and tp, also after sharding.

#include <cstdint>
#include <span>
#include <vector>

#include "core/view.hpp"
#include "sharding/layout.hpp"

namespace gyre {

/// Rounding of the stream length for tp ranks that share a sequence.
enum class TpRounding {
  per_rank,  ///< tp divides the slots of each context-parallel rank: lcm(2·cp, cp·tp)
  total,     ///< tp divides the slots of all ranks, as in SALM: lcm(2·cp, tp)
};

struct SalmOptions {
  int64_t pad_id = 0;
  int64_t placeholder_id = -1;  ///< replaced by the frames of one audio
  int cp = 1;
  int tp = 1;
  TpRounding rounding = TpRounding::per_rank;
};

/// Rows of equal width, padded on the left, and the audio of their placeholders in row-major order.
struct SalmBatch {
  int64_t rows = 0;
  int64_t hidden = 1;
  std::span<const int64_t> ids;                    ///< [rows, width]
  std::span<const float> embeddings;               ///< [rows, width, hidden], of the text
  std::span<const int64_t> targets;                ///< [rows, width], not shifted; -100: none
  std::span<const MatrixView<const float>> audio;  ///< each [frames, hidden]; frames may be 0
};

/// The packed stream, T slots; N = rows.
struct SalmPacked {
  int64_t hidden = 1;
  std::vector<float> embeddings;         ///< [T, hidden]; padding is 0
  std::vector<int64_t> labels;           ///< [T] shifted; -100: none
  std::vector<int64_t> positions;        ///< [T] in the row, from 0; continue through its padding
  std::vector<int64_t> seq_lens;         ///< [N] real length of each row
  std::vector<int64_t> seq_lens_padded;  ///< [N] slots of each row
  std::vector<int32_t> cu_seqlens;       ///< [N + 1] sums of real lengths
  std::vector<int32_t>
      cu_seqlens_padded;   ///< [N + 1] first slots of rows: the boundaries of attention
  int32_t max_seqlen = 0;  ///< slots of the widest row
  /// [T] source row of each embedding in [text of all ids, frames of all audio]; -1: padding.
  /// Gathering by these indices gives `embeddings`.
  std::vector<int32_t> sources;
  SegmentBounds bounds() const { return {cu_seqlens, cu_seqlens_padded}; }
  int64_t tokens() const { return cu_seqlens.back(); }
  int64_t slots() const { return cu_seqlens_padded.back(); }
};

/// Packs a batch. With cp > 1 the slots of each row are its real length rounded up to 2·cp; with cp
/// = 1, its real length. With tp > 1 the last row grows until the total satisfies options.rounding.
/// A row of pads keeps one pad. Throws a usage error that names the row, slot or audio: no rows;
/// wrong sizes; a placeholder equal to the pad id; cp or tp below 1; more or fewer placeholders
/// than audio; audio of another hidden size; a row without any slot (audio of no frames only: it
/// would have a label and no embedding); more slots than int32.
SalmPacked pack_salm(const SalmBatch& batch, const SalmOptions& options);

/// One context-parallel rank's slots of a packed stream.
struct SalmShard {
  std::vector<float> embeddings;   ///< [T / cp, hidden]
  std::vector<int64_t> labels;     ///< [T / cp]
  std::vector<int64_t> positions;  ///< [T / cp], positions in the whole row
};

/// The shard of `rank`. With cp > 1 rows are rounded for dual-chunk-swap over cp ranks; with cp = 1
/// they are not (contiguous holds the whole stream). Boundaries and max_seqlen stay those of the
/// whole stream. Throws a usage error when the layout has another stream length or no such rank.
SalmShard shard_salm(const SalmPacked& packed, const Layout& layout, int rank);

}  // namespace gyre

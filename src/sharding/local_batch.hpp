#pragma once
// One rank's slots of a packed batch: token ids, positions and next-token targets.
//
// Targets are shifted in document order *before* sharding: a roll of the local tokens would be
// wrong at the end of every chunk.
//     one document a b c d e f g h, cp = 2, chunks of 2, target = next token, . = none
//     rank 0   a b | g h   targets b c | h .         rank 1   c d | e f   targets d e | f g

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout.hpp"

namespace gyre {

/// Target of a token that no loss counts.
inline constexpr int32_t no_target = -1;

struct LocalBatch {
  std::vector<int32_t> tokens;     ///< [slots]; padding holds id 0
  std::vector<int32_t> positions;  ///< [slots] position inside the document; continues through the
                                   ///< padding of a segment; padding of the layout is 0
  std::vector<int32_t> targets;    ///< [slots] next token of the document; no_target for its last
                                   ///< token and padding. Appended: further targets, by `again`
  std::vector<int32_t> again;      ///< slot that predicts each further target: it has several
                                   ///< if the text branches there (model/shared_prefixes.hpp)
};

/// documents[i] holds the tokens of segment i, bounds.real_length(i) of them. Precondition:
/// `layout` is made from these bounds.
LocalBatch make_local_batch(const Layout& layout, const SegmentBounds& bounds,
                            std::span<const std::span<const int32_t>> documents, int rank);

}  // namespace gyre

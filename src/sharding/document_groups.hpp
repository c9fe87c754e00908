#pragma once
// Groups of ranks, one for each document, of which the layout `hybrid` is made.
//
//     part of a document, g ranks    chunks i and 2g-1-i of 2g for member i, as dual-chunk-swap cuts
//     load of a rank                 the largest of
//                                        pairs / (pairs of all documents / cp)
//                                        tokens / (slots of the stream / cp, rounded up)
//                                        seconds of its needed keys / mean seconds of the pairs
//
//     any:            for share = 2^(n/4), ..., 2^(1/4), 1, 2^(-1/4), 2^(-1/2), ..., of which the
//                     first puts each document on one rank:
//                         size of a document's group = least g for which a rank with a g-th of its
//                             pairs and tokens has a load of at most `share`
//                         documents by descending pairs: each goes to the g ranks that have the
//                             least load with a g-th of it
//                         score = largest load + 0.1 · keys needed / keys needed by groups of cp
//                         until a load of 1 would not lower the score
//                     return the groups of the least score
//     power-of-two:   size = least power of two that is at least length / (slots / cp), the rule of
//                         Megatron-LM's hybrid context parallelism, whose ranks are consecutive:
//                         [k·size, (k+1)·size); placed by the same rule
//
// Example, cp = 2, documents of 8, 4 and 4 tokens; a rank has 8 slots. Of any size: the first is on
// both ranks (tokens 0, 1, 6, 7 and 2 to 5), the second on rank 0, the third on rank 1; 28 pairs
// each, 2 and 4 keys needed. By power-of-two: the first on rank 0, the others on rank 1; 36 and 20
// pairs.
//
// A group has at most half as many ranks as its document has tokens, so that no chunk is empty.
// O(documents · cp) for each share. Shares are farther apart if that is over 2^28 for 80 of them.
// Related: FlexSP (arXiv 2412.01523), which solves for sizes by integer programming, and ByteScale
// (arXiv 2502.21231).

#include <array>
#include <cstdint>
#include <vector>

#include "sharding/layouts.hpp"

namespace gyre {

/// Positions [begin, end) of a document.
struct TokenRange {
  int64_t begin, end;
  int64_t length() const { return end - begin; }
};

/// The chunks of member `member` of a group of `size` ranks that share a document of `length`
/// tokens. Chunk k of 2·size is [k·length / (2·size), (k+1)·length / (2·size)), rounded down, so
/// that lengths of chunks differ by at most one token.
std::array<TokenRange, 2> chunks_of_member(int64_t length, int64_t size, int64_t member);

struct DocumentGroups {
  std::vector<std::vector<int32_t>> ranks;  ///< [segments] ascending; none of one without tokens
  double largest_load = 0;                  ///< 1: pairs and tokens are even
};

/// The groups of the documents of a stream. Equal documents are exchanged for each other if their
/// order changes; nothing else changes. Throws a usage error for invalid boundaries, cp or times.
DocumentGroups choose_groups(const SegmentBounds& bounds, const LayoutOptions& options);

}  // namespace gyre

#pragma once
// A bin of document trees (packing/prefix_forest.hpp) as a decoder reads it: the mask, the
// positions of tokens in their documents, and what each row predicts.

#include <span>
#include <vector>

#include "attention/mask.hpp"
#include "packing/prefix_forest.hpp"
#include "sharding/layout.hpp"
#include "sharding/local_batch.hpp"

namespace gyre {

/// Mask of segments that hold these trees: every token sees its own node causally and all tokens of
/// the node's ancestors. Plain causal where every tree has a single node.
MaskRule mask_of(const PrefixForest& forest, std::span<const int64_t> trees);

/// A run of rows of one rank, with the documents that share it: positions start, start + stride,
/// ... of each document are at rows row, row + 1, ...
struct DocumentRun {
  std::span<const int64_t> documents;  ///< at least one
  int64_t start = 0, stride = 1, length = 0;
  int64_t row = 0;
};

/// Token runs of a shard, in ascending order of slots; every slot is in one run and each run lies
/// in one node. trees[i] is the tree of segment i. Runs are views into the forest.
std::vector<DocumentRun> token_runs(const PrefixForest& forest, std::span<const int64_t> trees,
                                    const Shard& shard);

/// Prediction runs of a shard. A row inside a node predicts the next token, in its own slot. The
/// last row of a node predicts the first token of each child; these predictions follow the slots.
std::vector<DocumentRun> prediction_runs(const PrefixForest& forest, std::span<const int64_t> trees,
                                         const Shard& shard);

/// One rank's view of the trees; texts[i] is the token stream of trees[i].
LocalBatch make_local_batch(const Layout& layout, const SegmentBounds& bounds,
                            const PrefixForest& forest, std::span<const int64_t> trees,
                            std::span<const std::span<const int32_t>> texts, int rank);

}  // namespace gyre

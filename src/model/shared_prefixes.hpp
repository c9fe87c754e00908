#pragma once
// A bin of trees of documents (packing/prefix_forest.hpp) as a decoder reads it: who sees whom,
// where tokens stand in their documents, and what each row predicts.

#include <span>
#include <vector>

#include "attention/mask.hpp"
#include "packing/prefix_forest.hpp"
#include "sharding/layout.hpp"
#include "sharding/local_batch.hpp"

namespace gyre {

/// The mask of segments that hold these trees: every token sees its node causally, and all of the
/// nodes above it. A plain causal mask where no tree has a second node.
MaskRule mask_of(const PrefixForest& forest, std::span<const int64_t> trees);

/// Rows of one rank and the documents that have them: positions start, start + stride, ... of each
/// of the documents lie at rows row, row + 1, ...
struct DocumentRun {
  std::span<const int64_t> documents;  ///< at least one
  int64_t start = 0, stride = 1, length = 0;
  int64_t row = 0;
};

/// The tokens of a shard, by ascending slot, every slot in one run; each run is of one node.
/// trees[i] is that of segment i. Runs view the forest.
std::vector<DocumentRun> token_runs(const PrefixForest& forest, std::span<const int64_t> trees,
                                    const Shard& shard);

/// The predictions of a shard: of rows inside a node, each in its slot; and of the last row of a
/// node the first token of each child, one after the other behind the slots.
std::vector<DocumentRun> prediction_runs(const PrefixForest& forest, std::span<const int64_t> trees,
                                         const Shard& shard);

/// One rank's view of the trees; texts[i] are the tokens of the stream of trees[i].
LocalBatch make_local_batch(const Layout& layout, const SegmentBounds& bounds,
                            const PrefixForest& forest, std::span<const int64_t> trees,
                            std::span<const std::span<const int32_t>> texts, int rank);

}  // namespace gyre

#include "model/shared_prefixes.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Rows of one node: tokens at, at + stride, ... of the token stream of a tree.
struct NodeRun {
  int64_t segment;
  std::span<const PrefixNode> tree;
  size_t node;
  int64_t at, stride, length;
  int64_t slot;

  const PrefixNode& self() const { return tree[node]; }
  int64_t position(int64_t i) const { return self().position + at + i * stride - self().begin; }
  /// Whether the last row of the run is the last one of its node.
  bool ends_node() const { return at + (length - 1) * stride == self().end() - 1; }
};

template <class F>
void for_each_node_run(const PrefixForest& forest, std::span<const int64_t> trees,
                       const Shard& shard, F f) {
  for (const Fragment& fragment : shard.fragments) {
    const int64_t segment = fragment.segment;
    const auto tree = forest.tree(trees[segment]);
    size_t node = node_at(tree, fragment.start.value());
    for (int64_t done = 0; done < fragment.length;) {
      const int64_t at = fragment.start.value() + done * fragment.stride;
      while (at >= tree[node].end()) ++node;
      const int64_t length =
          std::min(fragment.length - done, ceil_div(tree[node].end() - at, fragment.stride));
      f(NodeRun{segment, tree, node, at, fragment.stride, length,
                fragment.local_begin.value() + done});
      done += length;
    }
  }
}

}  // namespace

MaskRule mask_of(const PrefixForest& forest, std::span<const int64_t> trees) {
  std::vector<std::vector<Region>> documents;
  std::vector<int64_t> lengths;
  bool plain = true;
  for (const int64_t t : trees) {
    const auto tree = forest.tree(t);
    plain = plain && tree.size() == 1;
    lengths.push_back(forest.tokens(t));
    std::vector<Region>& regions = documents.emplace_back();
    for (const PrefixNode& node : tree) {
      if (node.length == 0) continue;
      regions.push_back({node.begin, node.end(), node.begin, node.end(), RegionKind::causal});
      const PrefixNode& last = (&node)[node.descendants];
      if (node.descendants > 0)
        regions.push_back({node.end(), last.end(), node.begin, node.end(), RegionKind::full});
    }
  }
  return plain ? MaskRule() : MaskRule(MaskTable(std::move(documents), lengths));
}

std::vector<DocumentRun> token_runs(const PrefixForest& forest, std::span<const int64_t> trees,
                                    const Shard& shard) {
  std::vector<DocumentRun> runs;
  for_each_node_run(forest, trees, shard, [&](const NodeRun& run) {
    runs.push_back(
        {forest.documents_of(run.self()), run.position(0), run.stride, run.length, run.slot});
  });
  return runs;
}

std::vector<DocumentRun> prediction_runs(const PrefixForest& forest, std::span<const int64_t> trees,
                                         const Shard& shard) {
  std::vector<DocumentRun> runs;
  int64_t row = shard.slots;
  for_each_node_run(forest, trees, shard, [&](const NodeRun& run) {
    const int64_t inside = run.ends_node() ? run.length - 1 : run.length;
    if (inside > 0)
      runs.push_back(
          {forest.documents_of(run.self()), run.position(0), run.stride, inside, run.slot});
    if (run.ends_node())
      for_each_child(run.tree, run.node, [&](size_t child) {
        runs.push_back(
            {forest.documents_of(run.tree[child]), run.tree[child].position - 1, 1, 1, row++});
      });
  });
  return runs;
}

LocalBatch make_local_batch(const Layout& layout, const SegmentBounds& bounds,
                            const PrefixForest& forest, std::span<const int64_t> trees,
                            std::span<const std::span<const int32_t>> texts, int rank) {
  LocalBatch batch = make_local_batch(layout, bounds, texts, rank);
  for_each_node_run(forest, trees, layout.shard(rank), [&](const NodeRun& run) {
    for (int64_t i = 0; i < run.length; ++i)
      batch.positions[run.slot + i] = static_cast<int32_t>(run.position(i));
    if (!run.ends_node()) return;
    const int64_t last = run.slot + run.length - 1;
    batch.targets[last] = no_target;
    for_each_child(run.tree, run.node, [&](size_t child) {
      batch.again.push_back(static_cast<int32_t>(last));
      batch.targets.push_back(texts[run.segment][run.tree[child].begin]);
    });
  });
  return batch;
}

}  // namespace gyre

#include "attention/kernels/attention_graphs.hpp"

namespace gyre {
namespace {

/// Largest number of graphs of even batches, each for one length; later even batches are treated as
/// ragged.
constexpr int64_t max_even_graphs = 64;

}  // namespace

AttentionGraph* AttentionGraphs::of(const AttentionGraphShape& shape) {
  auto found = graphs_.find(shape);
  if (found == graphs_.end() && shape.even && ++even_ > max_even_graphs) return nullptr;
  if (found == graphs_.end())
    found = graphs_.emplace(shape, shape.backward ? build_gradient(shape) : build(shape)).first;
  AttentionGraph* const graph = found->second.graph.get();
  used_ += graph != nullptr ? 1 : 0;
  return graph;
}

AttentionGraphs::Built AttentionGraphs::build(const AttentionGraphShape& shape) {
  Built result;
  result.graph = library_.build(shape, result.problem);
  built_ += result.graph ? 1 : 0;
  return result;
}

/// Deterministic if demanded, or if available at a moderate cost in workspace.
AttentionGraphs::Built AttentionGraphs::build_gradient(const AttentionGraphShape& shape) {
  AttentionGraphShape in_order = shape;
  in_order.deterministic = true;
  Built ordered = build(in_order);
  const int64_t bytes = ordered.graph ? ordered.graph->workspace_bytes() : 0;
  if (deterministic_ || (ordered.graph && is_moderate_order(bytes, 0))) return ordered;
  Built plain = build(shape);
  if (!plain.graph && ordered.graph) return ordered;
  if (ordered.graph && is_moderate_order(bytes, plain.graph->workspace_bytes())) return ordered;
  unordered_ = unordered_ || plain.graph;
  return plain;
}

}  // namespace gyre

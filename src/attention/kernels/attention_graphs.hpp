#pragma once
// Graphs of an attention library, each built once. Building one takes some tenths of a second.

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "attention/kernels/attention_library.hpp"

namespace gyre {

/// A deterministic backward graph is used if its workspace, in bytes, exceeds that of the
/// nondeterministic graph, `plain`, by at most this.
inline constexpr int64_t max_ordered_workspace = int64_t{1} << 30;
constexpr bool is_moderate_order(int64_t ordered, int64_t plain) {
  return ordered - plain <= max_ordered_workspace;
}

class AttentionGraphs {
 public:
  /// With `deterministic`, all backward graphs are; see make_ragged_kernel.
  AttentionGraphs(AttentionLibrary& library, bool deterministic)
      : library_(library), deterministic_(deterministic) {}

  /// The graph of a shape; nullptr if it is refused.
  AttentionGraph* of(const AttentionGraphShape& shape);
  /// Why the shape was refused. Precondition: of(shape) was called.
  const std::string& problem(const AttentionGraphShape& shape) const {
    return graphs_.at(shape).problem;
  }
  /// Whether some graph sums in no fixed order.
  bool unordered() const { return unordered_; }
  /// Number of graphs that were built, and of calls of of() that returned one.
  int64_t built() const { return built_; }
  int64_t used() const { return used_; }

 private:
  struct Built {
    std::unique_ptr<AttentionGraph> graph;  // none: refused
    std::string problem;
  };
  Built build(const AttentionGraphShape& shape);
  Built build_gradient(const AttentionGraphShape& shape);

  AttentionLibrary& library_;
  bool deterministic_;
  std::map<AttentionGraphShape, Built> graphs_;
  int64_t even_ = 0;  // requested graphs of even batches
  int64_t built_ = 0, used_ = 0;
  bool unordered_ = false;
};

}  // namespace gyre

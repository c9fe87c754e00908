#pragma once
// Graphs of cuDNN's fused attention over ragged batches, built with its C++ front end. For sources
// that include that anyway.

#include <cudnn_frontend.h>

#include <memory>
#include <optional>
#include <string>

#include "attention/kernels/attention_library.hpp"

namespace gyre {

using CudnnGraph = cudnn_frontend::graph::Graph;

/// The corner from which cuDNN counts the diagonal of a mask; none where there is no diagonal.
std::optional<cudnn_frontend::DiagonalAlignment_t> diagonal_of(RaggedMask mask);

/// The graph, not yet validated. bf16, sums in f32. `sm_version` (90 for compute capability 9.0):
/// that of the device it is for, 0: of the current one.
std::shared_ptr<CudnnGraph> make_attention_graph(const AttentionGraphShape& shape, int sm_version);

/// Why cuDNN's front end does not take a graph; empty when it does. Needs no device when
/// `sm_version` is given. What the library itself makes of it only a build on a device shows.
std::string refusal(const AttentionGraphShape& shape, int sm_version);

}  // namespace gyre

#pragma once
// Graphs of cuDNN's fused attention over ragged batches, built with its C++ front end. Only for
// sources that include that front end.

#include <cudnn_frontend.h>

#include <memory>
#include <optional>
#include <string>

#include "attention/kernels/attention_library.hpp"

namespace gyre {

using CudnnGraph = cudnn_frontend::graph::Graph;

/// The corner from which cuDNN counts the diagonal of a mask; nullopt if there is no diagonal.
std::optional<cudnn_frontend::DiagonalAlignment_t> diagonal_of(RaggedMask mask);

/// The graph, not yet validated; bf16 with sums in f32. `sm_version`: of the target device (90 for
/// compute capability 9.0); 0: of the current device.
std::shared_ptr<CudnnGraph> make_attention_graph(const AttentionGraphShape& shape, int sm_version);

/// Why cuDNN's front end rejects a graph; empty if it accepts it. Needs no device if `sm_version`
/// is given. The library itself may still reject the graph when it is built on a device.
std::string refusal(const AttentionGraphShape& shape, int sm_version);

}  // namespace gyre

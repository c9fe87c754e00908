#pragma once
// The workload of gyre-attention: documents, the shape and mask of the attention over them, and
// their place in a layout. The values of q, k, v and d_out are in apps/attention/inputs.hpp.

#include <string>
#include <vector>

#include "apps/common/mask_options.hpp"
#include "attention/plan.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {

struct AttentionFile;
struct AttentionOptions;

enum class InputTensor { q, k, v, d_out };

/// Documents, concatenated, and the attention over them. Token t of the concatenation is position
/// t - offsets[d] of document d.
struct AttentionWorkload {
  HeadShape heads;
  MaskRule mask;
  std::vector<int64_t> offsets;  ///< [documents + 1]
  std::vector<float> sinks;      ///< [heads], or empty
  DType type = DType::f32;       ///< of q, k, v, d_out: values are rounded to it
  double score_size = 1;         ///< rms of scaled scores, at least 1; 1 for normal inputs
  std::string origin;            ///< source of the documents, for the report

  int64_t documents() const { return std::ssize(offsets) - 1; }
  int64_t tokens() const { return offsets.back(); }
  int64_t length(int64_t d) const { return offsets[d + 1] - offsets[d]; }
  int64_t longest() const;
  /// Visible (query, key) pairs of all documents, times the query heads.
  int64_t pairs() const;
  /// Elements of a token's row in `tensor`.
  int64_t width(InputTensor tensor) const {
    const bool kv = tensor == InputTensor::k || tensor == InputTensor::v;
    return (kv ? heads.kv_heads : heads.heads) * heads.head_dim;
  }
};

/// The workload of the options: sequences of `size` tokens, or one pack of generated documents.
/// Throws usage errors of --gen.
AttentionWorkload generated_workload(const AttentionOptions& o, int64_t size);
/// The workload of a file. Its mask replaces that of the options.
AttentionWorkload workload_of(const AttentionFile& file, AttentionOptions& o);

/// A workload in a layout.
struct WorkloadLayout : PaddedLayout {
  WorkloadLayout(const AttentionWorkload& workload, const LayoutKind& kind,
                 const LayoutOptions& options)
      : PaddedLayout(workload.offsets, kind, weighed_by(options, workload.mask, workload.offsets)) {
  }
};

}  // namespace gyre

#pragma once
// Defines what gyre-attention runs: documents, their attention (heads and mask), rows of inputs,
// network and kernel, and the setup and plan of one schedule under one layout.

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "apps/attention/options.hpp"
#include "apps/common/workload_options.hpp"
#include "attention/kernels/block_kernel.hpp"
#include "attention/plan.hpp"
#include "attention/schedules/registry.hpp"
#include "comm/communicator.hpp"
#include "report/result.hpp"
#include "sharding/layouts.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {

struct AttentionFile;

enum class InputTensor { q, k, v, d_out };

/// Documents, concatenated, and the attention over them. Token t of the concatenation is position
/// t - offsets[d] of document d.
struct AttentionWorkload {
  HeadShape heads;
  MaskRule mask;
  std::vector<int64_t> offsets;  ///< [documents + 1]
  /// [documents + 1] prefix sums of queries, which the last tokens of a document have; empty: all.
  std::vector<int64_t> query_offsets;
  std::vector<float> sinks;  ///< [heads], or empty
  DType type = DType::f32;   ///< of q, k, v, d_out: values are rounded to it
  double score_size = 1;     ///< rms of scaled scores, at least 1; 1 for normal inputs
  std::string origin;        ///< source of the documents, for the report

  int64_t documents() const { return std::ssize(offsets) - 1; }
  int64_t tokens() const { return offsets.back(); }
  int64_t length(int64_t d) const { return offsets[d + 1] - offsets[d]; }
  int64_t queries_of(int64_t d) const {
    return query_offsets.empty() ? length(d) : query_offsets[d + 1] - query_offsets[d];
  }
  int64_t queries() const { return query_offsets.empty() ? tokens() : query_offsets.back(); }
  /// The row of a token's query among those of all documents.
  int64_t query_row(int64_t document, int64_t token) const {
    if (query_offsets.empty()) return token;
    return token - offsets[document + 1] + query_offsets[document + 1];
  }
  int64_t longest() const;
  /// Visible (query, key) pairs of all documents, times the query heads.
  int64_t pairs() const;
  /// Elements of a token's row in `tensor`.
  int64_t width(InputTensor tensor) const {
    const bool kv = tensor == InputTensor::k || tensor == InputTensor::v;
    const bool scored = tensor == InputTensor::q || tensor == InputTensor::k;
    return (kv ? heads.kv_heads : heads.heads) * (scored ? heads.head_dim : heads.value_dim());
  }
};

/// Elements [first, first + dim) of each of `heads` heads, which lie `stride` columns apart.
struct HeadColumns {
  int64_t heads, dim, first = 0, stride = dim;
  bool of_all_heads = false;  ///< the elements belong to all heads: arrays of them have no heads
  int64_t at(size_t i) const {
    const auto index = static_cast<int64_t>(i);
    return index / dim * stride + first + index % dim;
  }
};
/// Columns of keys, or of their gradients, that each KV head has of its own.
inline HeadColumns own_key_columns(const HeadShape& shape) {
  return {shape.kv_heads, shape.own_key_dim(), 0, shape.head_dim};
}
/// Columns that all KV heads share.
inline HeadColumns shared_key_columns(const HeadShape& shape) {
  return {1, shape.shared_key_dim, shape.own_key_dim(), shape.head_dim, true};
}

/// The workload of the options: sequences of `size` tokens, or one pack of generated documents.
/// Throws usage errors of --gen.
AttentionWorkload generated_workload(const AttentionOptions& o, int64_t size);
/// The workload of a file. Its mask replaces that of the options.
AttentionWorkload workload_of(const AttentionFile& file, AttentionOptions& o);

/// A workload in a layout.
struct WorkloadLayout : QueryLayouts {
  WorkloadLayout(const AttentionWorkload& workload, const LayoutKind& kind,
                 const LayoutOptions& options)
      : QueryLayouts(workload.offsets, workload.query_offsets, kind,
                     weighed_by(options, workload.mask, workload.offsets)) {}
  /// The problem of this workload, which refers to this object.
  AttentionProblem problem_of(const AttentionWorkload& workload,
                              const ScheduleOptions& options) const {
    return {.layout = &layout,
            .heads = workload.heads,
            .mask = workload.mask,
            .options = options,
            .query_layout = queries()};
  }
};

/// One schedule under one layout, and the options of a run.
struct AttentionSetup {
  const Schedule& schedule;
  const LayoutKind& layout;
  ScheduleOptions schedule_options;
  LayoutOptions layout_options;
  ElementTypes types;
  bool with_backward = true;
  /// Further uses of the arrays' memory space: the statistics of all tokens are kept for
  /// verification and files, and results are copied for a file.
  bool gathers_statistics = true, writes = false;
  int64_t memory_bytes = 0;  ///< available to this rank; 0: no limit
  bool cuda_graph = false;   ///< runs are recorded as CUDA graphs
  bool replays = false;      ///< this process runs all ranks, which take turns
  bool only_sleeps = false;  ///< the kernel only sleeps and leaves no results
  double peak_flops = 0;     ///< measured FLOP/s of a rank; 0: unknown
};

/// The setup of one schedule under one layout, by the options.
AttentionSetup setup_of(const AttentionOptions& o, const Schedule& schedule,
                        const LayoutKind& layout, int64_t memory_bytes, double peak_flops = 0);

/// Prepares --cuda-graph; call it before any array is made. Throws a usage error if the messages of
/// `network` cannot be recorded.
void prepare_graphs(const Communicator& network);

/// Bytes that a rank allocates for a plan: the plan itself, its arrays, copies for messages,
/// statistics of all tokens, and copies for a file. A process that replays all ranks allocates as
/// much for each.
int64_t planned_bytes(const RankPlan& plan, const AttentionWorkload& workload,
                      const AttentionSetup& setup);

/// A workload in the layout of a setup: what the plans of all ranks are made of.
struct PlacedAttention : WorkloadLayout {
  PlacedAttention(const AttentionWorkload& workload, const AttentionSetup& setup);
  PlacedAttention(const PlacedAttention&) = delete;  // the problem points to the layout
  PlacedAttention& operator=(const PlacedAttention&) = delete;

  AttentionProblem problem;
};

/// The plan of one rank.
struct PlannedAttention {
  /// `placed_`: that of another rank of this process; null: makes it. Throws a usage error if layout
  /// or schedule refuses the workload, or if the plan needs more memory than the setup allows.
  PlannedAttention(const AttentionWorkload& workload, const AttentionSetup& setup, int rank,
                   std::shared_ptr<const PlacedAttention> placed_ = nullptr);

  std::shared_ptr<const PlacedAttention> placed;
  RankPlan plan;
};
using PlannedPtr = std::shared_ptr<const PlannedAttention>;

/// The plans of all workloads, with one schedule and one layout. Throws a usage error that lists
/// all workloads that they refuse or that do not fit the memory of `rank`. With several it plans
/// nothing, and returns null pointers: the run plans each, and skips those that are refused.
std::vector<PlannedPtr> plan_workloads(const std::vector<AttentionWorkload>& workloads,
                                       const AttentionOptions& o, int64_t memory_bytes, int rank);

/// Rows of the inputs. Every rank can read any row.
class TensorRows {
 public:
  virtual ~TensorRows() = default;
  /// to [width(tensor)] <- a token's row.
  virtual void row(InputTensor tensor, int64_t token, std::span<float> to) const = 0;
};

/// Nearly normal numbers, a function of seed, tensor, token and element only
/// (core/token_random.hpp), rounded to the type of the workload.
std::unique_ptr<TensorRows> random_rows(const AttentionWorkload& workload, uint64_t seed);
/// Random sinks [heads], by the same function.
std::vector<float> random_sinks(int64_t heads, uint64_t seed);
/// Rows of the file, which must outlive them, rounded to `type`.
std::unique_ptr<TensorRows> rows_of(const AttentionFile& file, DType type);
/// Removes the answers that depend on an input which the run rounds. Returns the use of every
/// answer.
std::vector<AnswerUse> keep_answers(AttentionFile& file, const AttentionOptions& o);

/// Throws a usage error if a bound of the scores of `file`, of sums over their keys, or of
/// gradients is beyond float32, in which kernels compute them. It is a bound of any mask.
void check_products(const AttentionFile& file, bool with_gradients);

/// The rms of scale · <q, k> over the visible pairs of the region and head where it is largest; at
/// least 1. Up to 32 documents, and 32 regions of each, are sampled. Of a single region, these are
/// 32 queries with 32 keys each; of several regions fewer, so that all documents have as many
/// pairs.
double sampled_score_size(const AttentionWorkload& workload, const TensorRows& inputs);

/// A token and its slot in a shard.
struct TokenRow {
  int64_t token, row, document;
};
/// The tokens of a shard (or of any rows of an array: shard_of), in the order of its fragments.
std::vector<TokenRow> token_rows(const AttentionWorkload& workload, const Shard& shard);

/// Fills `to` [slots, width(tensor)] with the rows of a rank's tokens, and its padding, which
/// nothing may read, with NaN.
void fill_rows(const AttentionWorkload& workload, const TensorRows& inputs, InputTensor tensor,
               const Shard& shard, MatrixRef to);

/// Whether --emulate-compute names the file of a machine (gyre-machine/1), not settings.
inline bool names_machine(const std::string& compute) {
  return compute.find('=') == std::string::npos;
}

struct NetworkAndKernel {
  std::unique_ptr<Communicator> emulated_network;  ///< null: there is none
  Communicator& network;                           ///< the emulated one, or the backend's
  std::unique_ptr<BlockKernel> kernel;
};

/// Makes network and kernel. With --emulate-compute, waits of the network and of context.world
/// sleep from now on. Collective.
NetworkAndKernel make_network_and_kernel(AppContext& context, const AttentionOptions& o,
                                         Backend& backend);

}  // namespace gyre

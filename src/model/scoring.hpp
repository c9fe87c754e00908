#pragma once
// Scoring of a set of documents on a dp × cp × tp grid: pack, shard, decode, and back to document
// order.
//
//     serial:
//     for every document d, every position p but its last:
//         logprob[d, p] = log P(token p+1 | tokens 0..p);  entropy[d, p] = H(P(. | tokens 0..p))
//
// Bins are dealt over the dp replicas by cost; each bin is a packed stream, sharded over cp by a
// layout and planned once by a schedule; all layers and iterations reuse the plan.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/schedules/registry.hpp"
#include "core/ragged.hpp"
#include "model/decoder.hpp"
#include "packing/packing.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Ragged documents: document i is tokens[offsets[i], offsets[i+1]).
struct DocumentView {
  std::span<const int32_t> tokens;
  std::span<const int64_t> offsets;
  int64_t size() const { return std::ssize(offsets) - 1; }
  int64_t length(int64_t i) const {
    return offsets[static_cast<size_t>(i) + 1] - offsets[static_cast<size_t>(i)];
  }
  std::span<const int32_t> document(int64_t i) const {
    return tokens.subspan(static_cast<size_t>(offsets[static_cast<size_t>(i)]),
                          static_cast<size_t>(length(i)));
  }
};

/// Forward FLOPs of the model without attention, per token: 2 per weight of a matrix product.
double linear_flops_per_token(const ModelConfig& config);

/// Memory of one of `tp` ranks for weights.
int64_t weight_bytes(const ModelConfig& config, int tp, DType type = DType::f32);
/// Memory of the activations of `slots` slots, without what attention stores.
int64_t activation_bytes(const ModelConfig& config, int tp, int64_t slots, DType type = DType::f32);

/// How a scoring is spread over ranks: the grid, who owns which slots of a bin, and how queries
/// meet the keys of other ranks.
struct ScoringSetup {
  GridShape grid;
  const LayoutKind* layout = &default_layout();
  LayoutOptions layout_options = {};  ///< but for cp, which is the grid's
  const Schedule* schedule = &default_schedule();
  ScheduleOptions schedule_options = {};

  /// Slots of a segment are a multiple of this: 2·cp for DualChunkSwap, which cuts every segment; 1
  /// for the others, which pad the row.
  int64_t slot_multiple() const;
  /// The layout of a bin. Throws the usage errors of the layout.
  Layout layout_of(const PackedBatch& bin) const;
  /// Causal attention of a bin, forward only, on one tensor-parallel rank of every cp rank.
  /// `layout` must outlive the result.
  AttentionProblem problem(const Layout& layout, const ModelConfig& config) const;
};

/// What is known of a scoring before it runs; the same on all ranks.
struct ScoringPlan {
  ScoringSetup setup;
  std::vector<PackedBatch> bins;
  std::vector<std::vector<int64_t>> bins_of_replica;  ///< [dp] indices into bins
  int64_t capacity = 0;
  int64_t tokens = 0, predictions = 0;
  int64_t pairs = 0;  ///< visible (query, key) pairs per head and layer

  double flops(const ModelConfig& config) const;
};

/// Packs the documents; each segment's slots are a multiple of setup.slot_multiple(). Throws usage
/// errors (capacity).
ScoringPlan plan_scoring(const DocumentView& documents, const ModelConfig& config,
                         const ScoringSetup& setup, int64_t bin_capacity);

/// Adds what attention does for one more bin: sums, but for memory, of which bins reuse the same.
void add_bin(PlanCount& total, const PlanCount& bin);

/// One bin on one rank.
struct BinShard {
  int64_t bin = 0;
  Shard shard;
  RankPlan plan;  ///< without backward steps
  LocalBatch batch;
  std::vector<LogprobEntropy> scores;  ///< [slots]
};

/// A contiguous run of all predictions, in document order.
struct ScoreRange {
  int64_t begin = 0;
  std::vector<float> logprob, entropy;
  int64_t end() const { return begin + std::ssize(logprob); }
};

/// `length` real tokens of a document on this rank: positions start, start + stride, ... lie at the
/// local slots slot, slot + 1, ...
struct DocumentRun {
  int64_t document = 0;
  int64_t start = 0, stride = 1, length = 0;
  int64_t slot = 0;
};

class Scorer {
 public:
  /// Shards and plans the bins of this rank's replica; no communication. Throws the usage errors of
  /// layouts and the refusals of schedules. `plan` and `grid` must outlive the scorer.
  Scorer(const DocumentView& documents, const ModelConfig& config, const ScoringPlan& plan,
         ProcessGrid& grid);

  const std::vector<BinShard>& shards() const { return shards_; }
  const HeadShape& heads() const { return heads_; }  ///< of this rank
  /// Is called with the number of bins done and of all bins of this rank, before each bin of a run.
  void on_progress(std::function<void(int64_t done, int64_t all)> f) { progress_ = std::move(f); }
  /// This rank's share of attention over all its bins in one layer, counted from the plans.
  PlanCount count() const;

  /// One pass of the decoder over all bins of this replica. Collective over the replica.
  DecoderTimes run(Decoder& decoder,
                   const std::function<void(const BinShard&, int64_t index,
                                            MatrixView<const float> x)>& observe = {});

  /// Of this rank's scores of the last run.
  uint64_t checksum() const;

  /// The scores of the last run in document order, in equal contiguous shares: rank r of the world
  /// gets predictions [P·r/n, P·(r+1)/n). One all-to-all-v. Collective over `world`, all
  /// ranks of the grid, a communicator of host memory.
  ScoreRange in_document_order(Communicator& world) const;

  /// Calls f for every run of real tokens in `shard`, by ascending slot.
  void for_each_run(const BinShard& shard, const std::function<void(const DocumentRun&)>& f) const;

 private:
  DocumentView documents_;
  const ScoringPlan& plan_;
  ProcessGrid& grid_;
  HeadShape heads_;  // of this rank
  std::vector<BinShard> shards_;
  std::function<void(int64_t done, int64_t all)> progress_;
};

/// Per-document sums over a set of ScoreRanges that together cover all predictions. Collective.
struct DocumentScore {
  double logprob = 0;  ///< sum, nats
  double entropy = 0;  ///< sum, nats
  int64_t predictions = 0;
};
std::vector<DocumentScore> score_documents(const ScoreRange& mine,
                                           std::span<const int64_t> prediction_offsets,
                                           Communicator& world);

}  // namespace gyre

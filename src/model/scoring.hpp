#pragma once
// Scoring of a set of documents on a dp × cp × tp grid: pack, shard, decode, and back to document
// order.
//
//     serial:
//     for every document d, every position p but its last:
//         logprob[d, p] = log P(token p+1 | tokens 0..p);  entropy[d, p] = H(P(. | tokens 0..p))
//
// Documents that begin alike may be stored once, as a tree (packing/prefix_forest.hpp): every
// document has the same scores. Trees are packed into bins, and bins are dealt over the dp replicas
// by cost; each bin is a packed stream, sharded over cp by a layout and planned once by a schedule;
// all layers and iterations reuse the plan.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/schedules/registry.hpp"
#include "core/ragged.hpp"
#include "model/decoder.hpp"
#include "model/shared_prefixes.hpp"
#include "packing/packing.hpp"
#include "packing/prefix_forest.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Forward FLOPs of the model without attention, per token: 2 per weight of a matrix product.
double linear_flops_per_token(const ModelConfig& config);

/// Memory of one of `tp` ranks for weights.
int64_t weight_bytes(const ModelConfig& config, int tp, DType type = DType::f32);
/// Memory of the activations of `slots` slots, `again` of which predict once more, without what
/// attention stores.
int64_t activation_bytes(const ModelConfig& config, int tp, int64_t slots, int64_t again = 0,
                         DType type = DType::f32);

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
};

/// A bin over the ranks: who owns which slots, and who sees whom.
struct BinLayout {
  MaskRule mask;
  Layout layout;
};

/// What is known of a scoring before it runs; the same on all ranks.
struct ScoringPlan {
  ScoringSetup setup;
  PrefixForest forest;                                ///< of the documents
  std::vector<PackedBatch> bins;                      ///< whose "documents" are trees
  std::vector<std::vector<int64_t>> bins_of_replica;  ///< [dp] indices into bins
  int64_t capacity = 0;
  int64_t tokens = 0;       ///< stored
  int64_t predictions = 0;  ///< of all documents
  int64_t pairs = 0;        ///< visible (query, key) pairs per head and layer

  /// The layout of a bin. Throws the usage errors of the layout.
  BinLayout layout_of(const PackedBatch& bin) const;
  /// Attention of a bin, forward only, on one tensor-parallel rank of every cp rank. `layout` must
  /// outlive the result.
  AttentionProblem problem(const BinLayout& layout, const ModelConfig& config) const;
  double flops(const ModelConfig& config) const;
};

/// Packs the trees of `forest`, made of documents of these offsets; each segment's slots are a
/// multiple of setup.slot_multiple(). Throws usage errors (capacity).
ScoringPlan plan_scoring(std::span<const int64_t> offsets, PrefixForest forest,
                         const ModelConfig& config, const ScoringSetup& setup,
                         int64_t bin_capacity);
/// The same, every document stored by itself.
ScoringPlan plan_scoring(std::span<const int64_t> offsets, const ModelConfig& config,
                         const ScoringSetup& setup, int64_t bin_capacity);

/// Throws a usage error when making the plans of all ranks of all bins of `plan`, which was made of
/// `offsets`, would not end in minutes (attention/plan_size.hpp). `alike_once`: of bins with the
/// same boundaries, one is planned.
void check_scoring_size(const ScoringPlan& plan, std::span<const int64_t> offsets,
                        const ModelConfig& config, bool alike_once);

/// Adds what attention does for one more bin: sums, but for memory, of which bins reuse the same.
void add_bin(PlanCount& total, const PlanCount& bin);

/// One bin on one rank.
struct BinShard {
  int64_t bin = 0;
  Shard shard;
  RankPlan plan;  ///< without backward steps
  LocalBatch batch;
  std::vector<LogprobEntropy> scores;    ///< [targets]
  std::vector<DocumentRun> tokens;       ///< rows are slots
  std::vector<DocumentRun> predictions;  ///< rows are indices of scores
};

/// A contiguous run of all predictions, in document order.
struct ScoreRange {
  int64_t begin = 0;
  std::vector<float> logprob, entropy;
  int64_t end() const { return begin + std::ssize(logprob); }
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

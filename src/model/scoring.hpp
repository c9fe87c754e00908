#pragma once
// Scores a set of documents on a dp × cp × tp grid: packs, shards, decodes, and restores document
// order.
//
//     serial:
//     for every document d, every position p but its last:
//         logprob[d, p] = log P(token p+1 | tokens 0..p);  entropy[d, p] = H(P(. | tokens 0..p))
//
// Documents with a common prefix may be stored once, as a tree (packing/prefix_forest.hpp); every
// document keeps the same scores. Trees are packed into bins, and bins are distributed over the dp
// replicas by cost. Each bin is a packed stream, sharded over cp by a layout and planned once by a
// schedule; all layers and iterations reuse the plan.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/schedules/registry.hpp"
#include "core/ragged.hpp"
#include "model/decoder.hpp"
#include "model/pass_work.hpp"
#include "model/recurrent_layer.hpp"
#include "model/shared_prefixes.hpp"
#include "packing/packing.hpp"
#include "packing/prefix_forest.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

/// Forward FLOPs of the model without attention, per token: 2 per weight of a matrix product.
double linear_flops_per_token(const ModelConfig& config);

/// Bytes of the activations of `slots` slots, without attention's own arrays and the head's tile of
/// logits; `again` slots predict one more token.
int64_t activation_bytes(const ModelConfig& config, int tp, const DecoderTypes& types,
                         int64_t slots, int64_t again = 0);

/// How scoring is distributed over ranks: the grid, which rank owns which slots of a bin, how
/// queries meet the keys of other ranks; and in which types it computes.
struct ScoringSetup {
  GridShape grid;
  const LayoutKind* layout = &default_layout();
  LayoutOptions layout_options = {};  ///< all but cp, which the grid sets
  const Schedule* schedule = &default_schedule();
  ScheduleOptions schedule_options = {};
  DecoderTypes types = {};
  const LayoutKind* recurrent_layout = &default_recurrent_layout();
  const StateSchedule* state_schedule = &state_schedules().front();  ///< of recurrent layers

  /// The number of slots of a segment is a multiple of this: 2·cp for DualChunkSwap, which cuts
  /// every segment; 1 for layouts that pad the row.
  int64_t slot_multiple() const;
};

/// How a bin is distributed: which rank owns which slots, and which query sees which keys in layers
/// without a window.
struct BinLayout {
  MaskRule mask;
  Layout layout;     ///< of softmax attention, and all else
  Layout recurrent;  ///< of recurrent layers, if the model has them
};

/// Plan of a scoring pass; the same on all ranks.
struct ScoringPlan {
  ScoringSetup setup;
  PrefixForest forest;                                ///< all documents
  std::vector<PackedBatch> bins;                      ///< each batch's "documents" are trees
  std::vector<double> bin_flops;                      ///< [bins] of all slots, with padding
  std::vector<std::vector<int64_t>> bins_of_replica;  ///< [dp] indices into bins
  int64_t capacity = 0;
  int64_t tokens = 0;            ///< stored: a shared prefix counts once
  int64_t predictions = 0;       ///< over all documents
  std::vector<LayerMask> masks;  ///< of the model's layers
  /// The masks whose pairs layouts balance: `masks`, but in the plan of a teacher the student's.
  std::vector<LayerMask> layout_masks;
  /// [masks] visible (query, key) pairs per head of one layer with that mask.
  std::vector<int64_t> pairs_of_mask;
  int64_t pairs = 0;  ///< sum of pairs_of_mask: each mask counts once, not once per layer
  int64_t recurrent_layers = 0;

  /// Layout of a bin. Throws the layout's usage errors.
  BinLayout layout_of(const PackedBatch& bin) const;
  /// Forward-only attention of a bin in the layers with masks[mask], on all cp ranks, with the
  /// heads of one tp rank. `layout` must outlive the result.
  AttentionProblem problem(const BinLayout& layout, const ModelConfig& config,
                           size_t mask = 0) const;
  /// A recurrent layer over a bin. `layout` and `config` must outlive the result.
  RecurrentProblem recurrent_problem(const BinLayout& layout, const ModelConfig& config) const;
  double flops(const ModelConfig& config) const;
};

/// "ring under dual-chunk-swap", and of recurrent layers ", state-gather under contiguous".
std::string name_of_choice(const ScoringPlan& plan);

/// Packs the trees of `forest`, built from documents with these offsets; the slots of each segment
/// are a multiple of setup.slot_multiple(). Throws usage errors (capacity; a tree with several
/// nodes where layers have windows or are recurrent).
ScoringPlan plan_scoring(std::span<const int64_t> offsets, PrefixForest forest,
                         const ModelConfig& config, const ScoringSetup& setup,
                         int64_t bin_capacity);
/// As above, with every document stored separately.
ScoringPlan plan_scoring(std::span<const int64_t> offsets, const ModelConfig& config,
                         const ScoringSetup& setup, int64_t bin_capacity);

/// Throws a usage error if planning all ranks of all bins of `plan`, which was made of `offsets`,
/// would take more than minutes (attention/plan_size.hpp). `alike_once`: bins with the same
/// boundaries are planned once.
void check_scoring_size(const ScoringPlan& plan, std::span<const int64_t> offsets,
                        const ModelConfig& config, bool alike_once);

/// Adds the counts of one bin in `layers` layers: sums, except for memory, which bins and layers
/// reuse.
void add_bin(PlanCount& total, const PlanCount& bin, int64_t layers);

/// One rank's part of a bin.
struct BinShard {
  int64_t bin = 0;
  Shard shard;
  BinPlans plans;  ///< without backward steps
  /// This rank's messages of all recurrent layers: counted from the plan, and by closed form.
  RecurrentTraffic recurrent_sent, recurrent_expected;
  LocalBatch batch;
  std::vector<PredictionScore> scores;   ///< [targets]
  std::vector<DocumentRun> tokens;       ///< row: slot
  std::vector<DocumentRun> predictions;  ///< row: index into scores
};

/// A contiguous range of all predictions, in document order.
struct ScoreRange {
  int64_t begin = 0;
  std::vector<float> logprob, entropy, kl;
  int64_t end() const { return begin + std::ssize(logprob); }
};

/// Called after each bin of a run, with its index in shards() and its scores, which it may complete.
/// Returns the time that it adds to the run's.
using BinObserver = std::function<DecoderTimes(int64_t shard, std::span<PredictionScore> scores)>;

class Scorer {
 public:
  /// Shards and plans the bins of this rank's replica, without communication. Throws the layouts'
  /// usage errors and the schedules' refusals. `plan` and `grid` must outlive the scorer.
  Scorer(const DocumentView& documents, const ModelConfig& config, const ScoringPlan& plan,
         ProcessGrid& grid);

  const std::vector<BinShard>& shards() const { return shards_; }
  const HeadShape& heads() const { return heads_; }  ///< heads of this rank
  /// Later runs call these for each bin: `head` with the input of the head, then `after`.
  void observe_bins(HeadObserver head, BinObserver after) {
    observe_head_ = std::move(head);
    after_bin_ = std::move(after);
  }
  /// Before each bin of a run, `f` is called with the bins done and all bins of this rank.
  void on_progress(std::function<void(int64_t done, int64_t all)> f) { progress_ = std::move(f); }
  /// Attention work of this rank over all its bins and layers, counted from the plans.
  PlanCount count() const;
  /// This rank's messages of recurrent layers over all its bins: counted from the plans, and by
  /// closed form.
  RecurrentTraffic recurrent_sent() const;
  RecurrentTraffic recurrent_expected() const;
  /// Work of this rank in a pass.
  PassWork work() const;

  /// One pass of the decoder over all bins of this replica. Collective over the replica.
  DecoderTimes run(Decoder& decoder,
                   const std::function<void(const BinShard&, int64_t index,
                                            MatrixView<const float> x)>& observe = {});

  /// Checksum of this rank's scores of the last run.
  uint64_t checksum() const;

  /// Scores of the last run in document order, in equal contiguous shares: rank r of the world gets
  /// predictions [P·r/n, P·(r+1)/n). One all-to-all-v. Collective over `world`, a host-memory
  /// communicator of all ranks of the grid.
  ScoreRange in_document_order(Communicator& world) const;

 private:
  DocumentView documents_;
  ModelConfig config_;
  const ScoringPlan& plan_;
  ProcessGrid& grid_;
  HeadShape heads_;  // heads of this rank
  HeadObserver observe_head_;
  BinObserver after_bin_;
  std::vector<BinShard> shards_;
  std::function<void(int64_t done, int64_t all)> progress_;
};

/// Sums per document over ScoreRanges that together cover all predictions, without the first
/// `unscored` of each document (empty: none). Collective.
struct DocumentScore {
  double logprob = 0;  ///< sum, nats
  double entropy = 0;  ///< sum, nats
  double kl = 0;       ///< sum, nats
  int64_t predictions = 0;
};
std::vector<DocumentScore> score_documents(const ScoreRange& mine,
                                           std::span<const int64_t> prediction_offsets,
                                           std::span<const int64_t> unscored, Communicator& world);

}  // namespace gyre

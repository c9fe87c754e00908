#pragma once
// Measurements of gyre-pipeline, and their presentation.

#include <string>
#include <vector>

#include "apps/common/backend.hpp"
#include "io/results.hpp"
#include "model/scoring.hpp"
#include "report/result.hpp"
#include "report/table.hpp"

namespace gyre {

/// Measurements of one configuration.
struct ScoringResult {
  GridShape shape;
  std::string layout, schedule;
  int64_t tokens = 0, predictions = 0, bins = 0;
  double packing = 0;         ///< real tokens over capacity
  Timing timing;              ///< of one pass
  Statistics time_ms;         ///< of its slowest rank
  double flops = 0;           ///< of one pass, all ranks
  double wire_bytes = 0;      ///< of one pass, sum over ranks, counted
  double exposed = 0;         ///< share of the pass that the worst rank waited for communication
  double pair_imbalance = 0;  ///< of attention, counted from the plans
  double time_imbalance = 0;  ///< of attention, measured
  double error_over_tolerance = 0;  ///< NaN: not checked
  std::string check;                ///< "ok", "FAILED" or "-"
  std::string finished;             ///< when: UTC, ISO 8601
  int ranks() const { return shape.ranks(); }
  double tokens_per_second() const { return static_cast<double>(tokens) / time_ms.median * 1e3; }
};
const Table<ScoringResult>& scoring_table();

/// Passes of the decoder over all documents, as measured on one rank.
struct Passes {
  Timing timing;          ///< of the timed passes
  double last_ms = 0;     ///< of the last one, on this rank
  DecoderTimes times;     ///< of the last pass
  double wire_bytes = 0;  ///< of the last pass, all ranks
  /// Of this rank's scores in each timed pass, and, at the front, in a pass that was not timed and
  /// whose messages were checked. Empty without verification.
  std::vector<uint64_t> checksums;
};
/// How passes are run.
struct PassOptions {
  RepeatOptions repeats;
  int warmup = 0;
  bool verify = true;
  Progress& progress;  ///< told of passes and bins
};
/// Runs `warmup` passes, then timed ones, each from a barrier on. The messages of the
/// last warm-up pass are checked; without warm-up, an additional pass comes first. `grid` is that
/// of the decoder, on the `backend`. Collective over `world`: all ranks of the grid, in host
/// memory.
Passes measure_passes(Scorer& scorer, Decoder& decoder, ProcessGrid& grid, Backend& backend,
                      Communicator& world, const PassOptions& options);

/// The result without its verification. Collective over `world`.
ScoringResult make_result(const ScoringPlan& plan, const Scorer& scorer, const Passes& passes,
                          const ModelConfig& config, Communicator& world);

/// The part of the output file beside the scores.
ResultsHeader make_results_header(const RunReport& report, const Documents& documents,
                                  const ScoringPlan& plan);

/// Bits per byte (if the tokenizer is one of bytes), bits per token, and mean entropy.
struct Compression {
  double bits_per_byte = 0;  ///< NaN without bytes
  double bits_per_token = 0;
  double mean_entropy_bits = 0;
  int64_t predictions = 0;
};
Compression compression_of(const Documents& documents, std::span<const DocumentScore> scores);

/// Adds the result and the figures of merit to the report.
void add_result(RunReport& report, const ScoringResult& result, const Compression& compression,
                int64_t vocab_size);

/// "# score ..." line, and a table of the `top` documents with the most bits per byte.
std::string compression_text(const Documents& documents, std::span<const DocumentScore> scores,
                             int top);

/// "# phase ..." line: each phase of the last pass on its slowest rank. Collective.
std::string phases_text(const Passes& passes, Communicator& world);

/// A "#" table with a line for each rank: its share of attention and its times in the last pass.
/// Collective.
std::string ranks_text(const Passes& passes, const Scorer& scorer, Communicator& world);

/// Memory of this rank: weights, activations of its largest bin, blocks of other ranks and copies
/// for messages.
int64_t planned_bytes(const ScoringPlan& plan, const ModelConfig& config, const Scorer& scorer);

/// Sizes, FLOPs, bytes and memory of a run on the plan's grid, without running it. Plans the
/// attention of one rank and bin at a time. Throws the usage errors of layouts and schedules.
std::string dry_run_text(const ScoringPlan& plan, const ModelConfig& config);

}  // namespace gyre

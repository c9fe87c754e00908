#pragma once
// Output of gyre-pipeline: report, text and tables of the measurements.

#include <string>

#include "apps/pipeline/case.hpp"

namespace gyre {

/// Columns of the table of runs. With a teacher, one of them is the mean divergence.
const Table<ScoringResult>& scoring_table(bool with_teacher);

/// The header of the output file, which holds everything but the scores and checksums of inputs.
ResultsHeader make_results_header(const RunReport& report, const Documents& documents,
                                  const ScoringPlan& plan);

/// "#" lines that say whether weights are rounded to `activations` and whether documents are too
/// long for the model.
std::string model_notes(const ScoringInputs& in, DType activations);

/// A "#" line if documents are longer than what the model was made for, `longest_text` (0:
/// unknown); else "".
std::string length_note(const Documents& documents, int64_t longest_text);

/// Bits per byte (for a byte tokenizer only), bits per token, and mean entropy.
struct Compression {
  double bits_per_byte = 0;  ///< NaN without bytes
  double bits_per_token = 0;
  double mean_entropy_bits = 0;
  double mean_kl_bits = 0;
  int64_t predictions = 0;
};
Compression compression_of(const Documents& documents, std::span<const DocumentScore> scores);

/// Adds the figures of merit.
void add_figures(RunReport& report, const ScoringResult& result, const Compression& compression,
                 int64_t vocab_size);

/// "# score ..." line, and a table of the `top` documents with the most bits per byte. With a
/// teacher, both state divergences.
std::string compression_text(const Documents& documents, std::span<const DocumentScore> scores,
                             int top, bool with_teacher);

/// A "#" table with a line for each rank: its share of attention and its times
/// in the last pass. Collective.
std::string ranks_text(const ScoringCase& subject, Communicator& world);

/// Memory of this rank, whose arrays are in `space`: weights, activations of its largest bin, a
/// tile of logits, blocks of other ranks and copies for messages.
int64_t planned_bytes(const ScoringPlan& plan, const ModelConfig& config, const Scorer& scorer,
                      MemorySpace space);

/// Memory of this rank that the teacher needs beside planned_bytes(); 0 without a teacher.
int64_t teacher_bytes(const std::optional<Teacher>& teacher);

/// Sizes, FLOPs, bytes and memory of a run on the plan's grid, without running
/// it. Plans the attention of one rank and bin at a time. Throws the usage
/// errors of layouts and schedules.
std::string dry_run_text(const ScoringPlan& plan, const ModelConfig& config);
/// FLOPs and memory that a teacher adds to those of dry_run_text().
std::string teacher_text(const ScoringPlan& plan, const ModelConfig& teacher,
                         const ModelConfig& student);

}  // namespace gyre

#pragma once
// The workload of gyre-recurrence has documents, the shape of their recurrence and rows of inputs. A
// kind, a schedule and a layout give it a plan.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/recurrence/options.hpp"
#include "io/schemas/recurrence_file.hpp"
#include "recurrence/recurrence_reference.hpp"
#include "recurrence/tolerance.hpp"
#include "report/result.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {

/// Documents, concatenated. Token t of the concatenation is position t - offsets[d] of document d.
struct RecurrenceWorkload {
  std::vector<int64_t> offsets;  ///< [documents + 1]
  DType type = DType::f32;
  std::string origin;  ///< source of the documents, for the report
  int64_t documents() const { return std::ssize(offsets) - 1; }
  int64_t tokens() const { return offsets.back(); }
  DocumentTokens document(int64_t d) const { return {offsets[d], offsets[d + 1] - offsets[d]}; }
  int64_t longest() const;
  /// Token `i` of a fragment.
  int64_t token_of(const Fragment& f, int64_t i) const {
    return offsets[f.segment] + f.start.value() + i * f.stride;
  }
};

RecurrenceWorkload generated_workload(const RecurrenceOptions& o, int64_t size);
/// The workload of a file. Throws a usage error if its numbers are not those of gates: g must not
/// be positive, and beta |k|² from 0 to 2; after a convolution, |k| is at most 1.
RecurrenceWorkload workload_of(const RecurrenceFile& file, const RecurrenceOptions& o);
/// The kind that a file's arrays are of.
const RecurrenceKind& kind_of(const RecurrenceFile& file);
RecurrenceShape shape_of(const RecurrenceFile& file);
RecurrenceShape shape_of(const RecurrenceOptions& o, const RecurrenceKind& kind);

/// Rows of inputs: random ones, or those of the file, which must outlive them.
RecurrenceRows random_rows(const RecurrenceShape& shape, const RecurrenceOptions& o);
RecurrenceRows rows_of(const RecurrenceFile& file, DType type);
/// Removes the answers that depend on an input which the run rounds. Returns the use of every
/// answer.
std::vector<AnswerUse> keep_answers(RecurrenceFile& file, const RecurrenceOptions& o);

/// One kind under one schedule and one layout, planned for one rank.
struct PlannedRecurrence {
  /// Throws a usage error if states do not pass under the layout.
  PlannedRecurrence(const RecurrenceWorkload& workload, const RecurrenceKind& kind,
                    const RecurrenceShape& shape, const StateSchedule& schedule,
                    const LayoutKind& layout, const LayoutOptions& options, int rank);
  PlannedRecurrence(const PlannedRecurrence&) = delete;  // the problem points to the layout
  PlannedRecurrence& operator=(const PlannedRecurrence&) = delete;

  const RecurrenceKind& kind;
  const StateSchedule& schedule;
  PaddedLayout placed;
  RecurrenceProblem problem;
  StatePlan plan;
};

/// Bytes that a rank allocates: its arrays, the buffers of the plan, and a GPU's scratch.
int64_t planned_bytes(const PlannedRecurrence& planned, DType type, MemorySpace space);

}  // namespace gyre

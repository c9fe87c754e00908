#pragma once
// Per-row records for soft cross entropies, 20 bytes each (CrossPartial), in the memory space of
// the logits. They are used like those of score_records.hpp.

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string_view>

#include "comm/communicator.hpp"
#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/rows/row_statistics.hpp"

namespace gyre {

class RowKernels;

/// Results of merging the records of all ranks, in host memory. All spans are [rows].
struct CrossScores {
  std::span<RowNormalizer> students, teachers;
  std::span<float> value;  ///< nats
};

/// Totals of one student and teacher row over all shards.
struct CrossTotal {
  float student_max = -std::numeric_limits<float>::infinity(), teacher_max = student_max;
  double student_sum = 0, teacher_sum = 0, cross = 0;

  /// `records`: the row's record of rank 0; records of consecutive ranks are `distance` apart.
  GYRE_HOST_DEVICE CrossTotal(const CrossPartial* records, int64_t distance, int ranks) {
    for (int r = 0; r < ranks; ++r) {
      const CrossPartial& part = records[r * distance];
      if (student_max < part.student_max) student_max = part.student_max;
      if (teacher_max < part.teacher_max) teacher_max = part.teacher_max;
    }
    for (int r = 0; r < ranks; ++r) add(records[r * distance]);
  }
  GYRE_HOST_DEVICE RowNormalizer student() const {
    return {student_max, static_cast<float>(std::log(student_sum))};
  }
  GYRE_HOST_DEVICE RowNormalizer teacher() const {
    return {teacher_max, static_cast<float>(std::log(teacher_sum))};
  }
  GYRE_HOST_DEVICE float value() const {
    return static_cast<float>(std::log(student_sum) - cross / teacher_sum / sum_unit);
  }

 private:
  GYRE_HOST_DEVICE void add(const CrossPartial& part) {
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    const double of_teacher = part.teacher_sum;
    const double shift = part.student_max - static_cast<double>(student_max);
    student_sum += part.student_sum * std::exp(shift);
    if (of_teacher == 0) return;
    const double factor = std::exp(part.teacher_max - static_cast<double>(teacher_max));
    teacher_sum += of_teacher * factor;
    // -inf if the student has -inf where the teacher has not: the cross entropy is infinite.
    cross +=
        part.cross == nothing ? nothing : (part.cross + shift * sum_unit * of_teacher) * factor;
  }
};

class CrossRecords {
 public:
  CrossRecords(int ranks, int threads) : ranks_(ranks), threads_(threads) {}
  virtual ~CrossRecords() = default;

  /// out <- scores of the first `columns` columns of student and teacher [rows, >= columns], read
  /// in order of `stream`, the kernels' stream; complete on return. Collective: one all-gather by
  /// `arrays`, of the matrices' memory space. Returns the seconds that `stream` waited.
  double merge(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns,
               Communicator& arrays, Stream& stream, std::string_view what, const CrossScores& out);

 protected:
  /// Computes this rank's records [rows].
  virtual std::span<const CrossPartial> make(ConstMatrixRef student, ConstMatrixRef teacher,
                                             int64_t columns) = 0;
  /// Returns the buffer for the records of all ranks [ranks, rows].
  virtual std::span<CrossPartial> all() = 0;
  virtual void merge_records(std::span<const CrossPartial> records, const CrossScores& out) = 0;

  int ranks_, threads_;
};

/// Creates records in host memory; `kernels` must be those of the host.
std::unique_ptr<CrossRecords> make_host_cross_records(RowKernels& kernels, int ranks, int threads);

}  // namespace gyre

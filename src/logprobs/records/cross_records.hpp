#pragma once
// Merges the records of soft cross entropies, 20 bytes a row (CrossPartial), of all ranks.

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "core/host_device.hpp"
#include "logprobs/rows/row_gradient.hpp"
#include "logprobs/rows/row_statistics.hpp"
#include "runtime/stream.hpp"

namespace gyre {

/// Results of merging the records of all ranks, [rows] each.
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

/// Merges records [ranks, rows] of all ranks, in the memory of `stream`; out [rows] is in memory that
/// the stream's work reaches. Submitted to the stream; on the host, done on return.
void merge_crosses(Stream& stream, int threads, std::span<const CrossPartial> records, int ranks,
                   const CrossScores& out);

}  // namespace gyre

#pragma once
// The records of which soft cross entropies are made, 20 bytes a row (CrossMoments), in the memory
// that the logits lie in; as score_records.hpp.

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string_view>

#include "comm/communicator.hpp"
#include "core/host_device.hpp"
#include "core/matrix_ref.hpp"
#include "logprobs/row_gradient.hpp"
#include "logprobs/row_statistics.hpp"

namespace gyre {

class RowKernels;

/// What is made of the records of all ranks, in host memory. [rows]
struct CrossScores {
  std::span<RowNormalizer> students, teachers;
  std::span<float> value;  ///< nats
};

/// One row of student and teacher over all shards.
struct CrossTotal {
  float student_max = -std::numeric_limits<float>::infinity(), teacher_max = student_max;
  double student_sum = 0, teacher_sum = 0, cross = 0;

  /// `records`: those of the row, of all ranks in rank order, `distance` records apart.
  GYRE_HOST_DEVICE CrossTotal(const CrossMoments* records, int64_t distance, int ranks) {
    for (int r = 0; r < ranks; ++r) {
      const CrossMoments& part = records[r * distance];
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
    return static_cast<float>(std::log(student_sum) - cross / teacher_sum);
  }

 private:
  GYRE_HOST_DEVICE void add(const CrossMoments& part) {
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    const auto of_teacher = static_cast<double>(part.teacher_sum);
    const double shift = static_cast<double>(part.student_max) - static_cast<double>(student_max);
    student_sum += static_cast<double>(part.student_sum) * std::exp(shift);
    if (of_teacher == 0) return;
    const double factor =
        std::exp(static_cast<double>(part.teacher_max) - static_cast<double>(teacher_max));
    teacher_sum += of_teacher * factor;
    // Only the student has -inf somewhere: infinite, for any probability of the teacher.
    cross += part.cross == nothing
                 ? static_cast<double>(nothing)
                 : (static_cast<double>(part.cross) + shift * of_teacher) * factor;
  }
};

class CrossRecords {
 public:
  CrossRecords(int ranks, int threads) : ranks_(ranks), threads_(threads) {}
  virtual ~CrossRecords() = default;

  /// From the first `columns` of student and teacher [rows, >= columns], which are read in the
  /// order of the kernels' stream; one all-gather by `arrays`, which is of their memory. Results
  /// are complete on return. Returns the seconds that `stream`, the kernels', waited. Collective.
  double merge(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns,
               Communicator& arrays, Stream& stream, std::string_view what, const CrossScores& out);

 protected:
  /// This rank's, [rows].
  virtual std::span<const CrossMoments> make(ConstMatrixRef student, ConstMatrixRef teacher,
                                             int64_t columns) = 0;
  /// Room for those of all ranks, [ranks, rows].
  virtual std::span<CrossMoments> all() = 0;
  virtual void merge_records(std::span<const CrossMoments> records, const CrossScores& out) = 0;

  int ranks_, threads_;
};

/// On the host, of rows that `kernels`, the host's, read.
std::unique_ptr<CrossRecords> make_host_cross_records(RowKernels& kernels, int ranks, int threads);

}  // namespace gyre

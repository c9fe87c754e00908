#include "logprobs/records/cross_records.hpp"
#include "logprobs/records/record_loops.cuh"

namespace gyre {
namespace {

struct MergeCross {
  const CrossPartial* records;
  int64_t rows;
  int ranks;
  RowNormalizer *students, *teachers;
  float* value;

  template <class Lanes>
  GYRE_HOST_DEVICE void operator()(int64_t row, const Lanes& lanes) const {
    if (lanes.first != 0) return;
    const CrossTotal total(records + row, rows, ranks);
    students[row] = total.student();
    teachers[row] = total.teacher();
    value[row] = total.value();
  }
};

}  // namespace

void merge_crosses(Stream& stream, int threads, std::span<const CrossPartial> records, int ranks,
                   const CrossScores& out) {
  const int64_t rows = std::ssize(records) / ranks;
  const MergeCross merge{records.data(),  rows, ranks, out.students.data(), out.teachers.data(),
                         out.value.data()};
  for_record_rows(stream, threads, rows, ranks, merge);
}

}  // namespace gyre

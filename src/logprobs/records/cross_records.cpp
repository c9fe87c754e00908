#include "logprobs/records/cross_records.hpp"

#include "logprobs/records/gather_records.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "runtime/buffer.hpp"
#include "runtime/parallel.hpp"

namespace gyre {

double CrossRecords::merge(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns,
                           Communicator& arrays, Stream& stream, std::string_view what,
                           const CrossScores& out) {
  const std::span<const CrossPartial> own = make(student, teacher, columns);
  return merge_gathered(
      ranks_, own, ranks_ == 1 ? std::span<CrossPartial>() : all(), arrays, stream, what,
      [&](std::span<const CrossPartial> records) { merge_records(records, out); });
}

namespace {

class HostCrossRecords final : public CrossRecords {
 public:
  HostCrossRecords(RowKernels& kernels, int ranks, int threads)
      : CrossRecords(ranks, threads), kernels_(kernels) {}

 protected:
  std::span<const CrossPartial> make(ConstMatrixRef student, ConstMatrixRef teacher,
                                     int64_t columns) override {
    if (own_.size() != student.rows) own_ = Buffer<CrossPartial>(student.rows);
    kernels_.cross_partials(student, teacher, columns, threads_, own_.span());
    return own_.span();
  }
  std::span<CrossPartial> all() override {
    if (all_.size() != ranks_ * own_.size()) all_ = Buffer<CrossPartial>(ranks_ * own_.size());
    return all_.span();
  }
  void merge_records(std::span<const CrossPartial> records, const CrossScores& out) override {
    const int64_t rows = own_.size();
    const double nanoseconds = 30.0 * (ranks_ + 2);
    for_each_part(threads_, rows, nanoseconds, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const CrossTotal row(records.data() + i, rows, ranks_);
        const size_t at = i;
        out.students[at] = row.student();
        out.teachers[at] = row.teacher();
        out.value[at] = row.value();
      }
    });
  }

 private:
  RowKernels& kernels_;
  Buffer<CrossPartial> own_, all_;
};

}  // namespace

std::unique_ptr<CrossRecords> make_host_cross_records(RowKernels& kernels, int ranks, int threads) {
  return std::make_unique<HostCrossRecords>(kernels, ranks, threads);
}

}  // namespace gyre

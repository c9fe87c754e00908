#include "logprobs/rows/cuda_row_kernels.hpp"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "logprobs/records/staged_arrays.hpp"
#include "logprobs/rows/cuda_row_launch.hpp"
#include "logprobs/rows/cuda_row_memory.hpp"
#include "logprobs/rows/cuda_row_projection.hpp"
#include "logprobs/rows/token_columns.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {
namespace {

void check_rows(const ConstMatrixRef& matrix, int64_t columns, size_t results) {
  GYRE_CHECK(0 <= columns && columns <= matrix.cols && std::cmp_equal(results, matrix.rows),
             "{} of {} columns, {} rows, {} results", columns, matrix.cols, matrix.rows, results);
}
void check_output(const ConstMatrixRef& from, const MatrixRef& to, int64_t columns,
                  size_t row_values) {
  GYRE_CHECK(from.rows == to.rows && from.cols == to.cols, "{} x {} to {} x {}", from.rows,
             from.cols, to.rows, to.cols);
  check_rows(to, columns, row_values);
  GYRE_CHECK(from.data != to.data || (from.type == to.type && from.stride == to.stride),
             "in place, but the type or stride differs from the logits'");
}

/// Least number of rows of a gradient in two launches.
constexpr int64_t least_divided_rows = 4096;

/// Scratch limit, in bytes, for the rows that one selection processes together.
constexpr int64_t selection_scratch_bytes = int64_t{256} << 20;

class CudaRowKernels final : public RowKernels {
 public:
  explicit CudaRowKernels(Stream& stream)
      : stream_(stream), uploads_(stream), later_(stream), results_(stream) {
    GYRE_CHECK(stream.space() == MemorySpace::device, "row passes on a stream of the {}",
               name_of(stream.space()));
  }

  MemorySpace space() const override { return MemorySpace::device; }
  Stream& stream() override { return stream_; }

  RowParts parts(ConstMatrixRef logits, const RowScan& scan, Buffer<std::byte>& memory) override {
    const int64_t count = rows::parts_of(scan.columns, rows::part_columns);
    const auto sums = at_least<rows::PartSums>(memory, logits.rows * count, MemorySpace::device);
    rows::launch_part_sums(handle(), logits, scan, sums.data());
    return {.sums = sums.data(), .count = count};
  }
  const CrossPartial* cross_parts(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns,
                                  int, Buffer<std::byte>& memory) override {
    Places places;
    const int64_t results = places.add<CrossPartial>(student.rows);
    const int64_t parts = places.add<rows::CrossSums>(parts_of_rows(student.rows, columns));
    std::byte* const room = at_least<std::byte>(memory, places.bytes(), MemorySpace::device).data();
    auto* const to = reinterpret_cast<CrossPartial*>(room + results);
    rows::launch_cross_partials(handle(), student, teacher, columns,
                                reinterpret_cast<rows::CrossSums*>(room + parts), to);
    return to;
  }

  void partials(ConstMatrixRef logits, const RowScan& scan,
                std::span<SoftmaxPartial> out) override {
    check_rows(logits, scan.columns, out.size());
    Places places;
    const int64_t results = places.add<SoftmaxPartial>(logits.rows);
    const int64_t parts = places.add<rows::PartSums>(parts_of_rows(logits.rows, scan.columns));
    std::byte* const scratch = scratch_.at_least(places.bytes());
    auto* const found = reinterpret_cast<SoftmaxPartial*>(scratch + results);
    rows::launch_partials(handle(), logits, on_device(scan, logits.rows),
                          reinterpret_cast<rows::PartSums*>(scratch + parts), found);
    fetch(found, out);
  }

  void cross_partials(ConstMatrixRef student, ConstMatrixRef teacher, int64_t columns, int,
                      std::span<CrossPartial> out) override {
    check_rows(student, columns, out.size());
    check_rows(teacher, columns, out.size());
    fetch(cross_parts(student, teacher, columns, 1, cross_memory_), out);
  }

  void sums(ConstMatrixRef values, int64_t columns, int, std::span<double> out) override {
    check_rows(values, columns, out.size());
    Places places;
    const int64_t results = places.add<double>(values.rows);
    const int64_t parts = places.add<double>(parts_of_rows(values.rows, columns));
    std::byte* const scratch = scratch_.at_least(places.bytes());
    auto* const on_device = reinterpret_cast<double*>(scratch + results);
    rows::launch_sums(handle(), values, columns, reinterpret_cast<double*>(scratch + parts),
                      on_device);
    fetch(on_device, out);
  }

  void gradient(ConstMatrixRef logits, const RowPass& pass,
                std::span<const RowNormalizer> normalizers,
                std::span<const GradientCoefficients> coefficients, const RowTokenIds& token_ids,
                MatrixRef d_logits) override {
    check_output(logits, d_logits, pass.columns, normalizers.size());
    check_token_ids(token_ids, logits.rows);
    GYRE_CHECK(coefficients.size() == normalizers.size(), "{} coefficients", coefficients.size());
    // The first rows are computed while the host copies the constants of the others.
    const int64_t rows = logits.rows, first = rows < least_divided_rows ? rows : rows / 8;
    for (int64_t begin = 0; begin < rows; begin = begin == 0 ? first : rows) {
      const int64_t count = begin == 0 ? first : rows - first;
      const auto part = [&](auto all, int64_t per_row = 1) {
        return all.subspan(begin * per_row, count * per_row);
      };
      const RowTokenIds ids{part(token_ids.ids, token_ids.per_row),
                            part(token_ids.weights, token_ids.per_row), token_ids.per_row,
                            token_ids.first_column};
      rows::GradientTask task;
      task.pass = pass;
      const auto send = [&](auto& uploads) {
        const float* scales = nullptr;
        std::tie(task.normalizers, task.coefficients, task.token_ids.ids, task.token_ids.weights,
                 scales) = uploads.send(part(normalizers), part(coefficients), ids.ids, ids.weights,
                                        scales_of(pass.scale.from(begin), count));
        task.pass.scale = pass.scale.at(scales);
      };
      if (begin == 0)
        send(uploads_);
      else
        send(later_);
      launch_gradient(logits.rows_from(begin, count), ids, task, d_logits.rows_from(begin, count));
    }
    later_.release();
  }

  void log_softmax(ConstMatrixRef logits, const RowPass& pass,
                   std::span<const RowNormalizer> normalizers, bool exponentiate,
                   MatrixRef out) override {
    check_output(logits, out, pass.columns, normalizers.size());
    const auto [on_device, scales] = uploads_.send(normalizers, scales_of(pass.scale, logits.rows));
    rows::launch_log_softmax(handle(), logits, with_scales(pass, scales), on_device, exponentiate,
                             out);
  }

  void log_softmax_gradient(ConstMatrixRef logits, ConstMatrixRef d_logprobs, const RowPass& pass,
                            std::span<const RowNormalizer> normalizers, std::span<const float> sums,
                            MatrixRef d_logits) override {
    check_output(logits, d_logits, pass.columns, normalizers.size());
    check_output(d_logprobs, d_logits, pass.columns, sums.size());
    const auto [on_device, sums_there, scales] =
        uploads_.send(normalizers, sums, scales_of(pass.scale, logits.rows));
    rows::launch_log_softmax_gradient(handle(), logits, d_logprobs, with_scales(pass, scales),
                                      on_device, sums_there, d_logits);
  }

  void cross_gradient(ConstMatrixRef student, ConstMatrixRef teacher, const RowPass& pass,
                      std::span<const RowNormalizer> students,
                      std::span<const RowNormalizer> teachers, std::span<const float> gradients,
                      MatrixRef d_student) override {
    check_output(student, d_student, pass.columns, students.size());
    check_output(teacher, d_student, pass.columns, teachers.size());
    GYRE_CHECK(pass.scale.is_one() && gradients.size() == students.size(),
               "a scale other than 1, or {} gradients", gradients.size());
    const auto [s, t, g] = uploads_.send(students, teachers, gradients);
    rows::launch_cross_gradient(handle(), student, teacher, pass.columns, s, t, g, d_student);
  }

  void filtered_gradient(ConstMatrixRef logits, const RowPass& pass,
                         std::span<const RowNormalizer> normalizers,
                         std::span<const RowSurvivors> survivors, std::span<const float> a,
                         const RowTokenIds& token_ids, MatrixRef d_logits) override {
    check_output(logits, d_logits, pass.columns, normalizers.size());
    check_token_ids(token_ids, logits.rows);
    GYRE_CHECK(token_ids.per_row == 1 && survivors.size() == normalizers.size() &&
                   a.size() == normalizers.size(),
               "{} token ids a row, {} survivors, {} coefficients", token_ids.per_row,
               survivors.size(), a.size());
    std::vector<GradientCoefficients> coefficients;
    for (const float coefficient : a) coefficients.push_back({coefficient, 0});
    rows::GradientTask task;
    const float* scales = nullptr;
    std::tie(task.normalizers, task.coefficients, task.survivors, task.token_ids.ids,
             task.token_ids.weights, scales) =
        uploads_.send(normalizers, std::span<const GradientCoefficients>(coefficients), survivors,
                      token_ids.ids, token_ids.weights, scales_of(pass.scale, logits.rows));
    task.pass = with_scales(pass, scales);
    launch_gradient(logits, token_ids, task, d_logits);
  }

  void scatter_token_weights(const RowTokenIds& token_ids, int64_t columns, MatrixRef d_logits,
                             int) override {
    check_token_ids(token_ids, d_logits.rows);
    GYRE_CHECK(0 <= columns && columns <= d_logits.cols, "{} of {} columns", columns,
               d_logits.cols);
    rows::GradientTask task;
    task.pass = {columns, 1, 1};
    std::tie(task.token_ids.ids, task.token_ids.weights) =
        uploads_.send(token_ids.ids, token_ids.weights);
    // Without coefficients, no logits are read.
    launch_gradient({nullptr, d_logits.type, d_logits.rows, d_logits.cols, 0}, token_ids, task,
                    d_logits);
  }

  void gather_token_logits(ConstMatrixRef logits, std::span<const int32_t> ids, int64_t per_row,
                           int64_t first_column, int64_t columns,
                           std::span<float> values) override {
    GYRE_CHECK(0 <= columns && columns <= logits.cols && ids.size() == values.size() &&
                   std::cmp_equal(ids.size(), logits.rows * per_row),
               "{} of {} columns, {} ids and {} values of {} rows of {}", columns, logits.cols,
               ids.size(), values.size(), logits.rows, per_row);
    rows::DeviceTokenIds token_ids;
    std::tie(token_ids.ids) = uploads_.send(ids);
    token_ids.per_row = per_row;
    token_ids.first_column = first_column;
    Places places;
    places.add<float>(std::ssize(ids));
    auto* const on_device = reinterpret_cast<float*>(scratch_.at_least(places.bytes()));
    rows::launch_gather(handle(), logits, columns, token_ids, on_device);
    const float* const found = results_.fetch(on_device, std::ssize(ids));
    for (size_t k = 0; k < ids.size(); ++k)
      if (rows::column_of(ids[k], first_column, columns) >= 0) values[k] = found[k];
  }

  void top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
           std::span<SoftmaxPartial> partials) override;

  void masses(ConstMatrixRef logits, int64_t columns, std::span<const MassRow> rows, int,
              std::span<int64_t> masses) override {
    GYRE_CHECK(std::cmp_equal(masses.size(), std::ssize(rows) * digit_sums), "{} sums for {} rows",
               masses.size(), rows.size());
    const auto [queries] = uploads_.send(rows);
    int64_t* const sums = cleared<int64_t>(std::ssize(masses));
    rows::launch_masses(handle(), logits, columns, queries, std::ssize(rows), sums);
    fetch(sums, masses);
  }

  void count_columns(ConstMatrixRef logits, std::span<const ColumnQuery> queries, int,
                     std::span<ColumnCounts> counts) override {
    GYRE_CHECK(counts.size() == queries.size(), "{} counts of {} queries", counts.size(),
               queries.size());
    const auto [on_device] = uploads_.send(queries);
    auto* const sums = cleared<ColumnCounts>(std::ssize(counts));
    rows::launch_counts(handle(), logits, on_device, std::ssize(queries), sums);
    fetch(sums, counts);
  }

  void find_ties(ConstMatrixRef logits, int64_t columns, std::span<const TieQuery> queries, int,
                 std::span<int64_t> found) override {
    GYRE_CHECK(found.size() == queries.size(), "{} columns for {} queries", found.size(),
               queries.size());
    const auto [on_device] = uploads_.send(queries);
    auto* const results = cleared<int64_t>(std::ssize(found));
    rows::launch_ties(handle(), logits, columns, on_device, std::ssize(queries), results);
    fetch(results, found);
    for (size_t i = 0; i < found.size(); ++i)
      GYRE_CHECK(found[i] >= 0, "fewer than {} elements of row {} are {}", queries[i].n,
                 queries[i].row, queries[i].value);
  }

  std::unique_ptr<RowProjection> make_projection(const ProjectionShard& shard) override {
    return make_cuda_row_projection(stream_, shard);
  }

 private:
  CUstream_st* handle() const { return cuda_handle(stream_); }
  static int64_t parts_of_rows(int64_t rows, int64_t columns) {
    return rows * rows::parts_of(columns, rows::part_columns);
  }

  /// Factors of rows to upload; none if all have the same.
  static std::span<const float> scales_of(const RowScale& scale, int64_t rows) {
    return {scale.of_rows(), scale.of_rows() == nullptr ? 0 : static_cast<size_t>(rows)};
  }
  static RowPass with_scales(RowPass pass, const float* on_device) {
    pass.scale = pass.scale.at(on_device);
    return pass;
  }
  /// The scan with its factors of rows on the device, until the next upload.
  RowScan on_device(RowScan scan, int64_t rows) {
    if (scan.scale.of_rows() == nullptr) return scan;
    const auto [scales] = uploads_.send(scales_of(scan.scale, rows));
    scan.scale = scan.scale.at(scales);
    return scan;
  }

  void launch_gradient(ConstMatrixRef logits, const RowTokenIds& token_ids,
                       rows::GradientTask& task, MatrixRef d_logits) {
    const auto bytes = static_cast<int64_t>(token_ids.ids.size_bytes());
    task.token_ids.bases = reinterpret_cast<float*>(scratch_.at_least(bytes));
    task.token_ids.per_row = token_ids.per_row;
    task.token_ids.first_column = token_ids.first_column;
    rows::launch_gradient(handle(), logits, task, d_logits);
  }

  /// Returns scratch filled with zeros.
  template <class T>
  T* cleared(int64_t count) {
    const int64_t bytes = count * sizeof(T);
    std::byte* const memory = scratch_.at_least(bytes);
    stream_.fill(memory, std::byte{0}, bytes);
    return reinterpret_cast<T*>(memory);
  }

  template <class T>
  void fetch(const T* from, std::span<T> to) {
    std::copy_n(results_.fetch(from, std::ssize(to)), to.size(), to.begin());
  }

  /// The scan of rows [first, first + count), with their factors on the device.
  RowScan part_of(RowScan scan, int64_t first, int64_t count) {
    scan.scale = scan.scale.from(first);
    return on_device(scan, count);
  }
  void select_rows(ConstMatrixRef logits, const RowScan& scan, const rows::SelectionShape& shape,
                   const RowTop& top, std::span<SoftmaxPartial> partials);

  Stream& stream_;
  Uploads uploads_;
  UploadsAside later_;
  Pool scratch_{MemorySpace::device};
  Buffer<std::byte> cross_memory_;
  Download results_;
};

void CudaRowKernels::top(ConstMatrixRef logits, const RowScan& scan, const RowTop& top,
                         std::span<SoftmaxPartial> partials) {
  check_row_top(logits, scan, top, partials);
  const int64_t length = top.length;
  const rows::SelectionShape shape = rows::selection_shape(scan.columns, length);
  const int64_t entries = shape.parts * shape.part_length +
                          (shape.part_spills ? shape.parts * shape.part_capacity : 0) +
                          (shape.merge_spills ? shape.merge_capacity : 0) + length;
  const int64_t rows_at_once =
      std::max<int64_t>(1, selection_scratch_bytes / (entries * sizeof(uint64_t)));
  const int64_t element = size_of(logits.type);
  for (int64_t r = 0; r < logits.rows; r += rows_at_once) {
    const int64_t count = std::min(rows_at_once, logits.rows - r);
    const auto part = [&](auto span, int64_t width) {
      return span.empty() ? span : span.subspan(r * width, count * width);
    };
    select_rows(
        {logits.data + r * logits.stride * element, logits.type, count, logits.cols, logits.stride},
        part_of(scan, r, count), shape,
        {part(top.values, length), part(top.ids, length), part(top.last, 1), length},
        part(partials, 1));
  }
}

void CudaRowKernels::select_rows(ConstMatrixRef logits, const RowScan& scan,
                                 const rows::SelectionShape& shape, const RowTop& top,
                                 std::span<SoftmaxPartial> partials) {
  const int64_t rows = logits.rows, parts = rows * shape.parts;
  // Results come first, so that one copy fetches them.
  Places places;
  const int64_t values = places.add<float>(std::ssize(top.values));
  const int64_t ids = places.add<int32_t>(std::ssize(top.ids));
  const int64_t last = places.add<int32_t>(std::ssize(top.last));
  const int64_t results_of_rows = places.add<SoftmaxPartial>(std::ssize(partials));
  const int64_t results = places.bytes();
  const int64_t lists = places.add<uint64_t>(parts * shape.part_length);
  const int64_t lasts = places.add<int32_t>(parts);
  const int64_t sums = places.add<rows::PartSums>(parts);
  const int64_t part_room =
      places.add<uint64_t>(shape.part_spills ? parts * shape.part_capacity : 0);
  const int64_t merge_room =
      places.add<uint64_t>(shape.merge_spills ? rows * shape.merge_capacity : 0);
  std::byte* const scratch = scratch_.at_least(places.bytes());
  const auto at = [scratch]<class T>(int64_t place, T*) {
    return reinterpret_cast<T*>(scratch + place);
  };
  rows::SelectionTask task;
  task.values = at(values, task.values);
  task.ids = top.ids.empty() ? nullptr : at(ids, task.ids);
  task.last = top.last.empty() ? nullptr : at(last, task.last);
  task.partials = partials.empty() ? nullptr : at(results_of_rows, task.partials);
  task.lists = at(lists, task.lists);
  task.lasts = at(lasts, task.lasts);
  task.sums = at(sums, task.sums);
  task.part_room = at(part_room, task.part_room);
  task.merge_room = at(merge_room, task.merge_room);
  rows::launch_selection(handle(), logits, scan, shape, task);
  const std::byte* const found = results_.fetch(scratch, results);
  const auto take = [found]<class T>(int64_t place, std::span<T> to) {
    std::copy_n(reinterpret_cast<const T*>(found + place), to.size(), to.begin());
  };
  take(values, top.values);
  take(ids, top.ids);
  take(last, top.last);
  take(results_of_rows, partials);
}

}  // namespace

std::unique_ptr<RowKernels> make_cuda_row_kernels(Stream& stream) {
  return std::make_unique<CudaRowKernels>(stream);
}

}  // namespace gyre

#include <algorithm>
#include <tuple>

#include "core/error.hpp"
#include "logprobs/cuda_row_lanes.cuh"
#include "logprobs/cuda_row_launch.hpp"
#include "logprobs/cuda_row_memory.hpp"
#include "logprobs/cuda_score_records.hpp"
#include "logprobs/row_total.hpp"

namespace gyre {
namespace {

using rows::block_threads;

/// Index of this thread in a launch of over_all().
__device__ int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * block_threads + threadIdx.x;
}
Launch over_all(int64_t count, CUstream_st* stream) {
  return {rows::blocks_of(rows::parts_of(count, block_threads)), block_threads, stream};
}

__global__ void __launch_bounds__(block_threads) clear(RowTotal* totals, int64_t rows) {
  const int64_t row = thread_number();
  if (row < rows) totals[row] = RowTotal{};
}

__global__ void __launch_bounds__(block_threads)
    add_parts(const rows::PartSums* sums, int64_t rows, int64_t parts, float scale, bool weighted,
              RowTotal* totals) {
  const int64_t row = thread_number();
  if (row >= rows) return;
  totals[row].add(rows::partials_of(sums + row * parts, parts, rows::base_2(scale), weighted),
                  scale);
}

__global__ void __launch_bounds__(block_threads)
    write_partials(const RowTotal* totals, int64_t rows, int64_t partials, float* out) {
  const int64_t row = thread_number();
  if (row >= rows) return;
  const SoftmaxPartial total = totals[row].partials();
  out[row * partials] = total.max;
  out[row * partials + 1] = total.sum;
  if (partials == 3) out[row * partials + 2] = total.weighted;
}

/// Arguments of the merge of all ranks' records.
struct Merge {
  const float* records = nullptr;  // [ranks, rows · (partials + ids_per_token)]
  int64_t rows = 0, partials = 0, ids_per_token = 0;
  int ranks = 0;
  double scale = 1;
  const int64_t* offsets = nullptr;  // partition offsets, [ranks + 1]
  int64_t vocab_size = 0;
  const int32_t* ids = nullptr;  // [rows, ids_per_token]
  double* log_sums = nullptr;    // [rows]
  RowNormalizer* normalizers = nullptr;
  float* entropy = nullptr;  // null: not requested
  float* logprob = nullptr;

  __device__ int64_t block() const { return rows * (partials + ids_per_token); }
};

__global__ void __launch_bounds__(block_threads) merge_rows(Merge m) {
  const int64_t row = thread_number();
  if (row >= m.rows) return;
  RowTotal total;
  for (int r = 0; r < m.ranks; ++r) {
    const float* part = m.records + r * m.block() + row * m.partials;
    total.add({part[0], part[1], m.partials == 3 ? part[2] : 0}, m.scale);
  }
  const double log_sum = std::log(total.sum);
  m.log_sums[row] = log_sum;
  m.normalizers[row] = {total.max, static_cast<float>(log_sum)};
  if (m.entropy != nullptr) m.entropy[row] = total.entropy(log_sum);
}

__global__ void __launch_bounds__(block_threads) score_ids(Merge m) {
  const int64_t k = thread_number();
  if (k >= m.rows * m.ids_per_token) return;
  const int owner = owner_of(m.offsets, m.vocab_size, m.ids[k]);
  const int64_t row = k / m.ids_per_token;
  RowTotal total;
  total.max = m.normalizers[row].max;
  m.logprob[k] = owner < 0 ? 0
                           : total.logprob(m.records[owner * m.block() + m.rows * m.partials + k],
                                           m.scale, m.log_sums[row]);
}

/// Copies an array at offset `place` of the fetched results.
template <class T>
void take(const std::byte* fetched, int64_t place, std::span<T> to) {
  std::copy_n(reinterpret_cast<const T*>(fetched + place), to.size(), to.begin());
}

class CudaScoreRecords final : public ScoreRecords {
 public:
  CudaScoreRecords(Stream& stream, const RecordShape& shape)
      : ScoreRecords(shape), stream_(stream), ids_(stream), partition_(stream), results_(stream) {
    std::tie(offsets_) = partition_.send(std::span<const int64_t>(shape_.vocab.offsets));
  }

  void start(int64_t rows, std::span<const int32_t> ids) override {
    GYRE_CHECK(std::ssize(ids) == rows * shape_.ids_per_token, "{} ids of {} x {}", ids.size(),
               rows, shape_.ids_per_token);
    rows_ = rows;
    std::tie(ids_there_) = ids_.send(ids);
    totals_ = at_least<RowTotal>(totals_memory_, rows);
    own_ = at_least<float>(own_memory_, rows * shape_.width());
    launch(over_all(rows, handle()), clear, totals_, rows);
    // Ids that no tile contains keep a logit of 0.
    stream_.fill(own_ + rows * shape_.partials(), std::byte{0},
                 bytes<float>(rows * shape_.ids_per_token));
  }

  void add(ConstMatrixRef logits, int64_t row, int64_t column, int64_t columns) override {
    GYRE_CHECK(0 <= row && row + logits.rows <= rows_ && columns <= logits.cols,
               "rows {} to {} of {}, {} of {} columns", row, row + logits.rows, rows_, columns,
               logits.cols);
    const int64_t parts = rows::parts_of(columns, rows::part_columns);
    auto* const sums = at_least<rows::PartSums>(parts_memory_, logits.rows * parts);
    rows::launch_part_sums(handle(), logits, {columns, shape_.scale, shape_.entropy}, sums);
    launch(over_all(logits.rows, handle()), add_parts, sums, logits.rows, parts, shape_.scale,
           shape_.entropy, totals_ + row);
    const int64_t first = row * shape_.ids_per_token;
    rows::DeviceTokenIds token_ids;
    token_ids.ids = ids_there_ + first;
    token_ids.per_row = shape_.ids_per_token;
    token_ids.first_column = shape_.first_id() + column;
    rows::launch_gather(handle(), logits, columns, token_ids,
                        own_ + rows_ * shape_.partials() + first);
  }

 protected:
  std::span<const float> own() override {
    launch(over_all(rows_, handle()), write_partials, totals_, rows_, shape_.partials(), own_);
    return {own_, static_cast<size_t>(rows_ * shape_.width())};
  }
  std::span<float> all() override {
    const int64_t count = shape_.vocab.ranks() * rows_ * shape_.width();
    return {at_least<float>(all_memory_, count), static_cast<size_t>(count)};
  }
  void merge_records(std::span<const float> records, const RowScores& out) override {
    Places places;
    const int64_t normalizers = places.add<RowNormalizer>(rows_);
    const int64_t entropy = places.add<float>(std::ssize(out.entropy));
    const int64_t logprob = places.add<float>(rows_ * shape_.ids_per_token);
    const int64_t results = places.bytes();
    const int64_t log_sums = places.add<double>(rows_);
    std::byte* const room = results_memory_.at_least(places.bytes());
    Merge m;
    m.records = records.data();
    m.rows = rows_;
    m.partials = shape_.partials();
    m.ids_per_token = shape_.ids_per_token;
    m.ranks = shape_.vocab.ranks();
    m.scale = shape_.scale;
    m.offsets = offsets_;
    m.vocab_size = shape_.vocab.vocab_size;
    m.ids = ids_there_;
    m.log_sums = reinterpret_cast<double*>(room + log_sums);
    m.normalizers = reinterpret_cast<RowNormalizer*>(room + normalizers);
    m.entropy = out.entropy.empty() ? nullptr : reinterpret_cast<float*>(room + entropy);
    m.logprob = reinterpret_cast<float*>(room + logprob);
    launch(over_all(rows_, handle()), merge_rows, m);
    launch(over_all(rows_ * shape_.ids_per_token, handle()), score_ids, m);
    const std::byte* const found = results_.fetch(static_cast<const std::byte*>(room), results);
    take(found, normalizers, out.normalizers);
    take(found, entropy, out.entropy);
    take(found, logprob, out.logprob);
  }

 private:
  CUstream_st* handle() const { return cuda_handle(stream_); }
  template <class T>
  static size_t bytes(int64_t count) {
    return count * sizeof(T);
  }
  template <class T>
  static T* at_least(Pool& memory, int64_t count) {
    return reinterpret_cast<T*>(memory.at_least(static_cast<int64_t>(bytes<T>(count))));
  }

  Stream& stream_;
  int64_t rows_ = 0;
  Uploads ids_, partition_;  // ids of the last start(); the partition's offsets
  const int32_t* ids_there_ = nullptr;
  const int64_t* offsets_ = nullptr;
  Pool totals_memory_{MemorySpace::device}, own_memory_{MemorySpace::device},
      all_memory_{MemorySpace::device}, parts_memory_{MemorySpace::device},
      results_memory_{MemorySpace::device};
  RowTotal* totals_ = nullptr;  // [rows]
  float* own_ = nullptr;        // [rows, partials], then [rows, ids_per_token]
  Download results_;
};

/// Merges records [ranks, rows] of CrossPartial.
__global__ void __launch_bounds__(block_threads)
    merge_crosses(const CrossPartial* records, int64_t rows, int ranks, RowNormalizer* students,
                  RowNormalizer* teachers, float* value) {
  const int64_t row = thread_number();
  if (row >= rows) return;
  const CrossTotal total(records + row, rows, ranks);
  students[row] = total.student();
  teachers[row] = total.teacher();
  value[row] = total.value();
}

class CudaCrossRecords final : public CrossRecords {
 public:
  CudaCrossRecords(Stream& stream, int ranks, int threads)
      : CrossRecords(ranks, threads), stream_(stream), results_(stream) {}

 protected:
  std::span<const CrossPartial> make(ConstMatrixRef student, ConstMatrixRef teacher,
                                     int64_t columns) override {
    rows_ = student.rows;
    Places places;
    const int64_t own = places.add<CrossPartial>(rows_);
    const int64_t sums =
        places.add<rows::CrossSums>(rows_ * rows::parts_of(columns, rows::part_columns));
    std::byte* const memory = own_memory_.at_least(places.bytes());
    auto* const to = reinterpret_cast<CrossPartial*>(memory + own);
    rows::launch_cross_partials(handle(), student, teacher, columns,
                                reinterpret_cast<rows::CrossSums*>(memory + sums), to);
    return {to, static_cast<size_t>(rows_)};
  }
  std::span<CrossPartial> all() override {
    const int64_t count = ranks_ * rows_;
    auto* const memory = all_memory_.at_least(count * sizeof(CrossPartial));
    return {reinterpret_cast<CrossPartial*>(memory), static_cast<size_t>(count)};
  }
  void merge_records(std::span<const CrossPartial> records, const CrossScores& out) override {
    Places places;
    const int64_t students = places.add<RowNormalizer>(rows_);
    const int64_t teachers = places.add<RowNormalizer>(rows_);
    const int64_t value = places.add<float>(rows_);
    std::byte* const room = results_memory_.at_least(places.bytes());
    launch(over_all(rows_, handle()), merge_crosses, records.data(), rows_, ranks_,
           reinterpret_cast<RowNormalizer*>(room + students),
           reinterpret_cast<RowNormalizer*>(room + teachers),
           reinterpret_cast<float*>(room + value));
    const std::byte* const found =
        results_.fetch(static_cast<const std::byte*>(room), places.bytes());
    take(found, students, out.students);
    take(found, teachers, out.teachers);
    take(found, value, out.value);
  }

 private:
  CUstream_st* handle() const { return cuda_handle(stream_); }

  Stream& stream_;
  int64_t rows_ = 0;
  Pool own_memory_{MemorySpace::device}, all_memory_{MemorySpace::device},
      results_memory_{MemorySpace::device};
  Download results_;
};

}  // namespace

std::unique_ptr<CrossRecords> make_cuda_cross_records(Stream& stream, int ranks, int threads) {
  return std::make_unique<CudaCrossRecords>(stream, ranks, threads);
}

std::unique_ptr<ScoreRecords> make_cuda_score_records(Stream& stream, const RecordShape& shape) {
  return std::make_unique<CudaScoreRecords>(stream, shape);
}

}  // namespace gyre

#include <algorithm>
#include <tuple>

#include "core/error.hpp"
#include "logprobs/records/cuda_score_records.hpp"
#include "logprobs/records/row_total.hpp"
#include "logprobs/rows/cuda_row_lanes.cuh"
#include "logprobs/rows/cuda_row_launch.hpp"
#include "logprobs/rows/cuda_row_memory.hpp"

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

/// Results from all ranks' records, for ids [rows, per_row].
struct Merge {
  const float* records = nullptr;  // [ranks, rows · (partials + per_row)]
  int64_t rows = 0, per_row = 0;
  PartialFields fields;
  int ranks = 0;
  RowScale scale;
  const int64_t* offsets = nullptr;  // partition offsets, [ranks + 1]
  int64_t vocab_size = 0;
  const int32_t* ids = nullptr;
  RowNormalizer* normalizers = nullptr;
  float *entropy = nullptr, *mean_logprob = nullptr;  // null: not requested
  float* logprob = nullptr;

  __device__ int64_t block() const { return rows * (fields.count() + per_row); }
};

/// Rows that a block finishes together: `rows` of them, by `threads` threads each.
struct RowGroup {
  int64_t rows = 1;
  int threads = 1;

  explicit RowGroup(int64_t ids_per_row)
      : rows(std::max<int64_t>(1, block_threads / std::max<int64_t>(1, ids_per_row))),
        threads(static_cast<int>(block_threads / rows)) {}
  __device__ int64_t row_of_thread(int64_t group) const {
    return group * rows + static_cast<int>(threadIdx.x) / threads;
  }
  /// Whether this thread has a row, of `all`.
  __device__ bool active(int64_t group, int64_t all) const {
    return static_cast<int>(threadIdx.x) < rows * threads && row_of_thread(group) < all;
  }
  __device__ int first_id() const { return static_cast<int>(threadIdx.x) % threads; }
};

/// Writes the results of a row; its threads share its ids.
__device__ void score_row(const Merge& m, const RowGroup& group, int64_t row) {
  const double scale = m.scale[row];
  const RowTotal total =
      m.fields.merged(m.records + row * m.fields.count(), m.block(), m.ranks, scale);
  const double log_sum = std::log(total.sum);
  const int first = group.first_id();
  if (first == 0) {
    m.normalizers[row] = {total.max, static_cast<float>(log_sum)};
    if (m.entropy != nullptr) m.entropy[row] = total.entropy(log_sum);
    if (m.mean_logprob != nullptr)
      m.mean_logprob[row] = total.mean_logprob(m.vocab_size, scale, log_sum);
  }
  for (int64_t i = first; i < m.per_row; i += group.threads) {
    const int64_t k = row * m.per_row + i;
    const int owner = owner_of(m.offsets, m.vocab_size, m.ids[k]);
    m.logprob[k] = owner < 0
                       ? 0
                       : total.logprob(m.records[owner * m.block() + m.rows * m.fields.count() + k],
                                       scale, log_sum);
  }
}

__global__ void __launch_bounds__(block_threads) score_rows(Merge m, RowGroup group) {
  if (group.active(blockIdx.x, m.rows)) score_row(m, group, group.row_of_thread(blockIdx.x));
}

/// A tile of logits whose partials and logits of ids are added to a rank's records. Pointers are
/// those of its first row.
struct Tile {
  int64_t rows = 0, columns = 0, parts = 0;
  int64_t first_id = 0;  // id of its first column
  bool first = false;    // it has column 0: the records are empty
  bool all = false;      // one rank, and the tile is its whole shard: the results are known
  RowScale scale;        // of its rows
  rows::PartSums* sums = nullptr;  // [rows, parts]
  RowTotal* totals = nullptr;      // [rows]
  float* partials = nullptr;       // [rows, partials of a row]
  float* id_logits = nullptr;      // [rows, ids of a row]
  const int32_t* ids = nullptr;    // [rows, ids of a row]
};

/// Adds the tile's sums to the totals of its rows, and finds the logits of ids; writes the results
/// if tile.all. One block per group of rows.
template <class T>
__global__ void __launch_bounds__(block_threads)
    finish_tile(const T* logits, int64_t stride, const __grid_constant__ Tile tile,
                const __grid_constant__ Merge m, const __grid_constant__ RowGroup group) {
  const int64_t row = group.row_of_thread(blockIdx.x);
  const bool active = group.active(blockIdx.x, tile.rows);
  RowTotal total;
  if (active) {
    if (!tile.first) total = tile.totals[row];
    const float scale = tile.scale[row];
    total.add(rows::partials_of(tile.sums + row * tile.parts, tile.parts, rows::base_2(scale),
                                m.fields.weighted),
              scale);
  }
  __syncthreads();  // all threads of a row have read its total
  if (active) {
    if (group.first_id() == 0) {
      tile.totals[row] = total;
      m.fields.write(total.partials(), tile.partials + row * m.fields.count());
    }
    for (int64_t i = group.first_id(); i < m.per_row; i += group.threads) {
      const int64_t k = row * m.per_row + i;
      const int64_t column = rows::column_of(tile.ids[k], tile.first_id, tile.columns);
      if (column >= 0)
        tile.id_logits[k] = to_float(logits[row * stride + column]);
      else if (tile.first)
        tile.id_logits[k] = 0;  // unless another tile has it
    }
  }
  if (!tile.all) return;
  __syncthreads();
  if (active) score_row(m, group, row);
}

/// Copies an array at offset `place` of the fetched results.
template <class T>
void take(const std::byte* fetched, int64_t place, std::span<T> to) {
  std::copy_n(reinterpret_cast<const T*>(fetched + place), to.size(), to.begin());
}

/// Ids and results of a call in memory of the host that kernels read and write: the caller's if it
/// is pinned, else pinned copies.
class HostScores {
 public:
  explicit HostScores(Stream& stream) : stream_(stream) {}

  void begin(std::span<const int32_t> ids, const RowScores& out) {
    if (running_) stream_.synchronize();  // a call that did not end may still use the copies
    running_ = true;
    out_ = out;
    Places places;
    const int64_t ids_at = place(places, ids);
    places_ = {place(places, out.normalizers), place(places, out.entropy),
               place(places, out.mean_logprob), place(places, out.logprob)};
    std::byte* const room = memory_.at_least(places.bytes());
    ids_ = ids.data();
    if (ids_at >= 0) {
      auto* const copy = reinterpret_cast<int32_t*>(room + ids_at);
      std::ranges::copy(ids, copy);
      ids_ = copy;
    }
  }
  /// Waits for the stream, and copies the results to the caller's memory where they are not there.
  void finish() {
    stream_.synchronize();
    running_ = false;
    const std::byte* const room = memory_.at_least(0);
    const auto [normalizers, entropy, mean_logprob, logprob] = places_;
    if (normalizers >= 0) take(room, normalizers, out_.normalizers);
    if (entropy >= 0) take(room, entropy, out_.entropy);
    if (mean_logprob >= 0) take(room, mean_logprob, out_.mean_logprob);
    if (logprob >= 0) take(room, logprob, out_.logprob);
  }

  const int32_t* ids() const { return ids_; }
  RowNormalizer* normalizers() { return at(places_[0], out_.normalizers); }
  float* entropy() { return out_.entropy.empty() ? nullptr : at(places_[1], out_.entropy); }
  float* mean_logprob() {
    return out_.mean_logprob.empty() ? nullptr : at(places_[2], out_.mean_logprob);
  }
  float* logprob() { return at(places_[3], out_.logprob); }

 private:
  /// Place of a copy; -1 if the array itself is pinned.
  template <class T>
  static int64_t place(Places& places, std::span<T> array) {
    return array.empty() || is_pinned(array.data())
               ? -1
               : places.add<std::remove_const_t<T>>(std::ssize(array));
  }
  template <class T>
  T* at(int64_t place, std::span<T> array) {
    return place < 0 ? array.data() : reinterpret_cast<T*>(memory_.at_least(0) + place);
  }

  Stream& stream_;
  bool running_ = false;
  RowScores out_;
  const int32_t* ids_ = nullptr;
  std::array<int64_t, 4> places_{-1, -1, -1, -1};  // normalizers, entropy, mean_logprob, logprob
  Pool memory_{MemorySpace::pinned};
};

class CudaScoreRecords final : public ScoreRecords {
 public:
  CudaScoreRecords(Stream& stream, const RecordShape& shape)
      : ScoreRecords(shape),
        stream_(stream),
        group_(shape.ids_per_token),
        partition_(stream),
        scales_(stream),
        results_(stream) {
    std::tie(merge_.offsets) = partition_.send(std::span<const int64_t>(shape_.vocab.offsets));
    merge_.fields = shape_.fields;
    merge_.per_row = shape_.ids_per_token;
    merge_.ranks = shape_.vocab.ranks();
    merge_.vocab_size = shape_.vocab.vocab_size;
  }

  void start(int64_t rows, std::span<const int32_t> ids, const RowScores& out) override {
    GYRE_CHECK(std::ssize(ids) == rows * shape_.ids_per_token, "{} ids of {} x {}", ids.size(),
               rows, shape_.ids_per_token);
    rows_ = rows;
    added_ = scored_ = false;
    results_.begin(ids, out);
    own_ = at_least<float>(own_memory_, rows * shape_.width());
    merge_.scale = shape_.scale;
    if (const float* scales = shape_.scale.of_rows(); scales != nullptr) {
      std::tie(scales) = scales_.send(std::span(scales, static_cast<size_t>(rows)));
      merge_.scale = shape_.scale.at(scales);
    }
    merge_.rows = rows;
    merge_.records = own_;
    merge_.ids = results_.ids();
    merge_.normalizers = results_.normalizers();
    merge_.entropy = results_.entropy();
    merge_.mean_logprob = results_.mean_logprob();
    merge_.logprob = results_.logprob();
  }

  void add(ConstMatrixRef logits, int64_t row, int64_t column, int64_t columns) override {
    GYRE_CHECK(0 <= row && row + logits.rows <= rows_ && columns <= logits.cols,
               "rows {} to {} of {}, {} of {} columns", row, row + logits.rows, rows_, columns,
               logits.cols);
    added_ = true;
    const int64_t first = row * shape_.ids_per_token;
    Tile tile;
    tile.rows = logits.rows;
    tile.columns = columns;
    tile.parts = rows::parts_of(columns, rows::part_columns);
    tile.first_id = shape_.first_id() + column;
    tile.first = column == 0;
    tile.all = shape_.vocab.ranks() == 1 && logits.rows == rows_ &&
               columns == shape_.vocab.valid(shape_.rank);
    tile.scale = merge_.scale.from(row);
    tile.sums = at_least<rows::PartSums>(parts_memory_, logits.rows * tile.parts);
    tile.totals = at_least<RowTotal>(totals_memory_, rows_) + row;
    tile.partials = own_ + row * shape_.partials();
    tile.id_logits = own_ + rows_ * shape_.partials() + first;
    tile.ids = merge_.ids + first;
    scored_ = tile.all;
    rows::launch_part_sums(handle(), logits,
                           {columns, tile.scale, shape_.fields.weighted, 1, shape_.fields.total},
                           tile.sums);
    rows::with_elements(logits, [&](auto z) {
      launch(of_groups(logits.rows), finish_tile<typename decltype(z)::Type>, z.view.data,
             z.view.stride, tile, merge_, group_);
    });
  }

 protected:
  std::span<const float> own() override {
    if (!added_) add({nullptr, DType::f32, rows_, 0, 0}, 0, 0, 0);  // a shard without columns
    return {own_, static_cast<size_t>(rows_ * shape_.width())};
  }
  std::span<float> all() override {
    const int64_t count = shape_.vocab.ranks() * rows_ * shape_.width();
    return {at_least<float>(all_memory_, count), static_cast<size_t>(count)};
  }
  void merge_records(std::span<const float> records) override {
    Merge m = merge_;
    m.records = records.data();
    if (!scored_) launch(of_groups(rows_), score_rows, m, group_);
    results_.finish();
  }

 private:
  CUstream_st* handle() const { return cuda_handle(stream_); }
  template <class T>
  static T* at_least(Pool& memory, int64_t count) {
    return reinterpret_cast<T*>(memory.at_least(static_cast<int64_t>(count * sizeof(T))));
  }
  /// A launch of one block per group of rows.
  Launch of_groups(int64_t rows) const {
    return {rows::blocks_of(rows::parts_of(rows, group_.rows)), block_threads, handle()};
  }

  Stream& stream_;
  RowGroup group_;
  Merge merge_;  // of this rank's records
  int64_t rows_ = 0;
  bool added_ = false, scored_ = false;  // since start()
  Uploads partition_;                    // the partition's offsets
  Uploads scales_;                       // factors of rows
  Pool totals_memory_{MemorySpace::device}, own_memory_{MemorySpace::device},
      all_memory_{MemorySpace::device}, parts_memory_{MemorySpace::device};
  float* own_ = nullptr;  // [rows, width]
  HostScores results_;
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

#include "logprobs/records/score_records.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "logprobs/records/gather_records.hpp"
#include "logprobs/records/row_total.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "runtime/buffer.hpp"
#include "runtime/parallel.hpp"

namespace gyre {

MemorySpace results_space(const RowKernels& kernels) {
  return kernels.space() == MemorySpace::device ? MemorySpace::pinned : MemorySpace::host;
}

double ScoreRecords::merge(Communicator& arrays, Stream& stream, std::string_view what) {
  const std::span<const float> mine = own();
  const int ranks = shape_.vocab.ranks();
  return merge_gathered(ranks, mine, ranks == 1 ? std::span<float>() : all(), arrays, stream, what,
                        [&](std::span<const float> records) { merge_records(records); });
}

namespace {

class HostScoreRecords final : public ScoreRecords {
 public:
  HostScoreRecords(RowKernels& kernels, const RecordShape& shape)
      : ScoreRecords(shape), kernels_(kernels) {}

  void start(int64_t rows, std::span<const int32_t> ids, const RowScores& out) override {
    if (rows_ != rows) {
      totals_ = Buffer<RowTotal>(rows);
      own_ = Buffer<float>(rows * shape_.width());
    }
    rows_ = rows;
    ids_ = ids;
    out_ = out;
    std::ranges::fill(totals_.span(), RowTotal{});
    std::ranges::fill(id_logits(0, rows), 0.0F);
  }

  void add(ConstMatrixRef logits, int64_t row, int64_t column, int64_t columns) override {
    if (partials_.size() < logits.rows) partials_ = Buffer<SoftmaxPartial>(logits.rows);
    const size_t rows = logits.rows;
    kernels_.partials(logits,
                      {columns, shape_.scale.from(row), shape_.fields.weighted, shape_.threads,
                       shape_.fields.total},
                      partials_.span().first(rows));
    for_each_row(logits.rows, 1,
                 [&](int64_t i) { totals_[row + i].add(partials_[i], shape_.scale[row + i]); });
    kernels_.gather_token_logits(
        logits, ids_.subspan(row * shape_.ids_per_token, rows * shape_.ids_per_token),
        shape_.ids_per_token, shape_.first_id() + column, columns, id_logits(row, logits.rows));
  }

 protected:
  std::span<const float> own() override {
    for (int64_t i = 0; i < rows_; ++i)
      shape_.fields.write(totals_[i].partials(), own_.data() + i * shape_.partials());
    return own_.span();
  }
  std::span<float> all() override {
    const int64_t size = shape_.vocab.ranks() * own_.size();
    if (all_.size() != size) all_ = Buffer<float>(size);
    return all_.span();
  }
  void merge_records(std::span<const float> records) override {
    for_each_row(rows_, shape_.vocab.ranks(), [&](int64_t i) { merge_row(i, records.data()); });
  }

 private:
  /// Calls body(row) for all rows, distributed over threads; each call merges `parts` parts.
  template <class Body>
  void for_each_row(int64_t rows, int64_t parts, Body body) const {
    const double nanoseconds = 30.0 * (parts + 2);
    for_each_part(shape_.threads, rows, nanoseconds, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }
  std::span<float> id_logits(int64_t row, int64_t rows) {
    return own_.span().subspan(rows_ * shape_.partials() + row * shape_.ids_per_token,
                               rows * shape_.ids_per_token);
  }
  void merge_row(int64_t i, const float* records) const {
    const int64_t block = rows_ * shape_.width(), partials = shape_.partials();
    const double scale = shape_.scale[i];
    const RowTotal row =
        shape_.fields.merged(records + i * partials, block, shape_.vocab.ranks(), scale);
    const double log_sum = std::log(row.sum);
    const size_t at = i;
    out_.normalizers[at] = {row.max, static_cast<float>(log_sum)};
    if (!out_.entropy.empty()) out_.entropy[at] = row.entropy(log_sum);
    if (!out_.mean_logprob.empty())
      out_.mean_logprob[at] = row.mean_logprob(shape_.vocab.vocab_size, scale, log_sum);
    const float* logits_of_ids = records + rows_ * partials;
    for (int64_t k = i * shape_.ids_per_token; k < (i + 1) * shape_.ids_per_token; ++k) {
      const int owner = shape_.vocab.owner(ids_[k]);
      out_.logprob[k] =
          owner < 0 ? 0 : row.logprob(logits_of_ids[owner * block + k], scale, log_sum);
    }
  }

  RowKernels& kernels_;
  int64_t rows_ = -1;
  std::span<const int32_t> ids_;
  RowScores out_;
  Buffer<RowTotal> totals_;          // [rows]
  Buffer<float> own_;                // [rows, partials], then [rows, ids_per_token]
  Buffer<float> all_;                // [ranks, size of own_]; empty on one rank
  Buffer<SoftmaxPartial> partials_;  // of the rows being added
};

}  // namespace

std::unique_ptr<ScoreRecords> make_host_score_records(RowKernels& kernels,
                                                      const RecordShape& shape) {
  return std::make_unique<HostScoreRecords>(kernels, shape);
}

}  // namespace gyre

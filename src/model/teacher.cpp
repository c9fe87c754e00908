#include "model/teacher.hpp"

#include <algorithm>

#include "logprobs/fused_linear/fused_linear_ops.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

/// Rows of a block of logits of `columns` columns: at most 16 MiB, or one row.
int64_t rows_of_block(int64_t columns) {
  constexpr int64_t elements = int64_t{1} << 22, most = 64;
  return std::clamp<int64_t>(elements / std::max<int64_t>(1, columns), 1, most);
}

/// Logits of one model in the columns of this rank that are no padding, block by block.
class BlockLogits {
 public:
  BlockLogits(ConstMatrixRef h, ConstMatrixRef head, const ModelConfig& config, int64_t valid,
              int64_t rows)
      : h_(h),
        head_(head),
        soft_cap_(static_cast<float>(config.final_soft_cap)),
        valid_(valid),
        columns_(std::min(valid, usual_tile(MemorySpace::host).columns)),
        tile_(cpu_linear_ops().make_tile({rows, columns_}, h.cols, h.type, head.type, 1)),
        block_(rows * head.rows) {}

  /// Logits of rows [first, first + rows): [rows, columns of this rank]. Padding is not set.
  MatrixRef of(int64_t first, int64_t rows) {
    LinearOps& ops = cpu_linear_ops();
    const MatrixRef block = block_.matrix(rows, head_.rows);
    tile_->load(h_, first, rows);
    for (int64_t c = 0; c < valid_; c += columns_) {
      const int64_t count = std::min(columns_, valid_ - c);
      const MatrixView<float> z = tile_->logits(head_.rows_from(c, count));
      if (soft_cap_ > 0) ops.soft_cap(z, soft_cap_);
      ops.copy(z, block.columns_from(c, count));
    }
    return block;
  }

 private:
  ConstMatrixRef h_, head_;
  float soft_cap_;
  int64_t valid_, columns_;
  std::unique_ptr<LinearTile> tile_;
  Buffer<float> block_;
};

}  // namespace

ScoringPlan plan_teacher(ScoringPlan& plan, const ModelConfig& student, const ModelConfig& teacher,
                         std::span<const int64_t> offsets) {
  ScoringPlan result = plan_scoring(offsets, plan.forest, teacher, plan.setup, plan.capacity);
  result.layout_masks = plan.layout_masks;
  std::vector<double> flops;
  for (size_t i = 0; i < plan.bins.size(); ++i)
    flops.push_back(plan.bin_flops[i] + result.bin_flops[i] +
                    divergence_flops(plan.bins[i].slots(), teacher, student));
  plan.bins_of_replica = result.bins_of_replica = balance_over_groups(flops, plan.setup.grid.dp);
  return result;
}

double divergence_flops(int64_t tokens, const ModelConfig& teacher, const ModelConfig& student) {
  return 2.0 * static_cast<double>(tokens * teacher.vocab_size) *
         static_cast<double>(teacher.hidden_size + student.hidden_size);
}

int64_t divergence_bytes(const ScoringPlan& plan, const ModelConfig& teacher,
                         const ModelConfig& student, int64_t predictions) {
  const int64_t columns = local_vocab(student, plan.setup.grid.tp);
  const int64_t rows = std::min(predictions, rows_of_block(columns));
  const int64_t tile = std::min(columns, usual_tile(MemorySpace::host).columns);
  const int64_t kept = student.hidden_size * size_of(plan.setup.types.activations);
  const int64_t records = (plan.setup.grid.tp + 2) * sizeof(CrossPartial);  // of a row
  return predictions * (kept + size_of(DType::f32)) +
         rows * (records + (2 * columns + 2 * tile + teacher.hidden_size + student.hidden_size) *
                               size_of(DType::f32));
}

WeightReader with_padding(WeightReader read, int64_t from, int64_t to) {
  if (from >= to) return read;
  return [read = std::move(read), from](const std::string& name, int64_t row, int64_t rows,
                                        int64_t column, int64_t columns) {
    const bool by_rows = name == "embed", by_columns = name == "head";
    if (!by_rows && !by_columns) return read(name, row, rows, column, columns);
    const auto there = [&](int64_t begin, int64_t count) {
      return std::clamp<int64_t>(from - begin, 0, count);
    };
    const int64_t some_rows = by_rows ? there(row, rows) : rows;
    const int64_t some_columns = by_columns ? there(column, columns) : columns;
    const Buffer<float> part =
        read(name, some_rows > 0 ? row : 0, some_rows, some_columns > 0 ? column : 0, some_columns);
    Buffer<float> whole(rows * columns);
    std::ranges::fill(whole.span(), 0.0F);
    copy_converted(
        part.matrix(some_rows, some_columns),
        whole.matrix(rows, columns).rows_from(0, some_rows).columns_from(0, some_columns));
    return whole;
  };
}

Teacher::Teacher(const DocumentView& documents, const ModelConfig& config,
                 const ModelConfig& student, const ScoringPlan& plan, ProcessGrid& grid)
    : config_(config),
      student_(student),
      plan_(plan),
      grid_(grid),
      scorer_(documents, config, plan, grid),
      vocab_(even_partition(config.vocab_size, config.vocab_padded, grid.shape().tp)) {}

void Teacher::set_decoder(Decoder& decoder) {
  decoder_ = &decoder;
  soft_.emplace(0, vocab_, 1, grid_.tp());
}

void Teacher::add_to(PassWork& student) const {
  const PassWork own = scorer_.work();
  student.linear_flops += own.linear_flops;
  student.attention_flops += own.attention_flops;
  student.recurrence_flops += own.recurrence_flops;
  student.recurrent |= own.recurrent;
  student.elementwise_bytes += own.elementwise_bytes;
  // The logits of both models are computed for the scores and for the divergences.
  student.head_flops = 2 * (student.head_flops + own.head_flops);
  student.head_bytes = 2 * (student.head_bytes + own.head_bytes);
}

int64_t Teacher::bytes() const {
  int64_t predictions = 0;
  for (const BinShard& shard : scorer_.shards())
    predictions = std::max(predictions, std::ssize(shard.batch.targets));
  return divergence_bytes(plan_, config_, student_, predictions);
}

void Teacher::keep_student(ConstMatrixRef h, ConstMatrixRef head) {
  const int64_t bytes = h.rows * h.cols * size_of(h.type);
  if (kept_.size() < bytes) kept_ = Buffer<std::byte>(bytes);
  const MatrixRef kept(kept_.data(), h.type, h.rows, h.cols, h.cols);
  copy_converted(h, kept);
  h_ = kept;
  head_ = head;
}

double Teacher::cross_entropies(ConstMatrixRef teacher, ConstMatrixRef teacher_head) {
  set_current_step("divergence from the teacher");
  const int64_t rows = std::min(h_.rows, rows_of_block(head_.rows));
  const int64_t valid = vocab_.valid(grid_.tp_rank());
  BlockLogits of_student(h_, head_, student_, valid, rows);
  BlockLogits of_teacher(teacher, teacher_head, config_, valid, rows);
  HostStream stream;
  if (cross_.size() < h_.rows) cross_ = Buffer<float>(h_.rows);
  double waited = 0;
  for (int64_t first = 0; first < h_.rows; first += rows) {
    const int64_t count = std::min(rows, h_.rows - first);
    soft_->resize(count);
    waited += soft_->forward(of_student.of(first, count), of_teacher.of(first, count), stream,
                             cross_.span().subspan(first, count));
  }
  return grid_.shape().tp == 1 ? 0 : waited;
}

DecoderTimes Teacher::diverge(int64_t shard, std::span<PredictionScore> scores) {
  const BinShard& bin = scorer_.shards()[shard];
  std::vector<PredictionScore> own(scores.size());
  double waited = 0;
  DecoderTimes times = decoder_->forward(
      bin.batch, bin.plans, own, {},
      [&](ConstMatrixRef h, ConstMatrixRef head) { waited = cross_entropies(h, head); });
  for (size_t i = 0; i < scores.size(); ++i) scores[i].kl = cross_[i] - own[i].entropy;
  times.tp_wait += waited;
  times.head -= waited;
  return times;
}

}  // namespace gyre

// The backward pass of the fused linear layer.

#include <algorithm>
#include <array>

#include "core/error.hpp"
#include "core/index.hpp"
#include "logprobs/fused_linear_detail.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

void add_rows(MatrixView<const float> from, MatrixView<float> to, bool first) {
  for (int64_t r = 0; r < from.rows; ++r) {
    if (first)
      std::copy_n(from.row(r), from.cols, to.row(r));
    else
      for (int64_t i = 0; i < from.cols; ++i) to(r, i) += from(r, i);
  }
}

}  // namespace

/// What a backward pass does. Rows are dealt, also when every rank has all of X: each rank sums its
/// own.
class FusedLinear::Backward {
 public:
  struct Inputs {
    ConstMatrixRef x, weight;
    std::span<const int32_t> targets;
    std::span<const float> d_logprob, d_entropy;
  };

  Backward(const FusedLinear& layer, const Inputs& in, MatrixView<float> d_weight, Stream& stream)
      : layer_(layer),
        in_(in),
        d_weight_(d_weight),
        stream_(stream),
        tile_(layer.options_.tile_rows, layer.options_.tile_columns, layer.options_.hidden,
              layer.options_.threads),
        d_x_(layer.options_.tile_rows * layer.options_.hidden),
        normalizers_(layer.options_.tile_rows),
        slopes_(layer.options_.tile_rows),
        weights_(layer.options_.tile_rows),
        ids_(layer.options_.tile_rows) {}

  /// sum [rows of this rank, D] <- the gradient of its rows of X. Adds to d_weight. Returns the
  /// seconds waited.
  double run(MatrixView<float> sum);

 private:
  /// Rows of several ranks, in the order of `ranks`, are [rows(), D] of one part.
  struct Batch {
    int first_step, end_step;  // ranks this one + step
  };

  int ranks() const { return layer_.tp_.size(); }
  int peer(int step) const { return (layer_.tp_.rank() + step + ranks()) % ranks(); }
  int64_t rows_of_rank(int rank) const {
    return layer_.dealt_row(rank + 1) - layer_.dealt_row(rank);
  }
  int64_t rows_of_batch(const Batch& batch) const;
  bool active(int64_t token) const;
  void compute(const Batch& batch, MatrixView<float> part);
  void compute_tile(std::span<const int64_t> tokens);
  void post(const Batch& batch, MatrixView<float> part);
  void finish(MatrixView<float> sum);

  const FusedLinear& layer_;
  Inputs in_;
  MatrixView<float> d_weight_;
  Stream& stream_;
  fused::Tile tile_;
  Buffer<float> d_x_;  // [tile_rows, D]
  Buffer<RowNormalizer> normalizers_;
  Buffer<RowSlope> slopes_;
  Buffer<float> weights_;
  Buffer<int32_t> ids_;
  Batch travelling_{0, 0};
  Buffer<float> received_;  // [ranks of the batch that travels, own rows, D]
  WorkPtr work_ = completed_work();
  bool summed_ = false;
  double waited_ = 0;
};

int64_t FusedLinear::Backward::rows_of_batch(const Batch& batch) const {
  int64_t rows = 0;
  for (int step = batch.first_step; step < batch.end_step; ++step) rows += rows_of_rank(peer(step));
  return rows;
}

bool FusedLinear::Backward::active(int64_t token) const {
  const auto at = static_cast<size_t>(token);
  return in_.d_logprob[at] != 0 || (!in_.d_entropy.empty() && in_.d_entropy[at] != 0);
}

double FusedLinear::Backward::run(MatrixView<float> sum) {
  const int64_t hidden = layer_.options_.hidden;
  if (ranks() == 1) {
    compute({0, 1}, sum);
    return 0;
  }
  const int64_t most_rows = ceil_div(layer_.options_.tokens, ranks());
  const auto steps = static_cast<int>(std::clamp<int64_t>(
      layer_.options_.tile_rows / std::max<int64_t>(1, most_rows), 1, ranks() - 1));
  std::array<Buffer<float>, 2> parts;
  for (Buffer<float>& part : parts) part = Buffer<float>(steps * most_rows * hidden);
  received_ = Buffer<float>(steps * sum.rows * hidden);
  size_t turn = 0;
  for (int step = 1; step < ranks(); step += steps, turn ^= 1U) {
    const Batch batch{step, std::min(ranks(), step + steps)};
    const MatrixView<float> part = parts[turn].matrix(rows_of_batch(batch), hidden);
    compute(batch, part);
    finish(sum);
    post(batch, part);
  }
  const MatrixView<float> own = parts[turn].matrix(sum.rows, hidden);
  compute({0, 1}, own);
  finish(sum);
  add_rows(own, sum, false);
  return waited_;
}

void FusedLinear::Backward::compute(const Batch& batch, MatrixView<float> part) {
  Buffer<int64_t> tokens(part.rows), places(part.rows);
  int64_t place = 0, used = 0;
  for (int step = batch.first_step; step < batch.end_step; ++step)
    for (int64_t t = layer_.dealt_row(peer(step)); t < layer_.dealt_row(peer(step) + 1);
         ++t, ++place) {
      if (active(t)) {
        tokens[used] = t;
        places[used++] = place;
      } else {
        std::fill_n(part.row(place), part.cols, 0.0F);
      }
    }
  const int64_t tile_rows = layer_.options_.tile_rows;
  for (int64_t begin = 0; begin < used; begin += tile_rows) {
    const int64_t count = std::min(tile_rows, used - begin);
    compute_tile(tokens.span().subspan(static_cast<size_t>(begin), static_cast<size_t>(count)));
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(d_x_.data() + i * part.cols, part.cols, part.row(places[begin + i]));
  }
}

void FusedLinear::Backward::compute_tile(std::span<const int64_t> tokens) {
  const LinearOptions& options = layer_.options_;
  const auto scale = static_cast<double>(layer_.scale());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto at = static_cast<size_t>(tokens[i]);
    const auto g = static_cast<double>(in_.d_logprob[at]);
    const double h = in_.d_entropy.empty() ? 0 : static_cast<double>(in_.d_entropy[at]);
    const auto to = static_cast<int64_t>(i);
    normalizers_[to] = layer_.normalizers_[tokens[i]];
    slopes_[to] =
        slope_of(g, h, h == 0 ? 0 : static_cast<double>(layer_.entropy_[tokens[i]]), scale);
    weights_[to] = static_cast<float>(scale * g);
    ids_[to] = in_.targets[at];
  }
  const MatrixView<float> d_x = d_x_.matrix(std::ssize(tokens), options.hidden);
  tile_.load(in_.x, std::ssize(tokens), [&](int64_t i) { return tokens[static_cast<size_t>(i)]; });
  bool first = true;
  const int64_t first_id = layer_.vocab_.begin(layer_.tp_.rank());
  layer_.for_each_column_tile(in_.weight, [&](int64_t column, ConstMatrixRef weight) {
    const MatrixView<float> z = tile_.logits(weight);
    const size_t rows = tokens.size();
    row_gradient(z, {z.cols, layer_.scale(), options.threads}, normalizers_.span().first(rows),
                 slopes_.span().first(rows),
                 {ids_.span().first(rows), weights_.span().first(rows), 1, first_id + column}, z);
    tile_.add_d_x(z, weight, d_x, !first);
    tile_.add_d_weight(z, d_weight_.rows_from(column, weight.rows));
    first = false;
    work_->test();
  });
  if (first) std::fill_n(d_x.data, d_x.rows * d_x.cols, 0.0F);  // no columns here
}

void FusedLinear::Backward::post(const Batch& batch, MatrixView<float> part) {
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  const auto hidden = static_cast<size_t>(part.cols);
  const auto own = static_cast<size_t>(rows_of_rank(layer_.tp_.rank())) * hidden;
  std::span<const float> rest(part.data, static_cast<size_t>(part.rows) * hidden);
  for (int step = batch.first_step; step < batch.end_step; ++step) {
    const size_t count = static_cast<size_t>(rows_of_rank(peer(step))) * hidden;
    add_slices(peer(step), bytes_of(rest.first(count)), sends);
    rest = rest.subspan(count);
    const auto skipped = static_cast<size_t>(step - batch.first_step) * own;
    add_slices(peer(-step), writable_bytes_of(received_.span().subspan(skipped, own)), recvs);
  }
  travelling_ = batch;
  work_ = layer_.tp_.exchange(sends, recvs, stream_, "gradients of hidden states");
}

void FusedLinear::Backward::finish(MatrixView<float> sum) {
  const Stopwatch watch;
  work_->wait();
  waited_ += watch.seconds();
  const int64_t steps = travelling_.end_step - travelling_.first_step;
  for (int64_t i = 0; i < steps; ++i, summed_ = true)
    add_rows({received_.data() + i * sum.rows * sum.cols, sum.rows, sum.cols}, sum, !summed_);
  travelling_ = {0, 0};
}

double FusedLinear::backward(ConstMatrixRef x, ConstMatrixRef weight,
                             std::span<const int32_t> targets, std::span<const float> d_logprob,
                             std::span<const float> d_entropy, Stream& stream,
                             MatrixView<float> d_x, MatrixView<float> d_weight, bool accumulate) {
  check_inputs(x, weight, targets);
  GYRE_CHECK(std::ssize(d_logprob) == options_.tokens &&
                 (d_entropy.empty() || std::ssize(d_entropy) == entropy_.size()),
             "{} and {} gradients of {} tokens", d_logprob.size(), d_entropy.size(),
             options_.tokens);
  GYRE_CHECK(d_x.rows == x.rows && d_x.cols == x.cols && d_weight.rows == weight.rows &&
                 d_weight.cols == weight.cols,
             "gradients of {} x {} and {} x {}", d_x.rows, d_x.cols, d_weight.rows, d_weight.cols);
  if (!accumulate)
    for (int64_t r = 0; r < d_weight.rows; ++r) std::fill_n(d_weight.row(r), d_weight.cols, 0.0F);
  Backward pass(*this, {all_x(x), weight, targets, d_logprob, d_entropy}, d_weight, stream);
  if (options_.sharded || tp_.size() == 1) return pass.run(d_x);
  const int64_t own_rows = dealt_row(tp_.rank() + 1) - dealt_row(tp_.rank());
  Buffer<float> own(own_rows * d_x.cols);
  return pass.run(own.matrix(own_rows, d_x.cols)) + share_d_x(own.span(), stream, d_x);
}

double FusedLinear::share_d_x(std::span<const float> own, Stream& stream,
                              MatrixView<float> d_x) const {
  std::vector<int64_t> bytes;
  for (int r = 0; r < tp_.size(); ++r)
    bytes.push_back((dealt_row(r + 1) - dealt_row(r)) * d_x.cols *
                    static_cast<int64_t>(sizeof(float)));
  const bool dense = d_x.stride == d_x.cols;
  Buffer<float> copy(dense ? 0 : d_x.rows * d_x.cols);
  const MatrixView<float> all = dense ? d_x : copy.matrix(d_x.rows, d_x.cols);
  const Stopwatch watch;
  tp_.all_gather_v(bytes_of(own),
                   writable_bytes_of(std::span(all.data, static_cast<size_t>(all.rows * all.cols))),
                   bytes, stream, "gradients of hidden states")
      ->wait();
  const double waited = watch.seconds();
  if (!dense) add_rows(all, d_x, true);
  return waited;
}

}  // namespace gyre

// Backward pass of the fused linear layer.

#include <algorithm>
#include <array>

#include "core/error.hpp"
#include "core/index.hpp"
#include "logprobs/fused_linear/fused_linear_detail.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/clock.hpp"

namespace gyre {

/// One backward pass. Even if every rank has all of X, each rank sums the gradient of its own rows.
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
        ops_(layer.ops_),
        tile_(layer.make_tile(in.x.type, in.weight.type)),
        d_x_(layer.tile_rows() * layer.options_.hidden, layer.ops_.space()),
        normalizers_(layer.tile_rows()),
        coefficients_(layer.tile_rows()),
        weights_(layer.tile_rows()),
        scales_(layer.tile_rows()),
        ids_(layer.tile_rows()) {}

  /// sum [rows of this rank, D] <- gradient of its rows of X. Adds to d_weight. Returns the seconds
  /// waited.
  double run(MatrixView<float> sum);

 private:
  /// Rows of several ranks that form one part of dX, [rows, D], in order of the ranks' steps.
  struct Batch {
    int first_step = 0, end_step = 0;  // of rank r: (r - this rank) mod ranks
    int64_t rows = 0;
    int64_t begin = 0, end = 0;  // indices into tokens_
  };

  int ranks() const { return layer_.tp_.size(); }
  int peer(int step) const { return (layer_.tp_.rank() + step + ranks()) % ranks(); }
  int64_t rows_of_rank(int rank) const {
    return layer_.assigned_row(rank + 1) - layer_.assigned_row(rank);
  }
  bool active(int64_t token) const;
  void list(Batch& batch);
  void compute(const Batch& batch, MatrixView<float> part);
  void compute_tile(int64_t begin, int64_t count);
  void post(const Batch& batch, MatrixView<float> part);
  void finish(MatrixView<float> sum);
  void wait();

  const FusedLinear& layer_;
  Inputs in_;
  MatrixView<float> d_weight_;
  Stream& stream_;
  LinearOps& ops_;
  std::unique_ptr<LinearTile> tile_;
  Buffer<float> d_x_;  // [tile_rows, D]
  // Tokens with a gradient, batch after batch, and their rows in the batch's part; also in the
  // memory space of ops_.
  std::vector<int32_t> tokens_, places_;
  Buffer<int32_t> token_list_, place_list_;
  Buffer<RowNormalizer> normalizers_;
  Buffer<GradientCoefficients> coefficients_;
  Buffer<float> weights_, scales_;
  Buffer<int32_t> ids_;
  Batch travelling_;
  Buffer<float> received_;  // [ranks of the batch in flight, own rows, D]
  WorkPtr work_ = completed_work();
  bool summed_ = false;
  double waited_ = 0;
};

bool FusedLinear::Backward::active(int64_t token) const {
  const size_t at = token;
  return in_.d_logprob[at] != 0 || (!in_.d_entropy.empty() && in_.d_entropy[at] != 0);
}

/// Appends the batch's tokens with a gradient to the lists.
void FusedLinear::Backward::list(Batch& batch) {
  batch.begin = std::ssize(tokens_);
  for (int step = batch.first_step; step < batch.end_step; ++step)
    for (int64_t t = layer_.assigned_row(peer(step)); t < layer_.assigned_row(peer(step) + 1);
         ++t) {
      if (active(t)) {
        tokens_.push_back(static_cast<int32_t>(t));
        places_.push_back(static_cast<int32_t>(batch.rows));
      }
      ++batch.rows;
    }
  batch.end = std::ssize(tokens_);
}

double FusedLinear::Backward::run(MatrixView<float> sum) {
  const int64_t hidden = layer_.options_.hidden;
  const int64_t max_rows = ceil_div(layer_.options_.tokens, ranks());
  const auto steps = static_cast<int>(std::clamp<int64_t>(
      layer_.tile_rows() / std::max<int64_t>(1, max_rows), 1, std::max(1, ranks() - 1)));
  std::vector<Batch> batches;
  for (int step = 1; step < ranks(); step += steps)
    batches.push_back({step, std::min(ranks(), step + steps)});
  Batch own{0, 1};
  for (Batch& batch : batches) list(batch);
  list(own);
  token_list_ = ops_.upload(tokens_);
  place_list_ = ops_.upload(places_);
  if (ranks() == 1) {
    compute(own, sum);
    return 0;
  }
  std::array<Buffer<float>, 2> parts;
  for (Buffer<float>& part : parts) part = Buffer<float>(steps * max_rows * hidden, ops_.space());
  received_ = Buffer<float>(steps * sum.rows * hidden, ops_.space());
  size_t turn = 0;
  for (const Batch& batch : batches) {
    const MatrixView<float> part = parts[turn].matrix(batch.rows, hidden);
    compute(batch, part);
    finish(sum);
    post(batch, part);
    turn ^= 1U;
  }
  const MatrixView<float> part = parts[turn].matrix(sum.rows, hidden);
  compute(own, part);
  finish(sum);
  wait();
  ops_.add(part, sum);
  return waited_;
}

void FusedLinear::Backward::compute(const Batch& batch, MatrixView<float> part) {
  if (batch.end - batch.begin < batch.rows) ops_.fill_zero(part);
  const int64_t tile_rows = layer_.tile_rows();
  for (int64_t begin = batch.begin; begin < batch.end; begin += tile_rows) {
    const int64_t count = std::min(tile_rows, batch.end - begin);
    compute_tile(begin, count);
    ops_.scatter(d_x_.matrix(count, part.cols), place_list_.data() + begin, part);
  }
}

void FusedLinear::Backward::compute_tile(int64_t begin, int64_t count) {
  const LinearOptions& options = layer_.options_;
  const RowScale scale = layer_.scale();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = tokens_[begin + i];
    const size_t at = token;
    const double g = in_.d_logprob[at];
    const double h = in_.d_entropy.empty() ? 0 : in_.d_entropy[at];
    normalizers_[i] = layer_.normalizers_[token];
    const ScoreSlopes slopes{.logprobs = g, .entropy = h};
    coefficients_[i] = slopes.coefficients(h == 0 ? 0 : layer_.entropy_[token], scale[token],
                                           layer_.vocab_.vocab_size);
    scales_[i] = scale[token];
    weights_[i] = static_cast<float>(static_cast<double>(scale[token]) * g);
    ids_[i] = in_.targets[at];
  }
  const MatrixView<float> d_x = d_x_.matrix(count, options.hidden);
  const size_t rows = count;
  tile_->load_listed(in_.x, token_list_.data() + begin, count);
  bool first = true;
  const int64_t first_id = layer_.vocab_.begin(layer_.tp_.rank());
  layer_.for_each_column_tile(in_.weight, [&](int64_t column, ConstMatrixRef weight) {
    const MatrixView<float> z = tile_->logits(weight);
    ops_.row_kernels().gradient(
        z, {z.cols, RowScale(1, scales_.data()), options.threads}, normalizers_.span().first(rows),
        coefficients_.span().first(rows),
        {ids_.span().first(rows), weights_.span().first(rows), 1, first_id + column},
        tile_->gradient());
    tile_->add_d_x(d_x, !first);
    tile_->add_d_weight(d_weight_.rows_from(column, weight.rows));
    first = false;
    work_->test();
  });
  if (first) ops_.fill_zero(d_x);  // no columns on this rank
}

void FusedLinear::Backward::post(const Batch& batch, MatrixView<float> part) {
  wait();
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  const size_t hidden = part.cols;
  const auto own = rows_of_rank(layer_.tp_.rank()) * hidden;
  std::span<const float> rest(part.data, part.rows * hidden);
  for (int step = batch.first_step; step < batch.end_step; ++step) {
    const size_t count = rows_of_rank(peer(step)) * hidden;
    add_slices(peer(step), bytes_of(rest.first(count)), sends);
    rest = rest.subspan(count);
    const auto skipped = (step - batch.first_step) * own;
    add_slices(peer(-step), writable_bytes_of(received_.span().subspan(skipped, own)), recvs);
  }
  travelling_ = batch;
  work_ = layer_.arrays_.exchange(sends, recvs, stream_, "gradients of hidden states");
}

/// Waits for the parts in flight and adds them to the sum.
void FusedLinear::Backward::finish(MatrixView<float> sum) {
  const Stopwatch watch;
  work_->wait_on_stream();
  waited_ += watch.seconds();
  const int64_t steps = travelling_.end_step - travelling_.first_step;
  for (int64_t i = 0; i < steps; ++i) {
    const MatrixView<const float> part(received_.data() + i * sum.rows * sum.cols, sum.rows,
                                       sum.cols);
    if (summed_)
      ops_.add(part, sum);
    else
      ops_.copy(part, sum);
    summed_ = true;
  }
  travelling_ = {};
}

void FusedLinear::Backward::wait() {
  const Stopwatch watch;
  work_->wait();
  waited_ += watch.seconds();
}

double FusedLinear::backward(ConstMatrixRef x, ConstMatrixRef weight,
                             std::span<const int32_t> targets, const LinearGradients& gradients,
                             Stream& stream) {
  const auto& [d_logprob, d_entropy, d_x, d_weight, accumulate] = gradients;
  check_inputs(x, weight, targets);
  GYRE_CHECK(options_.soft_cap == 0, "a gradient under a soft cap of {}", options_.soft_cap);
  GYRE_CHECK(std::ssize(d_logprob) == options_.tokens &&
                 (d_entropy.empty() || std::ssize(d_entropy) == entropy_.size()),
             "{} and {} gradients of {} tokens", d_logprob.size(), d_entropy.size(),
             options_.tokens);
  GYRE_CHECK(d_x.rows == x.rows && d_x.cols == x.cols && d_weight.rows == weight.rows &&
                 d_weight.cols == weight.cols,
             "gradients of {} x {} and {} x {}", d_x.rows, d_x.cols, d_weight.rows, d_weight.cols);
  if (!accumulate) ops_.fill_zero(d_weight);
  Backward pass(*this, {all_x(x), weight, targets, d_logprob, d_entropy}, d_weight, stream);
  if (options_.sharded || tp_.size() == 1) return pass.run(d_x);
  const int64_t own_rows = assigned_row(tp_.rank() + 1) - assigned_row(tp_.rank());
  Buffer<float> memory(own_rows * d_x.cols, ops_.space());
  const MatrixView<float> own = memory.matrix(own_rows, d_x.cols);
  const double waited = pass.run(own);
  return waited + share_d_x(own, stream, d_x);
}

double FusedLinear::share_d_x(MatrixView<const float> own, Stream& stream,
                              MatrixView<float> d_x) const {
  std::vector<int64_t> bytes;
  for (int r = 0; r < tp_.size(); ++r)
    bytes.push_back((assigned_row(r + 1) - assigned_row(r)) * d_x.cols * sizeof(float));
  const bool dense = d_x.stride == d_x.cols;
  Buffer<float> copy(dense ? 0 : d_x.rows * d_x.cols, ops_.space());
  const MatrixView<float> all = dense ? d_x : copy.matrix(d_x.rows, d_x.cols);
  const auto elements = [](auto m) { return std::span(m.data, m.rows * m.cols); };
  const WorkPtr work =
      arrays_.all_gather_v(bytes_of(elements(own)), writable_bytes_of(elements(all)), bytes, stream,
                           "gradients of hidden states");
  const Stopwatch watch;
  work->wait_on_stream();
  if (!dense) ops_.copy(all, d_x);
  work->wait();
  return watch.seconds();
}

}  // namespace gyre

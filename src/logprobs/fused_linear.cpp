#include "logprobs/fused_linear.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/index.hpp"
#include "logprobs/row_statistics.hpp"
#include "runtime/clock.hpp"
#include "runtime/gemm.hpp"
#include "runtime/parallel.hpp"

namespace gyre {
namespace {

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// Measured with bench/fused_linear.cpp: a few percent between 256 and 1024 either way; 128 rows,
// which pack the weight more often, cost 7 % more.
constexpr int64_t usual_tile_rows = 512;
constexpr int64_t usual_tile_columns = 512;

ConstMatrixRef rows_of(ConstMatrixRef m, int64_t begin, int64_t count) {
  return {m.data + begin * m.stride * static_cast<int64_t>(size_of(m.type)), m.type, count, m.cols,
          m.stride};
}

size_t row_bytes(ConstMatrixRef m) {
  return static_cast<size_t>(m.cols) * size_of(m.type);
}

void widen_row(ConstMatrixRef from, int64_t row, float* to) {
  if (from.type == DType::f32) {
    std::memcpy(to, from.as<float>().row(row), row_bytes(from));
    return;
  }
  const bf16* source = from.as<bf16>().row(row);
  for (int64_t i = 0; i < from.cols; ++i) to[i] = to_float(source[i]);
}

/// A message to or from a rank, in slices that one MPI call takes.
template <class Slice, class Byte>
void add_slices(int peer, std::span<Byte> data, std::vector<Slice>& slices) {
  constexpr size_t longest = size_t{1} << 30;
  for (; data.size() > longest; data = data.subspan(longest))
    slices.push_back({peer, data.first(longest)});
  slices.push_back({peer, data});
}

void add_rows(MatrixView<const float> from, MatrixView<float> to, bool first) {
  for (int64_t r = 0; r < from.rows; ++r) {
    if (first)
      std::copy_n(from.row(r), from.cols, to.row(r));
    else
      for (int64_t i = 0; i < from.cols; ++i) to(r, i) += from(r, i);
  }
}

void check_temperature(double temperature) {
  const auto scale = static_cast<float>(1 / temperature);
  if (!(std::isnormal(scale) && scale > 0))
    throw_usage("a temperature of {}; it must be positive and finite, and so its inverse in f32",
                temperature);
}

/// The moments of a row over tiles, or over ranks.
struct RowTotal {
  float max = minus_infinity;
  double sum = 0, weighted = 0;

  void add(const RowMoments& part, double scale) {
    if (part.sum == 0) return;  // nothing but -inf; a NaN gets on
    const double old_max = static_cast<double>(max);
    max = std::max(max, part.max);
    rescale(sum, weighted, (old_max - static_cast<double>(max)) * scale);
    auto part_sum = static_cast<double>(part.sum),
         part_weighted = static_cast<double>(part.weighted);
    rescale(part_sum, part_weighted,
            (static_cast<double>(part.max) - static_cast<double>(max)) * scale);
    sum += part_sum;
    weighted += part_weighted;
  }

 private:
  static void rescale(double& sum, double& weighted, double shift) {
    if (sum == 0) return;
    weighted = (weighted + shift * sum) * std::exp(shift);
    sum *= std::exp(shift);
  }
};

/// Calls body(begin, count) for parts of [0, columns) that products may be cut into.
template <class Body>
void share_columns(int threads, int64_t columns, Body body) {
  const int64_t panels = ceil_div(columns, gemm_panel_columns);
  const int64_t tasks = std::min<int64_t>(std::max(1, threads), panels);
  for_each_task(threads, tasks, [&](int64_t task, int) {
    const int64_t begin = panels * task / tasks * gemm_panel_columns;
    const int64_t end = std::min(columns, panels * (task + 1) / tasks * gemm_panel_columns);
    body(begin, end - begin);
  });
}

/// Some rows of X as f32, and the tile of their logits in some columns.
class Tile {
 public:
  Tile(int64_t rows, int64_t columns, int64_t hidden, int threads)
      : threads_(threads), x_(rows * hidden), logits_(rows * columns), hidden_(hidden) {}

  /// token(i): row of x that is row i here.
  template <class Token>
  void load(ConstMatrixRef x, int64_t rows, Token token) {
    rows_ = rows;
    for (int64_t i = 0; i < rows; ++i) widen_row(x, token(i), x_.data() + i * hidden_);
  }
  /// The logits of these rows of the weight.
  MatrixView<float> logits(ConstMatrixRef weight) {
    const MatrixView<float> z = logits_.matrix(rows_, weight.rows);
    share_columns(threads_, z.cols, [&](int64_t begin, int64_t count) {
      gemm_b_transposed(x(), rows_of(weight, begin, count), z.columns_from(begin, count));
    });
    return z;
  }
  /// d_x <- or += g · weight
  void add_d_x(MatrixView<const float> g, ConstMatrixRef weight, MatrixView<float> d_x,
               bool accumulate) const {
    share_columns(threads_, hidden_, [&](int64_t begin, int64_t count) {
      gemm(g, weight.columns_from(begin, count), d_x.columns_from(begin, count), accumulate);
    });
  }
  /// d_weight += gᵀ · x
  void add_d_weight(MatrixView<const float> g, MatrixView<float> d_weight) const {
    share_columns(threads_, hidden_, [&](int64_t begin, int64_t count) {
      gemm_a_transposed(g, x().columns_from(begin, count), d_weight.columns_from(begin, count),
                        true);
    });
  }

 private:
  MatrixView<const float> x() const { return x_.matrix(rows_, hidden_); }

  int threads_;
  Buffer<float> x_, logits_;
  int64_t hidden_, rows_ = 0;
};

}  // namespace

FusedLinear::FusedLinear(const LinearOptions& options, const VocabPartition& vocab,
                         Communicator& tp)
    : options_(options), vocab_(vocab), tp_(tp) {
  constexpr std::string_view what = "fused linear layer";
  const auto check = [&] {
    if (options.tokens < 0) throw_usage("{} tokens; the fewest are 0", options.tokens);
    if (options.hidden < 1) throw_usage("a hidden size of {}; at least 1", options.hidden);
    if (options.tile_rows < 0 || options.tile_columns < 0)
      throw_usage("tiles of {} x {}; at least 1 x 1, or 0: by size", options.tile_rows,
                  options.tile_columns);
    check_partition(vocab, tp.size());
    check_temperature(options.temperature);
  };
  agree_on_arguments(tp, what, check,
                     {{"the number of tokens", options.tokens},
                      {"the hidden size", options.hidden},
                      {"whether rows are dealt", options.sharded ? 1 : 0},
                      {"whether entropies are wanted", options.entropy ? 1 : 0},
                      {"the rows of a tile", options.tile_rows}});
  agree_on_partition(tp, what, vocab);
  agree_on_temperature();
  if (options_.tile_rows == 0) options_.tile_rows = usual_tile_rows;
  if (options_.tile_columns == 0) options_.tile_columns = usual_tile_columns;
  options_.tile_rows = std::min(options_.tile_rows, std::max<int64_t>(1, options_.tokens));
  options_.tile_columns =
      std::min(options_.tile_columns, std::max<int64_t>(1, vocab_.valid(tp.rank())));
  normalizers_ = Buffer<RowNormalizer>(options_.tokens);
  entropy_ = Buffer<float>(options_.entropy ? options_.tokens : 0);
}

void FusedLinear::agree_on_temperature() const {
  const std::vector<double> all = all_gather_value(tp_, options_.temperature);
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw Error(ExitCode::usage,
                  fmt::format("fused linear layer: the temperature is {} on rank 0, but {} on rank "
                              "{}; it must be the same on all ranks of the group",
                              all[0], all[r], r),
                  true);
}

int64_t FusedLinear::dealt_row(int rank) const {
  const int64_t ranks = tp_.size();
  return options_.tokens / ranks * rank + std::min<int64_t>(rank, options_.tokens % ranks);
}

int64_t FusedLinear::first_row(int rank) const {
  return options_.sharded ? dealt_row(rank) : 0;
}

int64_t FusedLinear::rows() const {
  return options_.sharded ? dealt_row(tp_.rank() + 1) - dealt_row(tp_.rank()) : options_.tokens;
}

float FusedLinear::scale() const {
  return static_cast<float>(1 / options_.temperature);
}

void FusedLinear::check_inputs(ConstMatrixRef x, ConstMatrixRef weight,
                               std::span<const int32_t> targets) const {
  GYRE_CHECK(x.rows == rows() && x.cols == options_.hidden, "{} x {} hidden states, not {} x {}",
             x.rows, x.cols, rows(), options_.hidden);
  GYRE_CHECK(weight.rows == vocab_.columns(tp_.rank()) && weight.cols == options_.hidden,
             "a weight of {} x {}, not {} x {}", weight.rows, weight.cols,
             vocab_.columns(tp_.rank()), options_.hidden);
  GYRE_CHECK(std::ssize(targets) == options_.tokens, "{} targets of {} tokens", targets.size(),
             options_.tokens);
}

/// Calls body(first column, their rows of the weight) for each tile of this rank's valid columns.
template <class Body>
void FusedLinear::for_each_column_tile(ConstMatrixRef weight, Body body) const {
  const int64_t columns = vocab_.valid(tp_.rank());
  for (int64_t c = 0; c < columns; c += options_.tile_columns)
    body(c, rows_of(weight, c, std::min(options_.tile_columns, columns - c)));
}

WorkPtr FusedLinear::gather_x(ConstMatrixRef x, Stream& stream) {
  if (!exchanges_x()) return completed_work();
  const size_t row = row_bytes(x);
  x_type_ = x.type;
  const auto bytes = options_.tokens * static_cast<int64_t>(row);
  if (x_.size() != bytes) x_ = Buffer<std::byte>(bytes);
  const auto block = [&](int rank) {
    return x_.span().subspan(static_cast<size_t>(dealt_row(rank)) * row,
                             static_cast<size_t>(dealt_row(rank + 1) - dealt_row(rank)) * row);
  };
  const std::span<std::byte> own = block(tp_.rank());
  for (int64_t r = 0; r < x.rows; ++r)
    std::memcpy(own.data() + static_cast<size_t>(r) * row, rows_of(x, r, 1).data, row);
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  for (int step = 1; step < tp_.size(); ++step) {
    const int peer = (tp_.rank() + step) % tp_.size();
    add_slices(peer, own, sends);
    add_slices(peer, block(peer), recvs);
  }
  return tp_.exchange(sends, recvs, stream, "hidden states of all ranks");
}

ConstMatrixRef FusedLinear::all_x(ConstMatrixRef x) const {
  if (!exchanges_x()) return x;
  return {x_.data(), x_type_, options_.tokens, options_.hidden, options_.hidden};
}

/// What a forward pass knows of its own columns.
class FusedLinear::Forward {
 public:
  Forward(const FusedLinear& layer, ConstMatrixRef weight, std::span<const int32_t> targets)
      : layer_(layer),
        weight_(weight),
        targets_(targets),
        fields_(layer.options_.entropy ? 4 : 3),
        records_(layer.options_.tokens * fields_),
        tile_(layer.options_.tile_rows, layer.options_.tile_columns, layer.options_.hidden,
              layer.options_.threads),
        moments_(layer.options_.tile_rows),
        totals_(layer.options_.tile_rows),
        picked_(layer.options_.tile_rows) {}

  /// The records of tokens [begin, end); drives `other` meanwhile.
  void score(ConstMatrixRef x, int64_t begin, int64_t end, Work& other) {
    for (int64_t t = begin; t < end; t += layer_.options_.tile_rows)
      score_tile(x, t, std::min(layer_.options_.tile_rows, end - t), other);
  }
  /// max, sum, the target's logit and, with entropies, weighted: [tokens, fields()].
  std::span<const float> records() const { return records_.span(); }
  int64_t fields() const { return fields_; }

 private:
  void score_tile(ConstMatrixRef x, int64_t begin, int64_t count, Work& other) {
    const LinearOptions& options = layer_.options_;
    const auto rows = static_cast<size_t>(count);
    const std::span<RowTotal> totals = totals_.span().first(rows);
    const std::span<float> picked = picked_.span().first(rows);
    std::fill(totals.begin(), totals.end(), RowTotal{});
    std::fill(picked.begin(), picked.end(), 0.0F);
    tile_.load(x, count, [&](int64_t i) { return begin + i; });
    const int64_t first_id = layer_.vocab_.begin(layer_.tp_.rank());
    layer_.for_each_column_tile(weight_, [&](int64_t column, ConstMatrixRef weight) {
      const MatrixView<float> z = tile_.logits(weight);
      row_moments(z, {z.cols, layer_.scale(), options.entropy, options.threads},
                  moments_.span().first(rows));
      for (int64_t i = 0; i < count; ++i)
        totals_[i].add(moments_[i], static_cast<double>(layer_.scale()));
      gather_picks(z, targets_.subspan(static_cast<size_t>(begin), rows), 1, first_id + column,
                   z.cols, picked);
      other.test();
    });
    for (int64_t i = 0; i < count; ++i) {
      float* record = &records_[(begin + i) * fields_];
      record[0] = totals_[i].max;
      record[1] = static_cast<float>(totals_[i].sum);
      record[2] = picked_[i];
      if (fields_ == 4) record[3] = static_cast<float>(totals_[i].weighted);
    }
  }

  const FusedLinear& layer_;
  ConstMatrixRef weight_;
  std::span<const int32_t> targets_;
  int64_t fields_;
  Buffer<float> records_;
  Tile tile_;
  Buffer<RowMoments> moments_;  // of one tile
  Buffer<RowTotal> totals_;     // of the tiles of a row so far
  Buffer<float> picked_;
};

double FusedLinear::forward(ConstMatrixRef x, ConstMatrixRef weight,
                            std::span<const int32_t> targets, Stream& stream,
                            std::span<float> logprob, std::span<float> entropy) {
  check_inputs(x, weight, targets);
  GYRE_CHECK(std::ssize(logprob) == options_.tokens && std::ssize(entropy) == entropy_.size(),
             "{} log-probabilities and {} entropies", logprob.size(), entropy.size());
  const WorkPtr arriving = gather_x(x, stream);
  Forward pass(*this, weight, targets);
  const int64_t own = dealt_row(tp_.rank()), end = dealt_row(tp_.rank() + 1);
  pass.score(all_x(x), own, end, *arriving);
  const Stopwatch arrival;
  arriving->wait();
  double waited = arrival.seconds();
  pass.score(all_x(x), 0, own, *arriving);
  pass.score(all_x(x), end, options_.tokens, *arriving);
  std::span<const float> records = pass.records();
  Buffer<float> all;
  if (tp_.size() > 1) {
    all = Buffer<float>(std::ssize(records) * tp_.size());
    const Stopwatch watch;
    tp_.all_gather(bytes_of(records), writable_bytes_of(all.span()), stream,
                   "moments and logits of targets")
        ->wait();
    waited += watch.seconds();
    records = all.span();
  }
  finish_scores(records, pass.fields(), targets, logprob, entropy);
  return tp_.size() == 1 ? 0 : waited;
}

void FusedLinear::finish_scores(std::span<const float> records, int64_t fields,
                                std::span<const int32_t> targets, std::span<float> logprob,
                                std::span<float> entropy) {
  const auto scale = static_cast<double>(this->scale());
  const int64_t block = options_.tokens * fields;
  for (int64_t t = 0; t < options_.tokens; ++t) {
    RowTotal row;
    const float* of_token = records.data() + t * fields;
    for (int r = 0; r < tp_.size(); ++r) {
      const float* part = of_token + r * block;
      row.add({part[0], part[1], fields == 4 ? part[3] : 0}, scale);
    }
    const double log_sum = std::log(row.sum);
    normalizers_[t] = {row.max, static_cast<float>(log_sum)};
    const auto at = static_cast<size_t>(t);
    const int owner = vocab_.owner(targets[at]);
    const auto z = static_cast<double>(owner < 0 ? 0.0F : of_token[owner * block + 2]);
    logprob[at] =
        owner < 0 ? 0 : static_cast<float>((z - static_cast<double>(row.max)) * scale - log_sum);
    if (entropy.empty()) continue;
    const double h = log_sum - row.weighted / row.sum;
    entropy[at] = entropy_[t] = static_cast<float>(h < 0 ? 0 : h);  // a rounding below 0; NaN stays
  }
}

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
  Tile tile_;
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
    const double sum = h == 0 ? g : g + h * static_cast<double>(layer_.entropy_[tokens[i]]);
    const auto to = static_cast<int64_t>(i);
    normalizers_[to] = layer_.normalizers_[tokens[i]];
    slopes_[to] = {static_cast<float>(-scale * sum), static_cast<float>(-scale * h)};
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
    recvs.push_back({peer(-step), writable_bytes_of(received_.span().subspan(skipped, own))});
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

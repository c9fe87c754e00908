#include "logprobs/fused_linear.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "logprobs/fused_linear_detail.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

constexpr int64_t most_tokens = std::numeric_limits<int32_t>::max();  // rows have such numbers

}  // namespace
FusedLinear::FusedLinear(const LinearOptions& options, const VocabPartition& vocab,
                         Communicator& tp, Communicator* arrays)
    : options_(options),
      vocab_(vocab),
      tp_(tp),
      arrays_(arrays == nullptr ? tp : *arrays),
      ops_(options.ops == nullptr ? cpu_linear_ops() : *options.ops) {
  GYRE_CHECK(
      arrays_.rank() == tp.rank() && arrays_.size() == tp.size() && arrays_.space() == ops_.space(),
      "rank {} of {} in a group of {} memory, where {} of {} and {} memory are needed",
      arrays_.rank(), arrays_.size(), name_of(arrays_.space()), tp.rank(), tp.size(),
      name_of(ops_.space()));
  constexpr std::string_view what = "fused linear layer";
  const auto check = [&] {
    check_tokens(options.tokens);
    if (options.tokens > most_tokens)
      throw_usage("{} tokens; the most are {}", options.tokens, most_tokens);
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
  agree_on_number(tp, what, "the temperature", options.temperature);
  const TileSize usual = ops_.usual_tile();
  if (options_.tile_rows == 0) options_.tile_rows = usual.rows;
  if (options_.tile_columns == 0) options_.tile_columns = usual.columns;
  options_.tile_rows = std::min(options_.tile_rows, std::max<int64_t>(1, options_.tokens));
  options_.tile_columns =
      std::min(options_.tile_columns, std::max<int64_t>(1, vocab_.valid(tp.rank())));
  normalizers_ = Buffer<RowNormalizer>(options_.tokens);
  entropy_ = Buffer<float>(options_.entropy ? options_.tokens : 0);
}

int64_t FusedLinear::dealt_row(int rank) const {
  return first_dealt(options_.tokens, tp_.size(), rank);
}

int64_t FusedLinear::first_row(int rank) const {
  return options_.sharded ? dealt_row(rank) : 0;
}

int64_t FusedLinear::rows() const {
  return options_.sharded ? dealt_row(tp_.rank() + 1) - dealt_row(tp_.rank()) : options_.tokens;
}

float FusedLinear::scale() const {
  return scale_of(options_.temperature);
}

std::unique_ptr<LinearTile> FusedLinear::make_tile(DType x, DType weight) const {
  return ops_.make_tile({options_.tile_rows, options_.tile_columns}, options_.hidden, x, weight,
                        options_.threads);
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

WorkPtr FusedLinear::gather_x(ConstMatrixRef x, Stream& stream) {
  if (!exchanges_x()) return completed_work();
  const size_t row = fused::row_bytes(x);
  x_type_ = x.type;
  const auto bytes = options_.tokens * static_cast<int64_t>(row);
  if (x_.size() != bytes) x_ = Buffer<std::byte>(bytes, ops_.space());
  const auto block = [&](int rank) {
    return x_.span().subspan(static_cast<size_t>(dealt_row(rank)) * row,
                             static_cast<size_t>(dealt_row(rank + 1) - dealt_row(rank)) * row);
  };
  const std::span<std::byte> own = block(tp_.rank());
  ops_.copy(x, {own.data(), x.type, x.rows, x.cols, x.cols});
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  for (int step = 1; step < tp_.size(); ++step) {
    const int peer = (tp_.rank() + step) % tp_.size();
    add_slices(peer, own, sends);
    add_slices(peer, block(peer), recvs);
  }
  return arrays_.exchange(sends, recvs, stream, "hidden states of all ranks");
}

ConstMatrixRef FusedLinear::all_x(ConstMatrixRef x) const {
  if (!exchanges_x()) return x;
  return {x_.data(), x_type_, options_.tokens, options_.hidden, options_.hidden};
}

/// What a forward pass knows of its own columns.
class FusedLinear::Forward {
 public:
  Forward(const FusedLinear& layer, DType x_type, ConstMatrixRef weight,
          std::span<const int32_t> targets)
      : layer_(layer),
        weight_(weight),
        targets_(targets),
        fields_(layer.options_.entropy ? 4 : 3),
        records_(layer.options_.tokens * fields_),
        tile_(layer.make_tile(x_type, weight.type)),
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
    RowKernels& kernels = layer_.ops_.row_kernels();
    tile_->load(x, begin, count);
    const int64_t first_id = layer_.vocab_.begin(layer_.tp_.rank());
    layer_.for_each_column_tile(weight_, [&](int64_t column, ConstMatrixRef weight) {
      const MatrixView<float> z = tile_->logits(weight);
      kernels.moments(z, {z.cols, layer_.scale(), options.entropy, options.threads},
                      moments_.span().first(rows));
      for (int64_t i = 0; i < count; ++i)
        totals_[i].add(moments_[i], static_cast<double>(layer_.scale()));
      kernels.gather_picks(z, targets_.subspan(static_cast<size_t>(begin), rows), 1,
                           first_id + column, z.cols, picked);
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
  std::unique_ptr<LinearTile> tile_;
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
  Forward pass(*this, x.type, weight, targets);
  const int64_t own = dealt_row(tp_.rank()), end = dealt_row(tp_.rank() + 1);
  pass.score(all_x(x), own, end, *arriving);
  const Stopwatch arrival;
  arriving->wait_on_stream();
  double waited = arrival.seconds();
  pass.score(all_x(x), 0, own, *arriving);
  pass.score(all_x(x), end, options_.tokens, *arriving);
  arriving->wait();
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
    logprob[at] = owner < 0 ? 0 : row.logprob(of_token[owner * block + 2], scale, log_sum);
    if (!entropy.empty()) entropy[at] = entropy_[t] = row.entropy(log_sum);
  }
}

}  // namespace gyre

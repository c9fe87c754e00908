#include "logprobs/fused_linear/fused_linear.hpp"

#include <algorithm>
#include <limits>

#include "comm/agree.hpp"
#include "core/checksum.hpp"
#include "core/error.hpp"
#include "logprobs/fused_linear/fused_linear_detail.hpp"
#include "logprobs/score_detail.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace {

constexpr int64_t max_tokens = std::numeric_limits<int32_t>::max();  // row indices are int32

}  // namespace
FusedLinear::FusedLinear(const LinearOptions& options, const VocabPartition& vocab,
                         Communicator& tp, Communicator* arrays)
    : options_(options),
      vocab_(vocab),
      tp_(tp),
      arrays_(arrays == nullptr ? tp : *arrays),
      ops_(options.ops == nullptr ? cpu_linear_ops() : *options.ops) {
  check_arrays(tp, arrays_, ops_.space());
  constexpr std::string_view what = "fused linear layer";
  const auto check = [&] {
    check_tokens(options.tokens);
    if (options.tokens > max_tokens)
      throw_usage("{} tokens; the most are {}", options.tokens, max_tokens);
    if (options.hidden < 1) throw_usage("a hidden size of {}; at least 1", options.hidden);
    if (options.tile_rows < 0 || options.tile_columns < 0)
      throw_usage("tiles of {} x {}; at least 1 x 1, or 0: by size", options.tile_rows,
                  options.tile_columns);
    check_partition(vocab, tp.size());
    check_temperature(options.temperature);
    check_temperatures(options.temperatures, options.tokens);
  };
  agree_on_arguments(tp, what, check,
                     {{"the number of tokens", options.tokens},
                      {"the hidden size", options.hidden},
                      {"whether rows are dealt", options.sharded ? 1 : 0},
                      {"whether entropies are wanted", options.entropy ? 1 : 0},
                      {"the rows of a tile", options.tile_rows},
                      {"the checksum of the tokens' temperatures",
                       static_cast<int64_t>(checksum_of(bytes_of(options.temperatures)))}});
  agree_on_partition(tp, what, vocab);
  agree_on_number(tp, what, "the temperature", options.temperature);
  agree_on_number(tp, what, "the soft cap", options.soft_cap);
  const TileSize usual = usual_tile(ops_.space());
  if (options_.tile_rows == 0) options_.tile_rows = usual.rows;
  if (options_.tile_columns == 0) options_.tile_columns = usual.columns;
  options_.tile_columns =
      std::min(options_.tile_columns, std::max<int64_t>(1, vocab_.valid(tp.rank())));
  scales_ = scales_of(options.temperatures);
  options_.temperatures = {};
  records_ = std::make_unique<ScoreRecords>(
      ops_.row_kernels(),
      RecordShape{vocab, tp.rank(), 1, {.weighted = options_.entropy}, scale(), options_.threads});
  resize(options_.tokens);
}

void FusedLinear::resize(int64_t tokens) {
  GYRE_CHECK(scales_.size() == 0 || scales_.size() == tokens,
             "{} tokens, {} temperatures of tokens", tokens, scales_.size());
  options_.tokens = tokens;
  const MemorySpace space = results_space(ops_.row_kernels());
  if (normalizers_.size() != tokens) normalizers_ = Buffer<RowNormalizer>(tokens, space);
  const int64_t entropies = options_.entropy ? tokens : 0;
  if (entropy_.size() != entropies) entropy_ = Buffer<float>(entropies, space);
}

int64_t FusedLinear::tile_rows() const {
  return std::min(options_.tile_rows, std::max<int64_t>(1, options_.tokens));
}

int64_t FusedLinear::assigned_row(int rank) const {
  return first_dealt(options_.tokens, tp_.size(), rank);
}

int64_t FusedLinear::first_row(int rank) const {
  return options_.sharded ? assigned_row(rank) : 0;
}

int64_t FusedLinear::rows() const {
  return options_.sharded ? assigned_row(tp_.rank() + 1) - assigned_row(tp_.rank())
                          : options_.tokens;
}

RowScale FusedLinear::scale() const {
  return {scale_of(options_.temperature), scales_of_rows(scales_)};
}

std::unique_ptr<LinearTile> FusedLinear::make_tile(DType x, DType weight) const {
  return ops_.make_tile({tile_rows(), options_.tile_columns}, options_.hidden, x, weight,
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
  const int64_t bytes = options_.tokens * row;
  if (x_.size() != bytes) x_ = Buffer<std::byte>(bytes, ops_.space());
  const auto block = [&](int rank) {
    return x_.span().subspan(assigned_row(rank) * row,
                             (assigned_row(rank + 1) - assigned_row(rank)) * row);
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

void FusedLinear::score(LinearTile& tile, ConstMatrixRef x, ConstMatrixRef weight, int64_t begin,
                        int64_t end, Work& other) {
  for (int64_t t = begin; t < end; t += tile_rows()) {
    tile.load(x, t, std::min(tile_rows(), end - t));
    for_each_column_tile(weight, [&](int64_t column, ConstMatrixRef rows) {
      const MatrixView<float> z = tile.logits(rows);
      if (options_.soft_cap > 0) ops_.soft_cap(z, static_cast<float>(options_.soft_cap));
      records_->add(z, t, column, z.cols);
      other.test();
    });
  }
}

double FusedLinear::forward(ConstMatrixRef x, ConstMatrixRef weight,
                            std::span<const int32_t> targets, Stream& stream,
                            std::span<float> logprob, std::span<float> entropy) {
  check_inputs(x, weight, targets);
  GYRE_CHECK(std::ssize(logprob) == options_.tokens && std::ssize(entropy) == entropy_.size(),
             "{} log-probabilities and {} entropies", logprob.size(), entropy.size());
  const WorkPtr arriving = gather_x(x, stream);
  records_->start(options_.tokens, targets, {normalizers_.span(), logprob, entropy_.span()});
  const std::unique_ptr<LinearTile> tile = make_tile(x.type, weight.type);
  const int64_t own = assigned_row(tp_.rank()), end = assigned_row(tp_.rank() + 1);
  score(*tile, all_x(x), weight, own, end, *arriving);
  const Stopwatch arrival;
  arriving->wait_on_stream();
  double waited = arrival.seconds();
  score(*tile, all_x(x), weight, 0, own, *arriving);
  score(*tile, all_x(x), weight, end, options_.tokens, *arriving);
  waited += records_->merge(arrays_, stream, "partial sums and logits of targets");
  arriving->wait();
  std::ranges::copy(entropy_.span(), entropy.data());
  return tp_.size() == 1 ? 0 : waited;
}

}  // namespace gyre

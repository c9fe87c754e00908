// Measures a decoder's operations for predictions: matrix products, row operations,
// log-probabilities, all-reduces.

#include <array>
#include <numeric>

#include "comm/agree.hpp"
#include "logprobs/vocab_parallel.hpp"
#include "model/decoder_ops.hpp"
#include "predict/calibrate.hpp"
#include "runtime/buffer.hpp"

namespace gyre {
namespace {

constexpr std::array<int64_t, 5> measured_slots = {16, 64, 256, 1024, 4096};
constexpr std::array<int64_t, 6> measured_columns = {32, 64, 128, 256, 512, 1024};
constexpr std::array<int64_t, 5> measured_bytes = {1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23};

/// Ones: no operation turns them into denormal or infinite values.
Buffer<float> ones(Stream& stream, int64_t count) {
  Buffer<float> host(count), there(count, stream.space());
  std::fill_n(host.data(), count, 1.0F);
  stream.copy(there.data(), host.data(), static_cast<size_t>(count) * sizeof(float));
  stream.synchronize();
  return there;
}

LinearSurface measure_linears(const CalibratedBackend& b, DecoderOps& ops) {
  const Buffer<float> x = ones(b.stream, measured_slots.back() * measured_columns.back());
  const Buffer<float> w = ones(b.stream, measured_columns.back() * measured_columns.back());
  Buffer<float> y = ones(b.stream, measured_slots.back() * measured_columns.back());
  LinearSurface surface;
  for (const int64_t slots : measured_slots) surface.rows.push_back(static_cast<double>(slots));
  for (const int64_t columns : measured_columns)
    surface.keys.push_back(static_cast<double>(columns));
  for (const int64_t slots : measured_slots)
    for (const int64_t columns : measured_columns) {
      const double seconds = seconds_of_call(b, [&] {
        ops.linear(x.matrix(slots, columns), w.matrix(columns, columns), y.matrix(slots, columns));
      });
      surface.flops_per_s.push_back(2 * static_cast<double>(slots * columns * columns) / seconds);
    }
  return surface;
}

/// Bytes per second of a norm, a rotation and an activation function, run in sequence.
double measure_elementwise(const CalibratedBackend& b, DecoderOps& ops) {
  constexpr int64_t slots = 1024, columns = 512, head_dim = 64;
  Buffer<float> x = ones(b.stream, slots * columns), h = ones(b.stream, slots * columns);
  const Buffer<float> y = ones(b.stream, slots * columns), weight = ones(b.stream, columns);
  std::vector<int32_t> tokens(slots, 0), positions(slots);
  std::iota(positions.begin(), positions.end(), 0);
  ops.set_slots(tokens, positions);
  const Rotary rotary = plain_rotary(head_dim, 1e4);
  const double seconds = seconds_of_call(b, [&] {
    ops.add_rms_norm(x.matrix(slots, columns), y.matrix(slots, columns), weight.data(), 1e-5F,
                     h.matrix(slots, columns));
    ops.rope(x.matrix(slots, columns), h.matrix(slots, columns), head_dim, rotary);
    ops.gate_multiply(h.matrix(slots, columns), y.matrix(slots, columns), GateActivation::silu);
  });
  constexpr double bytes_of_element = 16 + 2 * 8 + 12;
  return bytes_of_element * slots * columns / seconds;
}

/// Sets the logit rate and the time per row, from rows of two lengths.
void measure_logprobs(const CalibratedBackend& b, DecoderModel& model) {
  constexpr int64_t slots = 256, few = 256, many = 32768;
  const auto alone = b.world.split(b.world.rank());
  const std::unique_ptr<RowKernels> kernels = make_row_kernels(b.stream);
  const Buffer<float> logits = ones(b.stream, slots * many);
  const std::vector<int32_t> ids(slots, 0);
  std::vector<float> logprob(slots), entropy(slots);
  const auto seconds = [&](int64_t columns) {
    VocabScores scores(slots, even_partition(columns, columns, 1),
                       {.ids_per_token = 1, .entropy = true, .kernels = kernels.get()}, *alone);
    return seconds_of_call(
        b, [&] { scores.forward(logits.matrix(slots, columns), ids, b.stream, logprob, entropy); });
  };
  const double short_rows = seconds(few), long_rows = seconds(many);
  const double of_column = std::max(1e-15, (long_rows - short_rows) / (slots * (many - few)));
  model.logprob_bytes_per_s = sizeof(float) / of_column;
  model.logprob_row_s = std::max(0.0, short_rows / slots - few * of_column);
}

CollectiveTimes measure_all_reduce(const CalibratedBackend& b) {
  CollectiveTimes times;
  times.ranks = b.world.size();
  Buffer<float> data = ones(b.stream, measured_bytes.back() / 4);
  for (const int64_t bytes : measured_bytes)
    times.points.push_back({static_cast<double>(bytes), seconds_of_call(b, [&] {
                              b.data
                                  .all_reduce(data.data(), bytes / 4, DType::f32, ReduceOp::max,
                                              b.stream, "an all-reduce to be timed")
                                  ->wait();
                            })});
  return times;
}

}  // namespace

DecoderModel calibrate_decoder(const CalibratedBackend& backend) {
  DecoderModel model;
  const std::unique_ptr<DecoderOps> ops = make_decoder_ops(backend.stream);
  model.linears.push_back(measure_linears(backend, *ops));
  model.elementwise_bytes_per_s = measure_elementwise(backend, *ops);
  measure_logprobs(backend, model);
  if (backend.world.size() > 1) model.all_reduces.push_back(measure_all_reduce(backend));
  return model;
}

}  // namespace gyre

#include "model/recurrent_layer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "model/elementwise_math.hpp"

namespace gyre {
namespace {

int64_t halo_rows(const ModelConfig& config) {
  return config.recurrent.conv_width - 1;
}

float sigmoid(float x) {
  return times_sigmoid(1.0F, x);
}
float softplus(float x) {
  return std::max(x, 0.0F) + std::log1p(std::exp(-std::fabs(x)));
}

RecurrenceShape with_convolution(RecurrenceShape shape, const RecurrentConfig& config) {
  shape.convolution = config.conv_width;
  return shape;
}

std::span<std::byte> bytes_of_rows(MatrixRef matrix) {
  return {matrix.data, static_cast<size_t>(matrix.rows * matrix.cols * size_of(matrix.type))};
}

}  // namespace

const RecurrenceKind& kind_of_recurrent_layers() {
  return *std::ranges::find_if(recurrence_kinds(), [](const RecurrenceKind& kind) {
    return kind.delta && !kind.channel_decay;
  });
}

RecurrenceShape recurrence_shape(const ModelConfig& config, int tp) {
  const RecurrentConfig& r = config.recurrent;
  return {kind_of_recurrent_layers(), r.key_heads / tp, r.value_heads / tp, r.key_dim, r.value_dim};
}

std::string recurrent_refusal(const RecurrentProblem& problem) {
  for (int rank = 0; rank < problem.recurrent.cp(); ++rank)
    for (const Fragment& f : problem.recurrent.shard(rank).fragments)
      if (f.stride != 1 && f.length > 1)
        return fmt::format(
            "under {} rank {} has one in {} tokens of a document; a convolution is of consecutive "
            "tokens",
            problem.recurrent.name, rank, f.stride);
  return problem.schedule.why_not(
      {&problem.recurrent, recurrence_shape(problem.config, problem.tp)});
}

RecurrentPlan plan_recurrent(const RecurrentProblem& problem, int rank) {
  RecurrentPlan plan;
  const int64_t halo = halo_rows(problem.config);
  plan.layout = problem.recurrent;
  for (const std::vector<int32_t>& rows : halos_of(problem.recurrent, rank, halo))
    plan.halos.push_back(std::ssize(rows));
  plan.there = plan_relayout(problem.softmax, problem.recurrent, rank, halo);
  plan.back = plan_relayout(problem.recurrent, problem.softmax, rank);
  plan.states = plan_rank(problem.schedule,
                          {&problem.recurrent, recurrence_shape(problem.config, problem.tp)}, rank);
  return plan;
}

RecurrentTraffic count(const RecurrentPlan& plan, const RecurrentProblem& problem) {
  RecurrentTraffic sent;
  for (const SlotMoves* moves : {&plan.there, &plan.back})
    for (const SlotMoves::Message& message : moves->sends) {
      ++sent.messages;
      sent.bytes += std::ssize(message.slots) * problem.config.hidden_size *
                    static_cast<int64_t>(size_of(problem.activations));
    }
  const StateCount states =
      count(plan.states, Pass::forward, recurrence_shape(problem.config, problem.tp));
  return sent += {states.messages, states.bytes_sent};
}

RecurrentTraffic expected_traffic(const RecurrentProblem& problem, int rank) {
  const auto rank_of = [](const Layout& layout) {
    std::vector<int> ranks;
    for (const Owner& owner : slot_owners(layout)) ranks.push_back(owner.rank);
    ranks.resize(layout.stream_slots);
    return ranks;
  };
  const std::vector<int> before = rank_of(problem.softmax), after = rank_of(problem.recurrent);
  std::vector<int64_t> there(problem.softmax.cp(), 0), back = there;
  for (size_t slot = 0; slot < before.size(); ++slot) {
    if (before[slot] == rank) ++there[after[slot]];
    if (after[slot] == rank) ++back[before[slot]];
  }
  for (int peer = 0; peer < problem.softmax.cp(); ++peer)
    for (const std::vector<int32_t>& halo :
         halos_of(problem.recurrent, peer, halo_rows(problem.config)))
      there[peer] += std::ranges::count_if(halo, [&](int32_t s) { return before[s] == rank; });
  there[rank] = back[rank] = 0;
  const StateForm states = problem.schedule.closed_form(
      {&problem.recurrent, recurrence_shape(problem.config, problem.tp)}, rank, Pass::forward);
  RecurrentTraffic sent{states.messages, states.bytes_sent};
  const int64_t row = problem.config.hidden_size * size_of(problem.activations);
  for (const std::vector<int64_t>& rows : {there, back})
    for (const int64_t n : rows) sent += {n > 0 ? 1 : 0, n * row};
  return sent;
}

int64_t recurrence_bytes(const ModelConfig& config, int tp, int64_t slots) {
  if (config.recurrent_layers() == 0) return 0;
  const RecurrenceShape shape = recurrence_shape(config, tp);
  int64_t row = 0;
  for (int a = 0; a < recurrence_arrays; ++a)
    row += width_of(shape, static_cast<RecurrenceArray>(a)) * size_of(DType::f32);
  return slots * row;
}

RecurrentLayers::RecurrentLayers(const RecurrentPlan& plan, const ModelConfig& config, int tp,
                                 Communicator& group)
    : plan_(plan),
      config_(config),
      shape_(recurrence_shape(config, tp)),
      convolution_(with_convolution(shape_, config.recurrent), 1),
      kernel_(plan.states.computed(shape_), 1),
      executor_(plan.states, plan.layout, group, kernel_) {}

void RecurrentLayers::convolve(const RecurrentInputs& inputs, const RecurrentWeights& weights) {
  std::vector<float> by_channel;
  for (const ConstMatrixRef taps : {weights.conv_q, weights.conv_k, weights.conv_v})
    for (int64_t c = 0; c < taps.cols; ++c)
      for (int64_t j = 0; j < taps.rows; ++j) by_channel.push_back(taps.as<float>()(j, c));
  convolution_.set_weights(by_channel);
  const ConvolutionRows x = {inputs.q, inputs.k, inputs.v};
  int64_t halo = plan_.shard().slots;
  for (size_t f = 0; f < plan_.halos.size(); ++f) {
    const Fragment& fragment = plan_.shard().fragments[f];
    const int64_t at = fragment.local_begin.value();
    ConvolutionPart part;
    for (size_t i = 0; i < x.size(); ++i) {
      part.x[i] = x[i].rows_from(at, fragment.length);
      part.history[i] = x[i].rows_from(halo, plan_.halos[f]);
      part.y[i] = executor_.data()[convolved_arrays[i]].rows_from(at, fragment.length);
    }
    convolution_.forward(part);
    halo += plan_.halos[f];
  }
}

void RecurrentLayers::make_gates(const RecurrentInputs& inputs, const RecurrentWeights& weights) {
  const auto b = inputs.b.as<float>(), a = inputs.a.as<float>();
  const auto beta = executor_.data()[RecurrenceArray::beta].as<float>();
  const auto g = executor_.data()[RecurrenceArray::g].as<float>();
  for (int64_t t = 0; t < plan_.shard().slots; ++t)
    for (int64_t h = 0; h < shape_.value_heads; ++h) {
      beta(t, h) = sigmoid(b(t, h));
      g(t, h) = -std::exp(weights.a_log[h]) * softplus(a(t, h) + weights.dt_bias[h]);
    }
}

void RecurrentLayers::normalise(ConstMatrixRef z, std::span<const float> weight, MatrixRef out) {
  const ConstMatrixRef o = executor_.data()[RecurrenceArray::out];
  const int64_t dim = shape_.value_dim;
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  Buffer<float> row(o.cols), gate(o.cols);
  for (const Fragment& fragment : plan_.shard().fragments)
    for (int64_t t = 0; t < fragment.length; ++t) {
      const int64_t at = fragment.local_begin.value() + t;
      copy_converted(o.rows_from(at, 1), row.matrix(1, o.cols));
      copy_converted(z.rows_from(at, 1), gate.matrix(1, o.cols));
      for (int64_t h = 0; h < o.cols; h += dim) {
        float squares = 0;
        for (int64_t i = 0; i < dim; ++i) squares += row[h + i] * row[h + i];
        const float scale = rms_scale(squares, dim, eps);
        for (int64_t i = 0; i < dim; ++i)
          row[h + i] *= scale * weight[i] * times_sigmoid(gate[h + i], gate[h + i]);
      }
      copy_converted(row.matrix(1, o.cols), out.rows_from(at, 1));
    }
}

RecurrenceTimes RecurrentLayers::run(const RecurrentInputs& inputs, const RecurrentWeights& weights,
                                     MatrixRef out) {
  convolve(inputs, weights);
  make_gates(inputs, weights);
  const RecurrenceTimes times = executor_.run(Pass::forward);
  std::ranges::fill(bytes_of_rows(out), std::byte{0});
  normalise(inputs.z, weights.o_norm, out);
  return times;
}

}  // namespace gyre

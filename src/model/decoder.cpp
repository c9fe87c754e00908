#include "model/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <utility>

#include "comm/host_staging.hpp"
#include "logprobs/rows/row_kernels.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {

namespace {

/// Durations of phases, from marks in the stream.
class Phases {
 public:
  using Phase = double DecoderTimes::*;

  explicit Phases(Stream& stream) : stream_(stream) { end(nullptr); }
  /// Ends the phase that began at the previous call; null: its time is counted elsewhere.
  void end(Phase phase) { marks_.push_back({stream_.mark(), phase}); }
  /// The stream must be synchronised.
  void add_to(DecoderTimes& times) const {
    for (size_t i = 1; i < marks_.size(); ++i)
      if (marks_[i].phase != nullptr)
        times.*marks_[i].phase += marks_[i].mark->seconds() - marks_[i - 1].mark->seconds();
  }

 private:
  struct Marked {
    MarkPtr mark;
    Phase phase;
  };
  Stream& stream_;
  std::vector<Marked> marks_;
};

}  // namespace

/// Activations of one forward pass over the slots of a batch; from Again on, h has one row per
/// target.
struct Decoder::Workspace {
  Workspace(const ModelConfig& c, int tp, const DecoderTypes& types, const LocalBatch& b,
            const std::optional<RecurrentPlan>& recurrent_plan, std::span<PredictionScore> scores,
            Stream& stream)
      : slots(std::ssize(b.tokens)), batch(b), plan(recurrent_plan), out(scores), phases(stream) {
    for (const Activation a : activations_of_decoder) {
      const int64_t width = width_of(a, c, tp), rows = rows_of(a);
      const int64_t most = a == Activation::h ? targets() : rows;
      memory_.emplace_back(most * width * size_of(types.of(a)), stream.space());
      at(a) = {memory_.back().data(), types.of(a), rows, width, width};
    }
  }

  int64_t rows_of(Activation a) const {
    if (!is_of_recurrent_layers(a)) return slots;
    if (!plan) return 0;
    const bool has_halo = a < Activation::mixer_out;
    return has_halo ? plan->rows() : plan->shard().slots;
  }

  /// Sets the executor of the next layers; q, k, v and out become views of its arrays.
  void use(AttentionExecutor& executor) {
    attention = &executor;
    at(Activation::q) = executor.matrix(ArrayKind::q);
    at(Activation::k) = executor.keys();
    at(Activation::v) = executor.values();
    at(Activation::out) = executor.matrix(ArrayKind::out);
  }

  /// [slots, width_of()]
  MatrixRef& at(Activation a) { return views_.at(static_cast<size_t>(a)); }

  int64_t targets() const { return std::ssize(batch.targets); }

  int64_t slots;
  const LocalBatch& batch;
  const std::optional<RecurrentPlan>& plan;
  std::optional<RecurrentLayers> recurrent = {};
  AttentionExecutor* attention = nullptr;
  std::span<PredictionScore> out;
  HeadObserver observe_head = {};
  bool added = false;  // `partial` has already been added to x; the next norm must not add it again
  Phases phases;
  std::vector<WorkPtr> works;  // communications that the host has not yet waited for
  std::vector<std::pair<AttentionExecutor*, AttentionExecutor::Submission>> attentions;
  DecoderTimes times;

 private:
  std::vector<Buffer<std::byte>> memory_;
  std::array<MatrixRef, activation_kinds> views_;
};

namespace {

/// Phase of an operation; null for attention, whose executor measures it.
double DecoderTimes::*phase_of(const DecoderOperation& operation) {
  using namespace decoder_step;
  if (std::holds_alternative<Linear>(operation)) return &DecoderTimes::linear;
  if (std::holds_alternative<Attention>(operation)) return nullptr;
  if (std::holds_alternative<Relayout>(operation)) return &DecoderTimes::recurrence_wait;
  if (std::holds_alternative<AllReduce>(operation)) return &DecoderTimes::tp_wait;
  if (std::holds_alternative<Score>(operation)) return &DecoderTimes::head;
  return &DecoderTimes::elementwise;
}

/// Name of a layer for errors and the watchdog.
std::string name_of_layer(int64_t layer, const ModelConfig& config) {
  if (layer == 0) return "embedding";
  return layer > config.num_hidden_layers ? "log-probabilities" : fmt::format("layer {}", layer);
}

/// Host-memory communicator that stages through a device's stream; null on the host.
std::unique_ptr<Communicator> host_staging_of(Communicator& comm, Stream& stream) {
  if (stream.space() == MemorySpace::host) return nullptr;
  return make_host_staging_communicator(comm, stream);
}

}  // namespace

DecoderTimes& DecoderTimes::operator+=(const DecoderTimes& other) {
  linear += other.linear;
  elementwise += other.elementwise;
  attention += other.attention;
  recurrence += other.recurrence;
  head += other.head;
  attention_wait += other.attention_wait;
  tp_wait += other.tp_wait;
  recurrence_wait += other.recurrence_wait;
  return *this;
}

std::vector<LayerMask> layer_masks(const ModelConfig& config) {
  std::vector<LayerMask> masks;
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
    if (config.kind_of(l).recurrent) continue;
    const int64_t window = config.kind_of(l).window;
    const auto known = std::ranges::find(masks, window, &LayerMask::window);
    if (known != masks.end())
      ++known->layers;
    else
      masks.push_back({window, 1});
  }
  if (masks.empty()) masks.push_back({});
  return masks;
}

HeadShape local_heads(const ModelConfig& config, int tp) {
  return {config.num_attention_heads / tp, local_kv_heads(config, tp), config.head_dim,
          1.0f / std::sqrt(static_cast<float>(config.head_dim))};
}

ElementTypes attention_types(const DecoderTypes& types, int cp) {
  return {.activations = types.activations, .partial_out = cp > 1 ? DType::f32 : types.activations};
}

Decoder::Decoder(const ModelConfig& config, const DecoderTypes& types, DecoderWeights weights,
                 ProcessGrid& grid, BlockKernel& kernel, Stream& stream)
    : config_(config),
      types_(types),
      weights_(std::move(weights)),
      grid_(grid),
      kernel_(kernel),
      stream_(stream),
      ops_(make_decoder_ops(stream)),
      steps_(decoder_steps(config)),
      rotary_(rotary_of(config)),
      masks_(layer_masks(config)),
      heads_(local_heads(config, grid.shape().tp)),
      host_tp_(host_staging_of(grid.tp(), stream)),
      row_kernels_(make_row_kernels(stream)),
      head_ops_(make_linear_ops(stream, *row_kernels_)),
      head_({.hidden = config.hidden_size,
             .sharded = false,
             .entropy = true,
             .soft_cap = config.final_soft_cap,
             .ops = head_ops_.get()},
            even_partition(config.vocab_size, config.vocab_padded, grid.shape().tp),
            host_tp_ ? *host_tp_ : grid.tp(), &grid.tp()) {
  weights_.move_to(stream);
}

Decoder::~Decoder() = default;

void Decoder::run(const decoder_step::Embed& /*step*/, int64_t /*layer*/, Workspace& w) {
  ops_->embed(weights_.of(Weight::embed).matrix(),
              grid_.tp_rank() * local_vocab(config_, grid_.shape().tp), w.at(Activation::x));
}

void Decoder::run(const decoder_step::AllReduce& step, int64_t /*layer*/, Workspace& w) {
  const MatrixRef data = w.at(step.data);
  w.works.push_back(grid_.tp().all_reduce(data.data, data.rows * data.cols, data.type,
                                          ReduceOp::sum, stream_, step.what));
  w.works.back()->wait_on_stream();
}

void Decoder::perturb_norms(double deviation, uint64_t seed) {
  perturbed_ =
      deviation > 0 ? weights_.perturbed_norms(stream_, seed, deviation) : DecoderWeights();
}

const float* Decoder::norm_of(Weight weight, int64_t layer) const {
  const DecoderWeights& from = perturbed_.has(weight, layer) ? perturbed_ : weights_;
  return from.of(weight, layer).values().data();
}

void Decoder::run(const decoder_step::Norm& step, int64_t layer, Workspace& w) {
  const bool adds = step.adds && !std::exchange(w.added, false);
  ops_->add_rms_norm(w.at(Activation::x), adds ? w.at(Activation::partial) : MatrixRef(),
                     norm_of(step.weight, layer), static_cast<float>(config_.rms_norm_eps),
                     w.at(Activation::h));
}

void Decoder::run(const decoder_step::Linear& step, int64_t layer, Workspace& w) {
  ops_->linear(w.at(step.in), weights_.of(step.weight, layer).matrix(), w.at(step.out));
}

void Decoder::run(const decoder_step::AddBias& step, int64_t layer, Workspace& w) {
  ops_->add_bias(w.at(step.data), weights_.of(step.bias, layer).values().data());
}

void Decoder::run(const decoder_step::HeadNorm& step, int64_t layer, Workspace& w) {
  ops_->head_norm(w.at(step.data), config_.head_dim, norm_of(step.weight, layer),
                  static_cast<float>(config_.rms_norm_eps));
}

void Decoder::run(const decoder_step::Rope& /*step*/, int64_t /*layer*/, Workspace& w) {
  ops_->rope(w.at(Activation::q), w.at(Activation::k), config_.head_dim, rotary_);
}

void Decoder::run(const decoder_step::Attention& /*step*/, int64_t layer, Workspace& w) {
  if (config_.attention_sinks) w.attention->set_sinks(weights_.of(Weight::sinks, layer).values());
  w.attentions.emplace_back(w.attention, w.attention->start(Pass::forward));
  MatrixRef& out = w.at(Activation::out);
  if (out.type == types_.activations) return;
  const MatrixRef rounded = w.at(Activation::q);  // is not needed any more
  ops_->convert(out, rounded);
  out = rounded;
}

namespace {

/// Adds what `comm` sends while it lives.
class CountedTraffic {
 public:
  CountedTraffic(const Communicator& comm, RecurrentTraffic& total)
      : comm_(comm), before_(comm.traffic()), total_(total) {}
  CountedTraffic(const CountedTraffic&) = delete;
  CountedTraffic& operator=(const CountedTraffic&) = delete;
  ~CountedTraffic() {
    const Traffic now = comm_.traffic();
    total_ += {now.messages - before_.messages, now.bytes_sent - before_.bytes_sent};
  }

 private:
  const Communicator& comm_;
  Traffic before_;
  RecurrentTraffic& total_;
};

}  // namespace

void Decoder::run(const decoder_step::Relayout& step, int64_t /*layer*/, Workspace& w) {
  const MatrixRef from = w.at(step.from), to = w.at(step.to);
  const int64_t row = from.cols * static_cast<int64_t>(size_of(from.type));
  const bool there = is_of_recurrent_layers(step.to);
  const CountedTraffic counted(grid_.cp(), recurrent_traffic_);
  relayout_rows(there ? w.plan->there : w.plan->back, grid_.cp(),
                {from.data, static_cast<size_t>(from.rows * row)},
                {to.data, static_cast<size_t>(to.rows * row)}, row);
}

void Decoder::run(const decoder_step::Recurrence& /*step*/, int64_t layer, Workspace& w) {
  const auto matrix = [&](Weight weight) { return weights_.of(weight, layer).matrix(); };
  const auto values = [&](Weight weight) { return weights_.of(weight, layer).values(); };
  const RecurrentWeights weights{
      matrix(Weight::conv_q),
      matrix(Weight::conv_k),
      matrix(Weight::conv_v),
      values(Weight::a_log),
      values(Weight::dt_bias),
      {norm_of(Weight::o_norm, layer), static_cast<size_t>(config_.recurrent.value_dim)}};
  const RecurrentInputs inputs{w.at(Activation::mixer_q), w.at(Activation::mixer_k),
                               w.at(Activation::mixer_v), w.at(Activation::mixer_z),
                               w.at(Activation::mixer_b), w.at(Activation::mixer_a)};
  const CountedTraffic counted(grid_.cp(), recurrent_traffic_);
  const RecurrenceTimes times = w.recurrent->run(inputs, weights, w.at(Activation::mixer_out));
  w.times.recurrence += times.compute;
  w.times.recurrence_wait += times.wait;
  w.times.elementwise -= times.compute + times.wait;
}

void Decoder::run(const decoder_step::GateMultiply& step, int64_t /*layer*/, Workspace& w) {
  ops_->gate_multiply(w.at(step.gate), w.at(step.up), step.activation);
}

void Decoder::run(const decoder_step::Again& /*step*/, int64_t /*layer*/, Workspace& w) {
  MatrixRef& h = w.at(Activation::h);
  for (const int32_t slot : w.batch.again) {
    ++h.rows;
    stream_.copy(h.rows_from(h.rows - 1, 1).data, h.rows_from(slot, 1).data,
                 h.cols * size_of(h.type));
  }
}

void Decoder::run(const decoder_step::Score& step, int64_t /*layer*/, Workspace& w) {
  const int64_t targets = w.targets();
  Buffer<float> logprob(targets), entropy(targets);
  head_.resize(targets);
  const ConstMatrixRef h = w.at(Activation::h), head = weights_.of(step.weight).matrix();
  const double waited =
      head_.forward(h, head, w.batch.targets, stream_, logprob.span(), entropy.span());
  for (int64_t i = 0; i < targets; ++i) w.out[i] = {logprob[i], entropy[i]};
  if (w.observe_head) w.observe_head(h, head);
  w.times.tp_wait += waited;
  w.times.head -= waited;
}

void Decoder::show(const HiddenObserver& observe, int64_t index, Workspace& w) {
  if (!observe) return;
  w.added = index > 0;
  if (w.added) ops_->add(w.at(Activation::x), w.at(Activation::partial));
  const ConstMatrixRef x = w.at(Activation::x);
  Buffer<std::byte> copy(x.rows * x.cols * size_of(x.type));
  stream_.copy(copy.data(), x.data, copy.size());
  stream_.synchronize();
  Buffer<float> wide(x.rows * x.cols);
  copy_converted({copy.data(), x.type, x.rows, x.cols, x.cols}, wide.matrix(x.rows, x.cols));
  observe(index, wide.matrix(x.rows, x.cols));
  w.phases.end(nullptr);
}

std::deque<AttentionExecutor> Decoder::executors_of(std::span<const RankPlan> plans) {
  // All executors share attention_memory_. Making one may reallocate arrays of those made before.
  // The first round therefore only grows the memory; the second one makes the executors to run.
  std::deque<AttentionExecutor> executors;
  const int rounds = plans.size() > 1 ? 2 : 1;
  for (int round = 0; round < rounds; ++round) {
    executors.clear();
    for (const RankPlan& plan : plans)
      executors.emplace_back(plan, heads_, attention_types(types_, grid_.shape().cp), grid_.cp(),
                             kernel_, stream_, attention_memory_, false);
  }
  return executors;
}

DecoderTimes Decoder::forward(const LocalBatch& batch, const BinPlans& plans,
                              std::span<PredictionScore> out, const HiddenObserver& observe,
                              const HeadObserver& observe_head) {
  const int64_t slots = std::ssize(batch.tokens);
  GYRE_CHECK(plans.attention.size() == masks_.size(), "{} plans for {} masks",
             plans.attention.size(), masks_.size());
  const bool recurs = config_.recurrent_layers() > 0;
  GYRE_CHECK(!recurs || (plans.recurrent && stream_.space() == MemorySpace::host),
             "recurrent layers without a plan, or not on the host");
  for (const RankPlan& plan : plans.attention) {
    const int64_t planned = plan.arrays.at(own(ArrayKind::q)).tokens();
    GYRE_CHECK(planned == slots, "{} slots, a plan for {}", slots, planned);
  }
  GYRE_CHECK(out.size() == batch.targets.size() &&
                 std::ssize(batch.targets) == slots + std::ssize(batch.again),
             "{} slots, {} of them again, {} targets, {} outputs", slots, batch.again.size(),
             batch.targets.size(), out.size());
  std::deque<AttentionExecutor> executors = executors_of(plans.attention);
  Workspace w(config_, grid_.shape().tp, types_, batch, plans.recurrent, out, stream_);
  if (recurs) w.recurrent.emplace(*plans.recurrent, config_, grid_.shape().tp, grid_.cp());
  w.observe_head = observe_head;
  ops_->set_slots(batch.tokens, batch.positions);
  int64_t layer = -1;
  for (const DecoderStep& step : steps_) {
    if (step.layer != layer) {
      if (layer >= 0) show(observe, layer, w);
      layer = step.layer;
      if (layer > 0 && layer <= config_.num_hidden_layers &&
          !config_.kind_of(layer - 1).recurrent) {
        const int64_t window = config_.kind_of(layer - 1).window;
        w.use(executors[std::ranges::find(masks_, window, &LayerMask::window) - masks_.begin()]);
      }
      set_current_step(name_of_layer(layer, config_));
    }
    std::visit([&](const auto& operation) { run(operation, layer, w); }, step.operation);
    w.phases.end(phase_of(step.operation));
  }
  for (const WorkPtr& work : w.works) work->wait();
  stream_.synchronize();
  w.phases.add_to(w.times);
  for (const auto& [attention, run] : w.attentions) {
    const ExecutionTimes times = attention->finish(Pass::forward, run);
    w.times.attention += times.compute + times.copy;
    w.times.attention_wait += times.wait;
  }
  return w.times;
}

}  // namespace gyre

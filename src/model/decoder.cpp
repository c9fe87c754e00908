#include "model/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <utility>

#include "comm/host_staging.hpp"
#include "logprobs/row_kernels.hpp"
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

/// Activations of one forward pass over `n` slots; h and logits have one row per target.
struct Decoder::Workspace {
  Workspace(int64_t n, const ModelConfig& c, int tp, const LocalBatch& b,
            std::span<LogprobEntropy> scores, Stream& stream)
      : slots(n), batch(b), out(scores), phases(stream) {
    for (const Activation a : {Activation::x, Activation::h, Activation::partial, Activation::gate,
                               Activation::up, Activation::logits}) {
      const int64_t width = width_of(a, c, tp);
      const bool scored = a == Activation::h || a == Activation::logits;
      memory_.emplace_back((scored ? targets() : n) * width, stream.space());
      at(a) = memory_.back().matrix(a == Activation::logits ? targets() : n, width);
    }
  }

  /// Sets the executor of the next layers; q, k, v and out become views of its arrays.
  void use(AttentionExecutor& executor) {
    attention = &executor;
    at(Activation::q) = executor.matrix(ArrayKind::q).as<float>();
    at(Activation::k) = executor.keys().as<float>();
    at(Activation::v) = executor.values().as<float>();
    at(Activation::out) = executor.matrix(ArrayKind::out).as<float>();
  }

  /// [slots, width_of()]
  MatrixView<float>& at(Activation a) { return views_.at(static_cast<size_t>(a)); }

  int64_t targets() const { return std::ssize(batch.targets); }

  int64_t slots;
  const LocalBatch& batch;
  AttentionExecutor* attention = nullptr;
  std::span<LogprobEntropy> out;
  bool added = false;  // `partial` has already been added to x; the next norm must not add it again
  Phases phases;
  std::vector<WorkPtr> works;  // communications that the host has not yet waited for
  DecoderTimes times;

 private:
  std::vector<Buffer<float>> memory_;
  std::array<MatrixView<float>, activation_kinds> views_;
};

namespace {

MatrixView<const float> as_matrix(const Buffer<float>& buffer, int64_t rows) {
  return buffer.matrix(rows, rows == 0 ? 0 : buffer.size() / rows);
}

void move_to(Stream& stream, Buffer<float>& buffer) {
  if (buffer.space() == stream.space() || buffer.size() == 0) return;
  Buffer<float> moved(buffer.size(), stream.space());
  stream.copy(moved.data(), buffer.data(), buffer.size() * sizeof(float));
  stream.synchronize();
  buffer = std::move(moved);
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

const Buffer<float>& DecoderWeights::of(Weight weight, int64_t layer) const {
  if (weight == Weight::embed) return embed;
  if (weight == Weight::final_norm) return final_norm;
  if (weight == Weight::head) return head;
  const Layer& l = layers.at(layer - 1);
  switch (weight) {
    case Weight::attn_norm:
      return l.attn_norm;
    case Weight::wq:
      return l.wq;
    case Weight::wk:
      return l.wk;
    case Weight::wv:
      return l.wv;
    case Weight::bq:
      return l.bq;
    case Weight::bk:
      return l.bk;
    case Weight::bv:
      return l.bv;
    case Weight::q_norm:
      return l.q_norm;
    case Weight::k_norm:
      return l.k_norm;
    case Weight::wo:
      return l.wo;
    case Weight::bo:
      return l.bo;
    case Weight::mlp_norm:
      return l.mlp_norm;
    case Weight::w_gate:
      return l.w_gate;
    case Weight::w_up:
      return l.w_up;
    default:
      return l.w_down;
  }
}

void DecoderWeights::move_to(Stream& stream) {
  const auto move = [&](Buffer<float>& buffer) { gyre::move_to(stream, buffer); };
  move(embed);
  for (Layer& l : layers)
    for (Buffer<float>* buffer :
         {&l.attn_norm, &l.wq, &l.wk, &l.wv, &l.bq, &l.bk, &l.bv, &l.q_norm, &l.k_norm, &l.wo,
          &l.bo, &l.mlp_norm, &l.w_gate, &l.w_up, &l.w_down})
      move(*buffer);
  move(final_norm);
  move(head);
}

DecoderTimes& DecoderTimes::operator+=(const DecoderTimes& other) {
  linear += other.linear;
  attention += other.attention;
  logprobs += other.logprobs;
  attention_wait += other.attention_wait;
  tp_wait += other.tp_wait;
  return *this;
}

void check_tensor_parallel(const ModelConfig& config, int tp, ConfigErrors& errors) {
  const auto check = [&](const char* name, int64_t value) {
    if (value % tp != 0) errors.add("--tp {} does not divide the model's {} = {}", tp, name, value);
  };
  check("num_attention_heads", config.num_attention_heads);
  if (tp % config.num_key_value_heads != 0)
    check("num_key_value_heads", config.num_key_value_heads);
  check("intermediate_size", config.intermediate_size);
  check("vocab_padded", config.vocab_padded);
}

std::vector<int> allowed_tensor_parallel(const ModelConfig& config, int ranks) {
  std::vector<int> allowed;
  for (int tp = 1; tp <= ranks; ++tp) {
    ConfigErrors errors;
    check_tensor_parallel(config, tp, errors);
    if (errors.empty()) allowed.push_back(tp);
  }
  return allowed;
}

namespace {

/// Reads one tensor-parallel rank's part of each weight.
struct PartReader {
  const ModelConfig& c;
  int tp, tp_rank;
  const WeightReader& read;

  Buffer<float> columns(const std::string& name, int64_t width) const {
    return read(name, 0, c.hidden_size, tp_rank * width, width);
  }
  /// First column of this rank's keys and values.
  int64_t kv_begin() const { return tp_rank * c.num_key_value_heads / tp * c.head_dim; }
  Buffer<float> rows(const std::string& name, int64_t height) const {
    return read(name, tp_rank * height, height, 0, c.hidden_size);
  }
  Buffer<float> whole(const std::string& name, int64_t width) const {
    return read(name, 0, 1, 0, width);
  }
  DecoderWeights::Layer layer(int64_t number) const;
};

DecoderWeights::Layer PartReader::layer(int64_t number) const {
  const auto name = [&](const char* leaf) { return fmt::format("layers/{}/{}", number, leaf); };
  const int64_t q = width_of(Activation::q, c, tp), kv = width_of(Activation::k, c, tp);
  const int64_t inner = width_of(Activation::gate, c, tp);
  DecoderWeights::Layer layer;
  layer.attn_norm = whole(name("attn_norm"), c.hidden_size);
  layer.wq = columns(name("wq"), q);
  layer.wk = read(name("wk"), 0, c.hidden_size, kv_begin(), kv);
  layer.wv = read(name("wv"), 0, c.hidden_size, kv_begin(), kv);
  if (c.qkv_bias) {
    layer.bq = read(name("bq"), 0, 1, tp_rank * q, q);
    layer.bk = read(name("bk"), 0, 1, kv_begin(), kv);
    layer.bv = read(name("bv"), 0, 1, kv_begin(), kv);
  }
  if (c.qk_norm) {
    layer.q_norm = whole(name("q_norm"), c.head_dim);
    layer.k_norm = whole(name("k_norm"), c.head_dim);
  }
  layer.wo = rows(name("wo"), q);
  if (c.output_bias) layer.bo = whole(name("bo"), c.hidden_size);
  layer.mlp_norm = whole(name("mlp_norm"), c.hidden_size);
  layer.w_gate = columns(name("w_gate"), inner);
  layer.w_up = columns(name("w_up"), inner);
  layer.w_down = rows(name("w_down"), inner);
  return layer;
}

}  // namespace

DecoderWeights load_weights(const ModelConfig& c, int tp, int tp_rank, const WeightReader& read) {
  const PartReader reader{c, tp, tp_rank, read};
  const int64_t vocab_columns = width_of(Activation::logits, c, tp);
  DecoderWeights weights;
  weights.embed = reader.rows("embed", vocab_columns);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) weights.layers.push_back(reader.layer(l));
  weights.final_norm = reader.whole("final_norm", c.hidden_size);
  weights.head = reader.columns("head", vocab_columns);
  return weights;
}

std::vector<LayerMask> layer_masks(const ModelConfig& config) {
  std::vector<LayerMask> masks;
  for (int64_t l = 0; l < config.num_hidden_layers; ++l) {
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

Decoder::Decoder(const ModelConfig& config, DecoderWeights weights, ProcessGrid& grid,
                 BlockKernel& kernel, Stream& stream)
    : config_(config),
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
      scores_(0, even_partition(config.vocab_size, config.vocab_padded, grid.shape().tp),
              {.ids_per_token = 1,
               .entropy = true,
               .kernels = row_kernels_.get(),
               .arrays = &grid.tp()},
              host_tp_ ? *host_tp_ : grid.tp()) {
  weights_.move_to(stream);
}

Decoder::~Decoder() = default;

void Decoder::run(const decoder_step::Embed& /*step*/, int64_t /*layer*/, Workspace& w) {
  const MatrixView<const float> table =
      as_matrix(weights_.embed, width_of(Activation::logits, config_, grid_.shape().tp));
  ops_->embed(table, scores_.vocab().begin(grid_.tp_rank()), w.at(Activation::x));
}

void Decoder::run(const decoder_step::AllReduce& step, int64_t /*layer*/, Workspace& w) {
  w.phases.end(&DecoderTimes::linear);
  const MatrixView<float> data = w.at(step.data);
  w.works.push_back(grid_.tp().all_reduce(data.data, data.rows * data.cols, DType::f32,
                                          ReduceOp::sum, stream_, step.what));
  w.works.back()->wait_on_stream();
  w.phases.end(&DecoderTimes::tp_wait);
}

void Decoder::run(const decoder_step::Norm& step, int64_t layer, Workspace& w) {
  const bool adds = step.adds && !std::exchange(w.added, false);
  ops_->add_rms_norm(w.at(Activation::x), adds ? w.at(Activation::partial) : MatrixView<float>(),
                     weights_.of(step.weight, layer).data(),
                     static_cast<float>(config_.rms_norm_eps), w.at(Activation::h));
}

void Decoder::run(const decoder_step::Linear& step, int64_t layer, Workspace& w) {
  const MatrixView<const float> in = w.at(step.in);
  ops_->linear(in, as_matrix(weights_.of(step.weight, layer), in.cols), w.at(step.out));
}

void Decoder::run(const decoder_step::AddBias& step, int64_t layer, Workspace& w) {
  ops_->add_bias(w.at(step.data), weights_.of(step.bias, layer).data());
}

void Decoder::run(const decoder_step::HeadNorm& step, int64_t layer, Workspace& w) {
  ops_->head_norm(w.at(step.data), config_.head_dim, weights_.of(step.weight, layer).data(),
                  static_cast<float>(config_.rms_norm_eps));
}

void Decoder::run(const decoder_step::Rope& /*step*/, int64_t /*layer*/, Workspace& w) {
  ops_->rope(w.at(Activation::q), w.at(Activation::k), config_.head_dim, rotary_);
}

void Decoder::run(const decoder_step::Attention& /*step*/, int64_t /*layer*/, Workspace& w) {
  w.phases.end(&DecoderTimes::linear);
  const ExecutionTimes execution = w.attention->run(Pass::forward);
  w.times.attention += execution.compute + execution.copy;
  w.times.attention_wait += execution.wait;
  w.phases.end(nullptr);
}

void Decoder::run(const decoder_step::SiluMultiply& /*step*/, int64_t /*layer*/, Workspace& w) {
  ops_->silu_multiply(w.at(Activation::gate), w.at(Activation::up));
}

void Decoder::run(const decoder_step::Again& /*step*/, int64_t /*layer*/, Workspace& w) {
  MatrixView<float>& h = w.at(Activation::h);
  for (const int32_t slot : w.batch.again) {
    ++h.rows;
    stream_.copy(h.row(h.rows - 1), h.row(slot), h.cols * sizeof(float));
  }
}

void Decoder::run(const decoder_step::Score& /*step*/, int64_t /*layer*/, Workspace& w) {
  w.phases.end(&DecoderTimes::linear);
  const int64_t targets = w.targets();
  Buffer<float> logprob(targets), entropy(targets);
  scores_.resize(targets);
  const double waited = scores_.forward(w.at(Activation::logits), w.batch.targets, stream_,
                                        logprob.span(), entropy.span());
  for (int64_t i = 0; i < targets; ++i) w.out[i] = {logprob[i], entropy[i]};
  w.phases.end(&DecoderTimes::logprobs);
  w.times.tp_wait += waited;
  w.times.logprobs -= waited;
}

void Decoder::show(const HiddenObserver& observe, int64_t index, Workspace& w) {
  if (!observe) return;
  w.added = index > 0;
  if (w.added) ops_->add(w.at(Activation::x), w.at(Activation::partial));
  w.phases.end(&DecoderTimes::linear);
  const MatrixView<const float> x = w.at(Activation::x);
  if (stream_.space() == MemorySpace::host) {
    observe(index, x);
  } else {
    Buffer<float> copy(x.rows * x.cols);
    stream_.copy(copy.data(), x.data, copy.size() * sizeof(float));
    stream_.synchronize();
    observe(index, copy.matrix(x.rows, x.cols));
  }
  w.phases.end(nullptr);
}

std::deque<AttentionExecutor> Decoder::executors_of(std::span<const RankPlan> plans) {
  // All executors share attention_memory_. Making one may reallocate arrays of those made before.
  // The first round therefore only grows the memory; the second one makes the executors to run.
  std::deque<AttentionExecutor> executors;
  for (int round = 0; round < (plans.size() > 1 ? 2 : 1); ++round) {
    executors.clear();
    for (const RankPlan& plan : plans)
      executors.emplace_back(plan, heads_, attention_types, grid_.cp(), kernel_, stream_,
                             attention_memory_, false);
  }
  return executors;
}

DecoderTimes Decoder::forward(const LocalBatch& batch, std::span<const RankPlan> plans,
                              std::span<LogprobEntropy> out, const HiddenObserver& observe) {
  const int64_t slots = std::ssize(batch.tokens);
  GYRE_CHECK(plans.size() == masks_.size(), "{} plans for {} masks", plans.size(), masks_.size());
  for (const RankPlan& plan : plans) {
    const int64_t planned = plan.arrays.at(own(ArrayKind::q)).tokens();
    GYRE_CHECK(planned == slots, "{} slots, a plan for {}", slots, planned);
  }
  GYRE_CHECK(out.size() == batch.targets.size() &&
                 std::ssize(batch.targets) == slots + std::ssize(batch.again),
             "{} slots, {} of them again, {} targets, {} outputs", slots, batch.again.size(),
             batch.targets.size(), out.size());
  std::deque<AttentionExecutor> executors = executors_of(plans);
  Workspace w(slots, config_, grid_.shape().tp, batch, out, stream_);
  ops_->set_slots(batch.tokens, batch.positions);
  int64_t layer = -1;
  for (const DecoderStep& step : steps_) {
    if (step.layer != layer) {
      if (layer >= 0) show(observe, layer, w);
      layer = step.layer;
      if (layer > 0 && layer <= config_.num_hidden_layers) {
        const int64_t window = config_.kind_of(layer - 1).window;
        w.use(executors[std::ranges::find(masks_, window, &LayerMask::window) - masks_.begin()]);
      }
      set_current_step(name_of_layer(layer, config_));
    }
    std::visit([&](const auto& operation) { run(operation, layer, w); }, step.operation);
  }
  for (const WorkPtr& work : w.works) work->wait();
  stream_.synchronize();
  w.phases.add_to(w.times);
  return w.times;
}

}  // namespace gyre

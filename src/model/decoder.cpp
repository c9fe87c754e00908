#include "model/decoder.hpp"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "comm/host_staging.hpp"
#include "logprobs/row_kernels.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {

namespace {

/// The times of phases, from marks in the stream.
class Phases {
 public:
  using Phase = double DecoderTimes::*;

  explicit Phases(Stream& stream) : stream_(stream) { end(nullptr); }
  /// Ends a phase that began with the last call; null: its time is counted elsewhere.
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

/// Activations of one forward pass over `n` slots.
struct Decoder::Workspace {
  Workspace(int64_t n, const ModelConfig& c, int64_t intermediate, int64_t columns,
            AttentionExecutor& executor, Stream& stream)
      : slots(n),
        x_(n * c.hidden_size, stream.space()),
        h_(n * c.hidden_size, stream.space()),
        partial_(n * c.hidden_size, stream.space()),
        gate_(n * intermediate, stream.space()),
        up_(n * intermediate, stream.space()),
        logits_(n * columns, stream.space()),
        logprob(n),
        entropy(n),
        x(x_.matrix(n, c.hidden_size)),
        h(h_.matrix(n, c.hidden_size)),
        partial(partial_.matrix(n, c.hidden_size)),
        q(executor.matrix(ArrayKind::q).as<float>()),
        k(executor.keys().as<float>()),
        v(executor.values().as<float>()),
        out(executor.matrix(ArrayKind::out).as<float>()),
        gate(gate_.matrix(n, intermediate)),
        up(up_.matrix(n, intermediate)),
        logits(logits_.matrix(n, columns)),
        attention(executor),
        phases(stream) {}

  int64_t slots;

 private:
  Buffer<float> x_, h_, partial_, gate_, up_, logits_;

 public:
  Buffer<float> logprob, entropy;   // [slots], on the host
  MatrixView<float> x, h, partial;  // [slots, hidden]
  MatrixView<float> q, k, v, out;   // [slots, heads · head_dim], of k and v kv_heads: the
                                    // executor's own arrays
  MatrixView<float> gate, up;       // [slots, intermediate of this rank]
  MatrixView<float> logits;         // [slots, vocabulary columns of this rank]
  bool partial_pending = false;     // partial is not yet added to x
  AttentionExecutor& attention;
  Phases phases;
  std::vector<WorkPtr> works;  // communications that the host has not yet waited for
  DecoderTimes times;
};

namespace {

MatrixView<const float> as_matrix(const Buffer<float>& buffer, int64_t rows) {
  return buffer.matrix(rows, rows == 0 ? 0 : buffer.size() / rows);
}

void move_to(Stream& stream, Buffer<float>& buffer) {
  if (buffer.space() == stream.space() || buffer.size() == 0) return;
  Buffer<float> moved(buffer.size(), stream.space());
  stream.copy(moved.data(), buffer.data(), static_cast<size_t>(buffer.size()) * sizeof(float));
  stream.synchronize();
  buffer = std::move(moved);
}

/// A communicator of host memory over that of a device's stream; none on the host.
std::unique_ptr<Communicator> host_staging_of(Communicator& comm, Stream& stream) {
  if (stream.space() == MemorySpace::host) return nullptr;
  return make_host_staging_communicator(comm, stream);
}

}  // namespace

void DecoderWeights::move_to(Stream& stream) {
  const auto move = [&](Buffer<float>& buffer) { gyre::move_to(stream, buffer); };
  move(embed);
  for (Layer& l : layers)
    for (Buffer<float>* buffer :
         {&l.attn_norm, &l.wq, &l.wk, &l.wv, &l.wo, &l.mlp_norm, &l.w_gate, &l.w_up, &l.w_down})
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

DecoderWeights load_weights(const ModelConfig& c, int tp, int tp_rank, const WeightReader& read) {
  const int64_t q = c.query_width() / tp, kv = c.kv_width() / tp, inner = c.intermediate_size / tp;
  const int64_t vocab_columns = c.vocab_padded / tp;
  const auto columns = [&](const std::string& name, int64_t width) {
    return read(name, 0, c.hidden_size, tp_rank * width, width);
  };
  const auto rows = [&](const std::string& name, int64_t height) {
    return read(name, tp_rank * height, height, 0, c.hidden_size);
  };
  DecoderWeights weights;
  weights.embed = rows("embed", vocab_columns);
  for (int64_t l = 0; l < c.num_hidden_layers; ++l) {
    const auto name = [&](const char* leaf) { return fmt::format("layers/{}/{}", l, leaf); };
    DecoderWeights::Layer layer;
    layer.attn_norm = read(name("attn_norm"), 0, 1, 0, c.hidden_size);
    layer.wq = columns(name("wq"), q);
    layer.wk = columns(name("wk"), kv);
    layer.wv = columns(name("wv"), kv);
    layer.wo = rows(name("wo"), q);
    layer.mlp_norm = read(name("mlp_norm"), 0, 1, 0, c.hidden_size);
    layer.w_gate = columns(name("w_gate"), inner);
    layer.w_up = columns(name("w_up"), inner);
    layer.w_down = rows(name("w_down"), inner);
    weights.layers.push_back(std::move(layer));
  }
  weights.final_norm = read("final_norm", 0, 1, 0, c.hidden_size);
  weights.head = columns("head", vocab_columns);
  return weights;
}

HeadShape local_heads(const ModelConfig& config, int tp) {
  return {config.num_attention_heads / tp, config.num_key_value_heads / tp, config.head_dim,
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
      columns_(config.vocab_padded / grid.shape().tp),
      host_tp_(host_staging_of(grid.tp(), stream)),
      row_kernels_(make_row_kernels(stream)),
      scores_(0, even_partition(config.vocab_size, config.vocab_padded, grid.shape().tp),
              {.picks = 1, .entropy = true, .kernels = row_kernels_.get()},
              host_tp_ ? *host_tp_ : grid.tp()) {
  const int tp = grid.shape().tp;
  heads_ = local_heads(config, tp);
  intermediate_ = config.intermediate_size / tp;
  weights_.move_to(stream);
}

Decoder::~Decoder() = default;

void Decoder::reduce(MatrixView<float> data, const char* what, Workspace& w) {
  w.works.push_back(grid_.tp().all_reduce(data.data, data.rows * data.cols, DType::f32,
                                          ReduceOp::sum, stream_, what));
  w.works.back()->wait_on_stream();
  w.phases.end(&DecoderTimes::tp_wait);
}

void Decoder::norm(const Buffer<float>& weight, Workspace& w) {
  const MatrixView<const float> nothing;
  ops_->add_rms_norm(w.x, w.partial_pending ? w.partial : nothing, weight.data(),
                     static_cast<float>(config_.rms_norm_eps), w.h);
  w.partial_pending = false;
}

void Decoder::embed(Workspace& w) {
  ops_->embed(as_matrix(weights_.embed, columns_), scores_.vocab().begin(grid_.tp_rank()), w.x);
  w.phases.end(&DecoderTimes::linear);
  reduce(w.x, "embedding all-reduce", w);
}

void Decoder::attention(const DecoderWeights::Layer& layer, Workspace& w) {
  const int64_t hidden = config_.hidden_size;
  norm(layer.attn_norm, w);
  ops_->linear(w.h, as_matrix(layer.wq, hidden), w.q);
  ops_->linear(w.h, as_matrix(layer.wk, hidden), w.k);
  ops_->linear(w.h, as_matrix(layer.wv, hidden), w.v);
  ops_->rope(w.q, w.k, config_.head_dim, config_.rope_theta);
  w.phases.end(&DecoderTimes::linear);

  const ExecutionTimes execution = w.attention.run(Pass::forward);
  w.times.attention += execution.compute + execution.copy;
  w.times.attention_wait += execution.wait;
  w.phases.end(nullptr);

  ops_->linear(w.out, as_matrix(layer.wo, heads_.heads * heads_.head_dim), w.partial);
  w.phases.end(&DecoderTimes::linear);
  reduce(w.partial, "attention output all-reduce", w);
  w.partial_pending = true;
}

void Decoder::mlp(const DecoderWeights::Layer& layer, Workspace& w) {
  const int64_t hidden = config_.hidden_size;
  norm(layer.mlp_norm, w);
  ops_->linear(w.h, as_matrix(layer.w_gate, hidden), w.gate);
  ops_->linear(w.h, as_matrix(layer.w_up, hidden), w.up);
  ops_->silu_multiply(w.gate, w.up);
  ops_->linear(w.gate, as_matrix(layer.w_down, intermediate_), w.partial);
  w.phases.end(&DecoderTimes::linear);
  reduce(w.partial, "MLP all-reduce", w);
  w.partial_pending = true;
}

void Decoder::score(const LocalBatch& batch, Workspace& w, std::span<LogprobEntropy> out) {
  norm(weights_.final_norm, w);
  ops_->linear(w.h, as_matrix(weights_.head, config_.hidden_size), w.logits);
  w.phases.end(&DecoderTimes::linear);
  scores_.resize(w.slots);
  const double waited =
      scores_.forward(w.logits, batch.targets, stream_, w.logprob.span(), w.entropy.span());
  for (int64_t i = 0; i < w.slots; ++i) out[static_cast<size_t>(i)] = {w.logprob[i], w.entropy[i]};
  w.phases.end(&DecoderTimes::logprobs);
  w.times.tp_wait += waited;
  w.times.logprobs -= waited;
}

void Decoder::show(const HiddenObserver& observe, int64_t index, Workspace& w) {
  if (!observe) return;
  if (w.partial_pending) ops_->add(w.x, w.partial);
  w.partial_pending = false;
  w.phases.end(&DecoderTimes::linear);
  if (stream_.space() == MemorySpace::host) {
    observe(index, w.x);
  } else {
    Buffer<float> copy(w.x.rows * w.x.cols);
    stream_.copy(copy.data(), w.x.data, static_cast<size_t>(copy.size()) * sizeof(float));
    stream_.synchronize();
    observe(index, copy.matrix(w.x.rows, w.x.cols));
  }
  w.phases.end(nullptr);
}

DecoderTimes Decoder::forward(const LocalBatch& batch, const RankPlan& plan,
                              std::span<LogprobEntropy> out, const HiddenObserver& observe) {
  const int64_t slots = std::ssize(batch.tokens);
  const int64_t planned = plan.arrays.at(own(ArrayKind::q)).tokens();
  GYRE_CHECK(std::ssize(out) == slots && planned == slots, "{} slots, {} outputs, a plan for {}",
             slots, out.size(), planned);
  AttentionExecutor executor(plan, heads_, attention_types, grid_.cp(), kernel_, stream_,
                             attention_memory_, false);
  Workspace w(slots, config_, intermediate_, columns_, executor, stream_);
  set_current_step("embedding");
  ops_->set_slots(batch.tokens, batch.positions);
  embed(w);
  show(observe, 0, w);
  for (size_t l = 0; l < weights_.layers.size(); ++l) {
    set_current_step(fmt::format("layer {}", l + 1));
    attention(weights_.layers[l], w);
    mlp(weights_.layers[l], w);
    show(observe, static_cast<int64_t>(l) + 1, w);
  }
  set_current_step("log-probabilities");
  score(batch, w, out);
  for (const WorkPtr& work : w.works) work->wait();
  stream_.synchronize();
  w.phases.add_to(w.times);
  return w.times;
}

}  // namespace gyre

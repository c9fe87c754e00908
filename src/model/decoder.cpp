#include "model/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model/elementwise.hpp"
#include "runtime/clock.hpp"
#include "runtime/gemm.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {

/// Activations of one forward pass over `n` slots.
struct Decoder::Workspace {
  Workspace(int64_t n, const ModelConfig& c, int64_t intermediate, int64_t columns,
            AttentionExecutor& executor)
      : slots(n),
        x_(n * c.hidden_size),
        h_(n * c.hidden_size),
        partial_(n * c.hidden_size),
        gate_(n * intermediate),
        up_(n * intermediate),
        logits_(n * columns),
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
        attention(executor) {}

  int64_t slots;

 private:
  Buffer<float> x_, h_, partial_, gate_, up_, logits_;

 public:
  Buffer<float> logprob, entropy;   // [slots]
  MatrixView<float> x, h, partial;  // [slots, hidden]
  MatrixView<float> q, k, v, out;   // [slots, heads · head_dim], of k and v kv_heads: the
                                    // executor's own arrays
  MatrixView<float> gate, up;       // [slots, intermediate of this rank]
  MatrixView<float> logits;         // [slots, vocabulary columns of this rank]
  AttentionExecutor& attention;
  DecoderTimes times;
};

namespace {

MatrixView<const float> as_matrix(const Buffer<float>& buffer, int64_t rows) {
  return buffer.matrix(rows, rows == 0 ? 0 : buffer.size() / rows);
}

}  // namespace

DecoderTimes& DecoderTimes::operator+=(const DecoderTimes& other) {
  linear += other.linear;
  attention += other.attention;
  logprobs += other.logprobs;
  attention_wait += other.attention_wait;
  tp_wait += other.tp_wait;
  return *this;
}

void check_tensor_parallel(const ModelConfig& config, int tp, Problems& problems) {
  const auto check = [&](const char* name, int64_t value) {
    if (value % tp != 0)
      problems.add("--tp {} does not divide the model's {} = {}", tp, name, value);
  };
  check("num_attention_heads", config.num_attention_heads);
  check("num_key_value_heads", config.num_key_value_heads);
  check("intermediate_size", config.intermediate_size);
  check("vocab_padded", config.vocab_padded);
}

std::vector<int> allowed_tensor_parallel(const ModelConfig& config, int ranks) {
  std::vector<int> allowed;
  for (int tp = 1; tp <= ranks; ++tp) {
    Problems problems;
    check_tensor_parallel(config, tp, problems);
    if (problems.empty()) allowed.push_back(tp);
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
      columns_(config.vocab_padded / grid.shape().tp),
      scores_(0, even_partition(config.vocab_size, config.vocab_padded, grid.shape().tp),
              {.picks = 1, .entropy = true}, grid.tp()) {
  const int tp = grid.shape().tp;
  heads_ = local_heads(config, tp);
  intermediate_ = config.intermediate_size / tp;
}

void Decoder::add_reduced(MatrixView<float> partial, const char* what, Workspace& w) {
  const Stopwatch watch;
  grid_.tp()
      .all_reduce(partial.data, partial.rows * partial.cols, DType::f32, ReduceOp::sum, stream_,
                  what)
      ->wait();
  w.times.tp_wait += watch.seconds();
  add_in_place(w.x, partial);
}

void Decoder::embed(const LocalBatch& batch, Workspace& w) {
  const int64_t hidden = config_.hidden_size;
  const Stopwatch watch;
  for (int64_t i = 0; i < w.slots; ++i) {
    const int64_t row =
        batch.tokens[static_cast<size_t>(i)] - scores_.vocab().begin(grid_.tp_rank());
    std::fill_n(w.x.row(i), hidden, 0.0f);
    if (row >= 0 && row < columns_)
      std::copy_n(weights_.embed.data() + row * hidden, hidden, w.partial.row(i));
    else
      std::fill_n(w.partial.row(i), hidden, 0.0f);
  }
  w.times.linear += watch.seconds();
  add_reduced(w.partial, "embedding all-reduce", w);
}

void Decoder::attention(const DecoderWeights::Layer& layer, const LocalBatch& batch, Workspace& w) {
  const int64_t hidden = config_.hidden_size;
  const Stopwatch projections;
  rms_norm(w.x, layer.attn_norm.span(), static_cast<float>(config_.rms_norm_eps), w.h);
  gemm(w.h, as_matrix(layer.wq, hidden), w.q);
  gemm(w.h, as_matrix(layer.wk, hidden), w.k);
  gemm(w.h, as_matrix(layer.wv, hidden), w.v);
  apply_rope(w.q, config_.head_dim, config_.rope_theta, batch.positions);
  apply_rope(w.k, config_.head_dim, config_.rope_theta, batch.positions);
  w.times.linear += projections.seconds();

  const ExecutionTimes execution = w.attention.run(Pass::forward);
  w.times.attention += execution.compute + execution.copy;
  w.times.attention_wait += execution.wait;

  const Stopwatch output;
  gemm(w.out, as_matrix(layer.wo, heads_.heads * heads_.head_dim), w.partial);
  w.times.linear += output.seconds();
  add_reduced(w.partial, "attention output all-reduce", w);
}

void Decoder::mlp(const DecoderWeights::Layer& layer, Workspace& w) {
  const int64_t hidden = config_.hidden_size;
  const Stopwatch watch;
  rms_norm(w.x, layer.mlp_norm.span(), static_cast<float>(config_.rms_norm_eps), w.h);
  gemm(w.h, as_matrix(layer.w_gate, hidden), w.gate);
  gemm(w.h, as_matrix(layer.w_up, hidden), w.up);
  silu_multiply(w.gate, w.up, w.gate);
  gemm(w.gate, as_matrix(layer.w_down, intermediate_), w.partial);
  w.times.linear += watch.seconds();
  add_reduced(w.partial, "MLP all-reduce", w);
}

void Decoder::score(const LocalBatch& batch, Workspace& w, std::span<LogprobEntropy> out) {
  const Stopwatch head;
  rms_norm(w.x, weights_.final_norm.span(), static_cast<float>(config_.rms_norm_eps), w.h);
  gemm(w.h, as_matrix(weights_.head, config_.hidden_size), w.logits);
  w.times.linear += head.seconds();
  const Stopwatch statistics;
  scores_.resize(w.slots);
  const double waited =
      scores_.forward(w.logits, batch.targets, stream_, w.logprob.span(), w.entropy.span());
  for (int64_t i = 0; i < w.slots; ++i) out[static_cast<size_t>(i)] = {w.logprob[i], w.entropy[i]};
  w.times.tp_wait += waited;
  w.times.logprobs += statistics.seconds() - waited;
}

DecoderTimes Decoder::forward(const LocalBatch& batch, const RankPlan& plan,
                              std::span<LogprobEntropy> out, const HiddenObserver& observe) {
  const int64_t slots = std::ssize(batch.tokens);
  const int64_t planned = plan.arrays.at(own(ArrayKind::q)).tokens();
  GYRE_CHECK(std::ssize(out) == slots && planned == slots, "{} slots, {} outputs, a plan for {}",
             slots, out.size(), planned);
  AttentionExecutor executor(plan, heads_, attention_types, grid_.cp(), kernel_, stream_,
                             attention_memory_, false);
  Workspace w(slots, config_, intermediate_, columns_, executor);
  set_current_step("embedding");
  embed(batch, w);
  if (observe) observe(0, w.x);
  for (size_t l = 0; l < weights_.layers.size(); ++l) {
    set_current_step(fmt::format("layer {}", l + 1));
    attention(weights_.layers[l], batch, w);
    mlp(weights_.layers[l], w);
    if (observe) observe(static_cast<int64_t>(l) + 1, w.x);
  }
  set_current_step("log-probabilities");
  score(batch, w, out);
  return w.times;
}

}  // namespace gyre

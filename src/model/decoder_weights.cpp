#include "model/decoder_weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/token_random.hpp"

namespace gyre {

void WeightTensor::move_to(Stream& stream) {
  if (bytes_.space() == stream.space() || bytes_.size() == 0) return;
  Buffer<std::byte> moved(bytes_.size(), stream.space());
  stream.copy(moved.data(), bytes_.data(), bytes_.size());
  stream.synchronize();
  bytes_ = std::move(moved);
}

WeightTensor WeightTensor::converted(DType type) const {
  WeightTensor to(type, rows_, cols_);
  copy_converted(matrix(), to.matrix());
  return to;
}

void DecoderWeights::move_to(Stream& stream) {
  for (auto& [key, tensor] : tensors_) tensor.move_to(stream);
}

DecoderWeights DecoderWeights::perturbed_norms(Stream& stream, uint64_t seed,
                                               double deviation) const {
  constexpr Weight norms[] = {Weight::attn_norm, Weight::q_norm,     Weight::k_norm,
                              Weight::mlp_norm,  Weight::final_norm, Weight::o_norm};
  DecoderWeights all;
  for (const auto& [key, tensor] : tensors_) {
    const auto& [layer, weight] = key;
    if (std::ranges::find(norms, weight) == std::end(norms)) continue;
    const ConstMatrixRef from = tensor.matrix();
    WeightTensor to(from.type, from.rows, from.cols);
    const MatrixRef row = to.matrix();
    stream.copy(row.data, from.data, from.cols * size_of(from.type));
    stream.synchronize();
    std::vector<float> u(from.cols);
    const auto number = (static_cast<int64_t>(Weight::head) + 1) * layer;
    fill_token_row({seed, TokenTensor::weight, false}, number + static_cast<int64_t>(weight), u);
    for (int64_t i = 0; i < from.cols; ++i) {
      float& x = row.as<float>()(0, i);
      x = static_cast<float>(x * (1 + deviation * u[i]));
    }
    to.move_to(stream);
    all.tensors_[key] = std::move(to);
  }
  return all;
}

DecoderWeights DecoderWeights::widened() && {
  for (auto& [key, tensor] : tensors_)
    if (tensor.matrix().type != DType::f32) tensor = tensor.converted(DType::f32);
  return std::move(*this);
}

void check_tensor_parallel(const ModelConfig& config, int tp, ConfigErrors& errors,
                           const char* whose) {
  const auto check = [&](const char* name, int64_t value) {
    if (value % tp != 0)
      errors.add("--tp {} does not divide the {}'s {} = {}", tp, whose, name, value);
  };
  check("num_attention_heads", config.num_attention_heads);
  if (tp % config.num_key_value_heads != 0)
    check("num_key_value_heads", config.num_key_value_heads);
  if (config.recurrent_layers() > 0)
    check("linear_num_key_heads", config.recurrent.key_heads);  // each has its heads of values
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
class PartReader {
 public:
  PartReader(const ModelConfig& config, int tp, int tp_rank, const WeightReader& read, DType type)
      : c_(config), tp_(tp), tp_rank_(tp_rank), read_(read), type_(type) {}

  DecoderWeights all() {
    const int64_t vocab = local_vocab(c_, tp_);
    rows(Weight::embed, "embed", vocab);
    for (layer_ = 1; layer_ <= c_.num_hidden_layers; ++layer_) read_layer();
    vector(Weight::final_norm, "final_norm", c_.hidden_size);
    if (!c_.tied_head)
      transposed(Weight::head, "head", {0, c_.hidden_size, tp_rank_ * vocab, vocab});
    return std::move(weights_);
  }

 private:
  struct Block {
    int64_t row, rows, column, columns;
  };
  int64_t width(Activation a) const { return width_of(a, c_, tp_); }
  /// First column of this rank's keys and values.
  int64_t kv_begin() const { return tp_rank_ * c_.num_key_value_heads / tp_ * c_.head_dim; }

  /// Calls f(first row in the block, values) for about 16 MiB of rows at a time, so that few bytes
  /// are held twice.
  template <class F>
  void read_rows(const std::string& name, const Block& block, F f) const {
    constexpr int64_t elements = int64_t{1} << 22;
    const int64_t some = std::max<int64_t>(1, elements / std::max<int64_t>(1, block.columns));
    for (int64_t r = 0; r < block.rows; r += some) {
      const int64_t rows = std::min(some, block.rows - r);
      const Buffer<float> part = read_(name, block.row + r, rows, block.column, block.columns);
      f(r, part.matrix(rows, block.columns));
    }
  }
  void matrix(Weight weight, const std::string& name, const Block& block) {
    matrix(weight, name, block, type_);
  }
  void matrix(Weight weight, const std::string& name, const Block& block, DType type) {
    WeightTensor tensor(type, block.rows, block.columns);
    read_rows(name, block, [&](int64_t r, MatrixView<const float> part) {
      copy_converted(part, tensor.matrix().rows_from(r, part.rows));
    });
    weights_.set(weight, layer_, std::move(tensor));
  }
  void transposed(Weight weight, const std::string& name, const Block& block) {
    WeightTensor tensor(type_, block.columns, block.rows);
    constexpr int64_t square = 64;
    float turned[square * square];
    read_rows(name, block, [&](int64_t r, MatrixView<const float> part) {
      for (int64_t c = 0; c < part.cols; c += square)
        for (int64_t i = 0; i < part.rows; i += square) {
          const int64_t columns = std::min(square, part.cols - c);
          const MatrixView<float> to(turned, columns, std::min(square, part.rows - i));
          for (int64_t j = 0; j < columns; ++j)
            for (int64_t k = 0; k < to.cols; ++k) to(j, k) = part(i + k, c + j);
          copy_converted(to, tensor.matrix().rows_from(c, columns).columns_from(r + i, to.cols));
        }
    });
    weights_.set(weight, layer_, std::move(tensor));
  }
  void vector(Weight weight, const std::string& name, int64_t size, int64_t begin = 0) {
    WeightTensor tensor(DType::f32, 1, size);
    const Buffer<float> values = read_(name, 0, 1, begin, size);
    copy_converted(values.matrix(1, size), tensor.matrix());
    weights_.set(weight, layer_, std::move(tensor));
  }
  void columns(Weight weight, const std::string& name, int64_t count) {
    matrix(weight, name, {0, c_.hidden_size, tp_rank_ * count, count});
  }
  void rows(Weight weight, const std::string& name, int64_t count) {
    matrix(weight, name, {tp_rank_ * count, count, 0, c_.hidden_size});
  }

  /// Name of a tensor of the current layer.
  std::string of_layer(const char* leaf) const {
    return fmt::format("layers/{}/{}", layer_ - 1, leaf);
  }

  void read_layer() {
    const int64_t inner = width(Activation::gate);
    vector(Weight::attn_norm, of_layer("attn_norm"), c_.hidden_size);
    if (c_.kind_of(layer_ - 1).recurrent)
      read_recurrence();
    else
      read_attention();
    vector(Weight::mlp_norm, of_layer("mlp_norm"), c_.hidden_size);
    columns(Weight::w_gate, of_layer("w_gate"), inner);
    columns(Weight::w_up, of_layer("w_up"), inner);
    rows(Weight::w_down, of_layer("w_down"), inner);
  }

  void read_recurrence() {
    const int64_t keys = width(Activation::mixer_q), values = width(Activation::mixer_v);
    const int64_t heads = width(Activation::mixer_b);
    columns(Weight::wq, of_layer("wq"), keys);
    columns(Weight::wk, of_layer("wk"), keys);
    columns(Weight::wv, of_layer("wv"), values);
    columns(Weight::wz, of_layer("wz"), values);
    columns(Weight::wb, of_layer("wb"), heads);
    columns(Weight::wa, of_layer("wa"), heads);
    const auto taps = [&](Weight weight, const char* leaf, int64_t count) {
      matrix(weight, of_layer(leaf), {0, c_.recurrent.conv_width, tp_rank_ * count, count},
             DType::f32);
    };
    taps(Weight::conv_q, "conv_q", keys);
    taps(Weight::conv_k, "conv_k", keys);
    taps(Weight::conv_v, "conv_v", values);
    vector(Weight::a_log, of_layer("a_log"), heads, tp_rank_ * heads);
    vector(Weight::dt_bias, of_layer("dt_bias"), heads, tp_rank_ * heads);
    vector(Weight::o_norm, of_layer("o_norm"), c_.recurrent.value_dim);
    rows(Weight::wo, of_layer("wo"), values);
  }

  void read_attention() {
    const int64_t q = width(Activation::q), kv = width(Activation::k);
    const int64_t heads = c_.num_attention_heads / tp_;
    columns(Weight::wq, of_layer("wq"), q);
    matrix(Weight::wk, of_layer("wk"), {0, c_.hidden_size, kv_begin(), kv});
    matrix(Weight::wv, of_layer("wv"), {0, c_.hidden_size, kv_begin(), kv});
    if (c_.qkv_bias) {
      vector(Weight::bq, of_layer("bq"), q, tp_rank_ * q);
      vector(Weight::bk, of_layer("bk"), kv, kv_begin());
      vector(Weight::bv, of_layer("bv"), kv, kv_begin());
    }
    if (c_.qk_norm) {
      vector(Weight::q_norm, of_layer("q_norm"), c_.head_dim);
      vector(Weight::k_norm, of_layer("k_norm"), c_.head_dim);
    }
    if (c_.attention_sinks) vector(Weight::sinks, of_layer("sinks"), heads, tp_rank_ * heads);
    if (c_.output_gate) columns(Weight::wz, of_layer("wz"), q);
    rows(Weight::wo, of_layer("wo"), q);
    if (c_.output_bias) vector(Weight::bo, of_layer("bo"), c_.hidden_size);
  }

  const ModelConfig& c_;
  int tp_, tp_rank_;
  const WeightReader& read_;
  DType type_;
  int64_t layer_ = 0;
  DecoderWeights weights_;
};

}  // namespace

DecoderWeights load_weights(const ModelConfig& config, int tp, int tp_rank,
                            const WeightReader& read, DType type) {
  return PartReader(config, tp, tp_rank, read, type).all();
}

int64_t weight_bytes(const ModelConfig& c, int tp, DType type) {
  const int64_t again = tp * width_of(Activation::k, c, tp) - c.kv_width();  // of shared KV heads
  const int64_t copies = (c.num_hidden_layers - c.recurrent_layers()) * c.hidden_size * 2 * again;
  const int64_t norms = (2 * c.num_hidden_layers + 1) * c.hidden_size;  // f32 on every rank
  return size_of(type) * (c.parameters() - norms + copies) / tp + size_of(DType::f32) * norms;
}

}  // namespace gyre

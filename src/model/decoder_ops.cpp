#include "model/decoder_ops.hpp"

#include <algorithm>

#include "model/cuda_decoder_ops.hpp"
#include "model/elementwise.hpp"
#include "runtime/gemm.hpp"

namespace gyre {
namespace {

class HostDecoderOps final : public DecoderOps {
 public:
  void set_slots(std::span<const int32_t> tokens, std::span<const int32_t> positions) override {
    tokens_ = tokens;
    positions_ = positions;
  }
  void embed(MatrixView<const float> table, int64_t first, MatrixView<float> out) override {
    for (int64_t i = 0; i < out.rows; ++i) {
      const int64_t row = tokens_[i] - first;
      if (row >= 0 && row < table.rows)
        std::copy_n(table.row(row), out.cols, out.row(i));
      else
        std::fill_n(out.row(i), out.cols, 0.0F);
    }
  }
  void add_rms_norm(MatrixView<float> x, MatrixView<const float> y, const float* weight, float eps,
                    MatrixView<float> h) override {
    if (y.data != nullptr) add_in_place(x, y);
    rms_norm(x, {weight, static_cast<size_t>(x.cols)}, eps, h);
  }
  void add(MatrixView<float> x, MatrixView<const float> y) override { add_in_place(x, y); }
  void linear(MatrixView<const float> x, MatrixView<const float> w, MatrixView<float> y) override {
    gemm(x, w, y);
  }
  void add_bias(MatrixView<float> x, const float* bias) override {
    for (int64_t i = 0; i < x.rows; ++i)
      add_in_place(x.rows_from(i, 1), MatrixView<const float>(bias, 1, x.cols));
  }
  void head_norm(MatrixView<float> x, int64_t head_dim, const float* weight, float eps) override {
    const std::span<const float> weights(weight, static_cast<size_t>(head_dim));
    for (int64_t i = 0; i < x.rows; ++i) {
      const MatrixView<float> heads(x.row(i), x.cols / head_dim, head_dim);
      rms_norm(heads, weights, eps, heads);
    }
  }
  void rope(MatrixView<float> q, MatrixView<float> k, int64_t head_dim,
            const Rotary& rotary) override {
    apply_rope(q, head_dim, rotary, positions_);
    apply_rope(k, head_dim, rotary, positions_);
  }
  void silu_multiply(MatrixView<float> gate, MatrixView<const float> up) override {
    gyre::silu_multiply(gate, up, gate);
  }

 private:
  std::span<const int32_t> tokens_, positions_;
};

}  // namespace

std::unique_ptr<DecoderOps> make_decoder_ops(Stream& stream) {
  if (stream.space() == MemorySpace::device) return make_cuda_decoder_ops(stream);
  return std::make_unique<HostDecoderOps>();
}

}  // namespace gyre

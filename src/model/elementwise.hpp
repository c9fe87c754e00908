#pragma once
// The decoder's operations on rows, f32, vectorised with run-time dispatch (Highway). Each has a
// serial double-precision twin inside the reference decoder (decoder_reference.cpp).

#include <cstdint>
#include <span>

#include "core/model_config.hpp"
#include "core/view.hpp"
#include "model/rotary.hpp"

namespace gyre {

/// out_i = x_i / sqrt(mean(x²) + eps) · weight, row by row. x, out [tokens, hidden] (may be the
/// same), weight [hidden].
void rms_norm(MatrixView<const float> x, std::span<const float> weight, float eps,
              MatrixView<float> out);

/// Rotary embedding in place, rotate-half convention (Hugging Face Llama). Pair i of a head is
/// elements i and i + rotary.dim / 2; elements from rotary.dim on stay unchanged. The angle of
/// pair i at position p is p · rotary.frequencies[i], evaluated in double; cos and sin are
/// multiplied by rotary.scale. x [tokens, heads * head_dim]; positions [tokens].
void apply_rope(MatrixView<float> x, int64_t head_dim, const Rotary& rotary,
                std::span<const int32_t> positions);

/// out = f(gate) · up, element-wise. All [tokens, columns]; out may be gate. f(x) is
///
///     silu         x / (1 + e^-x)
///     gelu         x · Φ(x) = x/2 · (1 + erf(x / √2))
///     gelu_tanh    x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))
///     sigmoid      1 / (1 + e^-x)
void gate_multiply(GateActivation activation, MatrixView<const float> gate,
                   MatrixView<const float> up, MatrixView<float> out);

}  // namespace gyre

#include "io/checkpoints/weight_encoding.hpp"

#include <cstring>

#include "core/bf16.hpp"
#include "core/error.hpp"
#include "core/f16.hpp"

namespace gyre {
namespace {

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

float half(const std::byte* at) {
  return to_float(load<f16>(at));
}

int byte_at(const std::byte* at, int64_t i) {
  return std::to_integer<int>(at[i]);
}

/// A block {f16 d, int8 q[32]} holds the values d q.
void q8_0(const std::byte* at, float* out) {
  const float d = half(at);
  for (int i = 0; i < 32; ++i) out[i] = d * load<int8_t>(at + 2 + i);
}

/// A block {f16 d, 32 nibbles q} holds the values d (q - 8). Low nibbles are values 0 to 15.
void q4_0(const std::byte* at, float* out) {
  const float d = half(at);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * ((byte_at(at, 2 + i) & 15) - 8);
    out[i + 16] = d * ((byte_at(at, 2 + i) >> 4) - 8);
  }
}

/// A block {f16 d, f16 m, 32 nibbles q} holds the values d q + m.
void q4_1(const std::byte* at, float* out) {
  const float d = half(at), m = half(at + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = d * (byte_at(at, 4 + i) & 15) + m;
    out[i + 16] = d * (byte_at(at, 4 + i) >> 4) + m;
  }
}

/// A block {low nibbles [128], high pairs of bits [64], int8 scales [16], f16 d} holds the values
/// d scale (q - 32). Each half of it has four quarters of 32, whose bits lie side by side.
void q6_k(const std::byte* at, float* out) {
  const float d = half(at + 208);
  for (int part = 0; part < 2; ++part)
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < 32; ++i) {
        const int low = byte_at(at, part * 64 + quarter % 2 * 32 + i) >> quarter / 2 * 4 & 15;
        const int high = byte_at(at, 128 + part * 32 + i) >> quarter * 2 & 3;
        const auto scale = load<int8_t>(at + 192 + part * 8 + quarter * 2 + i / 16);
        out[part * 128 + quarter * 32 + i] = d * scale * ((low | high << 4) - 32);
      }
}

}  // namespace

EncodedBlock block_of(WeightEncoding encoding) {
  switch (encoding) {
    case WeightEncoding::f32:
      return {1, 4};
    case WeightEncoding::f16:
    case WeightEncoding::bf16:
      return {1, 2};
    case WeightEncoding::q8_0:
      return {32, 34};
    case WeightEncoding::q4_0:
      return {32, 18};
    case WeightEncoding::q4_1:
      return {32, 20};
    case WeightEncoding::q6_k:
      return {256, 210};
  }
  throw_runtime("an unknown encoding of weights");
}

void decode_weights(WeightEncoding encoding, const std::byte* data, int64_t first,
                    std::span<float> out) {
  const EncodedBlock block = block_of(encoding);
  GYRE_CHECK(first % block.values == 0 && std::ssize(out) % block.values == 0,
             "values {} to {} are no whole blocks of {}", first, first + std::ssize(out),
             block.values);
  const std::byte* at = data + first / block.values * block.bytes;
  for (int64_t i = 0; i < std::ssize(out); i += block.values, at += block.bytes) switch (encoding) {
      case WeightEncoding::f32:
        out[i] = load<float>(at);
        break;
      case WeightEncoding::f16:
        out[i] = half(at);
        break;
      case WeightEncoding::bf16:
        out[i] = to_float(load<bf16>(at));
        break;
      case WeightEncoding::q8_0:
        q8_0(at, &out[i]);
        break;
      case WeightEncoding::q4_0:
        q4_0(at, &out[i]);
        break;
      case WeightEncoding::q4_1:
        q4_1(at, &out[i]);
        break;
      case WeightEncoding::q6_k:
        q6_k(at, &out[i]);
        break;
    }
}

}  // namespace gyre

#pragma once
// Number formats of weights in checkpoints: floats, and the block formats of GGUF.

#include <cstddef>
#include <cstdint>
#include <span>

namespace gyre {

/// q8_0, q4_0, q4_1: blocks of 32 values; q6_k: blocks of 256. Blocks are those of ggml
/// (ggml-common.h of llama.cpp); all numbers are little-endian.
enum class WeightEncoding { f32, f16, bf16, q8_0, q4_0, q4_1, q6_k };

/// Values of a block, and its bytes; 1 value for floats.
struct EncodedBlock {
  int64_t values = 1;
  int64_t bytes = 0;
};
EncodedBlock block_of(WeightEncoding encoding);

/// Decodes values [first, first + out.size()) of the array that starts at `data`. Both ends lie at
/// block boundaries.
void decode_weights(WeightEncoding encoding, const std::byte* data, int64_t first,
                    std::span<float> out);

}  // namespace gyre

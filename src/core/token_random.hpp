#pragma once
// Random inputs that every rank can generate itself. A value depends only on the seed, the tensor,
// the token and the position in the token's row, not on layouts, ranks or the order of calls. A
// reference can therefore generate single rows of a tensor that no rank holds in full.
//
//     row key   = mix(mix(mix(seed) + tensor) + token)
//     bits[i]   = mix(key + (i + 1) · golden)             i = head · head_dim + dim
//     value[i]  = (a + b + c + d - 131070) · 2^-16 · sqrt(3)   a..d: the 16-bit quarters of bits[i]
//
// mix and golden are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
// number generators", OOPSLA 2014); a row is the SplitMix64 stream of the row's key. The sum of
// four uniform variables is approximately normal: mean 0, variance 1, bounded by 2 sqrt(3),
// kurtosis 2.7 instead of 3. All arithmetic is integer except one exact conversion and one
// rounding, so the bits are the same on every machine.

#include <cstdint>
#include <span>

#include "core/matrix_ref.hpp"

namespace gyre {

inline constexpr uint64_t splitmix64_golden = 0x9e3779b97f4a7c15U;

/// The output function of SplitMix64: a bijection that mixes all bits.
constexpr uint64_t splitmix64_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

/// Tensors of attention, then of log-probabilities. Any other number names a further tensor.
enum class TokenTensor : uint32_t {
  q,
  k,
  v,
  d_out,
  sinks,
  logits,
  teacher,
  hidden,
  weight,
  ids,
  gradient,
  d_logprobs
};

struct TokenRandom {
  uint64_t seed = 0;
  TokenTensor tensor = TokenTensor::q;
  bool round_to_bf16 = false;  ///< values are rounded to bf16, whatever type stores them
};

/// Fills `row` [width] with the token's row, from element `first` on. `token` identifies the token
/// in all layouts, such as its position in the stream of real tokens.
void fill_token_row(const TokenRandom& random, int64_t token, std::span<float> row,
                    int64_t first = 0);

/// Returns the 64 random bits that generate element `i` of a token's row.
uint64_t token_bits(const TokenRandom& random, int64_t token, int64_t i);

/// Fills row r of `rows` (f32 or bf16, any stride) with the row of tokens[r]; rows of negative
/// tokens (padding) are unchanged. Column 0 of `rows` is element `first` of the tokens' rows. bf16
/// rows are rounded even without round_to_bf16. tokens: [rows.rows].
void fill_token_rows(const TokenRandom& random, std::span<const int64_t> tokens, MatrixRef rows,
                     int64_t first = 0);

}  // namespace gyre

#include "core/token_random.hpp"

#include "core/error.hpp"

namespace gyre {
namespace {

uint64_t row_key(const TokenRandom& random, int64_t token) {
  const uint64_t tensor =
      splitmix64_mix(random.seed + splitmix64_golden) + static_cast<uint64_t>(random.tensor);
  return splitmix64_mix(splitmix64_mix(tensor) + static_cast<uint64_t>(token));
}

/// sqrt(3) · 2^-16: the sum of four uniform 16-bit variables has a variance of 2^32 / 3.
constexpr float unit = 1.7320508075688772F * 0x1p-16F;

float normal_of(uint64_t bits) {
  // Adds neighbouring 16-bit quarters, then the two sums. The result has 18 bits: exact in f32.
  constexpr uint64_t low = 0x0000ffff0000ffffU;
  const uint64_t pairs = (bits & low) + ((bits >> 16) & low);
  const auto sum = static_cast<int32_t>((pairs & 0xffffffffU) + (pairs >> 32));
  return static_cast<float>(sum - 2 * 0xffff) * unit;
}

uint64_t bits_of(uint64_t key, int64_t i) {
  return splitmix64_mix(key + (static_cast<uint64_t>(i) + 1) * splitmix64_golden);
}

/// Calls put(i, value) with element first + i of a token's row, for i < `width`.
template <class Put>
void draw_row(const TokenRandom& random, int64_t token, int64_t first, int64_t width, Put put) {
  const uint64_t key = row_key(random, token);
  for (int64_t i = 0; i < width; ++i) put(i, normal_of(bits_of(key, first + i)));
}

}  // namespace

uint64_t token_bits(const TokenRandom& random, int64_t token, int64_t i) {
  return bits_of(row_key(random, token), i);
}

void fill_token_row(const TokenRandom& random, int64_t token, std::span<float> row, int64_t first) {
  float* const data = row.data();
  if (random.round_to_bf16)
    draw_row(random, token, first, std::ssize(row),
             [=](int64_t i, float x) { data[i] = to_float(to_bf16(x)); });
  else
    draw_row(random, token, first, std::ssize(row), [=](int64_t i, float x) { data[i] = x; });
}

void fill_token_rows(const TokenRandom& random, std::span<const int64_t> tokens, MatrixRef rows,
                     int64_t first) {
  GYRE_CHECK(std::ssize(tokens) == rows.rows, "{} tokens for {} rows", tokens.size(), rows.rows);
  for (int64_t r = 0; r < rows.rows; ++r) {
    const int64_t token = tokens[r];
    if (token < 0) continue;
    if (rows.type == DType::f32) {
      fill_token_row(random, token, {rows.as<float>().row(r), static_cast<size_t>(rows.cols)},
                     first);
    } else {
      bf16* const data = rows.as<bf16>().row(r);
      draw_row(random, token, first, rows.cols, [=](int64_t i, float x) { data[i] = to_bf16(x); });
    }
  }
}

}  // namespace gyre

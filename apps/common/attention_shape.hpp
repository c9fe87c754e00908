#pragma once
// Options that describe the attention and the machine, for programs that plan without a machine
// file.

#include <cstdint>
#include <string>

#include "report/options.hpp"
#include "sharding/layouts.hpp"

namespace gyre {

struct AttentionShape {
  int heads = 32, kv_heads = 8, head_dim = 128;
  std::string dtype = "bf16";  ///< of keys and values
  double tflops = 400;         ///< achieved by one rank
  double gbytes_per_s = 50;    ///< received by one rank
  bool operator==(const AttentionShape&) const = default;
  int64_t element_bytes() const { return dtype == "f32" ? 4 : 2; }
  double kv_token_bytes() const { return 2.0 * kv_heads * head_dim * element_bytes(); }
  TimeModel time_model() const {
    return {4.0 * heads * head_dim / (tflops * 1e12), kv_token_bytes() / (gbytes_per_s * 1e9)};
  }
};

inline constexpr const char* attention_options =
    "--heads, --kv-heads, --head-dim, --dtype, --tflops and --gbps";
/// Declares these options.
void declare_attention_shape(OptionTable& table, AttentionShape& shape);

}  // namespace gyre

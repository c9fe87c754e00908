#include "apps/common/attention_shape.hpp"

#include "apps/common/workload_options.hpp"

namespace gyre {

void declare_attention_shape(OptionTable& table, AttentionShape& shape) {
  const AddOptions add(table, "Problem"), plan(table, "Plan");
  add("--heads", "Query heads, from which times are estimated", shape.heads, 1, max_ranks);
  add("--kv-heads", "Key and value heads, from which bytes are estimated", shape.kv_heads, 1,
      max_ranks);
  add("--head-dim", "Elements of a head", shape.head_dim, 1, max_ranks);
  add.choice("-d,--dtype", "Type of keys and values", shape.dtype, activation_type_names());
  plan("--tflops", "Rate of attention on a rank, TFLOP/s, from which times are estimated",
       shape.tflops, positive);
  plan("--gbps", "Rate at which a rank receives, GB/s, from which times are estimated",
       shape.gbytes_per_s, positive);
}

}  // namespace gyre

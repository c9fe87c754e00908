#include "attention/kernels/emulated.hpp"

#include <algorithm>
#include <utility>

#include "attention/row_set.hpp"
#include "core/error.hpp"
#include "core/quantity.hpp"
#include "runtime/clock.hpp"
#include "runtime/sleep.hpp"

namespace gyre {
namespace {

class EmulatedKernel final : public BlockKernel {
 public:
  EmulatedKernel(KernelTime time, KernelSleep sleep)
      : time_(std::move(time)), sleep_(std::move(sleep)) {
    if (!sleep_.now) sleep_.now = monotonic_seconds;
    if (!sleep_.sleep_until) sleep_.sleep_until = gyre::sleep_until;
  }

  void forward(const ForwardBlock& block) override {
    const int64_t merged = block.overwrite ? 0 : query_elements(block, block.heads.value_dim());
    take_time({Pass::forward, block, false, false, merged});
  }
  void backward(const BackwardBlock& block) override {
    const bool d_q = block.d_q.data != nullptr, d_kv = block.d_k.data != nullptr;
    int64_t merged = 0;
    if (d_q && !block.overwrite_d_q) merged += query_elements(block, block.heads.head_dim);
    if (d_kv && !block.overwrite_d_kv) merged += key_elements(block);
    take_time({Pass::backward, block, d_q, d_kv, merged});
  }
  bool can_overwrite() const override { return true; }

 private:
  /// Elements in the result rows of the call's queries, whose heads have `dim` elements.
  static int64_t query_elements(const BlockInput& block, int64_t dim) {
    return queries_of(block.rectangles).count() * block.heads.heads * dim;
  }
  /// Elements in the rows of dK and dV of the call's keys.
  static int64_t key_elements(const BlockInput& block) {
    return keys_of(block.rectangles).count() * block.heads.kv_heads *
           (block.heads.head_dim + block.heads.value_dim());
  }
  void take_time(const KernelCall& call) {
    const double begin = sleep_.now();
    const double debt = std::max(0.0, late_ - (begin - end_));
    const double due = begin + std::max(0.0, time_(call) - debt);
    double now = sleep_.now();
    while (now < due) {
      const double event = sleep_.next_event ? std::max(now, sleep_.next_event()) : due;
      sleep_.sleep_until(std::min({due, now + sleep_.slice_s, event}));
      if (call.input.progress) call.input.progress();
      now = sleep_.now();
    }
    end_ = now;
    late_ = end_ - due;
  }

  KernelTime time_;
  KernelSleep sleep_;
  double end_ = 0, late_ = 0;  // of the latest call: its end, and its delay
};

}  // namespace

double flops_of(const KernelCall& call) {
  const BlockHeads& heads = call.input.heads;
  return flops_of_pair(call.pass, call.d_q, call.d_kv, heads.head_dim, heads.value_dim()) *
         (total_pairs(call.input.rectangles) * heads.heads);
}

KernelTime parse_kernel_time(std::string_view text) {
  constexpr std::string_view keys[] = {"tflops", "launch"};
  constexpr Unit no_unit[] = {{"", 1}};
  double tflops = 0, launch = 0;
  for (const Setting& s : parse_settings("compute", text, keys, "tflops=RATE and launch=TIME")) {
    if (s.key == "tflops") tflops = parse_quantity(s.value, no_unit).value_or(0);
    if (s.key == "tflops" && !(tflops > 0))
      throw_usage("compute: tflops is '{}'; it must be a number above 0, as in tflops=0.1",
                  s.value);
    if (s.key == "launch") launch = parse_time("compute", s);
  }
  if (tflops == 0) throw_usage("compute: '{}' has no tflops, as in tflops=0.1,launch=10us", text);
  return [flops_per_s = 1e12 * tflops, launch](const KernelCall& call) {
    return call.input.rectangles.empty() ? 0 : launch + flops_of(call) / flops_per_s;
  };
}

std::unique_ptr<BlockKernel> make_emulated_kernel(KernelTime time, KernelSleep sleep) {
  return std::make_unique<EmulatedKernel>(std::move(time), std::move(sleep));
}

}  // namespace gyre

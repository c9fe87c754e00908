#include "model/pass_work.hpp"

#include <variant>

namespace gyre {
namespace {

using namespace decoder_step;
using A = Activation;

class WorkCounter {
 public:
  WorkCounter(const ModelConfig& config, int tp, const DecoderTypes& types, int64_t rows)
      : config_(config), tp_(tp), types_(types), rows_(static_cast<double>(rows)) {}

  StepWork operator()(const Embed&) const {
    return memory(bytes(A::x) + width(A::x) * size_of(types_.activations));
  }
  StepWork operator()(const Norm& step) const {
    return memory(step.adds ? 2 * bytes(A::x) + bytes(A::partial) + bytes(A::h)
                            : bytes(A::x) + bytes(A::h));
  }
  StepWork operator()(const Linear& step) const {
    return {.flops = 2 * rows_ * static_cast<double>(width(step.in) * width(step.out))};
  }
  StepWork operator()(const AddBias& step) const { return memory(2 * bytes(step.data)); }
  StepWork operator()(const HeadNorm& step) const { return memory(2 * bytes(step.data)); }
  StepWork operator()(const Rope&) const {
    const StepWork whole = memory(2 * (bytes(A::q) + bytes(A::k)));
    const auto turned = static_cast<double>(config_.rotary_width());
    return {.bytes = whole.bytes * turned / static_cast<double>(config_.head_dim)};
  }
  StepWork operator()(const GateMultiply& step) const {
    return memory(2 * bytes(step.gate) + bytes(step.up));
  }
  StepWork operator()(const Score&) const {
    const int64_t vocab = scored_vocab(config_, tp_);
    StepWork work = memory(vocab * size_of(DType::f32));
    work.flops = 2 * rows_ * static_cast<double>(config_.hidden_size * vocab);
    return work;
  }
  StepWork operator()(const AllReduce&) const { return {}; }
  StepWork operator()(const Attention&) const { return {}; }
  StepWork operator()(const Relayout& step) const {
    return memory(bytes(step.from) + bytes(step.to));
  }
  /// Convolution, gates and norms; the recurrence is counted as attention is, from its plan.
  StepWork operator()(const Recurrence&) const {
    return memory(2 * (2 * bytes(A::mixer_q) + bytes(A::mixer_v)) + 2 * bytes(A::mixer_b) +
                  2 * bytes(A::mixer_z) + bytes(A::mixer_out));
  }
  StepWork operator()(const Again&) const { return {}; }  // copies only a few rows

 private:
  int64_t width(A a) const { return width_of(a, config_, tp_); }
  int64_t bytes(A a) const { return width(a) * size_of(types_.of(a)); }
  StepWork memory(int64_t bytes_of_row) const {
    return {.bytes = rows_ * static_cast<double>(bytes_of_row)};
  }

  const ModelConfig& config_;
  int tp_;
  DecoderTypes types_;
  double rows_;
};

}  // namespace

StepWork work_of(const DecoderOperation& operation, const ModelConfig& config, int tp,
                 const DecoderTypes& types, int64_t rows) {
  return std::visit(WorkCounter(config, tp, types, rows), operation);
}

void add_work(PassWork& work, std::span<const DecoderStep> steps, const ModelConfig& config, int tp,
              const DecoderTypes& types, int64_t slots, int64_t predictions) {
  bool scored = false;  // after Again, rows are predictions
  for (const DecoderStep& step : steps) {
    scored |= std::holds_alternative<Again>(step.operation);
    const StepWork one = work_of(step.operation, config, tp, types, scored ? predictions : slots);
    if (std::holds_alternative<Score>(step.operation)) {
      work.head_flops += one.flops;
      work.head_bytes += one.bytes;
    } else {
      work.linear_flops += one.flops;
      work.elementwise_bytes += one.bytes;
    }
  }
}

}  // namespace gyre

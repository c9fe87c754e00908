#pragma once
// The chunked kernel of a recurrence on CPUs.

#include <vector>

#include "recurrence/chunk.hpp"

namespace gyre {

class CpuRecurrenceKernel final : public RecurrenceKernel {
 public:
  CpuRecurrenceKernel(const RecurrenceShape& shape, int threads);

  Stream& stream() override { return stream_; }
  std::unique_ptr<ConvolutionKernel> convolution(const RecurrenceShape& shape) override {
    return std::make_unique<CpuConvolutionKernel>(shape, threads_);
  }
  void between_heads(const std::function<void()>& progress) override { progress_ = progress; }
  void forward(const RecurrenceData& data, TokenRun run, const RunStates& states) override;
  void backward(const RecurrenceData& data, TokenRun run, const RunStates& states) override;
  void summarize(const RecurrenceData& data, TokenRun run, std::span<float> map,
                 std::span<float> state) override;
  void summarize_back(const RecurrenceData& data, TokenRun run, std::span<float> d_state) override;
  void apply(std::span<const float> map, std::span<const float> state, bool transposed,
             std::span<float> into) override;
  void join(const RunMap& first, const RunMap& second, bool transposed, std::span<float> map,
            std::span<float> state) override;
  void identity(std::span<float> map, std::span<float> state) override;

 private:
  struct Scratch {
    RecurrenceChunk narrow, wide;  ///< for states, and for [B | M]
    std::vector<float> state;
    std::vector<float> states;    ///< [chunks, key_dim, value_dim]
    std::vector<float> d_q, d_k;  ///< [tokens of the run, key_dim] of a key head
  };
  void backward_head(const RecurrenceData& data, TokenRun run, const RunStates& states,
                     int64_t head, Scratch& scratch);

  /// Calls body(head, thread) for every head.
  void for_each_head(int64_t heads, const std::function<void(int64_t, int)>& body);

  int threads_;
  HostStream stream_;
  std::function<void()> progress_;
  std::vector<std::unique_ptr<Scratch>> scratch_;  // [threads]
};

}  // namespace gyre

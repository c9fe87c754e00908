#pragma once
// Executes the plan of a rank with a Communicator and a RecurrenceKernel, in the memory of its stream.
//
//     const auto kernel = make_recurrence_kernel(plan.computed(shape), threads, stream);
//     RecurrenceExecutor layer(plan, layout, group, *kernel);
//     fill layer.data()[RecurrenceArray::q], ...
//     layer.run(Pass::forward);             results in layer.data()[RecurrenceArray::out]
//     layer.run(Pass::backward);            results in ...[RecurrenceArray::d_q], ...
//
// A backward pass reads the states that the last forward pass has left. With a convolution, queries,
// keys and values are those before it, and so are their gradients; see convolution().

#include <map>
#include <memory>
#include <vector>

#include "comm/communicator.hpp"
#include "recurrence/convolution_stage.hpp"
#include "recurrence/head_transfer.hpp"
#include "recurrence/kernel.hpp"
#include "recurrence/plan.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Seconds of the host in one run.
struct RecurrenceTimes {
  double compute = 0;  ///< in the kernel
  double wait = 0;     ///< in Wait steps
};

/// Which steps of a plan to run. Without messages, states are those of an earlier run.
enum class RunSteps { all, compute_only, messages_only };

class RecurrenceExecutor {
 public:
  /// Allocates the arrays of a rank, rows of its slots. All arguments must outlive it.
  RecurrenceExecutor(const StatePlan& plan, const Layout& layout, Communicator& group,
                     RecurrenceKernel& kernel);
  RecurrenceExecutor(const RecurrenceExecutor&) = delete;
  RecurrenceExecutor& operator=(const RecurrenceExecutor&) = delete;
  ~RecurrenceExecutor() { kernel_.between_heads({}); }

  RecurrenceData& data() { return data_; }
  /// Takes the weights, and has their gradients; null: there is none.
  ConvolutionStage* convolution() { return convolution_.get(); }
  Stream& stream() { return stream_; }
  /// Sets all bytes of results and states; 0xff: NaN.
  void overwrite(std::byte value);
  /// A buffer of the plan; empty for -1.
  std::span<float> buffer(int index) {
    return index < 0 ? std::span<float>() : buffers_[index].span();
  }
  /// Returns when the stream has done all of it. Collective.
  RecurrenceTimes run(Pass pass, RunSteps what = RunSteps::all);

 private:
  struct Pending {
    WorkPtr work;
    const state_step::Exchange* step = nullptr;
    const state_step::HeadExchange* heads = nullptr;
    Buffer<float> sent, received;  // of an all-gather
  };
  void step(const state_step::Summarize& s, Pass pass);
  void step(const state_step::SummarizeBack& s, Pass pass);
  void step(const state_step::Exchange& s, Pass pass);
  void step(const state_step::Wait& s, Pass pass);
  void step(const state_step::Compose& s, Pass pass);
  void step(const state_step::Join& s, Pass pass);
  void step(const state_step::HeadExchange& s, Pass pass);
  void step(const state_step::Run& s, Pass pass);
  void step(const state_step::Convolve& s, Pass pass);
  void step(const state_step::ConvolveSlopes& s, Pass pass);
  void step(const state_step::ConvolveBack& s, Pass pass);
  TokenRun run_of(int part) const;
  void fill(std::span<float> all, std::byte value) {
    stream_.fill(all.data(), value, all.size_bytes());
  }
  void copy(std::span<const float> from, std::span<float> to) {
    stream_.copy(to.data(), from.data(), from.size_bytes());
  }
  /// The arrays whose rows parts are of, as the recurrence reads and writes them.
  const RecurrenceData& computed() const {
    if (convolution_) return convolution_->data();
    return heads_ ? heads_->gathered() : data_;
  }

  const StatePlan& plan_;
  Communicator& group_;
  RecurrenceKernel& kernel_;
  Stream& stream_;
  std::vector<Buffer<std::byte>> arrays_;
  RecurrenceData data_;
  std::unique_ptr<ConvolutionStage> convolution_;  // null without one
  std::unique_ptr<HeadTransfer> heads_;            // null if ranks do not exchange heads
  std::vector<Buffer<float>> buffers_;             // [plan_.buffers]
  std::map<int, Pending> pending_;                 // by exchange id
  std::vector<WorkPtr> in_stream_;                 // waited for by the stream, not by the host
};

}  // namespace gyre

#pragma once
// Arrays of a rank's convolution, and its steps.

#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "recurrence/kernel.hpp"
#include "recurrence/plan.hpp"
#include "runtime/buffer.hpp"

namespace gyre {

/// Owning rows of queries, keys and values.
struct ConvolutionArrays {
  ConvolutionArrays(const RecurrenceShape& shape, DType type, int64_t tokens, MemorySpace space);
  Buffer<std::byte> bytes;
  ConvolutionRows rows;
};

class ConvolutionStage {
 public:
  /// Convolves arrays of `layer`, in the heads of `shape` that the rank computes, with the resources
  /// and in the memory of `kernel`. All arguments but the shape must outlive the stage.
  ConvolutionStage(const StatePlan& plan, const RecurrenceShape& shape, const RecurrenceData& layer,
                   RecurrenceKernel& kernel);

  /// The arrays of the recurrence: q, k, v and their gradients are here, the others are the
  /// layer's.
  const RecurrenceData& data() const { return data_; }
  /// weights: [channels, width], of all heads, in host memory
  void set_weights(std::span<const float> weights);
  /// [channels, width]. After slopes(): sums of this rank, 0 in channels of other heads. After the
  /// all-reduce: sums of all ranks.
  std::span<float> weight_gradients() { return d_weights_.span(); }
  /// Sets all bytes of results and messages.
  void overwrite(std::byte value);

  void convolve(std::span<const int> parts);
  void slopes();
  void backward(std::span<const int> parts);
  /// Adds the slices of messages of the plan's pieces.
  void add_sends(const StateMessage& message, Pass pass, std::vector<SendSlice>& to);
  void add_recvs(const StateMessage& message, Pass pass, std::vector<RecvSlice>& to);

 private:
  /// Calls body(first of the layer's channels, first of the rank's, number) for each array.
  template <class Body>
  void for_each_channels(Body body) const;
  ConvolutionPart part(int index);
  void add_received(int index, const ConvolutionRows& added);
  void fill(std::span<float> all, std::byte value) {
    stream_.fill(all.data(), value, all.size_bytes());
  }

  const StatePlan& plan_;
  RecurrenceShape all_heads_, shape_;  // shape_: the heads that the rank computes
  RecurrenceData layer_, data_;
  Stream& stream_;
  std::unique_ptr<ConvolutionKernel> kernel_;
  ConvolutionArrays y_, d_y_;
  std::vector<ConvolutionArrays> histories_, d_histories_, added_;  // [parts]
  std::vector<ConvolutionArrays> received_;  // [plan_.history] gradients; empty if not of this rank
  Buffer<float> d_weights_;
};

/// Bytes that a stage allocates; `slots`: the rank's, in the layout. 0 without a convolution.
int64_t convolution_bytes(const StatePlan& plan, int64_t slots, const RecurrenceShape& shape);
/// Bytes that a plan needs beside the arrays of the layer: buffer_bytes() and these.
int64_t transient_bytes(const StatePlan& plan, const RecurrenceProblem& problem);

}  // namespace gyre

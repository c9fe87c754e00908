#pragma once
// The convolution as loops over elements and rows (runtime/for_rows.cuh): what a GPU runs. On the
// host it is slow, and for tests.

#include "recurrence/convolution.hpp"
#include "runtime/buffer.hpp"
#include "runtime/stream.hpp"

namespace gyre {

class StreamConvolutionKernel final : public ConvolutionKernel {
 public:
  /// The stream must outlive it.
  StreamConvolutionKernel(const RecurrenceShape& shape, Stream& stream);

  void set_weights(std::span<const float> weights) override;
  void forward(const ConvolutionPart& part) override;
  void slopes(const ConvolutionPart& part) override;
  void backward(const ConvolutionPart& part) override;
  void clear_weight_gradients() override;
  void weight_gradients(int64_t first, std::span<float> to) override;

 private:
  void add_weight_gradients(const ConvolutionPart& part, size_t array);

  RecurrenceShape shape_;
  Stream& stream_;
  Buffer<float> taps_;     // [width, channels]
  Buffer<double> d_taps_;  // [width, channels]
  Buffer<double> sums_;    // [blocks of tokens, width, columns] of the array that is added
};

}  // namespace gyre

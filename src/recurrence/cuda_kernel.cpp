#include "recurrence/cuda_kernel.hpp"

#include <cuda_runtime_api.h>

#include "core/error.hpp"
#include "recurrence/cuda_chunk.hpp"
#include "recurrence/state_maps.hpp"
#include "recurrence/stream_convolution.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_check.hpp"

namespace gyre {
namespace {

using Array = RecurrenceArray;

void check_shape(const RecurrenceShape& shape) {
  if (shape.key_dim > cuda_recurrence_largest_key_dim)
    throw_usage("a recurrence on a GPU with {} elements of a key; at most {}", shape.key_dim,
                cuda_recurrence_largest_key_dim);
  int device = 0, most = 0;
  GYRE_CHECK_CUDA(cudaGetDevice(&device));
  GYRE_CHECK_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (const int64_t bytes = chunk_shared_bytes(shape.key_dim); bytes > most)
    throw_usage("{} elements of a key need {} bytes of a GPU's shared memory, and a block has {}",
                shape.key_dim, bytes, most);
}

class CudaRecurrenceKernel final : public RecurrenceKernel {
 public:
  CudaRecurrenceKernel(const RecurrenceShape& shape, Stream& stream, int64_t scratch)
      : RecurrenceKernel(shape), stream_(stream), maps_(shape, stream), scratch_(scratch) {
    check_shape(shape);
  }

  Stream& stream() override { return stream_; }
  std::unique_ptr<ConvolutionKernel> convolution(const RecurrenceShape& shape) override {
    return std::make_unique<StreamConvolutionKernel>(shape, stream_);
  }
  void forward(const RecurrenceData& data, TokenRun run, const RunStates& states) override {
    in_rounds(data, run, false, [&](const ChunkArgs& args) {
      launch_scan(
          args,
          {.before = states.before.data(), .behind = states.behind.data(), .writes_out = true},
          stream_);
    });
  }
  void backward(const RecurrenceData& data, TokenRun run, const RunStates& states) override {
    in_rounds(data, run, true, [&](const ChunkArgs& args) {
      launch_scan(args, {.before = states.before.data(), .keeps = true}, stream_);
      launch_scan_back(args, {states.d_behind.data(), states.d_before.data(), true}, stream_);
      launch_gradients(args, stream_);
    });
  }
  void summarize(const RecurrenceData& data, TokenRun run, std::span<float> map,
                 std::span<float> state) override {
    in_rounds(data, run, false, [&](const ChunkArgs& args) {
      launch_scan(args, {.behind = state.data(), .map = shape_.delta ? map.data() : nullptr},
                  stream_);
    });
    if (!shape_.delta && !map.empty())
      maps_.decays(data[Array::g].as<float>().rows_from(run.begin, run.tokens), map);
  }
  void summarize_back(const RecurrenceData& data, TokenRun run, std::span<float> d_state) override {
    in_rounds(data, run, false, [&](const ChunkArgs& args) {
      launch_scan_back(args, {.d_before = d_state.data()}, stream_);
    });
  }
  void apply(std::span<const float> map, std::span<const float> state, bool transposed,
             std::span<float> into) override {
    maps_.apply({map, state}, transposed, into);
  }
  void join(const RunMap& first, const RunMap& second, bool transposed, std::span<float> map,
            std::span<float> state) override {
    maps_.join(first, second, transposed, map, state);
  }
  void identity(std::span<float> map, std::span<float> state) override {
    maps_.identity(map, state);
  }

 private:
  /// Calls body(args) for groups of heads whose scratch is made, after their pairs.
  template <class Body>
  void in_rounds(const RecurrenceData& data, TokenRun run, bool backward, Body body) {
    ChunkArgs args = arguments(data, run);
    const int64_t together = heads_at_once(shape_, run.tokens, backward, scratch_);
    const Buffer<float> scratch = make_scratch(args, together, backward);
    for (int64_t head = 0; head < shape_.value_heads; head += together) {
      args.first_head = static_cast<int>(head);
      args.heads = static_cast<int>(std::min(together, shape_.value_heads - head));
      launch_pairs(args, stream_);
      body(args);
    }
  }
  ChunkArgs arguments(const RecurrenceData& data, TokenRun run) const {
    ChunkArgs args;
    for (int a = 0; a < recurrence_arrays; ++a) {
      const MatrixRef& array = data.arrays[a];
      if (array.empty()) continue;
      args.arrays[a] = {array.rows_from(run.begin, run.tokens).data, array.stride,
                        array.type == DType::bf16};
    }
    args.tokens = run.tokens;
    args.chunks = ceil_div(run.tokens, recurrence_chunk);
    args.keys = static_cast<int>(shape_.key_dim);
    args.values = static_cast<int>(shape_.value_dim);
    args.group = static_cast<int>(shape_.group());
    args.delta = shape_.delta;
    args.channel_decay = shape_.channel_decay;
    args.scale = shape_.scale;
    return args;
  }
  /// The stream orders its later users behind its work (cuda_memory.hpp).
  Buffer<float> make_scratch(ChunkArgs& args, int64_t heads, bool backward) const {
    const DeviceScratch of(shape_, backward);
    const int64_t slots = heads * args.chunks;
    Buffer<float> all(slots * of.elements(), MemorySpace::device);
    float* next = all.data();
    const auto take = [&](float*& to, int64_t elements) {
      to = next;
      next += slots * elements;
    };
    ChunkScratch& to = args.scratch;
    take(to.pairs, of.square);
    if (shape_.delta) {
      take(to.key_pairs, of.square);
      take(to.inverse, of.square);
    }
    if (!backward) return all;
    take(to.states, of.state);
    take(to.d_states, of.state);
    if (shape_.delta) {
      take(to.residual, of.values);
      take(to.y, of.values);
    }
    take(to.d_q, of.keys);
    take(to.d_k, of.keys);
    return all;
  }

  Stream& stream_;
  StateMaps maps_;
  int64_t scratch_;  // bytes of a round
};

}  // namespace

std::unique_ptr<RecurrenceKernel> make_cuda_recurrence_kernel(const RecurrenceShape& shape,
                                                              Stream& stream, int64_t scratch) {
  return std::make_unique<CudaRecurrenceKernel>(shape, stream, scratch);
}

}  // namespace gyre

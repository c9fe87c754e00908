#include "runtime/cuda_stream.hpp"

#include <utility>

#include "core/error.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_event.hpp"
#include "runtime/watchdog.hpp"

#ifdef GYRE_SOFTGPU
#include <softgpu_progress.h>
#endif

namespace gyre {
namespace {

/// Origin of marks; recorded work gets a new origin at each submission.
struct MarkClock {
  std::shared_ptr<ClockOrigin> origin;
};

class CudaMark final : public Mark {
 public:
  CudaMark(std::shared_ptr<MarkClock> clock, cudaStream_t stream, unsigned flags)
      : clock_(std::move(clock)) {
    event_.record(stream, flags);
  }
  double seconds() const override {
    return clock_->origin->seconds() + event_.seconds_since(clock_->origin->event());
  }

 private:
  std::shared_ptr<MarkClock> clock_;
  CudaEvent event_{cudaEventDefault};
};

/// An instantiated CUDA graph.
class CudaGraph {
 public:
  explicit CudaGraph(cudaGraph_t graph) {
    size_t nodes = 0;
    GYRE_CHECK_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
    nodes_ = static_cast<int64_t>(nodes);
    GYRE_CHECK_CUDA(cudaGraphInstantiate(&handle_, graph, 0));
  }
  ~CudaGraph() { (void)cudaGraphExecDestroy(handle_); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  void launch(cudaStream_t stream) { GYRE_CHECK_CUDA(cudaGraphLaunch(handle_, stream)); }
  int64_t nodes() const { return nodes_; }

 private:
  cudaGraphExec_t handle_ = nullptr;
  int64_t nodes_ = 0;
};

/// Captures the work submitted to a stream; drops it if an exception comes before the end. (By its
/// destructor: a catch would unwind `submit`, which may communicate; see Error in core/error.hpp.)
class Capture {
 public:
  /// `clock` is set while the stream records.
  Capture(cudaStream_t stream, std::shared_ptr<MarkClock>& clock) : stream_(stream), clock_(clock) {
    GYRE_CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  }
  ~Capture() {
    if (!ended_) (void)finish();
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
    if (!ended_) (void)cudaGetLastError();
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  cudaGraph_t end() {
    ended_ = true;
    GYRE_CHECK_CUDA(finish());
    return graph_;
  }

 private:
  cudaError_t finish() {
    clock_.reset();
    return cudaStreamEndCapture(stream_, &graph_);
  }

  cudaStream_t stream_;
  std::shared_ptr<MarkClock>& clock_;
  cudaGraph_t graph_ = nullptr;
  bool ended_ = false;
};

class CudaStream final : public Stream {
 public:
  CudaStream() { GYRE_CHECK_CUDA(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~CudaStream() override { (void)cudaStreamDestroy(handle_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  MemorySpace space() const override { return MemorySpace::device; }
  void synchronize() override {
    const WaitScope scope("work on the GPU");
    GYRE_CHECK_CUDA(cudaStreamSynchronize(handle_));
  }
  MarkPtr mark() override {
    if (clock_) return std::make_unique<CudaMark>(clock_, handle_, cudaEventRecordExternal);
    return std::make_unique<CudaMark>(new_clock(), handle_, cudaEventRecordDefault);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) GYRE_CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle_));
  }
  void fill(void* to, std::byte value, size_t bytes) override {
    if (bytes > 0)
      GYRE_CHECK_CUDA(cudaMemsetAsync(to, std::to_integer<int>(value), bytes, handle_));
  }
  std::unique_ptr<RecordedWork> record(const std::function<void()>& submit) override {
    const auto clock = std::make_shared<MarkClock>();
    Capture capture(handle_, clock_);
    clock_ = clock;
    submit();
    return std::make_unique<Recorded>(*this, clock, capture.end());
  }
  bool recording() const override { return clock_ != nullptr; }
  cudaStream_t handle() const { return handle_; }

 private:
  class Recorded final : public RecordedWork {
   public:
    Recorded(CudaStream& stream, std::shared_ptr<MarkClock> clock, cudaGraph_t graph)
        : stream_(stream), clock_(std::move(clock)), graph_(graph) {}
    void submit() override {
      clock_->origin = stream_.new_clock()->origin;
      graph_.launch(stream_.handle_);
    }
    int64_t operations() const override { return graph_.nodes(); }

   private:
    CudaStream& stream_;
    std::shared_ptr<MarkClock> clock_;
    CudaGraph graph_;
  };

  std::shared_ptr<MarkClock> new_clock() {
    origin_ = next_origin(*this, origin_);
    return std::make_shared<MarkClock>(MarkClock{origin_});
  }

  cudaStream_t handle_ = nullptr;
  std::shared_ptr<ClockOrigin> origin_;
  std::shared_ptr<MarkClock> clock_;  // of the recording in progress
};

}  // namespace

int usable_cuda_devices(std::string* why) {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code == cudaSuccess && devices > 0) return devices;
  (void)cudaGetLastError();
  if (why != nullptr) *why = describe_cuda(code == cudaSuccess ? cudaErrorNoDevice : code);
  return 0;
}

void move_device_on() {
#ifdef GYRE_SOFTGPU
  softgpu::progress();
#endif
}

std::unique_ptr<Stream> make_cuda_stream() {
  return std::make_unique<CudaStream>();
}

CUstream_st* cuda_handle(const Stream& stream) {
  const auto* cuda = dynamic_cast<const CudaStream*>(&stream);
  GYRE_CHECK(cuda != nullptr, "not a CUDA stream");
  return cuda->handle();
}

}  // namespace gyre

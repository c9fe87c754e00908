#include "runtime/cuda_stream.hpp"

#include <utility>

#include "core/error.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_event.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

class CudaMark final : public Mark {
 public:
  CudaMark(std::shared_ptr<ClockOrigin> origin, cudaStream_t stream) : origin_(std::move(origin)) {
    event_.record(stream);
  }
  double seconds() const override {
    return origin_->seconds() + event_.seconds_since(origin_->event());
  }

 private:
  std::shared_ptr<ClockOrigin> origin_;
  CudaEvent event_{cudaEventDefault};
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
    origin_ = next_origin(*this, origin_);
    return std::make_unique<CudaMark>(origin_, handle_);
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes > 0) GYRE_CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle_));
  }
  void fill(void* to, std::byte value, size_t bytes) override {
    if (bytes > 0)
      GYRE_CHECK_CUDA(cudaMemsetAsync(to, std::to_integer<int>(value), bytes, handle_));
  }
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
  std::shared_ptr<ClockOrigin> origin_;
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

std::unique_ptr<Stream> make_cuda_stream() {
  return std::make_unique<CudaStream>();
}

CUstream_st* cuda_handle(const Stream& stream) {
  const auto* cuda = dynamic_cast<const CudaStream*>(&stream);
  GYRE_CHECK(cuda != nullptr, "not a CUDA stream");
  return cuda->handle();
}

}  // namespace gyre

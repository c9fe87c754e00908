#include "comm/cuda_nccl.hpp"
#include "core/error.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

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
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
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

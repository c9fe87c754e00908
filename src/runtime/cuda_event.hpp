#pragma once
// CUDA events, for sources that call CUDA.

#include <cuda_runtime_api.h>

#include "runtime/cuda_check.hpp"

namespace gyre {

class CudaEvent {
 public:
  explicit CudaEvent(unsigned flags = cudaEventDisableTiming) {
    GYRE_CHECK_CUDA(cudaEventCreateWithFlags(&handle_, flags));
  }
  ~CudaEvent() { (void)cudaEventDestroy(handle_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream) { GYRE_CHECK_CUDA(cudaEventRecord(handle_, stream)); }
  /// Work submitted to `stream` from now on comes after what was recorded.
  void hold(cudaStream_t stream) const { GYRE_CHECK_CUDA(cudaStreamWaitEvent(stream, handle_, 0)); }
  /// Whether what was recorded is done.
  bool done() const {
    const cudaError_t state = cudaEventQuery(handle_);
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check_cuda(state, "cudaEventQuery", __FILE__, __LINE__);
    return true;
  }
  /// Between two events that are done and were made with cudaEventDefault.
  double seconds_since(const CudaEvent& earlier) const {
    float milliseconds = 0;
    GYRE_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, earlier.handle_, handle_));
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

}  // namespace gyre

#pragma once
// CUDA events, for sources that call CUDA.

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>
#include <vector>

#include "runtime/clock.hpp"
#include "runtime/cuda_check.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre {

class CudaEvent {
 public:
  explicit CudaEvent(unsigned flags = cudaEventDisableTiming) {
    GYRE_CHECK_CUDA(cudaEventCreateWithFlags(&handle_, flags));
  }
  ~CudaEvent() { (void)cudaEventDestroy(handle_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(cudaStream_t stream, unsigned flags = cudaEventRecordDefault) {
    GYRE_CHECK_CUDA(cudaEventRecordWithFlags(handle_, stream, flags));
  }
  /// Work submitted to `stream` from now on comes after what was recorded.
  void wait_on_stream(cudaStream_t stream) const {
    GYRE_CHECK_CUDA(cudaStreamWaitEvent(stream, handle_, 0));
  }
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

/// An event whose time on the host's clock is known, for others to be measured from. CUDA tells the
/// time between two events in float milliseconds, which 100 s apart are steps of 8 us, so that
/// origins follow each other on a stream, and each is measured from the one before:
///
///     first origin     the host's clock when the stream has reached it
///     every other      origin before + time between the two, added up in double
class ClockOrigin {
 public:
  /// Records the event. The first of a stream waits for it; one with an origin `before` it on the
  /// same stream does not.
  explicit ClockOrigin(Stream& stream, std::shared_ptr<ClockOrigin> before = nullptr)
      : before_(std::move(before)) {
    event_.record(cuda_handle(stream));
    if (!before_) stream.synchronize();
    made_ = monotonic_seconds();
    if (!before_) seconds_ = made_;
  }
  /// Origins that nobody asked may be many, and would otherwise go by recursion.
  ~ClockOrigin() {
    while (before_ && before_.use_count() == 1) before_ = std::exchange(before_->before_, nullptr);
  }
  ClockOrigin(const ClockOrigin&) = delete;
  ClockOrigin& operator=(const ClockOrigin&) = delete;

  const CudaEvent& event() const { return event_; }
  /// When it was submitted, on the host's monotonic clock.
  double made() const { return made_; }
  /// When it was reached, on the same clock. Only when it is done; the origins before it are
  /// measured first, and forgotten.
  double seconds() {
    std::vector<ClockOrigin*> unknown;
    for (ClockOrigin* origin = this; origin->before_; origin = origin->before_.get())
      unknown.push_back(origin);
    for (auto origin = unknown.rbegin(); origin != unknown.rend(); ++origin) {
      const ClockOrigin& before = *(*origin)->before_;
      (*origin)->seconds_ = before.seconds_ + (*origin)->event_.seconds_since(before.event_);
      (*origin)->before_.reset();
    }
    return seconds_;
  }

 private:
  CudaEvent event_{cudaEventDefault};
  std::shared_ptr<ClockOrigin> before_;  // none: seconds_ is known
  double made_ = 0, seconds_ = 0;
};

/// The origin for what is marked in a stream now, when `last` was the one before, or none: a new
/// one after 0.25 s, so that CUDA tells times from it in steps of at most 15 ns.
inline std::shared_ptr<ClockOrigin> next_origin(Stream& stream, std::shared_ptr<ClockOrigin> last) {
  constexpr double renewed_after = 0.25;
  if (last && monotonic_seconds() <= last->made() + renewed_after) return last;
  return std::make_shared<ClockOrigin>(stream, std::move(last));
}

}  // namespace gyre

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
  /// Makes work that is submitted to `stream` from now on wait for the recorded work.
  void wait_on_stream(cudaStream_t stream) const {
    GYRE_CHECK_CUDA(cudaStreamWaitEvent(stream, handle_, 0));
  }
  /// Whether the recorded work is done.
  bool done() const {
    const cudaError_t state = cudaEventQuery(handle_);
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check_cuda(state, "cudaEventQuery", __FILE__, __LINE__);
    return true;
  }
  /// Time between two events that are done and were created with cudaEventDefault.
  double seconds_since(const CudaEvent& earlier) const {
    float milliseconds = 0;
    GYRE_CHECK_CUDA(cudaEventElapsedTime(&milliseconds, earlier.handle_, handle_));
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

/// An event with a known time on the host's clock, from which other events are measured. CUDA
/// returns the time between two events in float milliseconds: at 100 s the resolution is 8 us.
/// Origins therefore follow each other on a stream, each measured from the one before:
///
///     first origin     the host's clock when the stream has reached it
///     every other      origin before + time between the two, added up in double
class ClockOrigin {
 public:
  /// Records the event. `before` is the previous origin of the stream; without one, waits for the
  /// event.
  explicit ClockOrigin(Stream& stream, std::shared_ptr<ClockOrigin> before = nullptr)
      : before_(std::move(before)) {
    event_.record(cuda_handle(stream));
    if (!before_) stream.synchronize();
    made_ = monotonic_seconds();
    if (!before_) seconds_ = made_;
  }
  /// Frees the chain of unmeasured origins in a loop, because it may be too long for recursion.
  ~ClockOrigin() {
    while (before_ && before_.use_count() == 1) before_ = std::exchange(before_->before_, nullptr);
  }
  ClockOrigin(const ClockOrigin&) = delete;
  ClockOrigin& operator=(const ClockOrigin&) = delete;

  const CudaEvent& event() const { return event_; }
  /// Submission time, on the host's monotonic clock.
  double made() const { return made_; }
  /// Time when the stream reached the event, on the host's monotonic clock; the event must be done.
  /// Measures the origins before it first and frees them.
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
  std::shared_ptr<ClockOrigin> before_;  // null: seconds_ is known
  double made_ = 0, seconds_ = 0;
};

/// Returns the origin for a mark made now in a stream: `last`, or a new one if there is none or it
/// is older than 0.25 s, so that CUDA's resolution is at most 15 ns.
inline std::shared_ptr<ClockOrigin> next_origin(Stream& stream, std::shared_ptr<ClockOrigin> last) {
  constexpr double renewed_after = 0.25;
  if (last && monotonic_seconds() <= last->made() + renewed_after) return last;
  return std::make_shared<ClockOrigin>(stream, std::move(last));
}

}  // namespace gyre

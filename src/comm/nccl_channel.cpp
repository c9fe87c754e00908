#include "comm/nccl_channel.hpp"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "runtime/host.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {

CommStream::CommStream() {
  int least = 0, greatest = 0;
  GYRE_CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  GYRE_CHECK_CUDA(cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, greatest));
}

CommStream::~CommStream() {
  (void)cudaStreamSynchronize(handle_);
  (void)cudaStreamDestroy(handle_);
}

std::span<std::byte> CommStream::staging(int64_t bytes) {
  if (bytes == 0) return {};
  if (staging_.empty() || staging_.back().size() < bytes) {
    const int64_t twice = staging_.empty() ? 0 : 2 * staging_.back().size();
    staging_.emplace_back(std::max(bytes, twice), MemorySpace::device);
  }
  return staging_.back().span();
}

/// Synchronizes, because work on another stream may still use the memory of `flag`.
Channel::Channel(std::shared_ptr<CommStream> shared) : comm_stream(std::move(shared)) {
  GYRE_CHECK_CUDA(cudaDeviceSynchronize());
  GYRE_CHECK_CUDA(cudaMemsetAsync(flag.data(), 0, sizeof(int32_t), stream()));
}

/// ncclCommDestroy waits for the peers, which may never come when an error ends the run.
Channel::~Channel() {
  if (comm == nullptr) return;
  (void)(std::uncaught_exceptions() > 0 ? ncclCommAbort(comm) : ncclCommDestroy(comm));
}

void Channel::require_usable(std::string_view what) const {
  if (comm == nullptr)
    throw_runtime("{}: the NCCL communicator was aborted after an earlier error", what);
}

ncclResult_t Channel::settled(ncclResult_t result, std::string_view call) {
  if (result != ncclInProgress) return result;
  const WaitScope scope(call, world_ranks);
  while (result == ncclInProgress) {
    sched_yield();
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
    if (asked != ncclSuccess) result = asked;
  }
  return result;
}

void Channel::check(ncclResult_t result, std::string_view call, std::string_view file, int line) {
  const ncclResult_t final_result = settled(result, call);
  if (final_result != ncclSuccess) fail(final_result, call, file, line);
}

void Channel::check_progress(std::string_view what) {
  require_usable(what);
  ncclResult_t state = ncclSuccess;
  GYRE_CHECK_NCCL(*this, ncclCommGetAsyncError(comm, &state));
  if (state != ncclSuccess && state != ncclInProgress) fail(state, what, __FILE__, __LINE__);
}

void Channel::fail(ncclResult_t result, std::string_view call, std::string_view file, int line) {
  const char* last = ncclGetLastError(comm);
  const std::string detail = last == nullptr || *last == '\0' ? "no further message" : last;
  if (comm != nullptr) (void)ncclCommAbort(std::exchange(comm, nullptr));
  (void)cudaGetLastError();
  throw_runtime("{} failed at {}:{} on rank {} of {} (host {}): {}; NCCL's last error: {}", call,
                file.substr(file.rfind('/') + 1), line, rank, size, host_name(),
                ncclGetErrorString(result), detail);
}

Group::Group(Channel& channel) : channel_(channel) {
  GYRE_CHECK_NCCL(channel_, ncclGroupStart());
}

void Group::send(std::span<const std::byte> data, int peer) {
  note(ncclSend(data.data(), data.size(), ncclUint8, peer, channel_.comm, channel_.stream()),
       "ncclSend");
}

void Group::recv(std::span<std::byte> data, int peer) {
  note(ncclRecv(data.data(), data.size(), ncclUint8, peer, channel_.comm, channel_.stream()),
       "ncclRecv");
}

void Group::end() {
  const ncclResult_t closed = ncclGroupEnd();
  channel_.check(first_error_, failed_call_, __FILE__, __LINE__);
  channel_.check(closed, "ncclGroupEnd", __FILE__, __LINE__);
}

void Group::note(ncclResult_t result, const char* call) {
  if (first_error_ != ncclSuccess || result == ncclSuccess || result == ncclInProgress) return;
  first_error_ = result;
  failed_call_ = call;
}

}  // namespace gyre

#pragma once
// Shared parts of the NCCL operations: the communication stream, an NCCL communicator with its
// errors, and groups of point-to-point calls. For nccl*.cpp.

#include <nccl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/buffer.hpp"
#include "runtime/cuda_check.hpp"

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0),
              "Gyre needs NCCL 2.18 or later: ncclCommSplit");

namespace gyre {

/// The stream of all communication of this process. Its priority lets a transfer start while the
/// kernels of the caller's stream fill the device.
class CommStream {
 public:
  CommStream();
  /// Synchronizes, so that the staging memory is no longer in use when it is freed.
  ~CommStream();
  CommStream(const CommStream&) = delete;
  CommStream& operator=(const CommStream&) = delete;

  cudaStream_t handle() const { return handle_; }

  /// At least `bytes` bytes of device memory for the next operation. Operations run in stream
  /// order, so all share one buffer. A buffer that has become too small is kept until the end,
  /// because an operation in flight may still use it.
  std::span<std::byte> staging(int64_t bytes);

 private:
  cudaStream_t handle_ = nullptr;
  std::vector<Buffer<std::byte>> staging_;
};

/// An NCCL communicator and the state shared by its operations; each Work keeps it alive.
struct Channel {
  explicit Channel(std::shared_ptr<CommStream> shared);
  /// Destroys the communicator, or aborts it while an exception ends the run.
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  cudaStream_t stream() const { return comm_stream->handle(); }
  size_t index() const { return static_cast<size_t>(rank); }

  /// Throws a runtime error if the communicator was aborted.
  void require_usable(std::string_view what) const;
  /// Waits while `result` is ncclInProgress, which calls return with NCCL_COMM_BLOCKING=0; `call`
  /// names the wait. Returns the final result.
  ncclResult_t settled(ncclResult_t result, std::string_view call);
  /// Throws by fail() if `result` is an error, once it is settled.
  void check(ncclResult_t result, std::string_view call, std::string_view file, int line);
  /// Throws if a started operation has failed since, by a dead peer or a lost link.
  void check_progress(std::string_view what);
  /// Aborts the communicator and throws a runtime error that names call, place, rank and host.
  [[noreturn]] void fail(ncclResult_t result, std::string_view call, std::string_view file,
                         int line);

  ncclComm_t comm = nullptr;
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;  ///< the members' ranks in the world, for the watchdog's report
  std::shared_ptr<CommStream> comm_stream;
  Buffer<int32_t> flag{1, MemorySpace::device};  ///< operand of the barrier's reduction
};

#define GYRE_CHECK_NCCL(channel, call) (channel).check((call), #call, __FILE__, __LINE__)

/// Registers a symmetric window (NCCL 2.27) of the communicator on `memory`, valid while the result
/// lives. Returns nullptr on all ranks if one has another size or `memory` is not the beginning of
/// a block of ncclMemAlloc. least(x) returns the minimum of x over all ranks. Collective.
std::shared_ptr<void> register_nccl_window(const std::shared_ptr<Channel>& channel,
                                           std::span<std::byte> memory,
                                           const std::function<int64_t(int64_t)>& least);

/// Point-to-point calls that start together. An error is thrown after the group is closed, because
/// a communicator cannot be aborted while a group is open.
class Group {
 public:
  explicit Group(Channel& channel);
  void send(std::span<const std::byte> data, int peer);
  void recv(std::span<std::byte> data, int peer);
  void end();

 private:
  void note(ncclResult_t result, const char* call);

  Channel& channel_;
  ncclResult_t first_error_ = ncclSuccess;
  const char* failed_call_ = "";
};

}  // namespace gyre

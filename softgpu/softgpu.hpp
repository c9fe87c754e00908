#pragma once
// The inside of the software GPU: memory, queues of work, and how launches are run. One thread of
// the host does everything; see README.md.

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "cuda_runtime.h"
#include "softgpu_progress.h"

namespace softgpu {

constexpr size_t memory_bytes = size_t{2} << 30;
constexpr size_t shared_bytes_of_block = 227 * 1024;

/// Of this process: GYRE_SOFTGPU_DEVICES, or 1.
int devices();
/// Remembers an error for cudaGetLastError, and returns it.
cudaError_t note(cudaError_t error);

/// The process that used the device first: others are its forks.
pid_t owning_process();

/// Ends the program: a kernel or a call is wrong in a way that a GPU would not survive either.
[[noreturn]] void die(const std::string& why);

// ---- memory.cpp: device memory is out of the host's reach unless a DeviceAccess lives.

class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;
};

/// Null, and the bytes of the request, when it does not fit.
void* allocate_device(size_t bytes);
/// False: nothing was allocated there.
bool release_device(void* pointer);
void* allocate_pinned(size_t bytes);
bool release_pinned(void* pointer);
size_t used_device_bytes();

enum class Place { pageable, pinned, device };
Place place_of(const void* pointer);
/// Whether `bytes` bytes from `pointer` lie in one allocation, or in pageable memory.
bool is_inside(const void* pointer, size_t bytes);

/// Memory whose end is followed by an inaccessible page, for shared memory and stacks.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t bytes, bool guard_behind);
  std::byte* begin() const { return begin_; }
  std::byte* end() const { return end_; }

 private:
  std::byte* begin_;
  std::byte* end_;
};

/// For the report of a kernel that touches what it should not: what runs, or an empty text.
/// Called from a signal handler.
void describe_running(char* text, size_t bytes);
/// Whether an address is right behind the dynamic shared memory of a block.
bool behind_shared_memory(const void* address);

// ---- streams.cpp

enum class Step { waits, moved, done };
struct Graph;

/// A point in a stream's work.
struct Record {
  CUstream_st* stream = nullptr;
  bool reached = false;
  double seconds = 0;
};

/// One piece of a stream's work.
struct Task {
  std::function<Step()> step;                ///< called until it is done
  std::shared_ptr<Record> after;             ///< not before this is reached
  bool network = false;                      ///< another process waits for it
  const void* host[2] = {nullptr, nullptr};  ///< pinned memory that it uses
};

/// Appends to the queue of `stream`; null: the default stream.
void submit(cudaStream_t stream, Task task);
/// `run` as a task.
void submit(cudaStream_t stream, std::function<void()> run);
/// A task that keeps what it has come to: each launch of a graph needs one of its own.
void submit_made(cudaStream_t stream, std::function<Task()> make);
/// Runs all work of a stream, or of all, that has been submitted so far.
void finish(cudaStream_t stream);
void finish_all();
/// Runs work until `done` says so.
void run_until(const std::function<bool()>& done);
/// Whether a task that is not done uses pinned memory in [begin, end).
bool in_use(const void* begin, const void* end);

// ---- graphs.cpp

/// Whether work of the stream is being recorded.
bool is_recorded(cudaStream_t stream);
/// What a call that waits for the device, or gets memory, returns while a stream is recorded.
cudaError_t refuse_while_recording();
/// Breaks the recording of a stream and returns the error; cudaSuccess where none is recorded.
cudaError_t refuse_in_recorded(cudaStream_t stream);

// ---- nccl.cpp

/// Between ncclGroupStart and ncclGroupEnd, where nothing has been submitted yet.
bool in_nccl_group();

// ---- fibers.cpp

/// In which order the blocks of a launch, the warps of a block and the lanes of a warp take their
/// turns. A kernel without races gives the same result in all of them.
enum class LaneOrder { forward, reverse, drawn };

/// Runs all blocks of a launch, one after the other.
void run_grid(const LaunchShape& shape, const std::function<void()>& body, LaneOrder order);
// ---- races.cpp

/// A thread between two barriers of its block, and two functions of its warp.
struct Turn {
  uint64_t interval = 0;  ///< another one for every interval of every block
  uint64_t syncs = 0;     ///< functions of the warp so far
  int thread = 0;         ///< of the block
};
struct SharedRange {
  const std::byte* begin = nullptr;
  size_t bytes = 0;
  bool has(const void* address) const { return offset(address) < bytes; }
  size_t offset(const void* address) const {
    return static_cast<size_t>(reinterpret_cast<uintptr_t>(address) -
                               reinterpret_cast<uintptr_t>(begin));
  }
};
/// Where __shared__ variables lie, which are thread_local here.
SharedRange fixed_shared_memory();
/// Notes an access to dynamic shared memory, or to that of variables. Returns a thread with which
/// it races, or -1.
int note_access(bool is_dynamic, size_t offset, size_t bytes, Access access, const Turn& now);

}  // namespace softgpu

#pragma once
// An ordered queue of work. A host stream runs the work at submission; a device stream runs it
// later, in order. Every asynchronous interface takes a stream, so schedules and apps are written
// once for all backends.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace gyre {

/// pinned: page-locked host memory, which a device accesses directly and copies at full speed.
enum class MemorySpace { host, device, pinned };
constexpr const char* name_of(MemorySpace space) {
  if (space == MemorySpace::host) return "host";
  return space == MemorySpace::device ? "device" : "pinned";
}

/// A point in a stream's work, and the time at which the stream reached it.
class Mark {
 public:
  virtual ~Mark() = default;
  /// Seconds on this host's monotonic clock. Valid only after Stream::synchronize().
  virtual double seconds() const = 0;
};
using MarkPtr = std::unique_ptr<Mark>;

/// Work of a stream that was recorded once and can be submitted again by one call.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
  /// Submits the work to the stream that recorded it. Its marks then hold the times of the latest
  /// submission.
  virtual void submit() = 0;
  /// Number of kernels, copies, fills and marks in one submission.
  virtual int64_t operations() const = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual MemorySpace space() const = 0;
  /// Blocks until all work submitted to this stream is done.
  virtual void synchronize() = 0;
  /// Marks the end of the work submitted so far.
  virtual MarkPtr mark() = 0;
  /// Copies between two addresses, at least one in this stream's space or pinned; fill() sets all
  /// bytes to one value. Both are ordered with the stream's other work. `from` and `to` must stay
  /// valid until the copy is done; pageable host memory may be accessed before the call returns.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  virtual void fill(void* to, std::byte value, size_t bytes) = 0;

  /// Records, without running it, the work that `submit` submits to this stream and to streams that
  /// fork from it and join it again: a CUDA graph. It records addresses, not contents. During
  /// `submit`, nothing may wait for the device, query it, allocate its memory, or copy from or to
  /// pageable host memory; this throws CUDA's error. The stream and the marks must outlive the
  /// result. Returns nullptr, without calling `submit`, if the stream cannot record.
  virtual std::unique_ptr<RecordedWork> record(const std::function<void()>& /*submit*/) {
    return nullptr;
  }
  /// Whether work is being recorded.
  virtual bool recording() const { return false; }
};

/// Host stream: runs all work at submission.
class HostStream final : public Stream {
 public:
  MemorySpace space() const override { return MemorySpace::host; }
  void synchronize() override {}
  MarkPtr mark() override;
  void copy(void* to, const void* from, size_t bytes) override;
  void fill(void* to, std::byte value, size_t bytes) override;
};

}  // namespace gyre

#pragma once
// An ordered queue of work. The host's stream does the work at submission; a device's stream does
// it later, in order. Every asynchronous interface takes a stream, so that schedules and apps are
// written once for all backends.

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
  /// Monotonic seconds on this host's clock. After Stream::synchronize() only.
  virtual double seconds() const = 0;
};
using MarkPtr = std::unique_ptr<Mark>;

/// Work of a stream that was recorded once, and is submitted again with one call.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
  /// Submits all of it to the stream that it was recorded from. Marks in it tell the times of the
  /// latest submission.
  virtual void submit() = 0;
  /// Kernels, copies, fills and marks that one submission stands for.
  virtual int64_t operations() const = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual MemorySpace space() const = 0;
  /// Blocks until all work submitted to this stream is done.
  virtual void synchronize() = 0;
  /// Marks what has been submitted so far.
  virtual MarkPtr mark() = 0;
  /// Copies between any two places, one of them in this stream's space or pinned; fills with one
  /// byte. In order with the stream's other work. `from` and `to` must stay valid until it is done;
  /// host memory that is not pinned may be read, or written, before the call returns.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  virtual void fill(void* to, std::byte value, size_t bytes) = 0;

  /// Records, and does not do, what `submit` submits to this stream, and to streams that wait for
  /// it and for which it waits in the end: a CUDA graph. Addresses are recorded, contents of arrays
  /// are not. Meanwhile nothing may wait for the device, ask how far it is, get memory of it, or
  /// copy from or to host memory that is not pinned; CUDA's error is thrown then. The stream and
  /// the marks must outlive the result. nullptr, and nothing is called, where a stream cannot
  /// record.
  virtual std::unique_ptr<RecordedWork> record(const std::function<void()>& /*submit*/) {
    return nullptr;
  }
  /// Whether work is being recorded.
  virtual bool recording() const { return false; }
};

/// The host's stream: everything is done at submission.
class HostStream final : public Stream {
 public:
  MemorySpace space() const override { return MemorySpace::host; }
  void synchronize() override {}
  MarkPtr mark() override;
  void copy(void* to, const void* from, size_t bytes) override;
  void fill(void* to, std::byte value, size_t bytes) override;
};

}  // namespace gyre

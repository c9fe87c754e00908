#pragma once
// An ordered queue of work. The host's stream does the work at submission; a device's stream does
// it later, in order. Every asynchronous interface takes a stream, so that schedules and apps are
// written once for all backends.

#include <cstddef>
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

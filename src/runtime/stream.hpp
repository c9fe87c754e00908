#pragma once
// An ordered queue of work. On the host, work is done when it is submitted; a CUDA stream keeps it
// in order on the device. Every asynchronous interface takes one from day one, so that schedules
// and apps are written once.

#include <memory>

namespace gyre {

enum class MemorySpace { host, device };

class Stream {
 public:
  virtual ~Stream() = default;
  virtual MemorySpace space() const = 0;
  /// Blocks until all work submitted to this stream is done.
  virtual void synchronize() = 0;
};

/// The host's stream: everything is done at submission.
class HostStream final : public Stream {
 public:
  MemorySpace space() const override { return MemorySpace::host; }
  void synchronize() override {}
};

}  // namespace gyre

#include "runtime/stream.hpp"

#include <cstring>

#include "runtime/clock.hpp"

namespace gyre {
namespace {

class HostMark final : public Mark {
 public:
  double seconds() const override { return seconds_; }

 private:
  double seconds_ = monotonic_seconds();
};

}  // namespace

MarkPtr HostStream::mark() {
  return std::make_unique<HostMark>();
}
void HostStream::copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);
}
void HostStream::fill(void* to, std::byte value, size_t bytes) {
  if (bytes > 0) std::memset(to, std::to_integer<int>(value), bytes);
}

}  // namespace gyre

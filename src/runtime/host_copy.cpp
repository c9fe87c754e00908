#include "runtime/host_copy.hpp"

namespace gyre {
namespace {

/// Bytes from the first element of a matrix to the end of its last one.
size_t extent_of(const ConstMatrixRef& m) {
  if (m.rows == 0 || m.cols == 0) return 0;
  return ((m.rows - 1) * m.stride + m.cols) * size_of(m.type);
}

}  // namespace

HostCopy::HostCopy(const ConstMatrixRef& from, Stream& stream) : matrix_(from) {
  stream.synchronize();
  if (stream.space() == MemorySpace::host) return;
  const size_t bytes = extent_of(from);
  copy_ = Buffer<std::byte>(bytes);
  stream.copy(copy_.data(), from.data, bytes);
  stream.synchronize();
  matrix_.data = copy_.data();
}

HostFill::HostFill(const MatrixRef& to, Stream& stream) : to_(to), stream_(stream), matrix_(to) {
  GYRE_CHECK(to.cols == to.stride, "{} of {} columns are to be filled in", to.cols, to.stride);
  if (stream.space() == MemorySpace::host) return;
  staging_ = Buffer<std::byte>(extent_of(to));
  matrix_.data = staging_.data();
}

void HostFill::upload() {
  if (stream_.space() == MemorySpace::host) return;
  stream_.copy(to_.data, matrix_.data, extent_of(to_));
  stream_.synchronize();
}

}  // namespace gyre

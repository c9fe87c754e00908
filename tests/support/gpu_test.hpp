#pragma once
// Tests on a stream. Those of a GPU, or of the software GPU, are skipped, with
// the reason, where there is none.

#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "runtime/buffer.hpp"
#include "runtime/cuda_stream.hpp"

namespace gyre::test {

/// A test with a stream, and arrays in its memory.
class StreamTest : public testing::Test {
 protected:
  virtual MemorySpace space() const = 0;
  void SetUp() override {
    std::string why;
    if (space() == MemorySpace::host)
      stream_ = std::make_unique<HostStream>();
    else if (usable_cuda_devices(&why) == 0)
      GTEST_SKIP() << why;
    else
      stream_ = make_cuda_stream();
  }
  /// Memory that the test has given back may be another stream's next.
  void TearDown() override {
    if (stream_ != nullptr) stream_->synchronize();
  }

  Stream& stream() { return *stream_; }

  template <class T>
  Buffer<T> to_device(std::span<const T> values) {
    Buffer<T> buffer(std::ssize(values), stream_->space());
    stream_->copy(buffer.data(), values.data(), values.size_bytes());
    stream_->synchronize();
    return buffer;
  }
  template <class T>
  std::vector<T> to_host(const Buffer<T>& buffer) {
    std::vector<T> values(static_cast<size_t>(buffer.size()));
    stream_->copy(values.data(), buffer.data(), values.size() * sizeof(T));
    stream_->synchronize();
    return values;
  }

 private:
  std::unique_ptr<Stream> stream_;
};

class GpuTest : public StreamTest {
 protected:
  MemorySpace space() const override { return MemorySpace::device; }
  CUstream_st* handle() { return cuda_handle(stream()); }
};

}  // namespace gyre::test

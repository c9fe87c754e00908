// Work of a stream that is recorded once and submitted many times.

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "gpu_test.hpp"
#include "runtime/cuda_event.hpp"
#include "runtime/cuda_memory.hpp"

namespace gyre {
namespace GYRE_FILE {

class Recorded : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) byte_ = Buffer<unsigned char>(2, MemorySpace::device);
  }
  unsigned char* byte(int i) { return byte_.data() + i; }
  void set(int i, int value) { stream().fill(byte(i), static_cast<std::byte>(value), 1); }
  /// What the two bytes are when everything is done.
  std::vector<unsigned char> bytes() { return to_host(byte_); }

 private:
  Buffer<unsigned char> byte_;
};
using Bytes = std::vector<unsigned char>;

TEST_F(Recorded, IsDoneByEachSubmissionAndNotBefore) {
  set(0, 1), set(1, 1);
  const auto work = stream().record([&] {
    EXPECT_TRUE(stream().recording());
    set(0, 2);
    stream().copy(byte(1), byte(0), 1);
  });
  EXPECT_FALSE(stream().recording());
  EXPECT_EQ(work->operations(), 2);
  EXPECT_EQ(bytes(), (Bytes{1, 1}));
  work->submit();
  EXPECT_EQ(bytes(), (Bytes{2, 2}));
  set(0, 3), set(1, 3);
  work->submit();
  set(0, 4);  // behind it
  EXPECT_EQ(bytes(), (Bytes{4, 2}));
}

TEST_F(Recorded, TakesInStreamsThatWaitForIt) {
  const auto other = make_cuda_stream();
  const auto work = stream().record([&] {
    CudaEvent begin, end;
    set(0, 5);
    begin.record(handle());
    begin.wait_on_stream(cuda_handle(*other));
    other->copy(byte(1), byte(0), 1);
    end.record(cuda_handle(*other));
    end.wait_on_stream(handle());
    set(0, 6);
  });
  EXPECT_EQ(work->operations(), 3);
  for (int i = 0; i < 2; ++i) {
    set(0, 1), set(1, 1);
    work->submit();
    EXPECT_EQ(bytes(), (Bytes{6, 5}));
  }
  other->fill(byte(0), std::byte{7}, 1);  // records no more
  other->synchronize();
  EXPECT_EQ(bytes(), (Bytes{7, 5}));
}

TEST_F(Recorded, RefusesAStreamThatDoesNotComeBack) {
  const auto other = make_cuda_stream();
  EXPECT_THROW(stream().record([&] {
    CudaEvent begin;
    begin.record(handle());
    begin.wait_on_stream(cuda_handle(*other));
    other->fill(byte(0), std::byte{1}, 1);
  }),
               Error);
  set(0, 8);
  EXPECT_EQ(bytes()[0], 8);
}

TEST_F(Recorded, RefusesWhatCannotBeRecorded) {
  unsigned char pageable = 0;
  Buffer<std::byte> kept(64, MemorySpace::device);
  CudaEvent done;
  done.record(handle());
  stream().synchronize();
  const std::vector<std::function<void()>> wrong = {
      [&] { stream().synchronize(); },
      [&] { GYRE_CHECK_CUDA(cudaDeviceSynchronize()); },
      [&] { Buffer<std::byte>(int64_t{77} << 20, MemorySpace::device); },
      [&] { (void)done.done(); },
      [&] { done.wait_on_stream(handle()); },  // of work that is not recorded
#ifdef GYRE_SOFTGPU                            // CUDA does not say
      [&] { stream().copy(&pageable, byte(0), 1); },
#endif
  };
  for (const auto& call : wrong) {
    EXPECT_THROW(stream().record([&] {
      set(0, 1);
      call();
    }),
                 Error);
    EXPECT_FALSE(stream().recording());
    (void)cudaGetLastError();
    set(0, 9);
    EXPECT_EQ(bytes()[0], 9);
  }
  EXPECT_EQ(pageable, 0);
}

TEST_F(Recorded, AnErrorOfTheCallersEndsIt) {
  EXPECT_THROW(stream().record([&] {
    set(0, 1);
    throw std::runtime_error("of the caller");
  }),
               std::runtime_error);
  EXPECT_FALSE(stream().recording());
  set(0, 2);
  EXPECT_EQ(bytes()[0], 2);
}

TEST_F(Recorded, MarksTellTheLatestSubmission) {
  MarkPtr first, second;
  const auto work = stream().record([&] {
    first = stream().mark();
    set(0, 1);
    second = stream().mark();
  });
  EXPECT_EQ(work->operations(), 3);
  double last = 0;
  for (int i = 0; i < 3; ++i) {
    const MarkPtr before = stream().mark();
    work->submit();
    const MarkPtr behind = stream().mark();
    stream().synchronize();
    constexpr double resolution = 2e-6;
    EXPECT_GE(first->seconds(), before->seconds() - resolution);
    EXPECT_GE(second->seconds(), first->seconds());
    EXPECT_LE(second->seconds(), behind->seconds() + resolution);
    EXPECT_GT(first->seconds(), last);
    last = second->seconds();
  }
}

TEST_F(Recorded, ReleasesOfDeviceMemoryAreCounted) {
  const int64_t before = cuda_releases();
  Buffer<float> kept(10, MemorySpace::device);
  { Buffer<float> pinned(10, MemorySpace::pinned); }
  EXPECT_EQ(cuda_releases(), before);
  kept = {};
  EXPECT_EQ(cuda_releases(), before + 1);
}

TEST(RecordedOnTheHost, IsNothing) {
  HostStream stream;
  bool called = false;
  EXPECT_EQ(stream.record([&] { called = true; }), nullptr);
  EXPECT_FALSE(called);
}

}  // namespace GYRE_FILE
}  // namespace gyre

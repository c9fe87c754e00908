// The NCCL communicator: every operation against the MPI communicator, its order with kernels, and
// its errors.

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "comm/agree.hpp"
#include "comm/nccl.hpp"
#include "device_comm_cases.hpp"
#include "mpi_test.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

#ifdef GYRE_SOFTGPU
#include <nccl.h>
#include <softgpu_progress.h>
#endif

namespace gyre::test {
namespace {

struct NcclBackend {
  static void prepare() {
#ifdef GYRE_SOFTGPU
    setenv("GYRE_SOFTGPU_DEVICES", std::to_string(world().size()).c_str(), 1);
#endif
    if (const int devices = usable_cuda_devices(); devices > 0)
      GYRE_CHECK_CUDA(cudaSetDevice(world().rank() % devices));
  }
  static std::unique_ptr<Communicator> make(Communicator& mpi, Stream&) {
    return make_nccl_communicator(mpi);
  }
};
GYRE_TEST_DEVICE_COMM(NcclBackend);

}  // namespace
}  // namespace gyre::test

namespace gyre {
namespace {

using test::CommGroup;
using test::OnStream;
using test::part;
using test::writable_part;

class Nccl : public test::DeviceComm<test::NcclBackend> {};

TEST_F(Nccl, BarriersAndOperationsUnderWayTogether) {
  for (const CommGroup& group : groups()) {
    OnStream<int32_t> a(std::vector<int32_t>(100, 1), stream());
    OnStream<int32_t> b(std::vector<int32_t>(100, 2), stream());
    WorkPtr first = group.comm->all_reduce(a.data(), 100, DType::i32, ReduceOp::sum, stream(), "a");
    WorkPtr barrier = group.comm->barrier(stream(), "barrier");
    WorkPtr last = group.comm->all_reduce(b.data(), 100, DType::i32, ReduceOp::sum, stream(), "b");
    while (!last->test()) {
    }
    EXPECT_TRUE(first->test() && barrier->test()) << "operations complete in order";
    for (WorkPtr* work : {&barrier, &last, &first}) (*work)->wait();
    EXPECT_EQ(a.values(), std::vector<int32_t>(100, group.comm->size()));
    EXPECT_EQ(b.values(), std::vector<int32_t>(100, 2 * group.comm->size()));
  }
}

TEST_F(Nccl, AnOperationStartsAfterTheWorkOfTheCallersStream) {
#ifdef GYRE_SOFTGPU
  constexpr int64_t count = int64_t{1} << 12;
#else
  constexpr int64_t count = int64_t{1} << 24;
#endif
  const CommGroup group = groups().front();
  const int n = group.comm->size(), me = group.comm->rank();
  Buffer<int32_t> data(count, MemorySpace::device), received(count, MemorySpace::device);
  const size_t bytes = static_cast<size_t>(count) * sizeof(int32_t);
  // The last of many fills is what the neighbour must get.
  for (int fill = 0; fill < 100; ++fill)
    GYRE_CHECK_CUDA(cudaMemsetAsync(data.data(), fill, bytes, cuda_handle(stream())));
  const SendSlice sends[] = {{(me + 1) % n, part<int32_t>(data.data(), 0, count)}};
  const RecvSlice recvs[] = {{(me + n - 1) % n, writable_part(received.data(), 0, count)}};
  group.comm->exchange(sends, recvs, stream(), "ordered")->wait();
  std::vector<int32_t> result(count);
  GYRE_CHECK_CUDA(cudaMemcpyAsync(result.data(), received.data(), bytes, cudaMemcpyDeviceToHost,
                                  cuda_handle(stream())));
  stream().synchronize();
  EXPECT_EQ(std::count(result.begin(), result.end(), 0x63636363), count);
}

// ---- the order of communication and kernels

__global__ void write_all(int32_t* data, int count, int32_t value) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) data[i] = value + i;
}
__global__ void add_all(const int32_t* from, int32_t* to, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) to[i] += from[i];
}

TEST_F(Nccl, HoldOrdersKernelsBehindTheOperation) {
  constexpr int count = 500;
  for (const CommGroup& group : groups()) {
    const int n = group.comm->size(), me = group.comm->rank();
    Buffer<int32_t> data(count, MemorySpace::device), received(count, MemorySpace::device);
    launch({4, 128, cuda_handle(stream())}, write_all, data.data(), count, 1000 * me);
    const SendSlice sends[] = {{(me + 1) % n, part<int32_t>(data.data(), 0, count)}};
    const RecvSlice recvs[] = {{(me + n - 1) % n, writable_part(received.data(), 0, count)}};
    WorkPtr work = group.comm->exchange(sends, recvs, stream(), "between kernels");
    work->wait_on_stream();
    launch({4, 128, cuda_handle(stream())}, add_all, received.data(), data.data(), count);
    std::vector<int32_t> result(count), expected(count);
    stream().copy(result.data(), data.data(), count * sizeof(int32_t));
    stream().synchronize();  // before wait(): only wait_on_stream() has ordered the kernel
    work->wait();
    work->wait_on_stream();  // nothing more to do
    work.reset();
    for (int i = 0; i < count; ++i) expected[i] = 1000 * me + 1000 * ((me + n - 1) % n) + 2 * i;
    EXPECT_EQ(result, expected) << group.name;
  }
}

TEST_F(Nccl, HoldOfWhatTheHostSubmittedWaits) {
  const CommGroup group = groups().front();
  Buffer<int32_t> data(1, MemorySpace::device);
  const int32_t one = 1;
  int32_t result = 0;
  GYRE_CHECK_CUDA(cudaMemcpy(data.data(), &one, sizeof(one), cudaMemcpyHostToDevice));
  // A copy from memory that is not pinned may still be under way when it returns.
  GYRE_CHECK_CUDA(cudaDeviceSynchronize());
  HostStream host;
  WorkPtr work = group.comm->all_reduce(data.data(), 1, DType::i32, ReduceOp::sum, host, "sum");
  work->wait_on_stream();
  GYRE_CHECK_CUDA(cudaMemcpy(&result, data.data(), sizeof(result), cudaMemcpyDeviceToHost));
  EXPECT_EQ(result, group.comm->size());
  work->wait();
}

TEST_F(Nccl, OperationsMoveOnWhileTheHostWaitsForOtherRanks) {
  const CommGroup group = groups().front();
  OnStream<int32_t> data(std::vector<int32_t>(10, 1), stream());
  WorkPtr work =
      group.comm->all_reduce(data.data(), 10, DType::i32, ReduceOp::sum, stream(), "sum");
  // The others come to the agreement only after the operation, which needs rank 0.
  if (group.comm->rank() != 0) work->wait();
  EXPECT_EQ(all_reduce_value(*group.mpi, int64_t{1}, ReduceOp::sum), group.mpi->size());
  work->wait();
  EXPECT_EQ(data.values(), std::vector<int32_t>(10, group.comm->size()));
}

TEST_F(Nccl, EmptyOperations) {
  for (const CommGroup& group : groups()) {
    Buffer<float> data(1, MemorySpace::device);
    std::vector<WorkPtr> works;
    const std::span<std::byte> none = writable_part(data.data(), 0, 0);
    works.push_back(group.comm->exchange({}, {}, stream(), "no slices"));
    const SendSlice sends[] = {{0, none}};
    works.push_back(group.comm->exchange(sends, {}, stream(), "no bytes"));
    works.push_back(group.comm->all_gather(none, none, stream(), "no bytes"));
    works.push_back(group.comm->broadcast(none, 0, stream(), "no bytes"));
    works.push_back(
        group.comm->all_reduce(data.data(), 0, DType::f32, ReduceOp::sum, stream(), "none"));
    for (const WorkPtr& work : works) work->wait();
  }
}

TEST_F(Nccl, ItsOwnMemoryHoldsAllArrays) {
  ASSERT_TRUE(use_nccl_memory());
  constexpr int64_t count = int64_t{3} << 18;  // 3 MiB
  for (const CommGroup& group : groups()) {
    Buffer<int32_t> large(count, MemorySpace::device);
    const auto bytes = std::as_writable_bytes(large.span());
    stream().fill(large.data(), std::byte{1}, bytes.size());
    group.comm->all_reduce(large.data(), count, DType::i32, ReduceOp::sum, stream(), "large")
        ->wait();
    std::vector<int32_t> sums(count);
    stream().copy(sums.data(), large.data(), bytes.size());
    stream().synchronize();
    EXPECT_EQ(std::count(sums.begin(), sums.end(), 0x01010101 * group.comm->size()), count);
#ifdef GYRE_SOFTGPU
    Buffer<int32_t> small(100, MemorySpace::device);
    EXPECT_TRUE(softgpu::is_nccl_memory(large.data()));
    EXPECT_TRUE(softgpu::is_nccl_memory(small.data()));
    // A window needs the begin of a block of NCCL's memory, and one size on all ranks.
    const auto window = group.comm->register_window(bytes);
    EXPECT_NE(window, nullptr);
    const bool alone = group.comm->size() == 1;
    EXPECT_EQ(group.comm->register_window(bytes.subspan(4096)), nullptr);
    if (!alone) {
      const size_t unlike = bytes.size() - (group.comm->rank() == 0 ? 4096 : 0);
      EXPECT_EQ(group.comm->register_window(bytes.first(unlike)), nullptr);
    }
    group.comm->all_reduce(large.data(), 8, DType::i32, ReduceOp::sum, stream(), "in a window")
        ->wait();
#endif
  }
}

#ifdef GYRE_SOFTGPU

// ---- errors, on the software GPU: what another GPU does with them is not said

/// `wait`: starts the operation "never done" and waits for it.
void expect_error_and_no_hang(Stream& stream, const std::function<void(Communicator&)>& wait) {
  if (test::world().size() == 1) GTEST_SKIP() << "nobody to abort";
  std::unique_ptr<Communicator> comm = make_nccl_communicator(test::world());
  std::string text;
  if (comm->rank() == 1) {
    try {
      const std::unique_ptr<Communicator> lost = std::move(comm);  // aborted, not destroyed
      throw_runtime("rank 1 has an error of its own");
    } catch (const Error& error) {
      text = error.what();
    }
  } else {
    try {
      wait(*comm);
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_EQ(text.find("never done"), 0U) << text;
    EXPECT_NE(text.find(" failed at nccl_channel.cpp:"), std::string::npos) << text;
    // Rank 1, or one that has followed it since.
    EXPECT_NE(text.find(" has aborted the communicator"), std::string::npos) << text;
    EXPECT_THROW(comm->barrier(stream, "later"), Error);
  }
  stream.synchronize();  // what was aborted holds nothing up
  all_reduce_value(test::world(), int64_t{1}, ReduceOp::sum);
}

TEST_F(Nccl, WhenARankAbortsTheOthersGetAnErrorAndNoHang) {
  Buffer<int32_t> data(4, MemorySpace::device);
  const auto start = [&](Communicator& comm) {
    return comm.all_reduce(data.data(), 4, DType::i32, ReduceOp::sum, stream(), "never done");
  };
  expect_error_and_no_hang(stream(), [&](Communicator& comm) { start(comm)->wait(); });
  expect_error_and_no_hang(stream(), [&](Communicator& comm) {
    WorkPtr work;
    const auto recorded = stream().record([&] {
      work = start(comm);
      work->wait_on_stream();
    });
    recorded->submit();
    work->wait();
  });
}

TEST_F(Nccl, CommunicatorsThatDoNotBlock) {
  setenv("NCCL_COMM_BLOCKING", "0", 1);
  const std::unique_ptr<Communicator> comm = make_nccl_communicator(test::world());
  const std::unique_ptr<Communicator> half = comm->split(comm->rank() % 2);
  ASSERT_TRUE(use_nccl_memory());
  for (Communicator* one : {comm.get(), half.get()}) {
    const int n = one->size(), me = one->rank();
    Buffer<int32_t> memory(64, MemorySpace::device);
    EXPECT_NE(one->register_window(std::as_writable_bytes(memory.span())), nullptr);
    OnStream<int32_t> data(std::vector<int32_t>(4, me), stream());
    const SendSlice sends[] = {{(me + 1) % n, part<int32_t>(data.data(), 0, 2)}};
    const RecvSlice recvs[] = {{(me + n - 1) % n, writable_part(data.data(), 2, 2)}};
    one->exchange(sends, recvs, stream(), "exchange")->wait();
    EXPECT_EQ(data.values(), (std::vector<int32_t>{me, me, (me + n - 1) % n, (me + n - 1) % n}));
    one->all_reduce(data.data(), 4, DType::i32, ReduceOp::max, stream(), "maximum")->wait();
    EXPECT_EQ(data.values(), std::vector<int32_t>(4, n - 1));
  }
  unsetenv("NCCL_COMM_BLOCKING");
}

TEST_F(Nccl, RanksOnOneDeviceAreRefusedUnlessNcclIsToldToTakeThem) {
  const char* const variable = "NCCL_MULTI_RANK_GPU_ENABLE";
  const bool was_set = std::getenv(variable) != nullptr;  // as scripts/gpu_suite.sh does
  unsetenv(variable);
  int device = 0;
  GYRE_CHECK_CUDA(cudaGetDevice(&device));
  GYRE_CHECK_CUDA(cudaSetDevice(0));
  std::string text;
  try {
    make_nccl_communicator(test::world());
  } catch (const Error& error) {
    text = error.what();
    EXPECT_TRUE(error.agreed());
  }
  if (test::world().size() > 1) {
    EXPECT_EQ(text.find("ranks 0 and 1 on host "), 0u) << text;
    EXPECT_NE(text.find("NCCL_MULTI_RANK_GPU_ENABLE=1"), std::string::npos) << text;
  } else {
    EXPECT_EQ(text, "");
  }
  EXPECT_FALSE(nccl_shares_gpus());
  setenv(variable, "1", 1);
  EXPECT_TRUE(nccl_shares_gpus());
  EXPECT_EQ(make_nccl_communicator(test::world())->size(), test::world().size());
  if (!was_set) unsetenv(variable);
  GYRE_CHECK_CUDA(cudaSetDevice(device));
}

/// NCCL as such.
class NcclMisuse : public Nccl {
 protected:
  void SetUp() override {
    Nccl::SetUp();
    HostStream host;
    ncclUniqueId id{};
    if (rank() == 0) {
      ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    }
    test::world()
        .broadcast(std::as_writable_bytes(std::span(&id, 1)), 0, host, "unique id")
        ->wait();
    ASSERT_EQ(ncclCommInitRank(&comm_, test::world().size(), id, rank()), ncclSuccess);
    softgpu::throw_errors(true);
  }
  void TearDown() override {
    if (comm_ == nullptr) return;
    all_reduce_value(test::world(), int64_t{1}, ReduceOp::sum);  // all have complained
    softgpu::throw_errors(false);
    ncclCommAbort(std::exchange(comm_, nullptr));
    stream().synchronize();
    all_reduce_value(test::world(), int64_t{1}, ReduceOp::sum);
  }
  static int rank() { return test::world().rank(); }
  static int size() { return test::world().size(); }
  /// What is wrong with the work of the stream.
  static std::string complaint() {
    try {
      stream().synchronize();
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  }

  ncclComm_t comm_ = nullptr;
  std::unique_ptr<RecordedWork> recorded_;  // its end waits for operations that only an abort ends
  Buffer<int32_t> data_{64, MemorySpace::device};
};

TEST_F(NcclMisuse, MessagesOfDifferentLengths) {
  const cudaStream_t on = cuda_handle(stream());
  ncclGroupStart();
  const size_t sent = rank() == 0 ? 3 : 4;
  ncclSend(data_.data(), sent, ncclInt32, (rank() + 1) % size(), comm_, on);
  ncclRecv(data_.data() + 32, 4, ncclInt32, (rank() + size() - 1) % size(), comm_, on);
  ncclGroupEnd();
  if (rank() != 1 % size()) return;
  EXPECT_EQ(complaint(), fmt::format("ncclRecv of 16 bytes on rank {} of {} meets ncclSend of 12 "
                                     "bytes on rank 0",
                                     rank(), size()));
}

TEST_F(NcclMisuse, RecordedMessagesInRegisteredAndInOtherMemory) {
  void *registered = nullptr, *other = nullptr;
  ASSERT_EQ(ncclMemAlloc(&registered, 64), ncclSuccess);
  ASSERT_EQ(cudaMalloc(&other, 64), cudaSuccess);
  recorded_ = stream().record([&] {
    const cudaStream_t on = cuda_handle(stream());
    ncclGroupStart();
    ncclSend(rank() == 0 ? other : registered, 16, ncclInt8, (rank() + 1) % size(), comm_, on);
    ncclRecv(static_cast<char*>(registered) + 32, 16, ncclInt8, (rank() + size() - 1) % size(),
             comm_, on);
    ncclGroupEnd();
  });
  recorded_->submit();
  if (rank() != 1 % size()) return;
  EXPECT_EQ(complaint(),
            fmt::format("ncclRecv of 16 bytes in registered memory on rank {} of {} meets "
                        "ncclSend of 16 bytes on rank 0",
                        rank(), size()));
}

TEST_F(NcclMisuse, CollectivesOfDifferentLengthsOrInDifferentOrder) {
  if (size() == 1) return;
  const cudaStream_t on = cuda_handle(stream());
  const int64_t same_number = rank() == 0 ? 5 : 6;
  ncclAllReduce(data_.data(), data_.data(), same_number, ncclFloat32, ncclMax, comm_, on);
  std::string text = complaint();
  EXPECT_NE(text.find("ncclAllReduce of 5 float32 (max) on rank 0"), std::string::npos) << text;
  EXPECT_NE(text.find("ncclAllReduce of 6 float32 (max) on rank"), std::string::npos) << text;
  TearDown();
  SetUp();
  if (rank() == 0)
    ncclBroadcast(data_.data(), data_.data(), 8, ncclUint8, 0, comm_, on);
  else
    ncclAllGather(data_.data(), data_.data(), 2, ncclInt32, comm_, on);
  text = complaint();
  EXPECT_NE(text.find("ncclBroadcast of 8 uint8 from 0 on rank 0"), std::string::npos) << text;
  EXPECT_NE(text.find("ncclAllGather of 2 int32 on rank"), std::string::npos) << text;
}

TEST_F(NcclMisuse, AWindowOnOneSideOnly) {
  if (size() == 1) return;
  void* block = nullptr;
  ASSERT_EQ(ncclMemAlloc(&block, 4096), ncclSuccess);
  ncclWindow_t window = nullptr;
  ASSERT_EQ(ncclCommWindowRegister(comm_, block, 4096, &window, NCCL_WIN_COLL_SYMMETRIC),
            ncclSuccess);
  void* const to = rank() == 0 ? block : data_.data();
  ncclAllReduce(to, to, 8, ncclInt32, ncclSum, comm_, cuda_handle(stream()));
  const std::string text = complaint();
  EXPECT_NE(text.find("ncclAllReduce of 8 int32 (sum) from byte 0 of a window to byte 0 of a "
                      "window on rank 0"),
            std::string::npos)
      << text;
  EXPECT_EQ(ncclCommWindowDeregister(comm_, window), ncclSuccess);
  EXPECT_EQ(ncclCommWindowDeregister(comm_, window), ncclInvalidArgument);
}

TEST_F(NcclMisuse, AGroupThatIsNotClosed) {
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
  ncclGroupStart();
  EXPECT_EQ(complaint(), "cudaStreamSynchronize inside of an NCCL group");
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  EXPECT_EQ(complaint(), "");
}

TEST_F(NcclMisuse, ArraysOnTheHostAndRanksThatAreNone) {
  int32_t here[4] = {};
  const cudaStream_t on = cuda_handle(stream());
  EXPECT_EQ(ncclAllReduce(here, here, 4, ncclInt32, ncclSum, comm_, on), ncclInvalidArgument);
  EXPECT_EQ(ncclSend(data_.data(), 4, ncclInt32, size(), comm_, on), ncclInvalidArgument);
  EXPECT_EQ(ncclBroadcast(data_.data(), data_.data(), 4, ncclInt32, size(), comm_, on),
            ncclInvalidArgument);
}

#endif

}  // namespace
}  // namespace gyre

// The NCCL communicator against the MPI communicator: the same operation on the same data, on the
// device and on the host, leaves the same bytes. The data are small integers, exact in every type,
// so that the order of a reduction does not matter.

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "comm/agree.hpp"
#include "comm/nccl.hpp"
#include "mpi_test.hpp"
#include "runtime/buffer.hpp"
#include "runtime/cuda_stream.hpp"
#include "runtime/device_code.cuh"

#ifdef GYRE_SOFTGPU
#include <nccl.h>
#include <softgpu_progress.h>
#endif

namespace gyre {
namespace {

constexpr int64_t guard = 16;  // elements behind every receive buffer that nobody may write

template <class T>
std::vector<T> sample(int rank, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<T>((static_cast<size_t>(rank) * 31 + i * 7) % 97) - T{48};
  return values;
}

template <class T>
std::vector<T> untouched(int64_t count) {
  return std::vector<T>(static_cast<size_t>(count + guard), T{-999});
}

/// A vector's copy on the device, by way of the caller's stream.
template <class T>
class OnDevice {
 public:
  OnDevice(const std::vector<T>& values, Stream& stream)
      : values_(values), buffer_(std::ssize(values), MemorySpace::device), stream_(stream) {
    GYRE_CHECK_CUDA(cudaMemcpyAsync(buffer_.data(), values_.data(), bytes(), cudaMemcpyHostToDevice,
                                    cuda_handle(stream_)));
  }
  T* data() { return buffer_.data(); }
  std::vector<T> download() {
    GYRE_CHECK_CUDA(cudaMemcpyAsync(values_.data(), buffer_.data(), bytes(), cudaMemcpyDeviceToHost,
                                    cuda_handle(stream_)));
    stream_.synchronize();
    return values_;
  }

 private:
  size_t bytes() const { return values_.size() * sizeof(T); }

  std::vector<T> values_;
  Buffer<T> buffer_;
  Stream& stream_;
};

template <class T>
std::span<const std::byte> part(const T* data, int64_t begin, int64_t count) {
  return std::as_bytes(std::span<const T>(data + begin, static_cast<size_t>(count)));
}
template <class T>
std::span<std::byte> writable_part(T* data, int64_t begin, int64_t count) {
  return std::as_writable_bytes(std::span<T>(data + begin, static_cast<size_t>(count)));
}

std::vector<int64_t> in_bytes(std::vector<int64_t> counts, size_t element) {
  for (int64_t& count : counts) count *= static_cast<int64_t>(element);
  return counts;
}

int64_t sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/// One group of ranks, as both backends see it.
struct Group {
  std::string name;
  Communicator* mpi;
  Communicator* nccl;
};

class Nccl : public testing::Test {
 protected:
  static void SetUpTestSuite() {
#ifdef GYRE_SOFTGPU
    setenv("GYRE_SOFTGPU_DEVICES", std::to_string(test::world().size()).c_str(), 1);
#endif
    if (const int devices = usable_cuda_devices(); devices > 0)
      GYRE_CHECK_CUDA(cudaSetDevice(test::world().rank() % devices));
    try {
      nccl_world_ = make_nccl_communicator(test::world());
    } catch (const Error& error) {
      if (!error.agreed()) throw;
      why_not_ = error.what();
      return;
    }
    const int parity = test::world().rank() % 2;
    mpi_half_ = test::world().split(parity);
    nccl_half_ = nccl_world_->split(parity);
    stream_ = make_cuda_stream();
  }
  static void TearDownTestSuite() {
    stream_.reset();
    nccl_half_.reset();
    mpi_half_.reset();
    nccl_world_.reset();
  }
  void SetUp() override {
    if (nccl_world_ == nullptr) GTEST_SKIP() << why_not_;
  }

  static std::vector<Group> groups() {
    return {{"all ranks", &test::world(), nccl_world_.get()},
            {"ranks of one parity", mpi_half_.get(), nccl_half_.get()}};
  }
  static Stream& stream() {
    return *stream_;
  }

  /// Runs op(comm, send, recv, stream) with both backends; what it leaves in `recv` must agree.
  template <class T, class Op>
  static void expect_same(const Group& group, const std::vector<T>& send, std::vector<T> recv,
                          Op op) {
    SCOPED_TRACE(group.name);
    OnDevice<T> device_send(send, stream()), device_recv(recv, stream());
    HostStream host;
    op(*group.mpi, send.data(), recv.data(), host)->wait();
    op(*group.nccl, device_send.data(), device_recv.data(), stream())->wait();
    EXPECT_EQ(device_recv.download(), recv);
    EXPECT_EQ(device_send.download(), send);
  }

 private:
  static inline std::string why_not_;
  static inline std::unique_ptr<Communicator> nccl_world_, mpi_half_, nccl_half_;
  static inline std::unique_ptr<Stream> stream_;
};

TEST_F(Nccl, SplitKeepsTheOrderOfRanks) {
  for (const Group& group : groups()) {
    EXPECT_EQ(group.nccl->rank(), group.mpi->rank()) << group.name;
    EXPECT_EQ(group.nccl->size(), group.mpi->size()) << group.name;
    EXPECT_EQ(group.nccl->space(), MemorySpace::device);
    EXPECT_EQ(group.nccl->backend(), "nccl");
  }
}

TEST_F(Nccl, ExchangeAroundARing) {
  constexpr int64_t count = 1000;
  for (const Group& group : groups()) {
    const int n = group.mpi->size(), me = group.mpi->rank();
    expect_same(group, sample<float>(me, count), untouched<float>(count),
                [&](Communicator& comm, const float* send, float* recv, Stream& on) {
                  const SendSlice sends[] = {{(me + 1) % n, part(send, 0, count)}};
                  const RecvSlice recvs[] = {{(me + n - 1) % n, writable_part(recv, 0, count)}};
                  return comm.exchange(sends, recvs, on, "ring");
                });
  }
}

TEST_F(Nccl, ExchangeOfTwoMessagesWithEveryRankItselfIncluded) {
  for (const Group& group : groups()) {
    const int n = group.mpi->size(), me = group.mpi->rank();
    // Message k from rank a to rank b has 3 a + b + 5 k elements; message 0 of rank 0 to itself
    // has none.
    const auto length = [](int from, int to, int k) -> int64_t { return 3 * from + to + 5 * k; };
    int64_t most = 0;
    for (int a = 0; a < n; ++a) most += length(n, a, 0) + length(n, a, 1);
    expect_same(group, sample<int32_t>(me, most), untouched<int32_t>(most),
                [&](Communicator& comm, const int32_t* send, int32_t* recv, Stream& on) {
                  std::vector<SendSlice> sends;
                  std::vector<RecvSlice> recvs;
                  int64_t sent = 0, received = 0;
                  for (int k = 0; k < 2; ++k)
                    for (int peer = 0; peer < n; ++peer) {
                      const int64_t out = length(me, peer, k), in = length(peer, me, k);
                      sends.push_back({peer, part(send, sent, out)});
                      recvs.push_back({peer, writable_part(recv, received, in)});
                      sent += out;
                      received += in;
                    }
                  return comm.exchange(sends, recvs, on, "all pairs");
                });
  }
}

TEST_F(Nccl, ExchangeOfMessagesCutDifferentlyAtTheirTwoEnds) {
  // From every rank to every rank, itself included: sent in 3 parts with an element between them,
  // received in 1 or 2. The larger exchanges need more staging than the smaller ones.
  for (const Group& group : groups())
    for (const int64_t count : {6, 600})
      for (const int64_t parts : {1, 2}) {
        const int n = group.mpi->size();
        const int64_t third = count / 3, received = count / parts;
        expect_same(
            group, sample<int32_t>(group.mpi->rank(), n * (count + 3)),
            untouched<int32_t>(n * (count + 2)),
            [&](Communicator& comm, const int32_t* send, int32_t* recv, Stream& on) {
              std::vector<SendSlice> sends;
              std::vector<RecvSlice> recvs;
              for (int peer = 0; peer < n; ++peer) {
                for (int64_t i = 0; i < 3; ++i)
                  sends.push_back({peer, part(send, peer * (count + 3) + i * (third + 1), third)});
                for (int64_t i = 0; i < parts; ++i)
                  recvs.push_back(
                      {peer,
                       writable_part(recv, peer * (count + 2) + i * (received + 1), received)});
              }
              return comm.exchange(sends, recvs, on, "cut differently");
            });
      }
}

TEST_F(Nccl, AllGatherOfEqualParts) {
  constexpr int64_t count = 513;
  for (const Group& group : groups()) {
    const int n = group.mpi->size();
    expect_same(group, sample<double>(group.mpi->rank(), count), untouched<double>(count * n),
                [&](Communicator& comm, const double* send, double* recv, Stream& on) {
                  return comm.all_gather(part(send, 0, count), writable_part(recv, 0, count * n),
                                         on, "all-gather");
                });
  }
}

TEST_F(Nccl, AllGatherOfUnequalPartsOneOfThemEmpty) {
  for (const Group& group : groups()) {
    const int me = group.mpi->rank();
    std::vector<int64_t> counts;
    for (int r = 0; r < group.mpi->size(); ++r) counts.push_back(r == 1 ? 0 : 100 + 37 * r);
    const int64_t mine = counts[static_cast<size_t>(me)];
    expect_same(group, sample<float>(me, mine + 1), untouched<float>(sum(counts)),
                [&](Communicator& comm, const float* send, float* recv, Stream& on) {
                  return comm.all_gather_v(part(send, 0, mine), writable_part(recv, 0, sum(counts)),
                                           in_bytes(counts, sizeof(float)), on, "all-gather-v");
                });
  }
}

TEST_F(Nccl, AllToAllOfEqualBlocks) {
  constexpr int64_t block = 129;
  for (const Group& group : groups()) {
    const int64_t count = block * group.mpi->size();
    expect_same(group, sample<float>(group.mpi->rank(), count), untouched<float>(count),
                [&](Communicator& comm, const float* send, float* recv, Stream& on) {
                  return comm.all_to_all(part(send, 0, count), writable_part(recv, 0, count), on,
                                         "all-to-all");
                });
  }
}

TEST_F(Nccl, AllToAllOfUnequalBlocksSomeOfThemEmpty) {
  for (const Group& group : groups()) {
    const int me = group.mpi->rank();
    std::vector<int64_t> out, in;
    for (int peer = 0; peer < group.mpi->size(); ++peer) {
      out.push_back((me * 5 + peer * 11) % 17);
      in.push_back((peer * 5 + me * 11) % 17);
    }
    expect_same(group, sample<int64_t>(me, sum(out) + 1), untouched<int64_t>(sum(in)),
                [&](Communicator& comm, const int64_t* send, int64_t* recv, Stream& on) {
                  return comm.all_to_all_v(part(send, 0, sum(out)), in_bytes(out, sizeof(int64_t)),
                                           writable_part(recv, 0, sum(in)),
                                           in_bytes(in, sizeof(int64_t)), on, "all-to-all-v");
                });
  }
}

template <class T>
class NcclReductions : public Nccl {};
using ReducedTypes = testing::Types<float, double, int32_t, int64_t>;
TYPED_TEST_SUITE(NcclReductions, ReducedTypes);

TYPED_TEST(NcclReductions, ReduceScatter) {
  constexpr int64_t count = 77;
  for (const Group& group : this->groups())
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min})
      this->expect_same(
          group, sample<TypeParam>(group.mpi->rank(), count * group.mpi->size()),
          untouched<TypeParam>(count),
          [&](Communicator& comm, const TypeParam* send, TypeParam* recv, Stream& on) {
            return comm.reduce_scatter(send, recv, count, dtype_of<TypeParam>, op, on, "reduce");
          });
}

TYPED_TEST(NcclReductions, AllReduceInPlace) {
  constexpr int64_t count = 1025;
  for (const Group& group : this->groups())
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min})
      this->expect_same(group, std::vector<TypeParam>(1),
                        sample<TypeParam>(group.mpi->rank(), count + guard),
                        [&](Communicator& comm, const TypeParam*, TypeParam* data, Stream& on) {
                          return comm.all_reduce(data, count, dtype_of<TypeParam>, op, on, "sum");
                        });
}

TEST_F(Nccl, BroadcastFromEveryRoot) {
  constexpr int64_t count = 300;
  for (const Group& group : groups())
    for (int root = 0; root < group.mpi->size(); ++root)
      expect_same(group, std::vector<float>(1), sample<float>(group.mpi->rank(), count + guard),
                  [&](Communicator& comm, const float*, float* data, Stream& on) {
                    return comm.broadcast(writable_part(data, 0, count), root, on, "broadcast");
                  });
}

TEST_F(Nccl, BarriersAndOperationsUnderWayTogether) {
  for (const Group& group : groups()) {
    OnDevice<int32_t> a(std::vector<int32_t>(100, 1), stream());
    OnDevice<int32_t> b(std::vector<int32_t>(100, 2), stream());
    WorkPtr first = group.nccl->all_reduce(a.data(), 100, DType::i32, ReduceOp::sum, stream(), "a");
    WorkPtr barrier = group.nccl->barrier(stream(), "barrier");
    WorkPtr last = group.nccl->all_reduce(b.data(), 100, DType::i32, ReduceOp::sum, stream(), "b");
    while (!last->test()) {
    }
    EXPECT_TRUE(first->test() && barrier->test()) << "operations complete in order";
    for (WorkPtr* work : {&barrier, &last, &first}) (*work)->wait();
    EXPECT_EQ(a.download(), std::vector<int32_t>(100, group.nccl->size()));
    EXPECT_EQ(b.download(), std::vector<int32_t>(100, 2 * group.nccl->size()));
  }
}

TEST_F(Nccl, AnOperationStartsAfterTheWorkOfTheCallersStream) {
#ifdef GYRE_SOFTGPU
  constexpr int64_t count = int64_t{1} << 12;
#else
  constexpr int64_t count = int64_t{1} << 24;
#endif
  const Group group = groups().front();
  const int n = group.nccl->size(), me = group.nccl->rank();
  Buffer<int32_t> data(count, MemorySpace::device), received(count, MemorySpace::device);
  const size_t bytes = static_cast<size_t>(count) * sizeof(int32_t);
  // The last of many fills is what the neighbour must get.
  for (int fill = 0; fill < 100; ++fill)
    GYRE_CHECK_CUDA(cudaMemsetAsync(data.data(), fill, bytes, cuda_handle(stream())));
  const SendSlice sends[] = {{(me + 1) % n, part<int32_t>(data.data(), 0, count)}};
  const RecvSlice recvs[] = {{(me + n - 1) % n, writable_part(received.data(), 0, count)}};
  group.nccl->exchange(sends, recvs, stream(), "ordered")->wait();
  std::vector<int32_t> result(static_cast<size_t>(count));
  GYRE_CHECK_CUDA(cudaMemcpyAsync(result.data(), received.data(), bytes, cudaMemcpyDeviceToHost,
                                  cuda_handle(stream())));
  stream().synchronize();
  EXPECT_EQ(std::count(result.begin(), result.end(), 0x63636363), count);
}

TEST_F(Nccl, AMessageToOneselfWithoutItsReceiveIsAnError) {
  const Group group = groups().front();
  Buffer<float> data(4, MemorySpace::device);
  const SendSlice sends[] = {{group.nccl->rank(), part<float>(data.data(), 0, 4)}};
  EXPECT_THROW(group.nccl->exchange(sends, {}, stream(), "unmatched"), Error);
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
  for (const Group& group : groups()) {
    const int n = group.nccl->size(), me = group.nccl->rank();
    Buffer<int32_t> data(count, MemorySpace::device), received(count, MemorySpace::device);
    launch({4, 128, cuda_handle(stream())}, write_all, data.data(), count, 1000 * me);
    const SendSlice sends[] = {{(me + 1) % n, part<int32_t>(data.data(), 0, count)}};
    const RecvSlice recvs[] = {{(me + n - 1) % n, writable_part(received.data(), 0, count)}};
    WorkPtr work = group.nccl->exchange(sends, recvs, stream(), "between kernels");
    work->hold();
    launch({4, 128, cuda_handle(stream())}, add_all, received.data(), data.data(), count);
    std::vector<int32_t> result(count), expected(count);
    stream().copy(result.data(), data.data(), count * sizeof(int32_t));
    stream().synchronize();  // before wait(): only hold() has ordered the kernel
    work->wait();
    work->hold();  // nothing more to do
    work.reset();
    for (int i = 0; i < count; ++i)
      expected[static_cast<size_t>(i)] = 1000 * me + 1000 * ((me + n - 1) % n) + 2 * i;
    EXPECT_EQ(result, expected) << group.name;
  }
}

TEST_F(Nccl, HoldOfWhatTheHostSubmittedWaits) {
  const Group group = groups().front();
  Buffer<int32_t> data(1, MemorySpace::device);
  const int32_t one = 1;
  int32_t result = 0;
  GYRE_CHECK_CUDA(cudaMemcpy(data.data(), &one, sizeof(one), cudaMemcpyHostToDevice));
  HostStream host;
  WorkPtr work = group.nccl->all_reduce(data.data(), 1, DType::i32, ReduceOp::sum, host, "sum");
  work->hold();
  GYRE_CHECK_CUDA(cudaMemcpy(&result, data.data(), sizeof(result), cudaMemcpyDeviceToHost));
  EXPECT_EQ(result, group.nccl->size());
  work->wait();
}

TEST_F(Nccl, OperationsMoveOnWhileTheHostWaitsForOtherRanks) {
  const Group group = groups().front();
  OnDevice<int32_t> data(std::vector<int32_t>(10, 1), stream());
  WorkPtr work =
      group.nccl->all_reduce(data.data(), 10, DType::i32, ReduceOp::sum, stream(), "sum");
  // The others come to the agreement only after the operation, which needs rank 0.
  if (group.nccl->rank() != 0) work->wait();
  EXPECT_EQ(all_reduce_value(*group.mpi, int64_t{1}, ReduceOp::sum), group.mpi->size());
  work->wait();
  EXPECT_EQ(data.download(), std::vector<int32_t>(10, group.nccl->size()));
}

TEST_F(Nccl, EmptyOperations) {
  for (const Group& group : groups()) {
    Buffer<float> data(1, MemorySpace::device);
    std::vector<WorkPtr> works;
    const std::span<std::byte> none = writable_part(data.data(), 0, 0);
    works.push_back(group.nccl->exchange({}, {}, stream(), "no slices"));
    const SendSlice sends[] = {{0, none}};
    works.push_back(group.nccl->exchange(sends, {}, stream(), "no bytes"));
    works.push_back(group.nccl->all_gather(none, none, stream(), "no bytes"));
    works.push_back(group.nccl->broadcast(none, 0, stream(), "no bytes"));
    works.push_back(
        group.nccl->all_reduce(data.data(), 0, DType::f32, ReduceOp::sum, stream(), "none"));
    for (const WorkPtr& work : works) work->wait();
  }
}

#ifdef GYRE_SOFTGPU

// ---- errors, on the software GPU: what another GPU does with them is not said

TEST_F(Nccl, WhenARankAbortsTheOthersGetAnErrorAndNoHang) {
  if (test::world().size() == 1) GTEST_SKIP() << "nobody to abort";
  std::unique_ptr<Communicator> comm = make_nccl_communicator(test::world());
  Buffer<int32_t> data(4, MemorySpace::device);
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
      comm->all_reduce(data.data(), 4, DType::i32, ReduceOp::sum, stream(), "never done")->wait();
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("never done failed at nccl.cpp:"), std::string::npos) << text;
    // Rank 1, or one that has followed it since.
    EXPECT_NE(text.find(" has aborted the communicator"), std::string::npos) << text;
    EXPECT_THROW(comm->barrier(stream(), "later"), Error);
  }
  stream().synchronize();  // what was aborted holds nothing up
  all_reduce_value(test::world(), int64_t{1}, ReduceOp::sum);
}

TEST_F(Nccl, RanksOnOneDeviceAreRefusedUnlessNcclIsToldToTakeThem) {
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
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  EXPECT_TRUE(nccl_shares_gpus());
  EXPECT_EQ(make_nccl_communicator(test::world())->size(), test::world().size());
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
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

TEST_F(NcclMisuse, CollectivesOfDifferentLengthsOrInDifferentOrder) {
  if (size() == 1) return;
  const cudaStream_t on = cuda_handle(stream());
  const auto same_number = static_cast<size_t>(rank() == 0 ? 5 : 6);
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

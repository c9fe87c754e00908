// Communication of device memory by way of the host, on ranks that share a GPU.

#include "comm/cuda_device.hpp"
#include "comm/staged.hpp"
#include "device_comm_cases.hpp"

namespace gyre::test {
namespace GYRE_FILE {

struct Staged {
  static std::unique_ptr<Communicator> make(Communicator& mpi, Stream&) {
    bind_device(mpi, true);
    return make_staged_communicator(mpi);
  }
};
GYRE_TEST_DEVICE_COMM(Staged);

class StagedComm : public GpuTest {};

TEST_F(StagedComm, TwoCommunicatorsAreDrivenTogether) {
  // The ranks wait for their two groups in different orders.
  const auto all = make_staged_communicator(world());
  const auto half = all->split(world().rank() % 2);
  const int32_t one = 1;
  Buffer<int32_t> a = to_device<int32_t>(std::span(&one, 1)), b = to_device<int32_t>({&one, 1});
  WorkPtr first = all->all_reduce(a.data(), 1, DType::i32, ReduceOp::sum, stream(), "all");
  WorkPtr second = half->all_reduce(b.data(), 1, DType::i32, ReduceOp::sum, stream(), "half");
  if (world().rank() % 2 == 0) std::swap(first, second);
  first->wait();
  second->wait();
  EXPECT_EQ(to_host(a)[0], all->size());
  EXPECT_EQ(to_host(b)[0], half->size());
}

TEST_F(StagedComm, WhatIsSubmittedFromTheHostIsCompleteAfterHold) {
  const auto comm = make_staged_communicator(world());
  const int32_t mine = world().rank();
  const Buffer<int32_t> from = to_device<int32_t>({&mine, 1});
  Buffer<int32_t> to(comm->size(), MemorySpace::device);
  HostStream host;
  const WorkPtr work = comm->all_gather(bytes_of(std::span<const int32_t>(from.span())),
                                        writable_bytes_of(to.span()), host, "from the host");
  work->wait_on_stream();
  const std::vector<int32_t> result = to_host(to);
  for (int r = 0; r < comm->size(); ++r) EXPECT_EQ(result[static_cast<size_t>(r)], r);
  work->wait();
}

TEST_F(StagedComm, AMessageOfNoBytesNeedsNoReceive) {
  const auto comm = make_staged_communicator(world());
  const int n = comm->size(), next = (comm->rank() + 1) % n, previous = (comm->rank() + n - 1) % n;
  const int32_t mine = comm->rank();
  const Buffer<int32_t> from = to_device<int32_t>({&mine, 1});
  Buffer<int32_t> to(1, MemorySpace::device);
  const SendSlice nothing[] = {{next, {}}}, sends[] = {{next, part(from.data(), 0, 1)}};
  const RecvSlice recvs[] = {{previous, writable_part(to.data(), 0, 1)}};
  const WorkPtr first = comm->exchange(nothing, {}, stream(), "nothing");
  const WorkPtr second = comm->exchange(sends, recvs, stream(), "a number");
  second->wait();
  first->wait();
  EXPECT_EQ(to_host(to)[0], previous);
}

TEST_F(StagedComm, ASumOfBf16IsRoundedOnce) {
  // 256 on rank 0 and 1 on the others: rounded after each addition, the ones would be lost.
  const auto comm = make_staged_communicator(world());
  const bf16 mine = to_bf16(world().rank() == 0 ? 256.F : 1.F);
  Buffer<bf16> data = to_device<bf16>({&mine, 1});
  comm->all_reduce(data.data(), 1, DType::bf16, ReduceOp::sum, stream(), "rounded once")->wait();
  EXPECT_EQ(to_float(to_host(data)[0]),
            to_float(to_bf16(255.F + static_cast<float>(comm->size()))));
}

}  // namespace GYRE_FILE
}  // namespace gyre::test

#pragma once
// A communicator against the MPI communicator of the same ranks: the same operation on the same
// data leaves the same bytes, wherever its memory lies. The data are small integers, exact in every
// type, so that the order of a reduction does not matter.
//
//     struct MyBackend {
//       static void prepare();  // optional: chooses the device
//       static std::unique_ptr<Communicator> make(Communicator& mpi, Stream& stream);  //
//       collective
//     };
//     GYRE_TEST_DEVICE_COMM(MyBackend);
//
// Arrays lie in the space of the communicator, and everything is submitted to one stream: a CUDA
// stream when that is the device. A backend that throws an agreed error cannot be had here, and its
// tests are skipped with that reason.

#include <algorithm>
#include <numeric>

#include "comm/agree.hpp"
#include "gpu_test.hpp"
#include "mpi_test.hpp"
#include "runtime/buffer.hpp"

namespace gyre::test {

constexpr int64_t comm_guard = 16;  ///< elements behind a receive buffer that nobody may write

template <class T>
T comm_value(int64_t x) {
  if constexpr (std::is_same_v<T, bf16>)
    return to_bf16(static_cast<float>(x));
  else
    return static_cast<T>(x);
}

/// Different on every rank, from -48 to 48.
template <class T>
std::vector<T> comm_sample(int rank, int64_t count) {
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(comm_value<T>((rank * 31 + i * 7) % 97 - 48));
  return values;
}
template <class T>
std::vector<T> comm_untouched(int64_t count) {
  return std::vector<T>(count + comm_guard, comm_value<T>(-999));
}

template <class T>
std::span<const std::byte> part(const T* data, int64_t begin, int64_t count) {
  return std::as_bytes(std::span<const T>(data + begin, count));
}
template <class T>
std::span<std::byte> writable_part(T* data, int64_t begin, int64_t count) {
  return std::as_writable_bytes(std::span<T>(data + begin, count));
}

/// A copy of a vector where a stream computes, made and read in the stream's order.
template <class T>
class OnStream {
 public:
  OnStream(const std::vector<T>& values, Stream& stream)
      : buffer_(std::ssize(values), stream.space()), stream_(stream) {
    stream_.copy(buffer_.data(), values.data(), values.size() * sizeof(T));
    stream_.synchronize();
  }
  T* data() { return buffer_.data(); }
  std::vector<T> values() {
    std::vector<T> values(buffer_.size());
    stream_.copy(values.data(), buffer_.data(), values.size() * sizeof(T));
    stream_.synchronize();
    return values;
  }

 private:
  Buffer<T> buffer_;
  Stream& stream_;
};

/// One group of ranks, as both backends see it.
struct CommGroup {
  std::string name;
  Communicator* mpi;
  Communicator* comm;
};

template <class Backend>
class DeviceComm : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if constexpr (requires { Backend::prepare(); }) Backend::prepare();
    std::string why;
    if (usable_cuda_devices(&why) == 0) {
      why_not_ = why;
      return;
    }
    cuda_ = make_cuda_stream();
    try {
      world_ = Backend::make(world(), *cuda_);
    } catch (const Error& error) {
      if (!error.agreed()) throw;
      why_not_ = error.what();
      return;
    }
    const int parity = world().rank() % 2;
    mpi_half_ = world().split(parity);
    half_ = world_->split(parity);
    if (world_->space() == MemorySpace::host) host_ = std::make_unique<HostStream>();
  }
  static void TearDownTestSuite() {
    half_.reset();
    mpi_half_.reset();
    world_.reset();
    host_.reset();
    if (cuda_ != nullptr) cuda_->synchronize();  // as GpuTest does
    cuda_.reset();
  }
  void SetUp() override {
    if (world_ == nullptr) GTEST_SKIP() << why_not_;
  }

  static std::vector<CommGroup> groups() {
    return {{"all ranks", &world(), world_.get()},
            {"ranks of one parity", mpi_half_.get(), half_.get()}};
  }
  static Stream& stream() { return host_ ? *host_ : *cuda_; }

  /// Runs op(comm, send, recv, stream) with both; what is in `recv` then, and what was counted as
  /// sent, must agree.
  template <class T, class Op>
  static void expect_same(const CommGroup& group, const std::vector<T>& send, std::vector<T> recv,
                          Op op) {
    SCOPED_TRACE(group.name);
    OnStream<T> there_send(send, stream()), there_recv(recv, stream());
    HostStream host;
    const Traffic before = group.mpi->traffic(), comm = group.comm->traffic();
    op(*group.mpi, send.data(), recv.data(), host)->wait();
    const Traffic after = group.mpi->traffic();  // `comm` may communicate by the same
    op(*group.comm, there_send.data(), there_recv.data(), stream())->wait();
    EXPECT_EQ(there_recv.values(), recv);
    EXPECT_EQ(there_send.values(), send);
    EXPECT_EQ(group.comm->traffic().bytes_sent - comm.bytes_sent,
              after.bytes_sent - before.bytes_sent);
    EXPECT_EQ(group.comm->traffic().messages - comm.messages, after.messages - before.messages);
  }

  /// Both reductions by every operator.
  template <class T>
  static void expect_same_reductions() {
    constexpr int64_t count = 77;
    for (const CommGroup& group : groups())
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
        const int me = group.mpi->rank(), n = group.mpi->size();
        expect_same(group, comm_sample<T>(me, count * n), comm_untouched<T>(count),
                    [&](Communicator& comm, const T* send, T* recv, Stream& on) {
                      return comm.reduce_scatter(send, recv, count, dtype_of<T>, op, on, "scatter");
                    });
        expect_same(group, std::vector<T>(1), comm_sample<T>(me, count + comm_guard),
                    [&](Communicator& comm, const T*, T* data, Stream& on) {
                      return comm.all_reduce(data, count, dtype_of<T>, op, on, "reduce");
                    });
      }
  }

 private:
  static inline std::string why_not_;
  static inline std::unique_ptr<Stream> cuda_, host_;
  static inline std::unique_ptr<Communicator> world_, mpi_half_, half_;
};

TYPED_TEST_SUITE_P(DeviceComm);

TYPED_TEST_P(DeviceComm, SplitKeepsTheOrderOfRanks) {
  for (const CommGroup& group : this->groups()) {
    EXPECT_EQ(group.comm->rank(), group.mpi->rank()) << group.name;
    EXPECT_EQ(group.comm->size(), group.mpi->size()) << group.name;
  }
}

TYPED_TEST_P(DeviceComm, ExchangeAroundARing) {
  constexpr int64_t count = 1000;
  for (const CommGroup& group : this->groups()) {
    const int n = group.mpi->size(), me = group.mpi->rank();
    this->expect_same(
        group, comm_sample<float>(me, count), comm_untouched<float>(count),
        [&](Communicator& comm, const float* send, float* recv, Stream& on) {
          const SendSlice sends[] = {{(me + 1) % n, part(send, 0, count)}};
          const RecvSlice recvs[] = {{(me + n - 1) % n, writable_part(recv, 0, count)}};
          return comm.exchange(sends, recvs, on, "ring");
        });
  }
}

TYPED_TEST_P(DeviceComm, ExchangeOfTwoMessagesWithEveryRankItselfIncluded) {
  for (const CommGroup& group : this->groups()) {
    const int n = group.mpi->size(), me = group.mpi->rank();
    // Message k from rank a to rank b has 3 a + b + 5 k elements; message 0 of rank 0 to itself has
    // none.
    const auto length = [](int from, int to, int k) -> int64_t { return 3 * from + to + 5 * k; };
    int64_t most = 0;
    for (int a = 0; a < n; ++a) most += length(n, a, 0) + length(n, a, 1);
    this->expect_same(group, comm_sample<int32_t>(me, most), comm_untouched<int32_t>(most),
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

TYPED_TEST_P(DeviceComm, ExchangeOfMessagesCutDifferentlyAtTheirTwoEnds) {
  // From every rank to every rank, itself included: sent in 3 parts with an element between them,
  // received in 1 or 2.
  for (const CommGroup& group : this->groups())
    for (const int64_t count : {6, 600})
      for (const int64_t parts : {1, 2}) {
        const int n = group.mpi->size();
        const int64_t third = count / 3, received = count / parts;
        this->expect_same(
            group, comm_sample<int32_t>(group.mpi->rank(), n * (count + 3)),
            comm_untouched<int32_t>(n * (count + 2)),
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

TYPED_TEST_P(DeviceComm, GathersOfEqualAndUnequalParts) {
  for (const CommGroup& group : this->groups())
    for (const bool equal : {true, false}) {
      const int n = group.mpi->size(), me = group.mpi->rank();
      std::vector<int64_t> counts, bytes;
      for (int r = 0; r < n; ++r)  // one of the unequal ones is empty
        counts.push_back(equal ? 129 : r == 1 ? 0 : 100 + 37 * r);
      for (const int64_t count : counts) bytes.push_back(count * 8);
      const int64_t mine = counts[me];
      const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
      this->expect_same(group, comm_sample<double>(me, mine + 1), comm_untouched<double>(all),
                        [&](Communicator& comm, const double* send, double* recv, Stream& on) {
                          return comm.all_gather_v(part(send, 0, mine), writable_part(recv, 0, all),
                                                   bytes, on, "gather");
                        });
    }
}

TYPED_TEST_P(DeviceComm, AllToAllOfUnequalBlocksSomeOfThemEmpty) {
  for (const CommGroup& group : this->groups()) {
    const int me = group.mpi->rank();
    std::vector<int64_t> out, in, out_bytes, in_bytes;
    for (int peer = 0; peer < group.mpi->size(); ++peer) {
      out.push_back((me * 5 + peer * 11) % 17);
      in.push_back((peer * 5 + me * 11) % 17);
      out_bytes.push_back(out.back() * 8);
      in_bytes.push_back(in.back() * 8);
    }
    const int64_t sent = std::accumulate(out.begin(), out.end(), int64_t{0});
    const int64_t received = std::accumulate(in.begin(), in.end(), int64_t{0});
    this->expect_same(group, comm_sample<int64_t>(me, sent + 1), comm_untouched<int64_t>(received),
                      [&](Communicator& comm, const int64_t* send, int64_t* recv, Stream& on) {
                        return comm.all_to_all_v(part(send, 0, sent), out_bytes,
                                                 writable_part(recv, 0, received), in_bytes, on,
                                                 "all-to-all");
                      });
  }
}

TYPED_TEST_P(DeviceComm, Reductions) {
  this->template expect_same_reductions<float>();
  this->template expect_same_reductions<double>();
  this->template expect_same_reductions<int32_t>();
  this->template expect_same_reductions<int64_t>();
}

TYPED_TEST_P(DeviceComm, ReductionsOfBf16) {
  // MPI has none to compare with; sums of these integers are exact in bf16 too.
  constexpr int64_t count = 77;
  for (const CommGroup& group : this->groups()) {
    SCOPED_TRACE(group.name);
    const int n = group.mpi->size(), me = group.mpi->rank();
    std::vector<bf16> summed = comm_untouched<bf16>(count), block = summed;
    for (int64_t i = 0; i < count; ++i) {
      float sum = 0, of_block = 0;
      for (int r = 0; r < n; ++r) {
        sum += to_float(comm_sample<bf16>(r, count)[i]);
        of_block += to_float(comm_sample<bf16>(r, count * n)[me * count + i]);
      }
      summed[i] = to_bf16(sum);
      block[i] = to_bf16(of_block);
    }
    std::vector<bf16> mine = comm_sample<bf16>(me, count);
    mine.resize(summed.size(), comm_value<bf16>(-999));
    OnStream<bf16> data(mine, this->stream()),
        send(comm_sample<bf16>(me, count * n), this->stream()),
        recv(comm_untouched<bf16>(count), this->stream());
    group.comm->all_reduce(data.data(), count, DType::bf16, ReduceOp::sum, this->stream(), "sum")
        ->wait();
    group.comm
        ->reduce_scatter(send.data(), recv.data(), count, DType::bf16, ReduceOp::sum,
                         this->stream(), "scatter")
        ->wait();
    EXPECT_EQ(data.values(), summed);
    EXPECT_EQ(recv.values(), block);
  }
}

TYPED_TEST_P(DeviceComm, BroadcastFromEveryRoot) {
  constexpr int64_t count = 300;
  for (const CommGroup& group : this->groups())
    for (int root = 0; root < group.mpi->size(); ++root)
      this->expect_same(group, std::vector<float>(1),
                        comm_sample<float>(group.mpi->rank(), count + comm_guard),
                        [&](Communicator& comm, const float*, float* data, Stream& on) {
                          return comm.broadcast(writable_part(data, 0, count), root, on, "root");
                        });
}

TYPED_TEST_P(DeviceComm, OperationsUnderWayAreDrivenInAnyOrder) {
  // Each rank waits in another order, and for some by test(): all are complete in the end.
  constexpr int count = 6;
  for (const CommGroup& group : this->groups()) {
    SCOPED_TRACE(group.name);
    const int n = group.mpi->size(), me = group.mpi->rank();
    std::vector<std::unique_ptr<OnStream<int32_t>>> data;
    std::vector<WorkPtr> works;
    for (int i = 0; i < count; ++i) {
      data.push_back(
          std::make_unique<OnStream<int32_t>>(std::vector<int32_t>(50, me + i), this->stream()));
      works.push_back(group.comm->all_reduce(data.back()->data(), 50, DType::i32, ReduceOp::sum,
                                             this->stream(), "under way"));
      works.push_back(group.comm->barrier(this->stream(), "barrier"));
    }
    if (me % 2 == 0) std::reverse(works.begin(), works.end());
    if (me % 3 == 0) std::rotate(works.begin(), works.begin() + 5, works.end());
    for (const WorkPtr& work : works) {
      if (me % 2 == 1)
        while (!work->test()) {
        }
      work->wait();
      EXPECT_TRUE(work->test());
    }
    for (int i = 0; i < count; ++i)
      EXPECT_EQ(data[i]->values(), std::vector<int32_t>(50, n * i + n * (n - 1) / 2));
  }
}

TYPED_TEST_P(DeviceComm, WhatFollowsAHoldSeesTheResultAndWhatCameBeforeIsSent) {
  for (const CommGroup& group : this->groups()) {
    SCOPED_TRACE(group.name);
    const int n = group.mpi->size(), me = group.mpi->rank();
    const size_t bytes = 64 * sizeof(float);
    OnStream<float> source(std::vector<float>(64, static_cast<float>(me)), this->stream());
    OnStream<float> out(std::vector<float>(64, -1), this->stream());
    OnStream<float> in(std::vector<float>(64, -2), this->stream());
    OnStream<float> after(std::vector<float>(64, -3), this->stream());
    this->stream().copy(out.data(), source.data(), bytes);
    const SendSlice sends[] = {{(me + 1) % n, part(out.data(), 0, 64)}};
    const RecvSlice recvs[] = {{(me + n - 1) % n, writable_part(in.data(), 0, 64)}};
    const WorkPtr work = group.comm->exchange(sends, recvs, this->stream(), "held");
    work->wait_on_stream();
    this->stream().copy(after.data(), in.data(), bytes);
    EXPECT_EQ(after.values(), std::vector<float>(64, static_cast<float>((me + n - 1) % n)));
    work->wait();
  }
}

TYPED_TEST_P(DeviceComm, AMessageToOneselfWithoutItsReceiveIsAnError) {
  const CommGroup group = this->groups().front();
  OnStream<float> data(std::vector<float>(4, 1), this->stream());
  const SendSlice sends[] = {{group.comm->rank(), part(data.data(), 0, 4)}};
  EXPECT_THROW(group.comm->exchange(sends, {}, this->stream(), "unmatched"), Error);
}

REGISTER_TYPED_TEST_SUITE_P(DeviceComm, SplitKeepsTheOrderOfRanks, ExchangeAroundARing,
                            ExchangeOfTwoMessagesWithEveryRankItselfIncluded,
                            ExchangeOfMessagesCutDifferentlyAtTheirTwoEnds,
                            GathersOfEqualAndUnequalParts, AllToAllOfUnequalBlocksSomeOfThemEmpty,
                            Reductions, ReductionsOfBf16, BroadcastFromEveryRoot,
                            OperationsUnderWayAreDrivenInAnyOrder,
                            WhatFollowsAHoldSeesTheResultAndWhatCameBeforeIsSent,
                            AMessageToOneselfWithoutItsReceiveIsAnError);

/// Tests a backend of the file that says so.
#define GYRE_TEST_DEVICE_COMM(Backend)                          \
  INSTANTIATE_TYPED_TEST_SUITE_P(Backend, DeviceComm, Backend); \
  [[maybe_unused]] const bool Backend##_is_of_this_file =       \
      ::gyre::test::assign_suite(#Backend "/DeviceComm/0", __FILE__)

}  // namespace gyre::test

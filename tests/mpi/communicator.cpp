// Every operation of the MPI backend, on exact integers; agreement on errors; the process grid.

#include "comm/communicator.hpp"

#include <array>
#include <cmath>
#include <numeric>

#include "comm/agree.hpp"
#include "comm/process_grid.hpp"
#include "core/bf16.hpp"
#include "errors.hpp"
#include "score_checks.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::agreed_message;
using test::world;

HostStream stream;

/// The rank that is `step` ranks after this one on the ring of all ranks.
int ring(int step) {
  return (world().rank() + step + world().size()) % world().size();
}

std::vector<float> iota(int64_t n, float first) {
  std::vector<float> values(n);
  std::iota(values.begin(), values.end(), first);
  return values;
}
template <class T>
std::span<const std::byte> in(const std::vector<T>& v) {
  return bytes_of(std::span<const T>(v));
}
template <class T>
std::span<std::byte> out(std::vector<T>& v) {
  return writable_bytes_of(std::span<T>(v));
}

TEST(Communicator, ExchangeRoundTheRing) {
  const int n = world().size(), r = world().rank(), next = ring(1), previous = ring(-1);
  const auto send = iota(1000, static_cast<float>(r) * 1000);
  std::vector<float> recv(1000, -1);
  const Traffic before = world().traffic();
  const std::array sends = {SendSlice{next, in(send)}};
  const std::array recvs = {RecvSlice{previous, out(recv)}};
  world().exchange(sends, recvs, stream, "ring")->wait();
  EXPECT_EQ(recv, iota(1000, static_cast<float>(previous) * 1000));
  EXPECT_EQ(world().traffic().bytes_sent - before.bytes_sent, n > 1 ? 4000 : 0);
  EXPECT_EQ(world().traffic().messages - before.messages, n > 1 ? 1 : 0);
}

TEST(Communicator, MessagesBetweenTwoRanksMatchInOrder) {
  const int r = world().rank(), next = ring(1), previous = ring(-1);
  const auto a = iota(3, static_cast<float>(r)), b = iota(5, static_cast<float>(100 + r));
  std::vector<float> first(3), second(5);
  const std::array sends = {SendSlice{next, in(a)}, SendSlice{next, in(b)}};
  const std::array recvs = {RecvSlice{previous, out(first)}, RecvSlice{previous, out(second)}};
  world().exchange(sends, recvs, stream, "two messages")->wait();
  EXPECT_EQ(first, iota(3, static_cast<float>(previous)));
  EXPECT_EQ(second, iota(5, static_cast<float>(100 + previous)));
}

TEST(Communicator, AllGatherOfUnevenParts) {
  const int n = world().size(), r = world().rank();
  const auto mine = iota(r + 1, static_cast<float>(10 * r));
  std::vector<int64_t> bytes;
  std::vector<float> expected;
  for (int k = 0; k < n; ++k) {
    bytes.push_back((k + 1) * 4);
    const auto part = iota(k + 1, static_cast<float>(10 * k));
    expected.insert(expected.end(), part.begin(), part.end());
  }
  std::vector<float> all(expected.size(), -1);
  const int64_t before = world().traffic().bytes_sent;
  world().all_gather_v(in(mine), out(all), bytes, stream, "gather")->wait();
  EXPECT_EQ(all, expected);
  EXPECT_EQ(world().traffic().bytes_sent - before, (n - 1) * (r + 1) * 4);
}

TEST(Communicator, AllToAllOfUnevenBlocks) {
  // Rank r sends k + 1 values of 100 r + k to rank k.
  const int n = world().size(), r = world().rank();
  std::vector<float> send, expected;
  std::vector<int64_t> send_bytes, recv_bytes;
  for (int k = 0; k < n; ++k) {
    send.insert(send.end(), k + 1, static_cast<float>(100 * r + k));
    expected.insert(expected.end(), r + 1, static_cast<float>(100 * k + r));
    send_bytes.push_back((k + 1) * 4);
    recv_bytes.push_back((r + 1) * 4);
  }
  std::vector<float> recv(expected.size(), -1);
  world().all_to_all_v(in(send), send_bytes, out(recv), recv_bytes, stream, "uneven")->wait();
  EXPECT_EQ(recv, expected);
}

TEST(Communicator, Reductions) {
  const int n = world().size(), r = world().rank();
  std::vector<float> sum = iota(7, static_cast<float>(r));
  const int64_t before = world().traffic().bytes_sent;
  world().all_reduce(sum.data(), 7, DType::f32, ReduceOp::sum, stream, "sum")->wait();
  for (int i = 0; i < 7; ++i)
    EXPECT_EQ(sum[static_cast<size_t>(i)], static_cast<float>(n * i + n * (n - 1) / 2));
  EXPECT_EQ(world().traffic().bytes_sent - before, n > 1 ? 2 * (n - 1) * 7 * 4 / n : 0);
  EXPECT_EQ(all_reduce_value(world(), int64_t{r}, ReduceOp::max), n - 1);
  EXPECT_EQ(all_reduce_value(world(), 1.0 + r, ReduceOp::min), 1.0);

  std::vector<int64_t> blocks(2 * n);
  std::iota(blocks.begin(), blocks.end(), int64_t{r});
  std::vector<int64_t> mine(2);
  world()
      .reduce_scatter(blocks.data(), mine.data(), 2, DType::i64, ReduceOp::sum, stream, "scatter")
      ->wait();
  EXPECT_EQ(mine[0], n * 2 * r + n * (n - 1) / 2);
  EXPECT_EQ(mine[1], n * (2 * r + 1) + n * (n - 1) / 2);
}

TEST(Communicator, ReductionsOfBf16RoundEachResult) {
  const int n = world().size(), r = world().rank();
  const auto reduced = [&](float mine, ReduceOp op) {
    bf16 x = to_bf16(mine);
    world().all_reduce(&x, 1, DType::bf16, op, stream, "bf16")->wait();
    return to_float(x);
  };
  EXPECT_EQ(reduced(static_cast<float>(r) - 1, ReduceOp::max), static_cast<float>(n - 2));
  EXPECT_EQ(reduced(static_cast<float>(r) - 1, ReduceOp::min), -1.0F);
  EXPECT_EQ(reduced(static_cast<float>(r), ReduceOp::sum), static_cast<float>(n * (n - 1) / 2));
  // 256 + 1 lies between two bf16 numbers, and rounds to the even one; NaN stays.
  const float large = r == 0 ? 256.0F : r == 1 ? 1.0F : 0.0F;
  EXPECT_EQ(reduced(large, ReduceOp::sum), 256.0F);
  EXPECT_TRUE(std::isnan(reduced(r == 0 ? NAN : 1.0F, ReduceOp::sum)));
}

TEST(Communicator, KeepsTheCommunicatorsOfItsSubgroups) {
  const int n = world().size(), r = world().rank();
  std::vector<int> all(n);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(&world().subgroup(all), &world());
  const std::unique_ptr<Communicator> mine = world().split(0);
  const int first = r - r % 2;
  const std::vector<int> pair =
      first + 1 < n ? std::vector<int>{first, first + 1} : std::vector<int>{first};
  Communicator& group = mine->subgroup(pair);
  EXPECT_EQ(&mine->subgroup(pair), &group);
  EXPECT_EQ(group.size(), std::ssize(pair));
  EXPECT_EQ(group.rank(), r % 2);
  const Traffic before = mine->traffic();
  float sum = static_cast<float>(r);
  group.all_reduce(&sum, 1, DType::f32, ReduceOp::sum, stream, "pair")->wait();
  EXPECT_EQ(sum, static_cast<float>(std::accumulate(pair.begin(), pair.end(), 0)));
  EXPECT_EQ(mine->traffic().messages - before.messages, pair.size() > 1 ? 1 : 0);
  EXPECT_EQ(mine->traffic().bytes_sent - before.bytes_sent, pair.size() > 1 ? 4 : 0);
}

TEST(Communicator, BroadcastBarrierAndText) {
  const int last = world().size() - 1;
  std::vector<double> value = {world().rank() == last ? 2.5 : 0.0};
  world().broadcast(out(value), last, stream, "value")->wait();
  EXPECT_EQ(value[0], 2.5);
  world().barrier(stream, "barrier")->wait();
  EXPECT_EQ(broadcast_string(world(), world().rank() == last ? "from the last rank" : "", last),
            "from the last rank");
}

TEST(Communicator, SeveralOperationsUnderWayAtOnce) {
  const int n = world().size(), r = world().rank();
  std::vector<float> a = {static_cast<float>(r)}, b(n), c = {1};
  WorkPtr gather = world().all_gather(in(a), out(b), stream, "gather");
  WorkPtr reduce = world().all_reduce(c.data(), 1, DType::f32, ReduceOp::sum, stream, "reduce");
  while (!reduce->test()) {
  }
  gather->wait();
  EXPECT_EQ(b, iota(n, 0));
  EXPECT_EQ(c[0], static_cast<float>(n));
}

TEST(RunAgreed, OneRanksErrorEndsAllRanksAlike) {
  EXPECT_EQ(agreed_message([] {
              run_agreed(world(), "test", [] {
                if (test::on_last_rank()) throw_usage("token 300 is too large");
              });
            }),
            "token 300 is too large" + test::found_on(world().size() - 1));
  EXPECT_NO_THROW(run_agreed(world(), "test", [] {}));
}

TEST(RunAgreed, TheLowestRankThatFailsIsHeard) {
  if (world().size() < 3) GTEST_SKIP() << "one rank of several fails otherwise";
  EXPECT_EQ(agreed_message([] {
              run_agreed(world(), "test", [] {
                if (world().rank() == 1) throw_usage("wrong");
                if (world().rank() == 2) throw_runtime("worse");
              });
            }),
            "wrong (found on rank 1)");
}

TEST(RunOnRoot, ItsErrorEndsAllRanks) {
  EXPECT_EQ(agreed_message([] { run_on_root(world(), "test", [] { throw_usage("wrong"); }); }),
            "wrong");
}

TEST(RunOnRoot, AllRanksSkipWithRankZero) {
  try {
    run_on_root(world(), "test", [] { throw Error(ExitCode::skipped, "no GPU"); });
    ADD_FAILURE() << "no error on rank " << world().rank();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::skipped);
    EXPECT_STREQ(error.what(), "no GPU");
  }
}

TEST(RunAgreed, APartOfTheRanksDoesNotAgreeForAll) {
  const auto part = world().split(world().rank() % 2);
  try {
    run_agreed(*part, "test", [] { throw_usage("wrong in this part"); });
    ADD_FAILURE() << "no error on rank " << world().rank();
  } catch (const Error& error) {
    EXPECT_EQ(error.agreed(), part->size() == world().size());
    EXPECT_EQ(dynamic_cast<const AgreedError*>(&error) != nullptr, error.agreed());
  }
}

TEST(RunAgreed, WorkOfEachRankAloneDoesNotCommunicate) {
  std::string message;
  try {
    run_agreed(world(), "test", [] { all_reduce_value(world(), 1.0, ReduceOp::sum); });
  } catch (const AgreedError& error) {
    message = error.what();
  }
  EXPECT_EQ(message.find("communication in work that each rank does alone") != std::string::npos,
            world().size() > 1)
      << message;
}

TEST(RunAgreed, ForeignExceptionsBecomeRuntimeErrors) {
  const auto expect = [](const std::string& message, const std::function<void()>& work) {
    try {
      run_agreed(world(), "reading", work);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::runtime);
      EXPECT_EQ(error.what(), message);
    }
  };
  expect("reading: disk on fire", [] { throw std::runtime_error("disk on fire"); });
  expect("reading: there is not enough memory", [] { throw std::bad_alloc(); });
}

TEST(AgreeOn, TheGravestCodeWins) {
  const bool first = world().rank() == 0;
  EXPECT_EQ(agree_on(world(), first ? ExitCode::usage : ExitCode::ok), ExitCode::usage);
  EXPECT_EQ(agree_on(world(), first ? ExitCode::skipped : ExitCode::ok),
            world().size() == 1 ? ExitCode::skipped : ExitCode::ok);
  EXPECT_EQ(agree_on(world(), first ? ExitCode::verification_failed : ExitCode::skipped),
            ExitCode::verification_failed);
}

TEST(ProcessGrid, TensorParallelRanksAreNeighbours) {
  const int n = world().size(), r = world().rank();
  for (const GridShape& shape : nearest_grids({1, 1, 1}, n, {1, 2, 3, 4, 8})) {
    ProcessGrid grid(world(), shape);
    EXPECT_EQ(r, (grid.dp_rank() * shape.cp + grid.cp_rank()) * shape.tp + grid.tp_rank());
    EXPECT_EQ(grid.tp().size(), shape.tp);
    EXPECT_EQ(grid.cp().size(), shape.cp);
    EXPECT_EQ(grid.tp().rank(), grid.tp_rank());
    EXPECT_EQ(grid.cp().rank(), grid.cp_rank());
    const std::vector<int64_t> members = all_gather_value(grid.tp(), int64_t{r});
    for (size_t t = 0; t < members.size(); ++t)
      EXPECT_EQ(members[t], r - grid.tp_rank() + static_cast<int>(t));
    const std::vector<int64_t> ring = all_gather_value(grid.cp(), int64_t{r});
    for (size_t c = 0; c < ring.size(); ++c)
      EXPECT_EQ(ring[c], r + (static_cast<int>(c) - grid.cp_rank()) * shape.tp);
  }
}

TEST(NearestGrids, OnlyPossibleOnesNearestFirst) {
  const auto grids = nearest_grids({1, 2, 3}, 8, {1, 2, 4});
  ASSERT_FALSE(grids.empty());
  EXPECT_EQ(grids[0], (GridShape{1, 2, 4}));
  for (const GridShape& grid : grids) EXPECT_EQ(grid.ranks(), 8);
  EXPECT_TRUE(nearest_grids({1, 1, 2}, 3, {2}).empty());
}

}  // namespace GYRE_FILE
}  // namespace gyre

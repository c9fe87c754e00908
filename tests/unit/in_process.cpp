// Ranks that take turns in one process: order of sums, groups, errors, ranks that wait for ever.

#include "comm/in_process.hpp"

#include <gtest/gtest.h>

#include "comm/agree.hpp"
#include "core/bf16.hpp"
#include "core/error.hpp"

namespace gyre {
namespace GYRE_FILE {

HostStream stream;

/// The message of the error that `work` throws.
std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(RanksInProcess, ReductionsAddInTheOrderOfRanksAndRoundEachSum) {
  RanksInProcess ranks(4);
  const std::vector<float> terms = {1e8F, 1, -1e8F, 1};  // in order 1, as pairs 0
  ranks.run([&](int rank) {
    Communicator& group = ranks.of(rank);
    float sum = terms[rank];
    group.all_reduce(&sum, 1, DType::f32, ReduceOp::sum, stream, "a sum")->wait();
    EXPECT_EQ(sum, 1);
    const std::vector<bf16> blocks(4, to_bf16(rank == 0 ? 256.0F : 1.0F));
    bf16 mine{};
    group.reduce_scatter(blocks.data(), &mine, 1, DType::bf16, ReduceOp::sum, stream, "sums")
        ->wait();
    EXPECT_EQ(to_float(mine), 256);  // 256 + 1 rounds to 256, three times
    EXPECT_EQ(all_reduce_value(group, int64_t{rank}, ReduceOp::max), 3);
    EXPECT_EQ(all_reduce_value(group, int64_t{rank}, ReduceOp::min), 0);
    EXPECT_EQ(broadcast_string(group, rank == 2 ? "two" : "", 2), "two");
    group.barrier(stream, "the end")->wait();
  });
}

TEST(RanksInProcess, GroupsSplitAndSplitAgain) {
  RanksInProcess ranks(6);
  ranks.run([&](int rank) {
    Communicator& odd_or_even =
        ranks.of(rank).subgroup(rank % 2 == 0 ? std::vector{0, 2, 4} : std::vector{1, 3, 5});
    EXPECT_EQ(odd_or_even.rank(), rank / 2);
    EXPECT_EQ(all_gather_value(odd_or_even, rank),
              (std::vector{rank % 2, rank % 2 + 2, rank % 2 + 4}));
    const auto alone = odd_or_even.split(rank);
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(all_gather_value(*alone, rank), std::vector{rank});
  });
}

TEST(RanksInProcess, MessagesToARankArriveInTheOrderInWhichTheyAreSent) {
  RanksInProcess ranks(2);
  ranks.run([&](int rank) {
    const int peer = 1 - rank;
    const std::vector<int> sent = {10 * rank, 10 * rank + 1};
    std::vector<int> received(2);
    std::vector<WorkPtr> works;
    for (const int i : {0, 1}) {
      const SendSlice send{peer, bytes_of(std::span<const int>(&sent[i], 1))};
      const RecvSlice recv{peer, writable_bytes_of(std::span<int>(&received[i], 1))};
      works.push_back(ranks.of(rank).exchange({&send, 1}, {&recv, 1}, stream, "a number"));
    }
    for (const int i : {1, 0}) works[i]->wait();
    EXPECT_EQ(received, (std::vector{10 * peer, 10 * peer + 1}));
    EXPECT_EQ(ranks.of(rank).traffic().messages, 2);
    EXPECT_EQ(ranks.of(rank).traffic().bytes_sent, 8);
  });
}

TEST(RanksInProcess, AnErrorOfOneRankEndsAllAndIsRethrown) {
  RanksInProcess ranks(3);
  const std::string message = message_of([&] {
    ranks.run([&](int rank) {
      if (rank == 1) throw_runtime("rank 1 is out of order");
      ranks.of(rank).barrier(stream, "never")->wait();
    });
  });
  EXPECT_EQ(message, "rank 1 is out of order");
}

TEST(RanksInProcess, WaitingForMessagesThatNobodySendsIsAnError) {
  for (const int size : {1, 3}) {
    RanksInProcess ranks(size);
    const std::string message = message_of([&] {
      ranks.run([&](int rank) {
        int number = 0;
        const RecvSlice recv{0, writable_bytes_of(std::span<int>(&number, 1))};
        ranks.of(rank).exchange({}, {&recv, 1}, stream, "nothing")->wait();
      });
    });
    EXPECT_EQ(message, "all ranks of a replay wait for messages that nobody has sent");
  }
}

TEST(RanksInProcess, AMessageOfAnotherLengthIsAnError) {
  RanksInProcess ranks(2);
  const std::string message = message_of([&] {
    ranks.run([&](int rank) {
      const std::vector<int> sent(rank + 1);
      std::vector<int> received(rank + 1);
      const SendSlice send{1 - rank, bytes_of(std::span<const int>(sent))};
      const RecvSlice recv{1 - rank, writable_bytes_of(std::span<int>(received))};
      ranks.of(rank).exchange({&send, 1}, {&recv, 1}, stream, "unequal")->wait();
    });
  });
  EXPECT_NE(message.find("unequal: "), std::string::npos) << message;
}

}  // namespace GYRE_FILE
}  // namespace gyre

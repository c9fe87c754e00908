// Ranks that take turns in one process: order of sums, groups, buffers in use, errors, ranks that
// wait for ever.

#include "comm/in_process.hpp"

#include <gtest/gtest.h>
#include <pthread.h>

#include "comm/agree.hpp"
#include "comm/checked.hpp"
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

/// Sends one number from rank `sender` of two to the other one, and returns the work.
WorkPtr pass_number(Communicator& group, int sender, int& number) {
  const SendSlice send{1 - sender, bytes_of(std::span<const int>(&number, 1))};
  const RecvSlice recv{sender, writable_bytes_of(std::span<int>(&number, 1))};
  if (group.rank() == sender) return group.exchange({&send, 1}, {}, stream, "a number");
  return group.exchange({}, {&recv, 1}, stream, "a number");
}

TEST(RanksInProcess, ASenderWaitsUntilItsMessageHasArrived) {
  RanksInProcess ranks(2);
  ranks.run([&](int rank) {
    int number = rank == 0 ? 7 : 0;
    const WorkPtr work = pass_number(ranks.of(rank), 0, number);
    EXPECT_EQ(work->test(), rank == 1);  // the second one moves the data
    work->wait();
    EXPECT_EQ(number, 7);
    number = 8;
  });
}

TEST(RanksInProcess, ABufferThatIsOverwrittenInFlightIsFound) {
  for (const bool checks : {false, true}) {
    RanksInProcess ranks(2);
    const std::string message = message_of([&] {
      ranks.run([&](int rank) {
        CheckedCommunicator group(ranks.of(rank).split(0));  // rank 1 goes on first
        group.check_messages(checks);
        int number = rank == 1 ? 7 : 0;
        const WorkPtr work = pass_number(group, 1, number);
        if (rank == 1) number = 8;
        work->wait();
        EXPECT_EQ(number, 8);
      });
    });
    EXPECT_EQ(message, checks ? "a number: what rank 1 sent arrived with other bits than were "
                                "sent: memory or network are at fault"
                              : "no error");
  }
}

TEST(RanksInProcess, TheFirstErrorEndsAllAndIsRethrown) {
  RanksInProcess ranks(3);
  const auto message = [&] {
    return message_of([&] {
      ranks.run([&](int rank) {
        if (rank == 1) throw_runtime("rank 1 is out of order");
        try {
          ranks.of(rank).barrier(stream, "never")->wait();
          ADD_FAILURE() << "rank " << rank << " goes on";
        } catch (...) {
          throw_runtime("a consequence on rank {}", rank);
        }
      });
    });
  };
  EXPECT_EQ(message(), "rank 1 is out of order");
  EXPECT_EQ(message(), "rank 1 is out of order") << "the ranks are used again";
}

TEST(RanksInProcess, AnErrorOnWhichAllAgreeIsThrownByAll) {
  RanksInProcess ranks(4);
  for (const int failing : {0, 2, 3}) {
    int ended = 0;
    const auto body = [&](int rank) {
      try {
        run_agreed(ranks.of(rank), "work", [&] {
          if (rank >= failing) throw_usage("rank {} cannot", rank);
        });
      } catch (const AgreedError& error) {
        EXPECT_EQ(error.code(), ExitCode::usage);
        ++ended;
        throw;
      }
    };
    const std::string found = fmt::format(" (found on rank {})", failing);
    EXPECT_EQ(message_of([&] { ranks.run(body); }),
              fmt::format("rank {} cannot{}", failing, failing == 0 ? "" : found));
    EXPECT_EQ(ended, 4);
  }
  // The others know nothing of an error on which a part of the ranks agrees.
  EXPECT_EQ(message_of([&] {
              ranks.run([&](int rank) {
                const auto part = ranks.of(rank).split(rank % 2);
                run_agreed(*part, "work", [&] {
                  if (rank % 2 == 1) throw_usage("odd ranks cannot");
                });
                ranks.of(rank).barrier(stream, "never")->wait();
                ADD_FAILURE() << "rank " << rank << " goes on";
              });
            }),
            "odd ranks cannot");
}

TEST(RanksInProcess, ThreadsThatCannotBeStartedAreAnError) {
  pthread_attr_t usual, huge;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_getattr_default_np(&huge), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 50), 0);  // beyond all address spaces
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  RanksInProcess ranks(3);
  const std::string message =
      message_of([&] { ranks.run([](int rank) { ADD_FAILURE() << "rank " << rank << " runs"; }); });
  ASSERT_EQ(pthread_setattr_default_np(&usual), 0);
  EXPECT_NE(message.find("a replay of 3 ranks needs as many threads, and the system starts 0"),
            std::string::npos)
      << message;
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
    EXPECT_EQ(message, "nothing: all ranks of a replay wait for each other");
  }
}

TEST(RanksInProcess, CollectivesThatDifferAreAnError) {
  RanksInProcess ranks(2);
  const std::string message = message_of([&] {
    ranks.run([&](int rank) {
      if (rank == 0) ranks.of(rank).barrier(stream, "never")->wait();
      int number = 0;
      ranks.of(rank).all_reduce(&number, 1, DType::i32, ReduceOp::sum, stream, "another")->wait();
    });
  });
  EXPECT_NE(message.find("another: ranks call different collectives"), std::string::npos)
      << message;
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

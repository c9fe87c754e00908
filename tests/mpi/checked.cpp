// A checked communicator gives what its transport gives, and notices every message that a transport
// changes.

#include "comm/checked.hpp"

#include <array>
#include <cstring>
#include <functional>
#include <numeric>

#include "comm/agree.hpp"
#include "comm/mpi.hpp"
#include "mpi_test.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::world;

HostStream stream;

/// Changes one bit of what arrives on the last rank in its n-th operation.
class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(Communicator& real, int fault) : real_(real), fault_(fault) {}
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  MemorySpace space() const override { return MemorySpace::host; }
  std::string_view backend() const override { return "faulty"; }
  std::unique_ptr<Communicator> split(int color) override { return real_.split(color); }
  int operations() const { return operations_; }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs, Stream& s,
                      std::string_view what) override {
    real_.exchange(sends, recvs, s, what)->wait();
    return flip(recvs.empty() ? std::span<std::byte>() : recvs.back().data);
  }
  WorkPtr do_collective(const Collective& call, Stream& s, std::string_view what) override {
    real_.collective(call, s, what)->wait();
    return call.kind == Collective::Kind::barrier ? completed_work() : flip(call.recv);
  }

 private:
  WorkPtr flip(std::span<std::byte> arrived) {
    if (operations_++ == fault_ && rank() + 1 == size() && !arrived.empty())
      arrived.back() ^= std::byte{4};
    return completed_work();
  }
  Communicator& real_;
  int fault_;
  int operations_ = 0;
};

/// One operation of each kind on what depends on the rank.
struct Operation {
  const char* name;
  std::vector<double> (*run)(Communicator&);
};

std::vector<double> values(const Communicator& comm, int64_t n) {
  std::vector<double> v(n);
  std::iota(v.begin(), v.end(), 100.0 * comm.rank());
  return v;
}
std::span<const std::byte> in(const std::vector<double>& v) {
  return bytes_of(std::span<const double>(v));
}
std::span<std::byte> out(std::vector<double>& v) {
  return writable_bytes_of(std::span<double>(v));
}

const std::array<Operation, 6> operations = {{
    {"exchange",
     [](Communicator& c) {
       const std::vector<double> a = values(c, 3), b = values(c, 5);
       std::vector<double> got(8);
       const int n = c.size(), next = (c.rank() + 1) % n, previous = (c.rank() + n - 1) % n;
       const std::array sends = {SendSlice{next, in(a)}, SendSlice{next, in(b)}};
       const std::array recvs = {RecvSlice{previous, out(got).first(32)},
                                 RecvSlice{previous, out(got).subspan(32)}};
       c.exchange(sends, recvs, stream, "exchange")->wait();
       return got;
     }},
    {"all-gather",
     [](Communicator& c) {
       const std::vector<double> mine = values(c, 4);
       std::vector<double> all(4 * c.size());
       c.all_gather(in(mine), out(all), stream, "all-gather")->wait();
       return all;
     }},
    {"all-to-all",
     [](Communicator& c) {
       const std::vector<double> mine = values(c, 2 * c.size());
       std::vector<double> got(mine.size());
       c.all_to_all(in(mine), out(got), stream, "all-to-all")->wait();
       return got;
     }},
    {"reduce-scatter",
     [](Communicator& c) {
       const std::vector<double> mine = values(c, 2 * c.size());
       std::vector<double> got(2);
       c.reduce_scatter(mine.data(), got.data(), 2, DType::f64, ReduceOp::sum, stream,
                        "reduce-scatter")
           ->wait();
       return got;
     }},
    {"all-reduce",
     [](Communicator& c) {
       std::vector<double> v = values(c, 5);
       c.all_reduce(v.data(), 5, DType::f64, ReduceOp::sum, stream, "all-reduce")->wait();
       return v;
     }},
    {"broadcast",
     [](Communicator& c) {
       std::vector<double> v = values(c, 5);
       c.broadcast(out(v), 0, stream, "broadcast")->wait();
       return v;
     }},
}};

TEST(Checked, GivesWhatTheTransportGives) {
  CheckedCommunicator checked(make_mpi_communicator(test::environment().world()));
  for (const bool on : {true, false}) {
    checked.check_messages(on);
    for (const Operation& operation : operations) {
      const Traffic before = world().traffic(), mine = checked.traffic();
      const std::vector<double> expected = operation.run(world());
      EXPECT_EQ(operation.run(checked), expected) << operation.name;
      EXPECT_EQ(checked.traffic().bytes_sent - mine.bytes_sent,
                world().traffic().bytes_sent - before.bytes_sent)
          << operation.name;
    }
  }
}

TEST(Checked, NoticesAChangedMessageAndAChangedChecksum) {
  if (world().size() == 1) GTEST_SKIP() << "one rank sends nothing";
  const bool victim = world().rank() + 1 == world().size();
  for (const Operation& operation : operations)
    for (const int fault : {0, 1}) {  // the payload, then what follows it
      auto faulty = std::make_unique<FaultyCommunicator>(world(), fault);
      FaultyCommunicator& transport = *faulty;
      CheckedCommunicator checked(std::move(faulty));
      std::string message;
      try {
        operation.run(checked);
      } catch (const Error& error) {
        message = error.what();
        EXPECT_EQ(error.code(), ExitCode::runtime);
      }
      EXPECT_EQ(transport.operations(), 2) << operation.name;
      EXPECT_EQ(message.find(operation.name), victim ? 0 : std::string::npos) << message;
      EXPECT_EQ(message.find("other bits than were sent") != std::string::npos, victim) << message;
    }
}

TEST(Checked, WithoutChecksNothingIsAdded) {
  auto faulty = std::make_unique<FaultyCommunicator>(world(), -1);
  FaultyCommunicator& transport = *faulty;
  CheckedCommunicator checked(std::move(faulty));
  checked.check_messages(false);
  operations[0].run(checked);
  EXPECT_EQ(transport.operations(), 1);
}

TEST(Checked, PartsCheckAsTheWholeDoes) {
  CheckedCommunicator checked(make_mpi_communicator(test::environment().world()));
  const auto half = checked.split(checked.rank() % 2);
  EXPECT_EQ(half->backend(), "mpi");
  const std::vector<int64_t> members = all_gather_value(*half, int64_t{checked.rank()});
  for (size_t i = 0; i < members.size(); ++i)
    EXPECT_EQ(members[i], checked.rank() % 2 + 2 * static_cast<int64_t>(i));
}

TEST(Agreement, ArgumentsOfOtherBitsThanWereSentAreNoDifferenceBetweenRanks) {
  if (world().size() == 1) GTEST_SKIP() << "one rank sends nothing";
  const bool victim = world().rank() + 1 == world().size();
  for (const int fault : {0, 1}) {  // the status and checksum of the arguments, then the arguments
    FaultyCommunicator faulty(world(), fault);
    std::string message;
    try {
      agree_on_arguments(faulty, "work", [] {}, {{"the size", 7}});
    } catch (const Error& error) {
      message = error.what();
      EXPECT_EQ(error.code(), ExitCode::runtime);
    }
    EXPECT_EQ(message, victim ? fmt::format("work: the arguments of rank {} are not those that it "
                                            "sent",
                                            world().size() - 1)
                              : "");
  }
}

TEST(Agreement, AStatusThatNoRankCanHaveIsAnError) {
  // A communicator that changes the status of the last rank into one of no meaning: 256 would be
  // exit code 0.
  class Liar final : public Communicator {
   public:
    int rank() const override { return world().rank(); }
    int size() const override { return world().size(); }
    MemorySpace space() const override { return MemorySpace::host; }
    std::string_view backend() const override { return "liar"; }
    std::unique_ptr<Communicator> split(int color) override { return world().split(color); }

   protected:
    WorkPtr do_exchange(std::span<const SendSlice>, std::span<const RecvSlice>, Stream&,
                        std::string_view) override {
      return completed_work();
    }
    WorkPtr do_collective(const Collective& call, Stream& s, std::string_view what) override {
      const bool gathers = call.kind == Collective::Kind::all_gather;
      if (gathers) world().collective(call, s, what)->wait();
      const int64_t status = 256;
      if (gathers || call.kind == Collective::Kind::all_reduce)
        std::memcpy(call.recv.data() + call.recv.size() - 8, &status, 8);
      return completed_work();
    }
  } liar;
  const auto message_of = [](const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::runtime);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(message_of([&] {
              run_agreed(liar, "work", [] {});
            }).find("says that its status is 0x100, which no rank can"),
            std::string::npos);
  if (world().size() > 1) {
    EXPECT_EQ(message_of([&] { agree_on(liar, ExitCode::ok); }),
              "a rank says that its status is of severity 256, which no rank can");
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

// The emulated network: what arrives, in which order, and not before its time. Where no message may
// be delayed the latency is a thousand seconds, so that a delay ends the test by its timeout.

#include <sched.h>

#include <array>
#include <cmath>
#include <cstring>
#include <list>
#include <numeric>

#include "comm/agree.hpp"
#include "comm/emulated.hpp"
#include "errors.hpp"
#include "mpi_test.hpp"
#include "runtime/clock.hpp"

namespace gyre {
namespace GYRE_FILE {

using test::expect_usage;
using test::world;

constexpr double never = 1000;  // seconds
constexpr double fast = 1e15;   // bytes per second

HostStream stream;

int ring(int step) {
  return (world().rank() + step + world().size()) % world().size();
}
/// Message number `index` from one rank to another.
std::vector<float> message(int from, int to, int index, int64_t length) {
  std::vector<float> values(length);
  std::iota(values.begin(), values.end(), static_cast<float>(100'000 * index + 1000 * from + to));
  return values;
}
std::span<const std::byte> in(const std::vector<float>& v) {
  return bytes_of(std::span<const float>(v));
}
std::span<std::byte> out(std::vector<float>& v) {
  return writable_bytes_of(std::span<float>(v));
}

/// One exchange with every rank, itself included: `count` messages to each, the first the longest.
class AllPairs {
 public:
  AllPairs(Communicator& comm, int count) : rank_(comm.rank()), ranks_(comm.size()), count_(count) {
    std::vector<SendSlice> sends;
    std::vector<RecvSlice> recvs;
    for (int i = 0; i < count; ++i)
      for (int peer = 0; peer < comm.size(); ++peer) {
        sent_.push_back(message(comm.rank(), peer, i, length(i)));
        received_.emplace_back(length(i), -1.0F);
        sends.push_back({peer, in(sent_.back())});
        recvs.push_back({peer, out(received_.back())});
      }
    work_ = comm.exchange(sends, recvs, stream, "all pairs");
  }
  Work& work() { return *work_; }
  void expect_contents() const {
    auto received = received_.begin();
    for (int i = 0; i < count_; ++i)
      for (int peer = 0; peer < ranks_; ++peer)
        EXPECT_EQ(*received++, message(peer, rank_, i, length(i))) << peer << ", " << i;
  }

 private:
  int64_t length(int i) const { return int64_t{1} << (2 * (count_ - i)); }
  int rank_, ranks_, count_;
  std::list<std::vector<float>> sent_, received_;
  WorkPtr work_;
};

TEST(NetworkModel, ReadsUnits) {
  const NetworkModel all = parse_network_model("alpha=10us,beta=5G,node=4");
  EXPECT_DOUBLE_EQ(all.latency_s, 10e-6);
  EXPECT_DOUBLE_EQ(all.bytes_per_s, 5e9);
  EXPECT_EQ(all.ranks_per_node, 4);
  const NetworkModel two = parse_network_model("beta=2.5M,alpha=0.5ms");
  EXPECT_DOUBLE_EQ(two.latency_s, 0.5e-3);
  EXPECT_DOUBLE_EQ(two.bytes_per_s, 2.5e6);
  EXPECT_EQ(two.ranks_per_node, 1);
  EXPECT_DOUBLE_EQ(parse_network_model("alpha=2s,beta=3K").latency_s, 2);
  EXPECT_DOUBLE_EQ(parse_network_model("alpha=0,beta=3K").latency_s, 0);
  EXPECT_DOUBLE_EQ(parse_network_model("alpha=0us,beta=3K").bytes_per_s, 3e3);
  EXPECT_DOUBLE_EQ(parse_network_model("alpha=0s,beta=1500").bytes_per_s, 1500);
}

TEST(NetworkModel, RefusesWhatItDoesNotKnow) {
  const auto refused = [](std::string text, const std::string& message) {
    SCOPED_TRACE(text);
    expect_usage("network: " + message, [&] { parse_network_model(text); });
  };
  refused("", "'' is none of alpha=TIME, beta=RATE and node=RANKS");
  refused("alpha=1us,beta=1G,", "'' is none of alpha=TIME, beta=RATE and node=RANKS");
  refused("alpha=1us,bandwidth=1G",
          "'bandwidth=1G' is none of alpha=TIME, beta=RATE and node=RANKS");
  refused("alpha", "'alpha' is none of alpha=TIME, beta=RATE and node=RANKS");
  for (const char* value : {"10", "10ns", "us", "-1us", "-0us", "infs", "nans", "1us ", " 1us", ""})
    refused(
        fmt::format("beta=1G,alpha={}", value),
        fmt::format("alpha is '{}'; it must be a number of us, ms or s, as in alpha=10us", value));
  for (const char* value : {"0", "0G", "-5G", "5g", "5GB", "5GiB", "inf", "nan", "G", ""})
    refused(fmt::format("alpha=1us,beta={}", value),
            fmt::format("beta is '{}'; it must be a number of bytes per second above 0, with K, M "
                        "or G for 10^3, 10^6 or 10^9, as in beta=5G",
                        value));
  for (const char* value : {"0", "-1", "2.5", "4K", "99999999999", ""})
    refused(fmt::format("alpha=1us,beta=1G,node={}", value),
            fmt::format("node is '{}'; it must be a number of ranks, at least 1", value));
  refused("alpha=1us,alpha=2us,beta=1G", "alpha is given twice in 'alpha=1us,alpha=2us,beta=1G'");
  refused("alpha=1us,node=2",
          "'alpha=1us,node=2' has no beta; both alpha and beta are needed, as in "
          "alpha=10us,beta=5G");
  refused("beta=1G",
          "'beta=1G' has no alpha; both alpha and beta are needed, as in alpha=10us,beta=5G");
}

TEST(NetworkModel, RefusesModelsWithoutMeaning) {
  for (const NetworkModel& model : {NetworkModel{-1, 1, 1}, NetworkModel{NAN, 1, 1},
                                    NetworkModel{0, 0, 1}, NetworkModel{0, 1, 0}})
    expect_usage(
        fmt::format("an emulated network of latency {} s, {} bytes/s and {} ranks a node: they "
                    "must be at least 0, above 0 and at least 1",
                    model.latency_s, model.bytes_per_s, model.ranks_per_node),
        [&] { emulate_network(world(), model); });
}

TEST(EgressLink, MessagesFollowOneAnother) {
  const NetworkModel model{0.5, 100, 1};
  EgressLink link;
  EXPECT_DOUBLE_EQ(link.send(model, 10, 200), 12.5);  // on the link from 10 to 12
  EXPECT_DOUBLE_EQ(link.send(model, 10, 100), 13.5);  // from 12 to 13
  EXPECT_DOUBLE_EQ(link.send(model, 11, 0), 13.5);    // takes no time, but its turn
  EXPECT_DOUBLE_EQ(link.send(model, 20, 100), 21.5);  // the link was free
}

TEST(EmulatedNetwork, ContentsAndOrderOnNodesOfAnySize) {
  for (const int node : {1, 2, 3, 8}) {
    const auto network = emulate_network(world(), {1e-3, 100e6, node});
    EXPECT_EQ(network->rank(), world().rank());
    EXPECT_EQ(network->size(), world().size());
    EXPECT_EQ(network->backend(), "emulated");
    AllPairs first(*network, 4), second(*network, 2);  // both under way at once
    second.work().wait();
    second.expect_contents();
    first.work().wait();
    first.expect_contents();
  }
}

/// Sends its own time to the next rank, in a message of `bytes`; seconds until it was received.
/// Clocks of ranks on one machine agree.
double time_of_message(Communicator& network, int64_t bytes) {
  std::vector<float> sent(bytes / sizeof(float)), received(sent.size());
  const double start = monotonic_seconds();
  std::memcpy(sent.data(), &start, sizeof(start));
  const std::array sends = {SendSlice{ring(1), in(sent)}};
  const std::array recvs = {RecvSlice{ring(-1), out(received)}};
  network.exchange(sends, recvs, stream, "timed message")->wait();
  double sent_at = 0;
  std::memcpy(&sent_at, received.data(), sizeof(sent_at));
  return monotonic_seconds() - sent_at;
}

TEST(EmulatedNetwork, AMessageTakesItsTime) {
  const int64_t bytes = 200'000;
  const auto network = emulate_network(world(), {20e-3, 10e6, 1});  // 20 ms + 20 ms
  const double seconds = time_of_message(*network, bytes);
  if (world().size() > 1) {
    EXPECT_GE(seconds, 40e-3);
  }
  EXPECT_LT(seconds, 10);  // generous: not the thousand seconds of a wrong unit
  const auto slow = emulate_network(world(), {never, 1, world().size()});  // all on one node
  EXPECT_LT(time_of_message(*slow, bytes), 10);
}

TEST(EmulatedNetwork, MessagesShareTheLinkOfTheirSender) {
  const int64_t count = 4, bytes = 100'000;  // 10 ms each
  const auto network = emulate_network(world(), {5e-3, 10e6, 1});
  // Two go to the next rank, two to the one before; which may be the same, or this one.
  const double start = monotonic_seconds();
  std::list<std::vector<float>> sent, received;
  std::list<WorkPtr> works;
  for (int i = 0; i < count; ++i) {
    sent.emplace_back(bytes / sizeof(float));
    received.emplace_back(bytes / sizeof(float));
    std::memcpy(sent.back().data(), &start, sizeof(start));
    const int step = i % 2 == 0 ? 1 : -1;
    const std::array sends = {SendSlice{ring(step), in(sent.back())}};
    const std::array recvs = {RecvSlice{ring(-step), out(received.back())}};
    works.push_back(network->exchange(sends, recvs, stream, "shared link"));
  }
  int64_t place = 0;
  for (const WorkPtr& work : works) {
    work->wait();
    double sent_at = 0;
    std::memcpy(&sent_at, std::next(received.begin(), place++)->data(), sizeof(sent_at));
    if (world().size() > 1) {
      EXPECT_GE(monotonic_seconds() - sent_at, 5e-3 + 10e-3 * static_cast<double>(place)) << place;
    }
  }
}

TEST(EmulatedNetwork, TestAloneCompletesAnExchange) {
  const auto network = emulate_network(world(), {5e-3, 1e9, 1});
  AllPairs pairs(*network, 2);
  const double start = monotonic_seconds();
  while (!pairs.work().test() && monotonic_seconds() - start < 30)
    sched_yield();  // time for computing
  EXPECT_TRUE(pairs.work().test());
  pairs.expect_contents();
  pairs.work().wait();
}

TEST(EmulatedNetwork, NothingArrivesBeforeItsTimeAndDestroyingTheNetworkReleasesTheRest) {
  const int64_t others = world().size() - 1;
  auto network = emulate_network(world(), {never, fast, 1});
  const int64_t before = world().traffic().messages;
  AllPairs first(*network, 3), second(*network, 1);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(first.work().test(), others == 0);
    EXPECT_EQ(second.work().test(), others == 0);
  }
  network.reset();
  EXPECT_EQ(world().traffic().messages, before);
  first.work().wait();
  second.work().wait();
  first.expect_contents();
  second.expect_contents();
}

TEST(EmulatedNetwork, CountsTrafficOnce) {
  const auto network = emulate_network(world(), {1e-3, 1e9, 2});
  const int64_t before = world().traffic().bytes_sent;
  AllPairs pairs(*network, 1);  // 4 floats to each
  const int64_t others = world().size() - 1;
  EXPECT_EQ(network->traffic().bytes_sent, 16 * others);
  EXPECT_EQ(network->traffic().messages, others);
  pairs.work().wait();
  EXPECT_EQ(network->traffic().bytes_sent, 16 * others);
  EXPECT_EQ(network->traffic().messages, others);
  EXPECT_EQ(world().traffic().bytes_sent, before);  // it has communicators of its own
}

TEST(EmulatedNetwork, CollectivesAreNotDelayed) {
  const auto network = emulate_network(world(), {never, 1, 1});
  const int n = world().size(), r = world().rank();
  const auto mine = static_cast<float>(r);
  std::vector<float> all(n, -1), expected(all.size());
  std::iota(expected.begin(), expected.end(), 0.0F);
  network->all_gather(in({mine}), out(all), stream, "all-gather")->wait();
  EXPECT_EQ(all, expected);
  std::vector<float> swapped(all.size(), -1);
  network->all_to_all(in(std::vector<float>(all.size(), mine)), out(swapped), stream, "all-to-all")
      ->wait();
  EXPECT_EQ(swapped, expected);
  std::vector<double> sum = {1, static_cast<double>(r)};
  network->all_reduce(sum.data(), 2, DType::f64, ReduceOp::sum, stream, "all-reduce")->wait();
  EXPECT_EQ(sum, (std::vector<double>{static_cast<double>(n), n * (n - 1) / 2.0}));
  float scattered = -1;
  network->reduce_scatter(all.data(), &scattered, 1, DType::f32, ReduceOp::sum, stream, "r")
      ->wait();
  EXPECT_EQ(scattered, static_cast<float>(r * n));
  std::vector<float> root = {mine};
  network->broadcast(out(root), n - 1, stream, "broadcast")->wait();
  EXPECT_EQ(root[0], static_cast<float>(n - 1));
  network->barrier(stream, "barrier")->wait();
}

TEST(EmulatedNetwork, WaitingForACollectiveSendsWhatIsDue) {
  // Every rank but 0 enters the barrier only when it has the message that rank 0 has delayed.
  const auto network = emulate_network(world(), {2e-3, 1e9, 1});
  std::list<std::vector<float>> values;
  std::vector<SendSlice> sends;
  std::vector<RecvSlice> recvs;
  const bool root = world().rank() == 0;
  for (int peer = 1; root && peer < world().size(); ++peer)
    sends.push_back({peer, in(values.emplace_back(message(0, peer, 0, 10)))});
  if (!root) recvs.push_back({0, out(values.emplace_back(10))});
  const WorkPtr work = network->exchange(sends, recvs, stream, "from rank 0");
  if (!root) work->wait();
  network->barrier(stream, "barrier")->wait();
  if (root) work->wait();
  if (!root) {
    EXPECT_EQ(values.front(), message(0, world().rank(), 0, 10));
  }
}

TEST(EmulatedNetwork, SplittingDrivesWhatIsDelayed) {
  const auto network = emulate_network(world(), {2e-3, 1e9, 1});
  AllPairs pairs(*network, 1);
  if (world().rank() % 2 == 1) pairs.work().wait();  // odd ranks come to the split with messages
  const auto part = network->split(0);
  pairs.work().wait();
  pairs.expect_contents();
  EXPECT_EQ(part->size(), world().size());
}

TEST(EmulatedNetwork, GroupsKeepTheirNodesAndTheLink) {
  const int r = world().rank();
  {
    const auto network = emulate_network(world(), {never, 1, 2});
    const auto node = network->split(r / 2);  // ranks of one node
    AllPairs pairs(*node, 2);
    pairs.work().wait();
    pairs.expect_contents();
  }
  {  // Ranks 0, 2, 4, ... are neighbours in their group, but on different nodes of the world.
    const auto network = emulate_network(world(), {never, fast, 2});
    auto across = network->split(r % 2);
    AllPairs pairs(*across, 2);
    EXPECT_EQ(pairs.work().test(), across->size() == 1);
    across.reset();
    pairs.work().wait();
    pairs.expect_contents();
  }
  const auto network = emulate_network(world(), {10e-3, 1e6, 2});
  const auto across = network->split(r % 2);
  // 10 kB to another node occupy the link for 10 ms; the group's next message waits for it.
  std::vector<float> sent(2500), received(2500), later = {1, 2};
  const int away = (r + 2) % world().size(), from = (r + world().size() - 2) % world().size();
  const double start = monotonic_seconds();
  const std::array sends = {SendSlice{away, in(sent)}};
  const std::array recvs = {RecvSlice{from, out(received)}};
  const WorkPtr blocking = network->exchange(sends, recvs, stream, "occupies the link");
  AllPairs behind(*across, 1);
  behind.work().wait();
  if (across->size() > 1) {
    EXPECT_GE(monotonic_seconds() - start, 20e-3);
  }
  blocking->wait();
  behind.expect_contents();
}

TEST(EmulatedNetwork, DroppedMessagesNeverArrive) {
  std::vector<float> dropped = {-1};
  {
    const auto network = emulate_network(world(), {never, fast, 1});
    std::vector<SendSlice> sends;
    for (int peer = 0; peer < world().size(); ++peer)
      if (peer != world().rank()) sends.push_back({peer, in(dropped)});
    const WorkPtr work = network->exchange(sends, {}, stream, "never waited for");
  }
  AllPairs pairs(world(), 2);
  pairs.work().wait();
  pairs.expect_contents();
}

}  // namespace GYRE_FILE
}  // namespace gyre

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "comm/agree.hpp"
#include "comm/mpi.hpp"
#include "machine/identity.hpp"
#include "machine/measure.hpp"
#include "mpi_test.hpp"
#include "runtime/host.hpp"

namespace gyre {
namespace GYRE_FILE {

/// For its lifetime, this rank may run on one CPU alone.
class Bound {
 public:
  explicit Bound(int cpu) {
    sched_getaffinity(0, sizeof(before_), &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    done_ = sched_setaffinity(0, sizeof(one), &one) == 0;
  }
  ~Bound() { sched_setaffinity(0, sizeof(before_), &before_); }
  bool done() const { return done_; }

 private:
  cpu_set_t before_;
  bool done_ = false;
};

/// For its lifetime, this rank alone is on a host of another name. Needs root.
class OtherHost {
 public:
  explicit OtherHost(const std::string& name) : before_(host_name()) {
    done_ = unshare(CLONE_NEWUTS) == 0 && sethostname(name.data(), name.size()) == 0;
  }
  ~OtherHost() {
    if (done_ && sethostname(before_.data(), before_.size()) != 0) std::abort();
  }
  bool done() const { return done_; }

 private:
  std::string before_;
  bool done_ = false;
};

bool on_all_ranks(bool mine) {
  return all_reduce_value(test::world(), int64_t{mine}, ReduceOp::min) == 1;
}

TEST(Machine, IsTheSameOnAllRanks) {
  Communicator& world = test::world();
  const MachineIdentity machine = find_machine(world);
  ASSERT_EQ(std::ssize(machine.ranks), world.size());
  ASSERT_EQ(machine.hosts.size(), 1U);
  EXPECT_EQ(machine.hosts[0].host, host_name());
  EXPECT_EQ(first_ranks(machine), std::vector<int>{0});
  for (int r = 0; r < world.size(); ++r) {
    const RankPlacement& rank = machine.ranks[r];
    EXPECT_EQ(rank.rank, r);
    EXPECT_EQ(rank.host, host_name());
    EXPECT_FALSE(parse_cpu_list(rank.cpus).empty());
    EXPECT_EQ(host_index(machine, r), 0);
  }
  EXPECT_EQ(machine.hosts[0], find_host()) << "the first rank's view";
  EXPECT_NE(machine.mpi.library, "");
  if (machine.mpi.device == "ch4:ucx") {
    EXPECT_NE(machine.mpi.transport.find("UCX"), std::string::npos);
    EXPECT_EQ(machine.mpi.inside_host.small.empty(), world.size() == 1);
    EXPECT_EQ(machine.mpi.inside_host.large.empty(), world.size() == 1);
  }
  EXPECT_EQ(machine.mpi.between_hosts, MpiRoute());
}

TEST(Machine, KnowsTheCpusOfEachRank) {
  Communicator& world = test::world();
  const std::vector<int> all = parse_cpu_list(find_machine(world).ranks[0].cpus);
  const auto cpu_of = [&](int rank) { return all[rank % all.size()]; };
  const Bound bound(cpu_of(world.rank()));
  if (!on_all_ranks(bound.done())) GTEST_SKIP() << "ranks cannot be bound here";
  const MachineIdentity machine = find_machine(world);
  for (int r = 0; r < world.size(); ++r)
    EXPECT_EQ(machine.ranks[static_cast<size_t>(r)].cpus, std::to_string(cpu_of(r)));
}

/// Measures in short windows.
MeasuredMachine measured_quickly(const MachineIdentity& machine) {
  const auto data = make_mpi_communicator(test::environment().world());
  HostStream stream;
  return measure_machine(machine, {test::world(), *data, stream}, {1, 2e-3});
}

void expect_link(const std::optional<MeasuredLink>& link, std::vector<int> ranks) {
  ASSERT_TRUE(link.has_value());
  EXPECT_EQ(link->ranks, ranks);
  EXPECT_GT(link->alpha_seconds, 0);
  EXPECT_GT(link->bytes_per_s, 0);
  ASSERT_GE(link->messages.size(), 2U);
  EXPECT_EQ(link->messages[0].bytes, 8);
  for (const MessageTime& message : link->messages) {
    EXPECT_EQ(message.seconds.samples.size(), 10U);
    EXPECT_GT(std::ranges::min(message.seconds.samples), 0);
  }
}

std::vector<int> first_numbers(int n) {
  std::vector<int> numbers;
  for (int i = 0; i < n; ++i) numbers.push_back(i);
  return numbers;
}

TEST(Machine, IsMeasured) {
  Communicator& world = test::world();
  const MeasuredMachine measured = measured_quickly(find_machine(world));
  EXPECT_EQ(measured.ranks_of_a_host, world.size());
  if (world.rank() != 0) return;  // complete on rank 0
  EXPECT_EQ(measured.backend, "cpu");
  EXPECT_EQ(measured.comm, "mpi");
  EXPECT_GE(measured.rates.array_bytes, 64 << 20);
  for (const WorkRates& rates : {measured.rates.one_rank, measured.rates.all_ranks})
    for (const Sampled& rate : {rates.fma, rates.read, rates.update, rates.copy}) {
      EXPECT_GT(rate.value, 0);
      EXPECT_EQ(rate.value, std::ranges::max(rate.samples));
    }
  EXPECT_GT(measured.rates.one_core_fma.value, 0);
  EXPECT_FALSE(measured.messages.between_hosts.has_value());
  EXPECT_FALSE(measured.gpu.has_value());
  EXPECT_EQ(measured.messages.inside_host.has_value(), world.size() > 1);
  if (world.size() == 1) return;
  expect_link(measured.messages.inside_host, {0, 1});
  expect_link(measured.messages.all_at_once, first_numbers(world.size()));
}

TEST(Machine, HasHostsWithRanksInAnyOrder) {
  Communicator& world = test::world();
  if (world.size() < 3) GTEST_SKIP() << "needs 3 ranks";
  // Ranks 0 2 4 6 and 1 3 5 7.
  const std::string names[] = {"even-host", "odd-host"};
  const int mine = world.rank() % 2;
  const OtherHost other(names[mine]);
  if (!on_all_ranks(other.done())) GTEST_SKIP() << "needs root, to name hosts";
  const MachineIdentity machine = find_machine(world);
  ASSERT_EQ(machine.hosts.size(), 2U);
  EXPECT_EQ(machine.hosts[0].host, names[0]);
  EXPECT_EQ(machine.hosts[1].host, names[1]);
  EXPECT_EQ(first_ranks(machine), (std::vector<int>{0, 1}));
  for (int r = 0; r < world.size(); ++r) EXPECT_EQ(host_index(machine, r), r % 2);
  if (machine.mpi.device == "ch4:ucx") {
    EXPECT_NE(machine.mpi.between_hosts, MpiRoute());
  }
  const MeasuredMachine measured = measured_quickly(machine);
  EXPECT_EQ(measured.ranks_of_a_host, (world.size() + 1) / 2);
  if (world.rank() != 0) return;
  expect_link(measured.messages.inside_host, {0, 2});
  expect_link(measured.messages.between_hosts, {0, 1});
  expect_link(measured.messages.all_at_once, first_numbers(world.size()));
}

}  // namespace GYRE_FILE
}  // namespace gyre

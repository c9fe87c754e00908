#include "comm/emulated.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "comm/agree.hpp"
#include "core/error.hpp"
#include "core/quantity.hpp"
#include "runtime/clock.hpp"
#include "runtime/mpi_env.hpp"
#include "runtime/watchdog.hpp"

namespace gyre {
namespace {

constexpr Unit rate_units[] = {{"", 1}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9}};

double parse_rate(std::string_view value) {
  const std::optional<double> rate = parse_quantity(value, rate_units);
  if (!rate || *rate <= 0)
    throw_usage(
        "network: beta is '{}'; it must be a number of bytes per second above 0, with K, M or G "
        "for 10^3, 10^6 or 10^9, as in beta=5G",
        value);
  return *rate;
}

int parse_node(std::string_view value) {
  int ranks = 0;
  const char* const end = value.data() + value.size();
  const auto [rest, error] = std::from_chars(value.data(), end, ranks);
  if (error != std::errc() || rest != end || ranks < 1)
    throw_usage("network: node is '{}'; it must be a number of ranks, at least 1", value);
  return ranks;
}

class DelayedWork;

/// A queued release: the byte that tells a rank that a message of an exchange has arrived.
struct Release {
  double due;
  Communicator* releases;
  int peer;
  DelayedWork* owner;
};
constexpr std::byte token{};

/// Egress link of this rank with its queued messages, for all communicators of one emulated
/// network. Messages are due in order of submission, so messages to one rank stay in order.
/// Releases use a communicator of their own, so that no other message matches them.
class Link {
 public:
  explicit Link(const NetworkModel& model) : model_(model) {}

  const NetworkModel& model() const { return model_; }
  void submit(Communicator& releases, int peer, int64_t bytes, DelayedWork& owner) {
    const double due = link_.send(model_, monotonic_seconds(), bytes);
    queue_.push_back({due, &releases, peer, &owner});
  }
  /// Releases the messages that are due.
  void progress() {
    while (!queue_.empty() && queue_.front().due <= monotonic_seconds()) {
      const Release next = queue_.front();
      queue_.pop_front();
      post(next);
    }
  }
  /// Releases the remaining messages of one communicator, due or not.
  void flush(const Communicator& releases) {
    const auto is_own = [&](const Release& r) { return r.releases == &releases; };
    for (const Release& r : take(is_own)) post(r);
  }
  /// Drops the remaining releases of one exchange.
  void drop(const DelayedWork& owner) {
    take([&](const Release& r) { return r.owner == &owner; });
  }
  bool idle() const { return queue_.empty(); }
  /// Due time of the next message; infinity if there is none.
  double next_due() const {
    return idle() ? std::numeric_limits<double>::infinity() : queue_.front().due;
  }
  /// Sets the sleep between two polls, in seconds, for all operations of the network.
  void set_pause(double seconds) { pause_ = seconds; }
  /// Sleeps between two polls, at most until a message is due.
  void pause() const {
    pause_politely(std::min(pause_, std::max(0.0, next_due() - monotonic_seconds())));
  }

 private:
  void post(const Release& release);
  /// Removes and returns the releases for which `chosen` is true, in order.
  template <class Chosen>
  std::deque<Release> take(Chosen chosen) {
    std::deque<Release> taken, kept;
    for (const Release& release : queue_) (chosen(release) ? taken : kept).push_back(release);
    queue_ = std::move(kept);
    return taken;
  }

  NetworkModel model_;
  EgressLink link_;
  double pause_ = 0;
  std::deque<Release> queue_;
};

/// An operation of the real communicator, and the delayed messages of an exchange, which are all
/// submitted at once: it is complete when those to and from other nodes are released. Waits also
/// release the messages of other operations, because a peer may need one before it can take part.
class DelayedWork final : public Work {
 public:
  DelayedWork(std::shared_ptr<Link> link, std::string_view what, std::vector<int> peers)
      : link_(std::move(link)), what_(what), peers_(std::move(peers)) {}
  ~DelayedWork() override { link_->drop(*this); }
  DelayedWork(const DelayedWork&) = delete;
  DelayedWork& operator=(const DelayedWork&) = delete;

  void add(WorkPtr work) { under_way_.push_back(std::move(work)); }
  void delay(Communicator& releases, int peer, int64_t bytes) {
    ++unsent_;
    link_->submit(releases, peer, bytes, *this);
  }
  void release(Communicator& releases, int peer) {
    const std::array sends = {SendSlice{peer, std::span(&token, 1)}};
    add(releases.exchange(sends, {}, stream_, what_));
    --unsent_;
  }
  /// Makes the operation also wait for one release from each of these ranks.
  void expect(Communicator& releases, const std::set<int>& peers) {
    tokens_.resize(peers.size());
    std::vector<RecvSlice> recvs;
    for (const int peer : peers) recvs.push_back({peer, std::span(&tokens_[recvs.size()], 1)});
    add(releases.exchange({}, recvs, stream_, what_));
  }

  bool test() override {
    link_->progress();
    std::erase_if(under_way_, [](const WorkPtr& work) { return work->test(); });
    return unsent_ == 0 && under_way_.empty();
  }
  /// Waits like the MPI backend: polls and sleeps, with a WaitScope for the watchdog.
  void wait() override {
    if (test()) return;
    const WaitScope scope(what_, peers_);
    while (!test()) link_->pause();
  }

 private:
  std::shared_ptr<Link> link_;
  std::string what_;
  std::vector<int> peers_;  // ranks in the world
  HostStream stream_;
  std::vector<WorkPtr> under_way_;
  std::vector<std::byte> tokens_;
  int64_t unsent_ = 0;
};

void Link::post(const Release& release) {
  release.owner->release(*release.releases, release.peer);
}

/// World ranks and nodes of a communicator's ranks.
struct Places {
  std::vector<int> world_ranks;
  std::vector<int> nodes;
};

class EmulatedCommunicator final : public Communicator {
 public:
  /// Collective: splits `real` twice.
  EmulatedCommunicator(Communicator& real, Places places, std::shared_ptr<Link> link)
      : own_(real.split(0)),
        releases_(real.split(0)),
        real_(*own_),
        places_(std::move(places)),
        link_(std::move(link)) {}
  ~EmulatedCommunicator() override { link_->flush(*releases_); }
  EmulatedCommunicator(const EmulatedCommunicator&) = delete;
  EmulatedCommunicator& operator=(const EmulatedCommunicator&) = delete;

  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  MemorySpace space() const override { return real_.space(); }
  std::string_view backend() const override { return "emulated"; }
  void sleep_between_polls(double seconds) override {
    link_->set_pause(seconds);
    real_.sleep_between_polls(seconds);
    releases_->sleep_between_polls(seconds);
  }
  double next_event() const override { return link_->next_due(); }

  std::unique_ptr<Communicator> split(int color) override {
    drain();
    const std::unique_ptr<Communicator> part = real_.split(color);
    const size_t me = rank();
    const auto gather = [&](int mine) {
      const std::vector<int64_t> all = all_gather_value(*part, int64_t{mine});
      return std::vector<int>(all.begin(), all.end());
    };
    Places places;
    places.world_ranks = gather(places_.world_ranks[me]);
    places.nodes = gather(places_.nodes[me]);
    return std::make_unique<EmulatedCommunicator>(*part, std::move(places), link_);
  }

 protected:
  WorkPtr do_exchange(std::span<const SendSlice> sends, std::span<const RecvSlice> recvs,
                      Stream& stream, std::string_view what) override {
    std::vector<int> peers;
    std::map<int, int64_t> delayed;  // bytes, by peer
    std::set<int> expected;
    for (const RecvSlice& recv : recvs) {
      peers.push_back(places_.world_ranks[recv.peer]);
      if (is_far(recv.peer)) expected.insert(recv.peer);
    }
    for (const SendSlice& send : sends) {
      peers.push_back(places_.world_ranks[send.peer]);
      if (is_far(send.peer)) delayed[send.peer] += std::ssize(send.data);
    }
    auto work = std::make_unique<DelayedWork>(link_, what, std::move(peers));
    for (const auto& [peer, bytes] : delayed) work->delay(*releases_, peer, bytes);
    work->add(real_.exchange(sends, recvs, stream, what));
    work->expect(*releases_, expected);
    return work;
  }

  WorkPtr do_collective(const Collective& call, Stream& stream, std::string_view what) override {
    auto work = std::make_unique<DelayedWork>(link_, what, places_.world_ranks);
    work->add(real_.collective(call, stream, what));
    return work;
  }

 private:
  bool is_far(int peer) const { return places_.nodes[peer] != places_.nodes[rank()]; }
  /// Releases all delayed messages when due, since nothing does so while the real split() blocks.
  void drain() {
    const WaitScope scope("delayed messages before splitting a communicator");
    while (!link_->idle()) {
      link_->progress();
      link_->pause();
    }
  }

  std::unique_ptr<Communicator> own_, releases_;
  Communicator& real_;  // *own_
  Places places_;
  std::shared_ptr<Link> link_;
};

}  // namespace

NetworkModel parse_network_model(std::string_view text) {
  NetworkModel model;
  constexpr std::string_view keys[] = {"alpha", "beta", "node"};
  const std::vector<Setting> settings =
      parse_settings("network", text, keys, "alpha=TIME, beta=RATE and node=RANKS");
  for (const Setting& setting : settings) {
    if (setting.key == "alpha") model.latency_s = parse_time("network", setting);
    if (setting.key == "beta") model.bytes_per_s = parse_rate(setting.value);
    if (setting.key == "node") model.ranks_per_node = parse_node(setting.value);
  }
  for (const std::string_view key : {"alpha", "beta"})
    if (std::ranges::find(settings, key, &Setting::key) == settings.end())
      throw_usage(
          "network: '{}' has no {}; both alpha and beta are needed, as in alpha=10us,beta=5G", text,
          key);
  return model;
}

double EgressLink::send(const NetworkModel& model, double now, int64_t bytes) {
  free_at_ = std::max(now, free_at_) + static_cast<double>(bytes) / model.bytes_per_s;
  return free_at_ + model.latency_s;
}

std::unique_ptr<Communicator> emulate_network(Communicator& real, const NetworkModel& model) {
  if (real.space() != MemorySpace::host)
    throw_usage("an emulated network needs a communicator in host memory; '{}' is not",
                real.backend());
  if (!(model.latency_s >= 0) || !(model.bytes_per_s > 0) || model.ranks_per_node < 1)
    throw_usage(
        "an emulated network of latency {} s, {} bytes/s and {} ranks a node: they must be at "
        "least 0, above 0 and at least 1",
        model.latency_s, model.bytes_per_s, model.ranks_per_node);
  Places places;
  places.world_ranks.resize(real.size());
  std::iota(places.world_ranks.begin(), places.world_ranks.end(), 0);
  for (const int rank : places.world_ranks) places.nodes.push_back(rank / model.ranks_per_node);
  return std::make_unique<EmulatedCommunicator>(real, std::move(places),
                                                std::make_shared<Link>(model));
}

}  // namespace gyre

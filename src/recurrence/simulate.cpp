#include "recurrence/simulate.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "core/error.hpp"

namespace gyre {
namespace {

using namespace state_step;

/// Messages from one rank to another, or all-gathers of one rank, in order.
using Channel = std::pair<size_t, int>;

/// An exchange under way: which messages it waits for, and when its own have left.
struct Posted {
  std::vector<std::pair<Channel, size_t>> messages;
  double left = 0;
};

/// Where a rank is in its list of steps.
struct Walker {
  size_t next = 0;
  double now = 0, link = 0;  // link: when its last message has left
  double wait = 0;
  std::map<int, Posted> posted;        // by id
  std::map<Channel, size_t> received;  // messages so far
};

class Simulation {
 public:
  Simulation(const std::vector<StatePlan>& plans, Pass pass, const RecurrenceShape& shape,
             const StateMachine& machine)
      : plans_(plans), pass_(pass), shape_(shape), machine_(machine), walkers_(plans.size()) {}

  StateTimes run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < plans_.size(); ++r)
        while (advance(r)) moved = true;
    }
    StateTimes times;
    for (size_t r = 0; r < plans_.size(); ++r) {
      if (walkers_[r].next < plans_[r].steps(pass_).size())
        throw Error(ExitCode::runtime, "a plan waits for a message that nobody sends");
      times.end.push_back(walkers_[r].now);
      times.wait.push_back(walkers_[r].wait);
    }
    return times;
  }

 private:
  /// Does the next step of a rank, if it can.
  bool advance(size_t rank) {
    Walker& walker = walkers_[rank];
    const std::vector<StateStep>& steps = plans_[rank].steps(pass_);
    if (walker.next == steps.size()) return false;
    const StateStep& step = steps[walker.next];
    if (const auto* exchange = std::get_if<Exchange>(&step)) {
      post(rank, *exchange);
    } else if (const auto* heads = std::get_if<HeadExchange>(&step)) {
      post(rank, *heads);
    } else if (const auto* wait = std::get_if<Wait>(&step)) {
      const std::optional<double> arrival = arrival_of(walker.posted.at(wait->id));
      if (!arrival) return false;
      walker.wait += std::max(0.0, *arrival - walker.now);
      walker.now = std::max(walker.now, *arrival);
    } else {
      const auto [flops, more] = flops_of(step, plans_[rank], pass_, shape_);
      walker.now += (flops + more) / machine_.flops_per_s;
    }
    ++walker.next;
    return true;
  }
  void post(size_t rank, const Exchange& exchange) {
    Posted& posted = walkers_[rank].posted[exchange.id] = {};
    const bool to_all = exchange.all_gather || exchange.all_reduce;
    for (const StateMessage& m : exchange.sends) {
      const auto bytes = static_cast<double>(bytes_of_message(m, plans_[rank], shape_));
      const int64_t others = std::ssize(exchange.recvs) - 1;
      if (exchange.all_gather)
        send(rank, all_ranks, others, bytes, posted);
      else if (exchange.all_reduce)
        send(rank, all_ranks, 2 * others, bytes / (2.0 * others), posted);
      else
        send(rank, m.peer, m.peer == plans_[rank].rank ? 0 : 1, bytes, posted);
    }
    for (const StateMessage& m : exchange.recvs)
      receive(rank, {m.peer, to_all ? all_ranks : static_cast<int>(rank)}, posted);
  }
  void post(size_t rank, const HeadExchange& exchange) {
    Posted& posted = walkers_[rank].posted[exchange.id] = {};
    const int others = plans_[rank].head_ranks() - 1;
    const HeadBytes bytes = bytes_of_heads(exchange, plans_[rank], shape_);
    send(rank, all_ranks, others, static_cast<double>(bytes.sent) / others, posted);
    for (size_t r = 0; r < plans_.size(); ++r) receive(rank, {r, all_ranks}, posted);
  }
  /// Sends `messages` messages of `bytes` bytes, one after the other.
  void send(size_t rank, int to, int64_t messages, double bytes, Posted& posted) {
    Walker& walker = walkers_[rank];
    if (messages > 0)
      walker.link = std::max(walker.link, walker.now) +
                    messages * (machine_.latency_s + bytes / machine_.bytes_per_s);
    posted.left = messages > 0 ? walker.link : walker.now;
    sent_[{rank, to}].push_back(posted.left);
  }
  void receive(size_t rank, Channel from, Posted& posted) {
    posted.messages.emplace_back(from, walkers_[rank].received[from]++);
  }
  /// When the messages of an exchange have left and arrived; unset if one is not posted yet.
  std::optional<double> arrival_of(const Posted& posted) const {
    double latest = posted.left;
    for (const auto& [channel, index] : posted.messages) {
      const auto messages = sent_.find(channel);
      if (messages == sent_.end() || messages->second.size() <= index) return {};
      latest = std::max(latest, messages->second[index]);
    }
    return latest;
  }

  static constexpr int all_ranks = -1;
  const std::vector<StatePlan>& plans_;
  Pass pass_;
  const RecurrenceShape& shape_;
  StateMachine machine_;
  std::vector<Walker> walkers_;
  std::map<Channel, std::vector<double>> sent_;  // when each message is there
};

}  // namespace

StateTimes simulate(const std::vector<StatePlan>& plans, Pass pass, const RecurrenceShape& shape,
                    const StateMachine& machine) {
  return Simulation(plans, pass, shape, machine).run();
}

}  // namespace gyre

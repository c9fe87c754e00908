#include "recurrence/simulate.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "core/error.hpp"

namespace gyre {
namespace {

using namespace state_step;

/// Where a rank is in its list of steps.
struct Walker {
  size_t next = 0;
  double now = 0, link = 0;  // link: when its last message has left
  double wait = 0;
  std::map<int, const Exchange*> posted;  // by id
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
    } else if (const auto* wait = std::get_if<Wait>(&step)) {
      const std::optional<double> arrival = arrival_of(rank, *walker.posted.at(wait->id));
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
    Walker& walker = walkers_[rank];
    walker.posted[exchange.id] = &exchange;
    const auto others = std::ssize(exchange.recvs) - 1, copies = exchange.all_gather ? others : 1;
    const auto messages = exchange.all_reduce ? 2 * others : copies;
    for (const StateMessage& m : exchange.sends) {
      const double bytes = copies * bytes_of_message(m, plans_[rank], shape_);
      walker.link = std::max(walker.link, walker.now) + messages * machine_.latency_s +
                    bytes / machine_.bytes_per_s;
      sent_[{rank, exchange.all_gather || exchange.all_reduce ? all_ranks : m.peer,
             exchange.what}] = walker.link;
    }
  }
  /// When the messages of an exchange have left and arrived; unset if one is not posted yet.
  std::optional<double> arrival_of(size_t rank, const Exchange& exchange) const {
    double latest = exchange.sends.empty() ? 0 : walkers_[rank].link;
    for (const StateMessage& m : exchange.recvs) {
      const int to =
          exchange.all_gather || exchange.all_reduce ? all_ranks : static_cast<int>(rank);
      const auto message = sent_.find({static_cast<size_t>(m.peer), to, exchange.what});
      if (message == sent_.end()) return {};
      latest = std::max(latest, message->second);
    }
    return latest;
  }

  static constexpr int all_ranks = -1;
  const std::vector<StatePlan>& plans_;
  Pass pass_;
  const RecurrenceShape& shape_;
  StateMachine machine_;
  std::vector<Walker> walkers_;
  std::map<std::tuple<size_t, int, std::string>, double>
      sent_;  // (rank, peer, what): when the message is there
};

}  // namespace

StateTimes simulate(const std::vector<StatePlan>& plans, Pass pass, const RecurrenceShape& shape,
                    const StateMachine& machine) {
  return Simulation(plans, pass, shape, machine).run();
}

}  // namespace gyre

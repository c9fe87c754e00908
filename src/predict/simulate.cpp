#include "predict/simulate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>

#include "core/error.hpp"
#include "predict/rank_state.hpp"

namespace gyre {
namespace {

using namespace simulation;

/// Observer that ignores all events.
struct NoObserver {
  void spent(int /*rank*/, const Op& /*op*/, int /*step*/, double /*begin*/, double /*end*/) {}
  void waited(int /*rank*/, int /*step*/, int /*posted*/, double /*begin*/, double /*end*/) {}
  void posted(int /*rank*/, const Op& /*op*/, int /*step*/, int /*peer*/, double /*time*/) {}
  void joined(int /*rank*/, const Op& /*op*/, int /*step*/, double /*begin*/) {}
  void collective_ended(int /*rank*/, int /*step*/, double /*end*/) {}
  void sent(int /*rank*/, const Op& /*op*/, int /*step*/, int /*peer*/, double /*begin*/,
            double /*left*/, double /*arrival*/) {}
};

template <class Observer>
class Engine {
 public:
  Engine(const Programs& programs, const MachineModel& machine, const std::string& schedule,
         Observer& observer)
      : programs_(programs),
        machine_(machine),
        schedule_(schedule),
        observer_(observer),
        states_(programs.ranks()),
        times_(programs.ranks()) {}

  std::vector<RankTimes> run() {
    for (int r = 0; r < programs_.ranks(); ++r) runnable_.push_back(r);
    while (!runnable_.empty()) {
      const int rank = runnable_.front();
      runnable_.pop_front();
      advance(rank);
    }
    for (int r = 0; r < programs_.ranks(); ++r) check_ended(r);
    return std::move(times_);
  }

 private:
  RankState& state(int rank) { return states_[rank]; }
  RankTimes& times(int rank) { return times_[rank]; }

  /// Advances a rank until it ends or waits for a message that has not been sent.
  void advance(int rank) {
    const std::vector<RankProgram::Part>& parts = programs_.rank(rank).parts;
    RankState& s = state(rank);
    s.blocked_on = -1;
    while (s.part < parts.size()) {
      const BlockTable::Block& block = programs_.block(parts[s.part].block);
      for (; s.op < block.ops.size(); ++s.op)
        if (!done(rank, s, block.ops[s.op])) return;
      s.op = 0;
      s.steps += block.steps;
      if (++s.time == parts[s.part].times) {
        s.time = 0;
        ++s.part;
      }
    }
    times(rank).total = s.clock;
  }

  /// Returns false if the rank must wait for a message that has not been sent.
  bool done(int rank, RankState& s, const Op& op) {
    const int step = s.steps + op.step;
    switch (op.kind) {
      case OpKind::spend:
        observer_.spent(rank, op, step, s.clock, s.clock + op.seconds);
        s.clock += op.seconds;
        account(times(rank), op) += op.seconds;
        times(rank).slowed += op.slowed;
        return true;
      case OpKind::send:
        send(rank, s, op, step);
        return true;
      case OpKind::receive: {
        const int peer = (rank + op.hop) % programs_.ranks();
        observer_.posted(rank, op, step, peer, s.clock);
        pending_of(s, op, step).receives.push_back({peer, s.channel(peer).expected++, op.bytes});
        return true;
      }
      case OpKind::join:
        join(rank, s, op, step);
        return true;
      case OpKind::wait:
        break;
    }
    return wait(rank, s, op, step);
  }

  static double& account(RankTimes& t, const Op& op) {
    if (op.spends == SpanKind::compute) return t.compute;
    return op.spends == SpanKind::pass ? t.pass : t.copy;
  }
  static Pending& pending_of(RankState& s, const Op& op, int step) {
    const size_t slot = op.exchange;
    if (s.pending.size() <= slot) s.pending.resize(slot + 1);
    s.pending[slot].step = step;
    return s.pending[slot];
  }

  void send(int rank, RankState& s, const Op& op, int step) {
    const int peer = (rank + op.hop) % programs_.ranks();
    observer_.posted(rank, op, step, peer, s.clock);
    double& link_free = s.link_free[op.tier];
    const double begin = std::max(s.clock, link_free);
    link_free = begin + op.seconds;
    const double latency = machine_.links.empty() ? 0 : machine_.links[op.tier].latency_s;
    const double arrival = link_free + latency;
    Pending& pending = pending_of(s, op, step);
    pending.left = std::max(pending.left, link_free);
    observer_.sent(rank, op, step, peer, begin, link_free, arrival);
    RankState& receiver = state(peer);
    receiver.channel(rank).sent.push_back({arrival, op.bytes, step});
    if (receiver.blocked_on == rank) {
      receiver.blocked_on = -1;
      runnable_.push_back(peer);
    }
  }

  void join(int rank, RankState& s, const Op& op, int step) {
    Group& group = groups_[{rank / op.group, op.group}];
    if (group.ranks == 0)
      group = {rank / op.group * op.group, op.group, {}, std::vector<size_t>(op.group)};
    const size_t index = group.joined[rank - group.first]++;
    if (group.collectives.size() <= index) group.collectives.resize(index + 1);
    LibraryCollective& collective = group.collectives[index];
    double& link_free = s.link_free[op.tier];
    const double begin = std::max(s.clock, link_free);
    link_free = begin + op.seconds;
    collective.begin = std::max(collective.begin, begin);
    ++collective.joined;
    pending_of(s, op, step).collectives.push_back({&group, index});
    observer_.joined(rank, op, step, begin);
    if (!group.complete(index)) return;
    collective.end = collective.begin + op.seconds;
    for (const int waiting : collective.waiting) {
      state(waiting).blocked_in = {};
      runnable_.push_back(waiting);
    }
    collective.waiting.clear();
  }

  bool wait(int rank, RankState& s, const Op& op, int step) {
    // An exchange of local copies alone has posted nothing.
    if (s.pending.size() <= static_cast<size_t>(op.exchange)) return true;
    Pending& pending = s.pending[op.exchange];
    for (const Joined& joined : pending.collectives) {
      LibraryCollective& collective = joined.group->collectives[joined.collective];
      if (!joined.group->complete(joined.collective)) {
        s.blocked_in = joined;
        collective.waiting.push_back(rank);
        return false;
      }
      pending.end = std::max(pending.end, collective.end);
      observer_.collective_ended(rank, pending.step, collective.end);
    }
    for (; pending.found < pending.receives.size(); ++pending.found) {
      const Expected& e = pending.receives[pending.found];
      Channel& channel = s.channel(e.peer);
      if (channel.count() <= e.place) {
        s.blocked_on = e.peer;
        return false;
      }
      const Channel::Sent& sent = channel.at(e.place);
      if (sent.bytes != e.bytes)
        throw_runtime("{} expects {} bytes from rank {}, which sends {} at step {}",
                      place(rank, step), e.bytes, e.peer, sent.bytes, sent.step);
      pending.end = std::max(pending.end, sent.arrival);
    }
    const double end = std::max({s.clock, pending.left, pending.end});
    for (const Expected& e : pending.receives) s.channel(e.peer).take(e.place);
    observer_.waited(rank, step, pending.step, s.clock, end);
    times(rank).wait += end - s.clock;
    s.clock = end;
    pending.collectives.clear();
    pending.receives.clear();
    pending.found = 0;
    pending.end = pending.left = 0;
    return true;
  }

  /// Position of a rank, for error messages.
  std::string place(int rank, int step) const {
    return fmt::format("schedule {}, {}: rank {} at step {}", schedule_, name_of(programs_.pass()),
                       rank, step);
  }
  /// Step at which a rank waits, or the number of its steps if it has ended.
  int step_of(int rank) {
    const RankState& s = state(rank);
    const auto& parts = programs_.rank(rank).parts;
    if (s.part == parts.size()) return s.steps;
    return s.steps + programs_.block(parts[s.part].block).ops[s.op].step;
  }
  void check_ended(int rank) {
    RankState& s = state(rank);
    if (s.blocked_in.group != nullptr) {
      const Group& group = *s.blocked_in.group;
      int missing = 0;
      while (group.joined[missing] > s.blocked_in.collective) ++missing;
      throw_runtime("{} waits for a collective of {} ranks that rank {} does not join",
                    place(rank, step_of(rank)), group.ranks, group.first + missing);
    }
    if (s.part < programs_.rank(rank).parts.size()) {
      const RankState& peer = state(s.blocked_on);
      const std::string why = peer.blocked_on >= 0
                                  ? fmt::format("itself waits at step {} for rank {}",
                                                step_of(s.blocked_on), peer.blocked_on)
                                  : "has ended";
      throw_runtime("{} waits for a message from rank {}, which {}", place(rank, step_of(rank)),
                    s.blocked_on, why);
    }
    for (auto& [peer, channel] : s.from)
      if (channel.count() > channel.expected)
        throw_runtime("{} has not received what rank {} sent at step {}",
                      place(rank, step_of(rank)), peer, channel.at(channel.expected).step);
  }

  const Programs& programs_;
  const MachineModel& machine_;
  const std::string& schedule_;
  Observer& observer_;
  std::vector<RankState> states_;
  std::vector<RankTimes> times_;
  std::map<std::pair<int, int>, Group> groups_;  ///< keys: {first rank / ranks, ranks}
  std::deque<int> runnable_;
};

/// Writes spans with the names of the plan's steps.
class SpanWriter {
 public:
  SpanWriter(const Plan& plan, Pass pass)
      : plan_(plan), pass_(pass), lines_(plan.ranks.size()), waited_for_(plan.ranks.size()) {}

  void spent(int rank, const Op& op, int step, double begin, double end) {
    const Step& of = step_of(rank, step);
    std::string name = std::visit([&](const auto& s) { return name_of_spending(rank, s); }, of);
    const bool deferred = std::holds_alternative<step::Compute>(of) ||
                          std::holds_alternative<step::Exchange>(of) ||
                          std::holds_alternative<step::Wait>(of);
    if (op.spends == SpanKind::pass && deferred) name = "deferred clear or delta";
    add(rank, op.spends, name, step, begin, end);
  }
  void waited(int rank, int step, int posted, double begin, double end) {
    waited_for_[rank] = posted;
    std::vector<TraceSpan>& transfers = line(rank).transfers;
    const auto transfer = std::find_if(transfers.rbegin(), transfers.rend(),
                                       [&](const TraceSpan& t) { return t.step == posted; });
    if (transfer != transfers.rend()) transfer->end = end;
    if (end > begin)
      add(rank, SpanKind::wait, "wait " + exchange(rank, posted).what, step, begin, end);
  }
  void sent(int rank, const Op& op, int step, int peer, double begin, double left, double arrival) {
    SimulatedSpan& span =
        add(rank, SpanKind::message, exchange(rank, step).what, step, begin, arrival);
    span.peer = peer;
    span.message = op.message;
    span.left = left;
  }
  void joined(int rank, const Op& op, int step, double begin) {
    for (int i = 1; i < op.group; ++i) {
      const int first = rank / op.group * op.group;
      const int peer = first + (rank - first + i) % op.group;
      posted(rank, op, step, peer, begin);
    }
    add(rank, SpanKind::message,
        fmt::format("{}, {}", exchange(rank, step).what, name_of(op.algorithm)), step, begin,
        begin);
  }
  void collective_ended(int rank, int step, double end) {
    const auto span = std::find_if(of(rank).rbegin(), of(rank).rend(), [&](const SimulatedSpan& s) {
      return s.kind == SpanKind::message && s.step == step;
    });
    span->end = span->left = end;
  }
  void posted(int rank, const Op& op, int step, int peer, double time) {
    std::vector<TraceSpan>& transfers = line(rank).transfers;
    if (transfers.empty() || transfers.back().step != step) {
      TraceSpan& span = transfers.emplace_back(
          TraceSpan{TraceLane::communication, exchange(rank, step).what, time, time});
      span.kind = SpanKind::message;
      span.step = step;
    }
    TraceSpan& span = transfers.back();
    if (op.kind != OpKind::receive) span.sent.push_back({peer, op.bytes});
    if (op.kind != OpKind::send) span.received.push_back({peer, op.bytes});
  }
  RankTimeline& line(int rank) { return lines_[rank]; }

 private:
  std::vector<SimulatedSpan>& of(int rank) { return line(rank).spans; }
  const Step& step_of(int rank, int step) const { return plan_.ranks[rank].steps(pass_)[step]; }
  const step::Exchange& exchange(int rank, int step) const {
    return std::get<step::Exchange>(step_of(rank, step));
  }
  std::string name_of_spending(int /*rank*/, const step::Exchange& e) const {
    return "pack " + e.what;
  }
  std::string name_of_spending(int rank, const step::Wait& /*wait*/) const {
    return "unpack " + exchange(rank, waited_for_[rank]).what;
  }
  std::string name_of_spending(int rank, const step::Compute& c) const {
    return name_of_keys(plan_.ranks[rank], c);
  }
  std::string name_of_spending(int /*rank*/, const step::Clear& /*clear*/) const { return "clear"; }
  std::string name_of_spending(int /*rank*/, const step::Merge& /*merge*/) const { return "merge"; }
  std::string name_of_spending(int /*rank*/, const step::Delta& /*delta*/) const { return "delta"; }
  template <class Other>
  std::string name_of_spending(int /*rank*/, const Other& /*step*/) const {
    return "";
  }
  SimulatedSpan& add(int rank, SpanKind kind, std::string name, int step, double begin,
                     double end) {
    const auto lane = kind == SpanKind::message ? TraceLane::communication : TraceLane::compute;
    SimulatedSpan& span = of(rank).emplace_back(SimulatedSpan{{lane, std::move(name), begin, end}});
    span.kind = kind;
    span.step = step;
    return span;
  }

  const Plan& plan_;
  Pass pass_;
  std::vector<RankTimeline> lines_;  ///< [rank]
  std::vector<int> waited_for_;      ///< [rank] step that posted the last exchange waited for
};

}  // namespace

Simulation simulate(const Plan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types,
                    const MachineModel& machine, GroupPlace place) {
  check_machine(machine);
  const auto ranks = static_cast<int>(plan.ranks.size());
  Programs programs(pass, heads, types, machine, ranks, place);
  for (const RankPlan& rank : plan.ranks) programs.add(programs.compile(rank, plan.schedule));
  SpanWriter spans(plan, pass);
  const std::vector<RankTimes> times = Engine(programs, machine, plan.schedule, spans).run();
  Simulation result{pass, std::vector<RankTimeline>(times.size())};
  for (int r = 0; r < ranks; ++r) {
    const size_t i = r;
    result.ranks[i] = std::move(spans.line(r));
    static_cast<RankTimes&>(result.ranks[i]) = times[i];
  }
  return result;
}

std::vector<TraceSpan> trace_of(const RankTimeline& rank, Pass pass) {
  std::vector<TraceSpan> spans;
  for (const SimulatedSpan& span : rank.spans)
    if (span.lane == TraceLane::compute) spans.push_back(span);
  spans.insert(spans.end(), rank.transfers.begin(), rank.transfers.end());
  for (TraceSpan& span : spans) span.direction = name_of(pass);
  return spans;
}

std::vector<RankTimes> run_programs(const Programs& programs, const MachineModel& machine,
                                    const std::string& schedule) {
  NoObserver nobody;
  return Engine(programs, machine, schedule, nobody).run();
}

}  // namespace gyre

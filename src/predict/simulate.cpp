#include "predict/simulate.hpp"

#include <algorithm>
#include <deque>
#include <map>

#include "core/error.hpp"

namespace gyre {
namespace {

/// Messages that one rank has sent to another, in order.
struct Channel {
  struct Sent {
    double arrival = 0;
    int64_t bytes = 0;
    int step = 0;
  };
  std::deque<Sent> sent;
  size_t expected = 0;  ///< messages that the receiver has posted
};

/// A receive that a rank has posted.
struct Expected {
  int peer = 0;
  size_t place = 0;  ///< index into the channel's messages
  int64_t bytes = 0;
};

/// An exchange from its posting to its Wait.
struct Pending {
  std::vector<Expected> receives;
  double left = 0;  ///< when the last message sent has left the link
  int64_t unpacked = 0;
  int step = 0;
};

struct RankState {
  size_t next_step = 0;
  double clock = 0;
  double link_free = 0, node_link_free = 0;
  std::map<int, Pending> pending;  ///< [id]
  std::map<int, Channel> from;     ///< [sender]
  int blocked_on = -1;
};

class Simulator {
 public:
  Simulator(const Plan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types,
            const MachineModel& machine)
      : plan_(plan),
        pass_(pass),
        heads_(heads),
        types_(types),
        machine_(machine),
        states_(plan.ranks.size()) {
    result_.pass = pass;
    result_.ranks.resize(plan.ranks.size());
  }

  Simulation run() {
    for (int r = 0; r < ranks(); ++r) runnable_.push_back(r);
    while (!runnable_.empty()) {
      const int rank = runnable_.front();
      runnable_.pop_front();
      advance(rank);
    }
    for (int r = 0; r < ranks(); ++r) check_ended(r);
    return std::move(result_);
  }

 private:
  int ranks() const { return static_cast<int>(plan_.ranks.size()); }
  RankState& state(int rank) { return states_[static_cast<size_t>(rank)]; }
  RankTimeline& timeline(int rank) { return result_.ranks[static_cast<size_t>(rank)]; }
  const RankPlan& plan(int rank) const { return plan_.ranks[static_cast<size_t>(rank)]; }
  const PlanArray& array(int rank, int index) const {
    return plan(rank).arrays[static_cast<size_t>(index)];
  }

  /// Runs the steps of a rank until they end or the rank waits for a message that is not yet sent.
  void advance(int rank) {
    const std::vector<Step>& steps = plan(rank).steps(pass_);
    RankState& s = state(rank);
    s.blocked_on = -1;
    while (s.next_step < steps.size()) {
      std::visit([&](const auto& step) { walk(rank, step); }, steps[s.next_step]);
      if (s.blocked_on >= 0) return;
      ++s.next_step;
    }
    timeline(rank).total = s.clock;
  }

  void walk(int rank, const step::Exchange& e) {
    RankState& s = state(rank);
    Pending& pending = s.pending[e.id];
    pending.step = static_cast<int>(s.next_step);
    int64_t packed = 0;
    for (const Message& m : e.sends)
      for (const Slice& slice : m.slices)
        if (m.peer == rank || !as_it_lies(rank, slice)) packed += bytes(rank, slice);
    copy(rank, "pack " + e.what, packed);
    for (size_t i = 0; i < e.sends.size(); ++i)
      if (e.sends[i].peer != rank) send(rank, e, static_cast<int>(i), pending);
    for (const Message& m : e.recvs) {
      if (m.peer == rank) continue;
      check_peer(rank, m.peer);
      Expected expected{m.peer, s.from[m.peer].expected++, 0};
      for (const Slice& slice : m.slices) {
        expected.bytes += bytes(rank, slice);
        if (slice.add || !as_it_lies(rank, slice)) pending.unpacked += bytes(rank, slice);
      }
      pending.receives.push_back(expected);
    }
  }

  void send(int rank, const step::Exchange& e, int index, Pending& pending) {
    const Message& m = e.sends[static_cast<size_t>(index)];
    check_peer(rank, m.peer);
    RankState& s = state(rank);
    const bool inside = machine_.ranks_per_node > 0 &&
                        rank / machine_.ranks_per_node == m.peer / machine_.ranks_per_node;
    int64_t size = 0;
    for (const Slice& slice : m.slices) size += bytes(rank, slice);
    double& link_free = inside ? s.node_link_free : s.link_free;
    const double begin = std::max(s.clock, link_free);
    link_free = begin + static_cast<double>(size) /
                            (inside ? machine_.node_bytes_per_s : machine_.bytes_per_s);
    const double arrival = link_free + (inside ? machine_.node_latency_s : machine_.latency_s);
    pending.left = std::max(pending.left, link_free);
    const int step = static_cast<int>(s.next_step);
    state(m.peer).from[rank].sent.push_back({arrival, size, step});
    SimulatedSpan span{{TraceLane::communication, e.what, begin, arrival}};
    span.kind = SpanKind::message;
    span.step = step;
    span.peer = m.peer;
    span.message = index;
    span.left = link_free;
    timeline(rank).spans.push_back(std::move(span));
    if (state(m.peer).blocked_on == rank) {
      state(m.peer).blocked_on = -1;
      runnable_.push_back(m.peer);
    }
  }

  void walk(int rank, const step::Wait& w) {
    RankState& s = state(rank);
    const auto found = s.pending.find(w.id);
    if (found == s.pending.end())
      throw_runtime("{} waits for exchange #{}, which is not under way", place(rank), w.id);
    const Pending& pending = found->second;
    double end = std::max(s.clock, pending.left);
    for (const Expected& e : pending.receives) {
      const Channel& channel = s.from.at(e.peer);
      if (channel.sent.size() <= e.place) {
        s.blocked_on = e.peer;
        return;
      }
      const Channel::Sent& sent = channel.sent[e.place];
      if (sent.bytes != e.bytes)
        throw_runtime("{} expects {} bytes from rank {}, which sends {} at step {}", place(rank),
                      e.bytes, e.peer, sent.bytes, sent.step);
      end = std::max(end, sent.arrival);
    }
    const auto& exchange =
        std::get<step::Exchange>(plan(rank).steps(pass_)[static_cast<size_t>(pending.step)]);
    timeline(rank).wait += spend(rank, SpanKind::wait, "wait " + exchange.what, end - s.clock);
    copy(rank, "unpack " + exchange.what, pending.unpacked);
    s.pending.erase(found);
  }

  void walk(int rank, const step::Compute& c) {
    timeline(rank).compute += spend(rank, SpanKind::compute, compute_name(rank, c),
                                    step_flops(plan(rank), c, heads_) / machine_.flops_per_s);
  }
  void walk(int rank, const step::Clear& c) { pass_over(rank, "clear", {c.array}); }
  void walk(int rank, const step::Delta& d) { pass_over(rank, "delta", {d.out, d.d_out}); }
  void walk(int /*rank*/, const step::Finish&) {}
  void walk(int /*rank*/, const step::SinkGradient&) {}

  /// Advances the rank's clock by `seconds`, and returns them.
  double spend(int rank, SpanKind kind, std::string name, double seconds) {
    RankState& s = state(rank);
    if (!(seconds > 0)) return 0;
    SimulatedSpan span{{TraceLane::compute, std::move(name), s.clock, s.clock + seconds}};
    span.kind = kind;
    span.step = static_cast<int>(s.next_step);
    timeline(rank).spans.push_back(std::move(span));
    s.clock += seconds;
    return seconds;
  }
  void copy(int rank, std::string name, int64_t size) {
    timeline(rank).copy += spend(rank, SpanKind::copy, std::move(name),
                                 static_cast<double>(size) / machine_.copy_bytes_per_s);
  }
  void pass_over(int rank, const char* name, std::initializer_list<int> arrays) {
    int64_t size = 0;
    for (const int index : arrays) size += stored_bytes(array(rank, index), heads_, types_);
    timeline(rank).pass +=
        spend(rank, SpanKind::pass, name, static_cast<double>(size) / machine_.copy_bytes_per_s);
  }

  std::string compute_name(int rank, const step::Compute& c) const {
    const std::vector<RankRows>& rows = array(rank, c.kv).rows;
    const bool one = std::all_of(rows.begin(), rows.end(),
                                 [&](const RankRows& run) { return run.rank == rows[0].rank; });
    return one && !rows.empty() ? fmt::format("keys of rank {}", rows[0].rank)
                                : std::string("keys of several ranks");
  }
  int64_t bytes(int rank, const Slice& slice) const {
    return wire_bytes(array(rank, slice.array).kind, slice, heads_, types_);
  }
  bool as_it_lies(int rank, const Slice& slice) const {
    return travels_as_it_lies(array(rank, slice.array), slice, types_);
  }

  /// The position of a rank: the beginning of an error message.
  std::string place(int rank) {
    return fmt::format("schedule {}, {}: rank {} at step {}", plan_.schedule, name_of(pass_), rank,
                       state(rank).next_step);
  }
  void check_peer(int rank, int peer) {
    if (peer < 0 || peer >= ranks())
      throw_runtime("{} exchanges with rank {} of {}", place(rank), peer, ranks());
  }
  void check_ended(int rank) {
    const RankState& s = state(rank);
    if (s.next_step < plan(rank).steps(pass_).size()) {
      const RankState& peer = state(s.blocked_on);
      const std::string why =
          peer.blocked_on >= 0
              ? fmt::format("itself waits at step {} for rank {}", peer.next_step, peer.blocked_on)
              : "has ended";
      throw_runtime("{} waits for a message from rank {}, which {}", place(rank), s.blocked_on,
                    why);
    }
    if (!s.pending.empty())
      throw_runtime("{} never waits for exchange #{} of step {}", place(rank),
                    s.pending.begin()->first, s.pending.begin()->second.step);
    for (const auto& [peer, channel] : s.from)
      if (channel.sent.size() > channel.expected)
        throw_runtime("{} has not received what rank {} sent at step {}", place(rank), peer,
                      channel.sent[channel.expected].step);
  }

  const Plan& plan_;
  Pass pass_;
  const HeadShape& heads_;
  const ElementTypes& types_;
  const MachineModel& machine_;
  std::vector<RankState> states_;
  std::deque<int> runnable_;
  Simulation result_;
};

}  // namespace

double Simulation::makespan() const {
  double longest = 0;
  for (const RankTimeline& rank : ranks) longest = std::max(longest, rank.total);
  return longest;
}

double Simulation::compute_only() const {
  double longest = 0;
  for (const RankTimeline& rank : ranks) longest = std::max(longest, rank.compute + rank.pass);
  return longest;
}

double step_flops(const RankPlan& plan, const step::Compute& compute, const HeadShape& heads) {
  const HeadRange all = plan.arrays[static_cast<size_t>(compute.q)].heads;
  const auto pairs = static_cast<double>(total_pairs(compute.rectangles) *
                                         query_heads_of(all, compute.kv_heads, heads).count);
  double products = 2;                                                        // scores, out
  if (compute.d_out >= 0)                                                     // scores, dP,
    products = 2 + (compute.d_q >= 0 ? 1 : 0) + (compute.d_kv >= 0 ? 2 : 0);  // dQ; dK, dV
  return 2 * products * static_cast<double>(heads.head_dim) * pairs;
}

Simulation simulate(const Plan& plan, Pass pass, const HeadShape& heads, const ElementTypes& types,
                    const MachineModel& machine) {
  check_machine(machine);
  return Simulator(plan, pass, heads, types, machine).run();
}

}  // namespace gyre

// Maps of parts are composed by a scan of Hillis and Steele (1986) over each chain, in log2 steps.
//
// Let i be the place of a part in a chain of n. Its maps cover the parts before it: E the last 2^k of
// them without its own, W with its own.
//
//     W = M, B of each part that continues elsewhere; E = nothing
//     for k = 0, 1, ... while 2^k < n
//       send W to part i + 2^k, if there is one; receive the map X of part i - 2^k, if there is one
//       E = E after X;  W = own after E
//     parts that begin a chain, and whole documents, while the last message is under way
//     the other parts, from the state E
//
// Once a map begins with the chain, the state before it is 0: M is not needed, and B alone is sent.
// So the last message that a part receives is a state, and those before it are maps. Backward is the
// same from the last part on, with C, and with maps that are composed in the other order: a gradient
// passes Mᵀ. A part needs no messages of another chain.
//
// Example, cp = 4, one document, contiguous:
//
//     k = 0    rank 0 sends B_0 to 1, rank 1 sends (M_1, B_1) to 2, rank 2 sends (M_2, B_2) to 3
//     k = 1    rank 0 sends B_0 to 2, rank 1 sends M_1 B_0 + B_1 to 3
//     rank 2   E = M_1 B_0 + B_1          rank 3   E = M_2 (M_1 B_0 + B_1) + B_2

#include <algorithm>
#include <map>
#include <set>

#include "recurrence/schedules/list.hpp"
#include "recurrence/schedules/steps.hpp"

namespace gyre {
namespace {

using namespace state_step;

/// Whether the map that a part at `place` sends in the step of `distance` begins behind the chain's
/// begin, so that M is needed.
bool sends_map(int place, int distance) {
  return place >= distance;
}

/// One pass of a part.
struct Side {
  int place = 0, places = 1;
  Compose::Term own, before, covered, received;  ///< own: M, B; before: E; covered: W
  int entry = -1;                                ///< the state that the part runs from
  Compose::Term sent;                            ///< what it sends next

  bool sends(int distance) const { return place + distance < places; }
  bool receives(int distance) const { return place >= distance; }
  /// Whether it receives no more behind the step of `distance`.
  bool ends(int distance) const { return place < 2 * distance; }
};

class Scan {
 public:
  Scan(const RecurrenceProblem& problem, int rank)
      : plan_(empty_state_plan(problem, rank)), parts_(problem.parts) {
    for (const StatePart& part : plan_.parts) {
      const int map = part.passes_through() ? add_buffer(plan_, StateKind::map) : -1;
      states_.push_back(side(part, Pass::forward, map));
      gradients_.push_back(side(part, Pass::backward, map));
    }
    pass(Pass::forward, plan_.forward);
    pass(Pass::backward, plan_.backward);
  }
  StatePlan take() { return std::move(plan_); }

 private:
  Side side(const StatePart& part, Pass pass, int map) {
    Side side;
    side.place = place_of(part, pass);
    side.places = part.places;
    const auto term = [&](bool with_state, bool with_map) {
      return Compose::Term{with_map ? add_buffer(plan_, StateKind::map) : -1,
                           with_state ? add_buffer(plan_, StateKind::state) : -1};
    };
    side.own = {map, term(side.sends(1), false).state};
    side.entry = term(side.receives(1), false).state;
    side.before = term(side.receives(2), side.receives(2));
    side.received = term(side.receives(2), side.receives(4));
    side.covered = term(side.receives(1) && side.sends(2), side.receives(2) && side.sends(2));
    side.sent = side.own;
    return side;
  }

  void pass(Pass pass, std::vector<StateStep>& steps) {
    std::vector<Side>& sides = pass == Pass::forward ? states_ : gradients_;
    const std::vector<int> order = parts_by_place(plan_, pass);
    for (const int part : order) {
      if (!sides[part].sends(1)) continue;
      if (pass == Pass::forward)
        steps.emplace_back(
            Summarize{part, sides[part].own.map, sides[part].own.state, !sides[part].receives(1)});
      else
        steps.emplace_back(SummarizeBack{part, sides[part].own.state});
    }
    int last = 0;
    for (const Side& side : sides)
      for (int distance = 1; side.sends(distance) || side.receives(distance); distance *= 2)
        last = std::max(last, distance);
    for (int distance = 1; distance <= last; distance *= 2) {
      steps.emplace_back(exchange(pass, distance, order, sides));
      if (distance == last) run(pass, order, false, steps);
      steps.emplace_back(Wait{distance});
      for (const int part : order)
        if (sides[part].receives(distance)) compose(sides[part], distance, steps);
    }
    if (last == 0) run(pass, order, false, steps);
    run(pass, order, true, steps);
  }

  /// The messages of one step: one to each rank, of all parts.
  Exchange exchange(Pass pass, int distance, const std::vector<int>& order,
                    const std::vector<Side>& sides) const {
    std::map<int, std::vector<int>> sends, recvs;
    const auto add = [](std::vector<int>& buffers, const Compose::Term& term, bool with_map) {
      if (with_map) buffers.push_back(term.map);
      buffers.push_back(term.state);
    };
    for (const int part : order) {
      const Side& side = sides[part];
      const int to = pass == Pass::forward ? distance : -distance;
      const std::vector<PartOfRank>& chain = parts_.chain(plan_.parts[part]);
      const int place = plan_.parts[part].place;
      if (side.sends(distance))
        add(sends[chain[place + to].rank], side.sent, sends_map(side.place, distance));
      if (side.receives(distance))
        add(recvs[chain[place - to].rank], arrival(side, distance),
            sends_map(side.place - distance, distance));
    }
    Exchange exchange;
    exchange.id = distance;
    exchange.what = pass == Pass::forward ? "maps of states" : "gradients of states";
    for (const auto& [peer, buffers] : sends) exchange.sends.push_back({peer, buffers});
    for (const auto& [peer, buffers] : recvs) exchange.recvs.push_back({peer, buffers});
    return exchange;
  }
  /// The buffers that a part receives into: what comes first is E itself.
  static Compose::Term arrival(const Side& side, int distance) {
    if (distance > 1) return side.received;
    return side.ends(distance) ? Compose::Term{-1, side.entry} : side.before;
  }
  /// E and W behind the step of `distance`.
  static void compose(Side& side, int distance, std::vector<StateStep>& steps) {
    const bool ends = side.ends(distance), sends = side.sends(2 * distance);
    if (distance > 1 && ends)
      steps.emplace_back(Compose{side.entry, side.received.state, {side.before}});
    else if (distance > 1)
      steps.emplace_back(Join{side.before, side.received, side.before});
    if (!sends) return;
    if (ends)
      steps.emplace_back(Compose{side.covered.state, side.entry, {side.own}});
    else
      steps.emplace_back(Join{side.covered, side.before, side.own});
    side.sent = side.covered;
  }
  /// Runs the parts that wait for a state, or those that do not.
  void run(Pass pass, const std::vector<int>& order, bool received,
           std::vector<StateStep>& steps) const {
    const std::vector<Side>& sides = pass == Pass::forward ? states_ : gradients_;
    for (const int part : order) {
      if (sides[part].receives(1) != received) continue;
      Run run;
      run.part = part;
      run.before = states_[part].entry;
      if (pass == Pass::backward) run.d_behind = gradients_[part].entry;
      steps.emplace_back(run);
    }
  }

  StatePlan plan_;
  const StateParts& parts_;
  std::vector<Side> states_, gradients_;  // [parts]
};

StatePlan plan(const RecurrenceProblem& problem, int rank) {
  return Scan(problem, rank).take();
}

StateForm closed_form(const RecurrenceProblem& problem, int rank, Pass pass) {
  const RecurrenceShape& shape = problem.shape;
  StateForm form;
  std::set<std::pair<int, int>> messages;  // (distance, rank)
  for (const StatePart& part : problem.parts.of_rank[rank]) {
    const int place = place_of(part, pass);
    for (int distance = 1; place + distance < part.places; distance *= 2) {
      const int to = part.place + (pass == Pass::forward ? distance : -distance);
      const int peer = problem.parts.chain(part)[to].rank;
      if (peer == rank) continue;
      messages.emplace(distance, peer);
      const int64_t map = sends_map(place, distance) ? shape.map_elements() : 0;
      form.bytes_sent += shape.value_heads * (map + shape.state_elements()) * 4;
    }
  }
  form.messages = std::ssize(messages);
  return form;
}

/// A composed map is a product of two, and its state another.
int64_t maps(const RecurrenceProblem& problem) {
  return 2 * maps_of_chains(problem);
}

}  // namespace

StateSchedule state_scan_schedule() {
  return {.name = "state-scan",
          .summary = "maps of states are composed in log2 steps between ranks",
          .plan = plan,
          .closed_form = closed_form,
          .maps = maps,
          .why_not = state_refusal};
}

}  // namespace gyre

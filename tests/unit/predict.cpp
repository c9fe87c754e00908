// Predictions from streamed plans and shared blocks, against plans walked one step at a time,
// against sums over messages, and against closed forms.

#include "predict/predict.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <numeric>

#include "attention/masks/registry.hpp"
#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/registry.hpp"
#include "layout_cases.hpp"
#include "sharding/padded_layout.hpp"

namespace gyre {
namespace GYRE_FILE {

HeadShape shape{8, 4, 16, 0.25F};
constexpr ElementTypes types{DType::bf16, DType::f32, DType::f32, DType::bf16};

LinkTier tier(const char* name, int ranks, double bytes_per_s, double latency_s = 0) {
  LinkTier result;
  result.name = name;
  result.ranks = ranks;
  result.bytes_per_s = bytes_per_s;
  result.latency_s = latency_s;
  return result;
}

/// Nodes of 2 ranks, racks of 4, a switch; everything that a model can say, of one order in time.
MachineModel three_tiers() {
  MachineModel machine;
  machine.links = {tier("node", 2, 4e6, 1e-5), tier("rack", 4, 2e6, 1e-4),
                   tier("switch", 0, 1e6, 3e-4)};
  machine.links[0].curve = {{256, 1e6}, {1024, 2e6}, {65536, 4e6}};
  machine.links[0].kernel_slowdown = 0.25;
  machine.links[1].kernel_slowdown = 0.125;
  machine.links[2].all_at_once = 0.5;
  machine.copy_bytes_per_s = 3e7;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    KernelSurface surface;
    surface.pass = pass;
    surface.type = types.activations;
    surface.head_dim = shape.head_dim;
    surface.launch_s = 1e-5;
    surface.diagonal_s = 1e-6;
    surface.rows = {8, 32};
    surface.flops_per_s = {1e8, 3e8};
    machine.kernel.surfaces.push_back(surface);
  }
  return machine;
}

/// One rate for all kernels, and nodes of this many ranks in a network.
MachineModel nodes_of(int ranks, const LinkTier& network) {
  MachineModel machine = flat_machine(1e9);
  machine.links = {tier("node", ranks, 1e7, 1e-5), network};
  return machine;
}

/// A plan walked step by step, as predict/simulate.hpp says: neither programs nor blocks.
class StepWalk {
 public:
  StepWalk(const Plan& plan, Pass pass, const MachineModel& machine, GroupPlace place)
      : plan_(plan), pass_(pass), machine_(machine), place_(place), ranks_(plan.ranks.size()) {
    for (bool moved = true; moved;) {
      moved = false;
      for (const RankPlan& rank : plan.ranks)
        while (walk_step(rank)) moved = true;
    }
  }
  double makespan() const {
    double longest = 0;
    for (const State& s : ranks_) longest = std::max(longest, s.clock);
    return longest;
  }
  double compute_only() const {
    double longest = 0;
    for (const State& s : ranks_) longest = std::max(longest, s.busy);
    return longest;
  }
  bool ended() const {
    for (size_t r = 0; r < ranks_.size(); ++r)
      if (ranks_[r].next < plan_.ranks[r].steps(pass_).size()) return false;
    return true;
  }

 private:
  struct Open {
    double left = 0;
    std::map<int, double> beside;  ///< [tier]
    int64_t unpacked = 0;
    std::vector<std::pair<int, size_t>> expected;  ///< sender, which of its messages
  };
  struct State {
    size_t next = 0;
    double clock = 0, busy = 0;
    std::map<int, double> link_free;              ///< [tier]
    std::map<int, Open> open;                     ///< [id]
    std::map<int, std::vector<double>> arrivals;  ///< [sender]
    std::map<int, size_t> expected;               ///< [sender]
  };
  State& state(int rank) { return ranks_[rank]; }

  bool walk_step(const RankPlan& rank) {
    State& s = state(rank.rank);
    const std::vector<Step>& steps = rank.steps(pass_);
    if (s.next == steps.size() ||
        !std::visit([&](const auto& step) { return walk(rank, s, step); }, steps[s.next]))
      return false;
    ++s.next;
    return true;
  }
  void copy(State& s, int64_t bytes) const {
    s.clock += static_cast<double>(bytes) / machine_.copy_bytes_per_s;
  }
  void work(State& s, double seconds) const {
    s.clock += seconds;
    s.busy += seconds;
  }
  static int64_t bytes_of(const RankPlan& rank, const Message& message) {
    int64_t sum = 0;
    for (const Slice& slice : message.slices)
      sum += wire_bytes(rank.arrays[slice.array].kind, slice, shape, types);
    return sum;
  }
  /// Bytes read and written for slices that are copied or added; `all`: even those that lie as they
  /// travel.
  static int64_t copied(const RankPlan& rank, const Message& message, bool all) {
    int64_t sum = 0;
    for (const Slice& slice : message.slices) {
      const PlanArray& array = rank.arrays[slice.array];
      if (all || slice.add || !travels_as_it_lies(array, slice, shape, types))
        sum += (slice.add ? 3 : 2) * wire_bytes(array.kind, slice, shape, types);
    }
    return sum;
  }
  const LinkTier& link_to(int rank, int peer, int& tier) const {
    tier = machine_.tier_between(place_.first + rank * place_.stride,
                                 place_.first + peer * place_.stride);
    return machine_.links[tier];
  }

  bool walk(const RankPlan& rank, State& s, const step::Exchange& e) {
    Open& open = s.open[e.id];
    for (const Message& m : e.sends) {
      Message sent = m;
      for (Slice& slice : sent.slices) slice.add = false;
      copy(s, copied(rank, sent, m.peer == rank.rank));
    }
    std::map<int, double> receiving;
    int tier = 0;
    for (const Message& m : e.sends) {
      if (m.peer == rank.rank) continue;
      const LinkTier& link = link_to(rank.rank, m.peer, tier);
      const double held = link.seconds(static_cast<double>(bytes_of(rank, m)));
      double& free = s.link_free[tier];
      free = std::max(free, s.clock) + held;
      open.left = std::max(open.left, free);
      open.beside[tier] += held;
      state(m.peer).arrivals[rank.rank].push_back(free + link.latency_s);
    }
    for (const Message& m : e.recvs) {
      if (m.peer == rank.rank) continue;
      const LinkTier& link = link_to(rank.rank, m.peer, tier);
      receiving[tier] += link.seconds(static_cast<double>(bytes_of(rank, m)));
      open.unpacked += copied(rank, m, false);
      open.expected.emplace_back(m.peer, s.expected[m.peer]++);
    }
    for (const auto& [t, seconds] : receiving) open.beside[t] = std::max(open.beside[t], seconds);
    return true;
  }
  bool walk(const RankPlan& /*rank*/, State& s, const step::Wait& w) {
    const Open& open = s.open.at(w.id);
    double end = std::max(s.clock, open.left);
    for (const auto& [peer, place] : open.expected) {
      if (s.arrivals[peer].size() <= place) return false;
      end = std::max(end, s.arrivals[peer][place]);
    }
    s.clock = end;
    copy(s, open.unpacked);
    s.open.erase(w.id);
    return true;
  }
  bool walk(const RankPlan& rank, State& s, const step::Compute& c) {
    ModelledCall call;
    call.pass = pass_;
    call.type = types.activations;
    call.query_heads = query_heads_of(rank.arrays[c.q].heads, c.kv_heads, shape).count;
    call.head_dim = shape.head_dim;
    call.value_dim = shape.value_dim();
    call.rectangles = c.rectangles;
    call.d_q = c.d_q >= 0;
    call.d_kv = c.d_kv >= 0;
    int64_t queries = 0, keys = 0, bytes = 0;
    for (const Rectangle& r : c.rectangles) queries += r.q_length, keys += r.k_length;
    for (const int index : {c.q, c.stats, c.out, c.d_out, c.d_q, c.kv, c.d_kv}) {
      if (index < 0) continue;
      const PlanArray& array = rank.arrays[index];
      const bool of_keys = array.kind == ArrayKind::kv || array.kind == ArrayKind::d_kv;
      const int64_t heads = of_keys ? c.kv_heads.count : call.query_heads;
      bytes += std::min(array.tokens(), of_keys ? keys : queries) *
               row_elements(array.kind, heads, shape) * size_of(types.stored(array.kind));
    }
    const double seconds = std::max(machine_.kernel.time(call).seconds,
                                    static_cast<double>(bytes) / machine_.copy_bytes_per_s);
    work(s, seconds);
    for (auto& [id, open] : s.open)
      for (auto& [tier, left] : open.beside) {
        const double together = std::min(left, seconds);
        left -= together;
        s.clock += machine_.links[tier].kernel_slowdown * together;
      }
    return true;
  }
  bool pass_over(const RankPlan& rank, State& s, std::initializer_list<int> arrays) const {
    int64_t bytes = 0;
    for (const int array : arrays) bytes += stored_bytes(rank.arrays[array], shape, types);
    return pass(s, static_cast<double>(bytes));
  }
  bool pass(State& s, double bytes) const {
    work(s, bytes / machine_.copy_bytes_per_s);
    return true;
  }
  bool walk(const RankPlan& rank, State& s, const step::Clear& c) const {
    return pass_over(rank, s, {c.array});
  }
  bool walk(const RankPlan& rank, State& s, const step::Delta& d) const {
    return pass_over(rank, s, {d.out, d.d_out});
  }
  bool walk(const RankPlan& rank, State& s, const step::Merge& m) const {
    const auto lse_read_or_written = [&](int stats, int times) {
      return 0.5 * times * static_cast<double>(stored_bytes(rank.arrays[stats], shape, types));
    };
    pass_over(rank, s, {m.out, m.out});
    pass(s, lse_read_or_written(m.stats, 4));  // L_0 = L; exp(L_0 - L)
    for (const auto& [out, stats] : m.partials) {
      pass_over(rank, s, {out, m.out, m.out});
      pass(s, lse_read_or_written(m.stats, 3) + lse_read_or_written(stats, 2));
    }
    return true;
  }
  static bool walk(const RankPlan&, State&, const step::Finish&) { return true; }
  static bool walk(const RankPlan&, State&, const step::SinkGradient&) { return true; }

  const Plan& plan_;
  Pass pass_;
  const MachineModel& machine_;
  GroupPlace place_;
  std::vector<State> ranks_;
};

/// Bytes of all messages between ranks, by the tier that joins them.
std::vector<double> bytes_by_tier(const Plan& plan, Pass pass, const MachineModel& machine,
                                  GroupPlace place) {
  std::vector<double> bytes(machine.links.size());
  for (const RankPlan& rank : plan.ranks)
    for (const Step& step : rank.steps(pass)) {
      const auto* const exchange = std::get_if<step::Exchange>(&step);
      if (exchange == nullptr) continue;
      for (const Message& m : exchange->sends) {
        if (m.peer == rank.rank) continue;
        const int tier = machine.tier_between(place.first + rank.rank * place.stride,
                                              place.first + m.peer * place.stride);
        for (const Slice& slice : m.slices)
          bytes.at(tier) += wire_bytes(rank.arrays[slice.array].kind, slice, shape, types);
      }
    }
  return bytes;
}

LayoutOptions ranks_of(int cp) {
  LayoutOptions options;
  options.cp = cp;
  return options;
}

void expect_seconds(double actual, double expected) {
  EXPECT_NEAR(actual, expected, 1e-9 * expected);
}

/// One direction of a prediction against all that says the same in another way.
void expect_equal(const PassPrediction& predicted, const Plan& plan, const MachineModel& machine,
                  GroupPlace place) {
  SCOPED_TRACE(name_of(predicted.pass));
  const Simulation simulated = simulate(plan, predicted.pass, shape, types, machine, place);
  EXPECT_EQ(predicted.seconds, simulated.makespan());
  EXPECT_EQ(predicted.compute_only, simulated.compute_only());
  const StepWalk walk(plan, predicted.pass, machine, place);
  ASSERT_TRUE(walk.ended());
  expect_seconds(predicted.seconds, walk.makespan());
  expect_seconds(predicted.compute_only, walk.compute_only());

  int64_t pairs = 0, sent = 0, most = 0, messages = 0, transient = 0;
  double kernel = 0, kernel_most = 0, copies = 0;
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const PlanCount counted = count(plan.ranks[r], predicted.pass, shape, types);
    pairs += counted.pairs;
    sent += counted.bytes_sent;
    most = std::max(most, counted.bytes_sent);
    messages = std::max(messages, counted.messages);
    transient = std::max(transient, counted.transient_bytes);
    const RankTimeline& rank = simulated.ranks[r];
    kernel += rank.compute - rank.slowed;
    kernel_most = std::max(kernel_most, rank.compute - rank.slowed);
    copies = std::max(copies, simulated.ranks[r].copy);
  }
  EXPECT_EQ(predicted.pairs, pairs);
  EXPECT_EQ(predicted.bytes_most, most);
  EXPECT_EQ(predicted.messages_most, messages);
  EXPECT_EQ(predicted.transient_bytes, transient);
  expect_seconds(predicted.kernel_mean, kernel / static_cast<double>(plan.ranks.size()));
  expect_seconds(predicted.kernel_most, kernel_most);
  EXPECT_EQ(predicted.copies_most, copies);
  EXPECT_EQ(predicted.bytes_by_tier, bytes_by_tier(plan, predicted.pass, machine, place));
  EXPECT_EQ(std::accumulate(predicted.bytes_by_tier.begin(), predicted.bytes_by_tier.end(), 0.0),
            static_cast<double>(sent));
}

TEST(Predict, IsWhatTheWholePlansSayOfEveryScheduleAndLayout) {
  const MachineModel machine = three_tiers();
  // Documents of one token, of many, and none.
  const std::vector<int64_t> offsets = {0, 1, 1, 90, 131}, query_offsets = {0, 1, 1, 12, 40};
  std::map<std::string, int> done;
  for (const Schedule& schedule : schedules())
    for (const LayoutKind& kind : layout_kinds())
      for (int cp = 1; cp <= 8; ++cp) {
        shape.shared_key_dim = cp % 2 == 0 ? 4 : 0;
        SCOPED_TRACE(fmt::format("{} under {}, cp {}", schedule.name, kind.name, cp));
        MaskRule mask(MaskKind::causal, cp % 3 == 2 ? 9 : 0);
        const bool fewer = cp % 4 == 1;
        if (fewer) mask = of_last_queries(mask, offsets, query_offsets);
        const QueryLayouts placed(offsets, fewer ? query_offsets : std::vector<int64_t>(), kind,
                                  ranks_of(cp));
        const AttentionProblem problem{&placed.layout,   shape,           mask, {},
                                       PlanPasses::both, placed.queries()};
        if (!schedule.why_not(problem).empty()) continue;
        ++done[schedule.name];
        const GroupPlace place{cp % 3, 1 + cp % 2};
        const std::vector<PassPrediction> passes =
            predict({schedule, problem, types, place}, machine);
        ASSERT_EQ(passes.size(), 2U);
        const Plan plan = plan_all(schedule, problem);
        for (const PassPrediction& pass : passes) expect_equal(pass, plan, machine, place);
      }
  shape.shared_key_dim = 0;
  for (const Schedule& schedule : schedules()) EXPECT_GE(done[schedule.name], 3) << schedule.name;
}

/// A ring of one document under a full mask: all steps of all ranks are alike.
struct FullRing {
  int64_t local;
  Layout layout;
  AttentionProblem problem;
  FullRing(int cp, int64_t local_tokens)
      : local(local_tokens),
        layout(
            find_layout("contiguous").make(test::full_bounds({cp * local}).view(), ranks_of(cp))),
        problem{&layout, shape, MaskKind::full, {}, PlanPasses::forward} {}

  double bytes() const { return static_cast<double>(local) * 2 * 4 * 16 * 2; }  // bf16
  double step(const MachineModel& machine) const {
    return static_cast<double>(local * local) * 4 * 16 * 8 / machine.kernel.flops_per_s;
  }
  PassPrediction predict_on(const MachineModel& machine, GroupPlace place = {}) const {
    return predict({find_schedule("ring"), problem, types, place}, machine).at(0);
  }
};

TEST(Predict, AQueryOfALongDocumentTakesTheTimeThatItsKeysTakeToBeRead) {
  const std::vector<int64_t> offsets{0, 4096}, query_offsets{0, 1};
  const QueryLayouts placed(offsets, query_offsets, find_layout("contiguous"), ranks_of(1));
  const AttentionProblem problem{
      &placed.layout,      shape,           of_last_queries({}, offsets, query_offsets), {},
      PlanPasses::forward, placed.queries()};
  MachineModel machine = three_tiers();
  machine.kernel.surfaces[0].flops_per_s = {1e12, 1e12};
  machine.kernel.surfaces[0].launch_s = 0;
  machine.kernel_bytes_per_s = 5e7;
  const PassPrediction one = predict({find_schedule("ring"), problem, types}, machine).at(0);
  const int64_t keys = 4096 * row_elements(ArrayKind::kv, shape.kv_heads, shape) * 2;
  EXPECT_GT(one.kernel_mean, static_cast<double>(keys) / machine.kernel_bytes_per_s);
  EXPECT_LT(one.kernel_mean, 1.01 * static_cast<double>(keys) / machine.kernel_bytes_per_s);
}

/// How long a message is under way: it holds the link, then comes the latency.
double hop(const LinkTier& link, double bytes) {
  return bytes / link.bytes_per_s + link.latency_s;
}

TEST(Predict, ARingInsideANodeIsTimedByTheNodesLinks) {
  const MachineModel machine = nodes_of(8, tier("switch", 0, 1e5, 1));
  for (const int64_t local : {16, 200}) {  // a transfer takes longer than a step, or less long
    const FullRing ring(8, local);
    const double step = ring.step(machine), inside = hop(machine.links[0], ring.bytes());
    EXPECT_EQ(inside > step, local == 16);
    const PassPrediction p = ring.predict_on(machine);
    expect_seconds(p.seconds, step + 7 * std::max(step, inside));
    expect_seconds(p.compute_only, 8 * step);
    EXPECT_EQ(p.bytes_by_tier[1], 0);
    EXPECT_EQ(p.bytes_by_tier[0], 8 * 7 * ring.bytes());
  }
}

TEST(Predict, ASlowLinkOfARingHoldsUpEveryStep) {
  // Two of the eight links leave a node of four. Their senders wait each step until the block has
  // left; the others hear of it one rank later at a time, and hide what they are faster.
  const FullRing ring(8, 100);
  const MachineModel machine = nodes_of(4, tier("switch", 0, 1e6));
  const double step = ring.step(machine), crossing = hop(machine.links[1], ring.bytes());
  ASSERT_GT(crossing, step);
  ASSERT_LT(hop(machine.links[0], ring.bytes()), step);
  const PassPrediction p = ring.predict_on(machine);
  expect_seconds(p.seconds, step + 7 * crossing);
  EXPECT_EQ(p.bytes_by_tier[1], 2 * 7 * ring.bytes());
}

TEST(Predict, TheLatencyOfASlowLinkIsPaidWhereABlockCrossesIt) {
  // The sender is free when the block has left the link, so that a latency delays only ranks behind
  // the link, once for each crossing. Seven times a rank begins a step after its own last one, or
  // after the block from its neighbour. The longest of such chains crosses both links: there are
  // three hops inside the node between them, and two steps of a rank remain.
  const FullRing ring(8, 100);
  MachineModel machine = nodes_of(4, tier("switch", 0, 1e9, 0.05));
  const double step = ring.step(machine), crossing = hop(machine.links[1], ring.bytes());
  ASSERT_GT(crossing, step);
  const double inside = hop(machine.links[0], ring.bytes());
  ASSERT_LT(inside, step);
  expect_seconds(ring.predict_on(machine).seconds, 2 * crossing + 3 * inside + 2 * step + step);
  // With nodes of one rank all hops cross.
  machine.links[0].ranks = 1;
  expect_seconds(ring.predict_on(machine).seconds, step + 7 * crossing);
}

TEST(Predict, RanksThatShareHeadsPutNeighboursIntoOtherNodesEarlier) {
  const FullRing ring(8, 100);
  MachineModel machine = nodes_of(4, tier("rack", 8, 1e6));
  machine.links.push_back(tier("switch", 0, 1e5));
  const double of_a_link = 7 * ring.bytes();
  using Bytes = std::vector<double>;
  // Neighbours are 1, 2 or 4 ranks of the machine apart; a rank in the middle of a node.
  EXPECT_EQ(ring.predict_on(machine).bytes_by_tier, (Bytes{6 * of_a_link, 2 * of_a_link, 0}));
  EXPECT_EQ(ring.predict_on(machine, {0, 2}).bytes_by_tier,
            (Bytes{4 * of_a_link, 2 * of_a_link, 2 * of_a_link}));
  EXPECT_EQ(ring.predict_on(machine, {0, 4}).bytes_by_tier,
            (Bytes{0, 4 * of_a_link, 4 * of_a_link}));
  EXPECT_EQ(ring.predict_on(machine, {2, 1}).bytes_by_tier,
            (Bytes{5 * of_a_link, of_a_link, 2 * of_a_link}));
  const double step = ring.step(machine);
  for (const auto& [place, slowest] :
       {std::pair{GroupPlace{0, 1}, 1}, {GroupPlace{0, 2}, 2}, {GroupPlace{0, 4}, 2}})
    expect_seconds(ring.predict_on(machine, place).seconds,
                   step + 7 * hop(machine.links[slowest], ring.bytes()));
}

TEST(Predict, ATransferSlowsTheKernelBesideIt) {
  const FullRing ring(2, 100);
  MachineModel machine = flat_machine(1e9, 1e6);
  const double step = ring.step(machine), transfer = hop(machine.links[0], ring.bytes());
  ASSERT_GT(transfer, step);
  machine.links[0].kernel_slowdown = 0.5;
  // Of a transfer that takes longer only the part beside the kernel counts.
  EXPECT_NEAR(ring.predict_on(machine).kernel_mean, 2 * step, 1e-12);
  expect_seconds(ring.predict_on(machine).compute_only, 2 * step);
  EXPECT_EQ(ring.predict_on(machine).bound(), PassPrediction::Bound::network);
  expect_seconds(ring.predict_on(machine).seconds, std::max(1.5 * step, transfer) + step);
  machine.links[0].bytes_per_s = 1e8;
  const double shorter = hop(machine.links[0], ring.bytes());
  ASSERT_LT(shorter, step);
  expect_seconds(ring.predict_on(machine).seconds, 2 * step + 0.5 * shorter);
  // All that communication adds is that the kernel is slower.
  EXPECT_NEAR(ring.predict_on(machine).exposed(), 0.5 * shorter, 1e-12);
}

TEST(Predict, ATransferSlowsTheKernelByTheLinkThatItTakes) {
  // Rank 1 of two nodes of 2 receives on the node's link and sends, for longer, on the network's.
  MachineModel machine = nodes_of(2, tier("switch", 0, 2e6));
  machine.links[0].kernel_slowdown = 0.5;
  machine.links[1].kernel_slowdown = 0.125;
  const FullRing ring(4, 400);
  const double step = ring.step(machine), slow = ring.bytes() / 2e6, fast = ring.bytes() / 1e7;
  ASSERT_LT(slow, step);
  const PassPrediction p = ring.predict_on(machine);
  expect_seconds(p.seconds, 4 * step + 3 * (0.5 * fast + 0.125 * slow));
  expect_seconds(p.compute_only, 4 * step);
}

TEST(Predict, EveryStepOfARingButTheFirstMergesItsResult) {
  const int cp = 4;
  FullRing ring(cp, 32);
  ring.problem.passes = PlanPasses::both;
  MachineModel machine = three_tiers();
  for (LinkTier& link : machine.links) link.kernel_slowdown = 0;
  const std::vector<PassPrediction> without =
      predict({find_schedule("ring"), ring.problem, types, {}}, machine);
  for (KernelSurface& surface : machine.kernel.surfaces) surface.merge_s = 1e-6;
  const std::vector<PassPrediction> with =
      predict({find_schedule("ring"), ring.problem, types, {}}, machine);
  // A row of out, or of dQ, of 8 heads; of dK and dV of 4 each, which arrive from the rank before.
  const double of_queries = 32.0 * 8 * 16, of_keys = 32.0 * 2 * 4 * 16;
  EXPECT_NEAR(with[0].kernel_mean - without[0].kernel_mean, 1e-6 * (cp - 1) * of_queries, 1e-9);
  EXPECT_NEAR(with[1].kernel_mean - without[1].kernel_mean,
              1e-6 * (cp - 1) * (of_queries + of_keys), 1e-9);
}

TEST(Predict, AMergeAtTheEndReadsAndWritesOutputsAndLogSumExps) {
  const int cp = 4, partials = cp - 1;
  FullRing ring(cp, 32);
  MachineModel machine = three_tiers();
  const PassPrediction at_once = ring.predict_on(machine);
  ring.problem.options.merge = 1;
  const PassPrediction at_end = ring.predict_on(machine);
  const double out = 32 * 8 * 16 * 4, lse = 32 * 8 * 4;
  const double cleared = partials * (out + 2 * lse);  // with delta
  const double merged = 2 * out + 4 * lse + partials * (3 * out + 5 * lse);
  expect_seconds(at_end.compute_only - at_once.compute_only,
                 (cleared + merged) / machine.copy_bytes_per_s);
  // Partial outputs of a library are written, not cleared.
  MachineModel library = machine;
  for (KernelSurface& surface : library.kernel.surfaces) surface.merge_s = 1e-30;
  expect_seconds(at_end.compute_only - ring.predict_on(library).compute_only,
                 (cleared + out + 2 * lse) / machine.copy_bytes_per_s);
  for (const char* name : {"ring", "ring-forward"}) {
    const Plan plan = plan_all(find_schedule(name), ring.problem);
    for (const PassPrediction& pass :
         predict({find_schedule(name), ring.problem, types, {}}, machine))
      expect_equal(pass, plan, machine, {});
  }
}

/// Expects how many bytes rank 0 reads and writes to clear arrays and to compute delta.
void expect_passed(const Plan& plan, Pass pass, const MachineModel& machine, double bytes) {
  double seconds = 0;
  const Simulation simulated = simulate(plan, pass, shape, types, machine);
  for (const SimulatedSpan& span : simulated.ranks[0].spans)
    if (span.kind == SpanKind::pass) {
      seconds += span.end - span.begin;
      EXPECT_TRUE(span.name == "clear" || span.name == "delta" ||
                  span.name == "deferred clear or delta")
          << span.name;
    }
  EXPECT_NEAR(seconds * machine.copy_bytes_per_s, bytes, 1e-6);
}

TEST(Predict, ACallOfALibraryReplacesClearsAndDelta) {
  FullRing ring(1, 32);
  ring.problem.passes = PlanPasses::both;
  Plan plan = plan_all(find_schedule("ring"), ring.problem);
  MachineModel machine = three_tiers();
  // Bytes of a row of the output and of dQ, of the statistics, of dO, and of dK and dV.
  const double out = 8 * 16 * 4, stats = 2 * 8 * 4, d_out = 8 * 16 * 2, d_kv = 2 * 4 * 16 * 4;
  expect_passed(plan, Pass::forward, machine, 32 * (out + stats));
  expect_passed(plan, Pass::backward, machine, 32 * (out + d_out + out + d_kv));
  for (KernelSurface& surface : machine.kernel.surfaces) surface.merge_s = 1e-30;
  expect_passed(plan, Pass::forward, machine, 0);
  expect_passed(plan, Pass::backward, machine, 0);
  // Rows that the call does not write are cleared.
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (Step& step : pass == Pass::forward ? plan.ranks[0].forward : plan.ranks[0].backward)
      if (auto* call = std::get_if<step::Compute>(&step)) {
        call->rectangles.at(0).q_length = 24;
        call->rectangles.at(0).k_length = 20;
      }
  expect_passed(plan, Pass::forward, machine, 8 * (out + stats));
  expect_passed(plan, Pass::backward, machine, 8 * out + 12 * d_kv);
}

TEST(Predict, ALibraryClearsAndComputesDeltaBeforeMessages) {
  FullRing ring(2, 32);
  ring.problem.passes = PlanPasses::both;
  MachineModel machine = three_tiers();
  for (KernelSurface& surface : machine.kernel.surfaces) surface.merge_s = 1e-30;
  Plan plan{"hand-made", {}};
  for (int r = 0; r < 2; ++r) {
    PlanBuilder p(ring.problem, r);
    const auto swap = [&](int array, int with) {
      p.wait(p.exchange_pair("all", {1 - r, {p.whole(array)}}, {1 - r, {p.whole(with)}}));
    };
    const int dead =
        p.add_array(ArrayKind::out, p.rows_of(1 - r, ArrayKind::out), p.all_heads(ArrayKind::out));
    p.clear(dead);  // in vain: `other` takes its storage
    const int other =
        p.add_array(ArrayKind::out, p.rows_of(1 - r, ArrayKind::out), p.all_heads(ArrayKind::out));
    p.clear(own(ArrayKind::out));
    p.clear(other);
    p.clear(own(ArrayKind::stats));
    swap(own(ArrayKind::out), other);
    ArraySet merged;
    merged.out = other;
    p.compute(merged, own(ArrayKind::kv));  // merges into what has arrived
    p.begin(Pass::backward);
    const int d_out = p.add_array(ArrayKind::d_out, p.rows_of(1 - r, ArrayKind::d_out),
                                  p.all_heads(ArrayKind::d_out));
    p.clear(own(ArrayKind::d_q));  // and nothing uses it
    p.delta({});
    swap(own(ArrayKind::d_out), d_out);
    p.delta({});
    p.delta({});
    swap(d_out, own(ArrayKind::d_out));  // arrives where a delta reads
    plan.ranks.push_back(p.take());
    std::vector<PlanArray>& arrays = plan.ranks.back().arrays;
    arrays[other].storage = arrays[dead].storage;
  }
  const double out = 32 * 8 * 16 * 4, stats = 32 * 2 * 8 * 4, d_out = out / 2, d_q = out;
  expect_passed(plan, Pass::forward, machine, 2 * out + stats);
  expect_passed(plan, Pass::backward, machine, 3 * (out + d_out) + d_q);
}

TEST(Predict, BatchesOfACallAreMergedWhereTheyShareRows) {
  // 8 blocks of 4: a batch of the steps, and three of squares with half of all rows each.
  const std::vector<int64_t> lengths = {32};
  const Layout layout =
      find_layout("contiguous").make(test::full_bounds(lengths).view(), ranks_of(1));
  AttentionProblem problem{&layout, shape, parse_mask("block-causal,block=4").of(lengths), {}};
  problem.passes = PlanPasses::both;
  const auto kernels = [&](double merge_s) {
    MachineModel machine = three_tiers();
    for (KernelSurface& surface : machine.kernel.surfaces) surface.merge_s = merge_s;
    return predict({find_schedule("ring"), problem, types, {}}, machine);
  };
  const std::vector<PassPrediction> without = kernels(1e-30), with = kernels(1e-6);
  const double of_queries = 3 * 16.0 * 8 * 16, of_keys = 3 * 16.0 * 2 * 4 * 16;
  EXPECT_NEAR(with[0].kernel_mean - without[0].kernel_mean, 1e-6 * of_queries, 1e-9);
  EXPECT_NEAR(with[1].kernel_mean - without[1].kernel_mean, 1e-6 * (of_queries + of_keys), 1e-9);
}

TEST(Predict, ATransferBesideSeveralKernelsSlowsThemOnce) {
  const FullRing ring(2, 100);
  MachineModel machine = flat_machine(1e9, 1e6);
  machine.links[0].kernel_slowdown = 0.5;
  const double step = ring.step(machine);
  for (const double steps : {0.5, 1.5, 3.0}) {
    SCOPED_TRACE(steps);
    machine.links[0].bytes_per_s = ring.bytes() / (steps * step);
    Plan plan{"hand-made", {}};
    for (int r = 0; r < 2; ++r) {
      PlanBuilder p(ring.problem, r);
      const int other =
          p.add_array(ArrayKind::kv, p.rows_of(1 - r, ArrayKind::kv), p.all_heads(ArrayKind::kv));
      const int id =
          p.exchange("KV", {{1 - r, {p.whole(own(ArrayKind::kv))}}}, {{1 - r, {p.whole(other)}}});
      p.compute({}, own(ArrayKind::kv));
      p.compute({}, own(ArrayKind::kv));
      p.wait(id);
      plan.ranks.push_back(p.take());
    }
    const Simulation s = simulate(plan, Pass::forward, shape, types, machine);
    EXPECT_NEAR(s.ranks[0].compute, 2 * step + 0.5 * std::min(steps, 2.0) * step, 1e-12);
  }
}

TEST(Predict, WithoutLinksMessagesTakeNoTime) {
  const FullRing ring(4, 100);
  MachineModel machine = flat_machine(1e9);
  machine.links.clear();
  const PassPrediction p = ring.predict_on(machine);
  expect_seconds(p.seconds, 4 * ring.step(machine));
  EXPECT_EQ(p.bytes_by_tier, std::vector<double>{4 * 3 * ring.bytes()});
  EXPECT_EQ(p.exposed(), 0);
}

TEST(Predict, ForwardAloneIsThatOfBoth) {
  const Layout layout =
      find_layout("dual-chunk-swap").make(test::full_bounds({64}).view(), ranks_of(4));
  AttentionProblem problem{&layout, shape, MaskKind::causal, {}};
  const Schedule schedule = find_schedule("ring");
  const MachineModel machine = three_tiers();
  const double both = predict({schedule, problem, types}, machine).at(0).seconds;
  problem.passes = PlanPasses::forward;
  const std::vector<PassPrediction> forward = predict({schedule, problem, types}, machine);
  ASSERT_EQ(forward.size(), 1U);
  EXPECT_EQ(forward[0].seconds, both);
}

TEST(Predict, SaysWhatMostOfTheLostTimeGoesTo) {
  PassPrediction p;
  const auto bound = [&] { return std::string(name_of(p.bound())); };
  p.seconds = 10;
  p.kernel_mean = p.kernel_most = p.compute_only = 9.5;
  EXPECT_EQ(bound(), "kernel");
  p.kernel_mean = 5;
  EXPECT_EQ(bound(), "imbalance");
  p.kernel_most = p.compute_only = 5;
  EXPECT_EQ(bound(), "network");
  p.copies_most = 4;
  EXPECT_EQ(bound(), "copies");
}

TEST(Predict, PassesRefusalsOn) {
  const Layout layout = find_layout("contiguous").make(test::full_bounds({64}).view(), ranks_of(4));
  const AttentionProblem problem{&layout, shape, MaskKind::causal, {}};
  const Schedule halo = find_schedule("halo");
  ASSERT_NE(halo.why_not(problem), "");
  test::expect_usage("schedule halo: " + halo.why_not(problem), [&] {
    predict({halo, problem, types}, three_tiers());
  });
  MachineModel machine = three_tiers();
  machine.kernel.surfaces.pop_back();
  test::expect_usage("no kernel of bf16 bwd; the machine has bf16 fwd", [&] {
    predict({find_schedule("ring"), problem, types}, machine);
  });
}

/// The programs of a causal ring of one document, whose plans are made and dropped one by one.
Programs ring_programs(int cp, int64_t local, const MachineModel& machine) {
  const Layout layout =
      find_layout("dual-chunk-swap").make(test::full_bounds({cp * local}).view(), ranks_of(cp));
  const AttentionProblem problem{&layout, shape, MaskKind::causal, {}, PlanPasses::forward};
  Programs programs(Pass::forward, shape, types, machine, cp);
  for (int r = 0; r < cp; ++r)
    programs.add(programs.compile(plan_rank(find_schedule("ring"), problem, r), "ring"));
  return programs;
}

TEST(Programs, OfARingShareAHandfulOfBlocks) {
  // The first block, those of earlier and of later keys, the last one; each for ranks whose next
  // and previous ranks are in the node, the rack or beyond.
  const MachineModel flat = flat_machine(1e9, 1e6), tiers = three_tiers();
  const size_t alike = ring_programs(64, 16, flat).blocks();
  const size_t placed = ring_programs(64, 16, tiers).blocks();
  fmt::print("different blocks of 64 ranks: {}, on three tiers {}\n", alike, placed);
  EXPECT_LE(alike, 4U);
  EXPECT_LE(placed, 20U);
}

TEST(Programs, DoNotGrowWithTheStepsOfARing) {
  constexpr int cp = 1024;
  constexpr double local = 16;
  MachineModel machine = flat_machine(1e8, 1e9, 1e-6);
  const Programs programs = ring_programs(cp, 16, machine);
  EXPECT_EQ(programs.blocks(), ring_programs(64, 16, machine).blocks());
  size_t parts = 0;
  for (int r = 0; r < cp; ++r) parts = std::max(parts, programs.rank(r).parts.size());
  EXPECT_LE(parts, 6U);
  // Every transfer is hidden: the diagonal's step, then half of a square 1023 times.
  const double pair = 4.0 * 16 * 8 / machine.kernel.flops_per_s;
  const std::vector<RankTimes> times = run_programs(programs, machine, "ring");
  expect_seconds(makespan_of(times),
                 (local * local / 2 + local / 2 + (cp - 1) * local * local / 2) * pair);
}

}  // namespace GYRE_FILE
}  // namespace gyre

// Simulated times of plans against closed forms, and plans that cannot end.

#include "predict/simulate.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <functional>

#include "attention/schedules/builder/plan_builder.hpp"
#include "attention/schedules/registry.hpp"
#include "layout_cases.hpp"

namespace gyre {
namespace GYRE_FILE {

constexpr HeadShape shape{8, 2, 16, 0.25F};
constexpr ElementTypes types;
constexpr double flops_per_token_pair = 4.0 * 8 * 16;        // forward, all heads
constexpr double kv_bytes_per_token = 2.0 * 2 * 16 * 4;      // f32
constexpr double d_kv_bytes_per_token = kv_bytes_per_token;  // f32 on the wire

/// One document of cp · local tokens.
Layout one_document(const std::string& layout, int cp, int64_t local) {
  LayoutOptions options;
  options.cp = cp;
  return find_layout(layout).make(test::full_bounds({cp * local}).view(), options);
}

Simulation run(const std::string& schedule, const Layout& layout, const MaskRule& mask, Pass pass,
               const MachineModel& machine) {
  const AttentionProblem problem{&layout, shape, mask, {}};
  return simulate(plan_all(find_schedule(schedule), problem), pass, shape, types, machine);
}

/// Puts a tier of nodes inside of the machine's network.
void add_nodes(MachineModel& machine, int ranks, double latency_s = 0,
               double bytes_per_s = LinkTier::unlimited) {
  LinkTier node;
  node.name = "node";
  node.ranks = ranks;
  node.latency_s = latency_s;
  node.bytes_per_s = bytes_per_s;
  machine.links.insert(machine.links.begin(), node);
}

/// 1 GFLOP/s, 1 MB/s and 1 ms: times of a step of some 100 tokens are of one order.
MachineModel slow_machine() {
  MachineModel machine = flat_machine();
  machine.kernel.flops_per_s = 1e9;
  machine.links[0].bytes_per_s = 1e6;
  machine.links[0].latency_s = 1e-3;
  return machine;
}

void expect_seconds(double actual, double expected) {
  EXPECT_NEAR(actual, expected, 1e-12 * expected);
}

TEST(Simulate, RingHidesEachTransferBehindTheStepBeforeIt) {
  MachineModel machine = slow_machine();
  constexpr int cp = 4;
  for (const int64_t local : {64, 2000}) {  // communication-bound, compute-bound
    SCOPED_TRACE(local);
    const auto tokens = static_cast<double>(local);
    const double hop =
        machine.links[0].latency_s + tokens * kv_bytes_per_token / machine.links[0].bytes_per_s;
    const double pair = flops_per_token_pair / machine.kernel.flops_per_s;
    EXPECT_EQ(hop > tokens * tokens * pair, local == 64);

    const double full = tokens * tokens * pair;
    const Simulation dense =
        run("ring", one_document("contiguous", cp, local), MaskKind::full, Pass::forward, machine);
    expect_seconds(dense.makespan(), full + (cp - 1) * std::max(full, hop));
    expect_seconds(dense.compute_only(), cp * full);

    // DualChunkSwap, causal, chunks of c: 2c² + c pairs on the diagonal, then 2c² on every rank.
    const double later = tokens * tokens / 2 * pair, first = later + tokens / 2 * pair;
    const Simulation causal = run("ring", one_document("dual-chunk-swap", cp, local),
                                  MaskKind::causal, Pass::forward, machine);
    expect_seconds(causal.makespan(),
                   std::max(first, hop) + (cp - 2) * std::max(later, hop) + later);
    for (const RankTimeline& rank : causal.ranks) expect_seconds(rank.total, causal.makespan());
    expect_seconds(causal.exposed() + 1,
                   1 + std::max(0.0, hop - first) + (cp - 2) * std::max(0.0, hop - later));
  }
}

TEST(Simulate, TheLastHopOfARingsGradientIsExposed) {
  MachineModel machine = slow_machine();
  machine.kernel.flops_per_s = 1e7;  // everything but the tail is hidden
  constexpr int cp = 4;
  constexpr double tokens = 128, first = tokens * tokens / 2 + tokens / 2;
  const double pair = 2.5 * flops_per_token_pair / machine.kernel.flops_per_s;
  const double hop =
      machine.links[0].latency_s + tokens * d_kv_bytes_per_token / machine.links[0].bytes_per_s;
  const Layout layout = one_document("dual-chunk-swap", cp, 128);
  const double work = (first + (cp - 1) * tokens * tokens / 2) * pair;
  // Turning round, the owner adds the last term and no gradient remains to be sent.
  expect_seconds(run("ring", layout, MaskKind::causal, Pass::backward, machine).makespan(), work);
  expect_seconds(run("ring-forward", layout, MaskKind::causal, Pass::backward, machine).makespan(),
                 work + hop);
}

TEST(Simulate, ContiguousCausalRingUsesCpOverTwoCpLessOne) {
  MachineModel machine = slow_machine();
  machine.links[0].bytes_per_s = 1e9;  // a transfer takes less than the triangle of the first step
  for (const int cp : {2, 8, 64}) {
    constexpr int64_t local = 512;
    const Simulation s = run("ring", one_document("contiguous", cp, local), MaskKind::causal,
                             Pass::forward, machine);
    constexpr auto tokens = static_cast<double>(local);
    const double stream = cp * tokens;
    double work = 0;
    for (const RankTimeline& rank : s.ranks) work += rank.compute;
    expect_seconds(work, stream * (stream + 1) / 2 * flops_per_token_pair / 1e9);
    const double efficiency = work / (cp * s.makespan());
    // Exactly: the last rank has a triangle and cp - 1 squares.
    EXPECT_NEAR(
        efficiency,
        stream * (stream + 1) / (2 * cp * (tokens * (tokens + 1) / 2 + (cp - 1) * tokens * tokens)),
        1e-12);
    EXPECT_NEAR(efficiency, cp / (2.0 * cp - 1), 1 / tokens);
  }
}

TEST(Simulate, RingIsHiddenFromTheLengthOnThatTheModelSays) {
  // Forward, causal: L >= F · e / (G · W), without latency. Here 1e9 · 4 / (4 · 1e6) = 1000.
  MachineModel machine = slow_machine();
  machine.links[0].latency_s = 0;
  const auto exposed = [&](int64_t local) {
    return run("ring", one_document("dual-chunk-swap", 4, local), MaskKind::causal, Pass::forward,
               machine)
        .exposed();
  };
  EXPECT_EQ(exposed(1000), 0);
  EXPECT_GT(exposed(998), 0);
  // And a full mask from half of it on.
  const auto full = [&](int64_t local) {
    return run("ring", one_document("contiguous", 4, local), MaskKind::full, Pass::forward, machine)
        .exposed();
  };
  EXPECT_EQ(full(500), 0);
  EXPECT_GT(full(499), 0);
}

/// A schedule made here: a function appends the steps of one direction.
Plan plan_of(const AttentionProblem& problem, const std::function<void(PlanBuilder&)>& steps) {
  Plan plan{"hand-made", {}};
  for (int r = 0; r < problem.cp(); ++r) {
    PlanBuilder builder(problem, r);
    steps(builder);
    plan.ranks.push_back(builder.take());
  }
  return plan;
}

Simulation run(const Plan& plan, const MachineModel& machine, Pass pass = Pass::forward) {
  return simulate(plan, pass, shape, types, machine);
}

/// Posts messages of all KV to `peers` and from them; returns the id, and the arrays received.
int swap_kv(PlanBuilder& plan, const std::vector<int>& peers,
            std::vector<int>* received = nullptr) {
  std::vector<Message> sends, recvs;
  for (const int peer : peers) {
    sends.push_back({peer, {plan.whole(own(ArrayKind::kv))}});
    const int array = plan.add_array(ArrayKind::kv, plan.rows_of(peer, ArrayKind::kv),
                                     plan.all_heads(ArrayKind::kv));
    recvs.push_back({peer, {plan.whole(array)}});
    if (received != nullptr) received->push_back(array);
  }
  return plan.exchange("KV", sends, recvs);
}
std::vector<int> others(const PlanBuilder& plan) {
  std::vector<int> peers;
  for (int r = 1; r < plan.cp(); ++r) peers.push_back((plan.rank() + r) % plan.cp());
  return peers;
}

/// A schedule of the library's collectives.
Simulation run_by_library(const std::string& schedule, const Layout& layout, Pass pass,
                          const MachineModel& machine) {
  AttentionProblem problem{&layout, shape, MaskKind::full, {}};
  problem.options.collectives = 1;
  return simulate(plan_all(find_schedule(schedule), problem), pass, shape, types, machine);
}

TEST(Simulate, ALibrarysAllGatherTakesARingOfMuchAndATreeOfLittle) {
  MachineModel machine = slow_machine();
  for (const int cp : {4, 6})
    for (const int64_t local : {64, 2000}) {
      SCOPED_TRACE(fmt::format("{} tokens on each of {} ranks", local, cp));
      const auto tokens = static_cast<double>(local);
      const bool ring = cp * tokens * kv_bytes_per_token >= 512 << 10;
      EXPECT_EQ(ring, local == 2000);
      const double rounds = ring ? cp - 1 : 3 - (cp == 4 ? 1 : 0);
      const double gather = rounds * machine.links[0].latency_s +
                            (cp - 1) * tokens * kv_bytes_per_token / machine.links[0].bytes_per_s;
      const double square = tokens * tokens * flops_per_token_pair / machine.kernel.flops_per_s;
      const Layout layout = one_document("contiguous", cp, local);
      const Simulation s = run_by_library("all-gather", layout, Pass::forward, machine);
      expect_seconds(s.makespan(), std::max(square, gather) + (cp - 1) * square);
      // Backward: nothing hides the reduce-scatter.
      expect_seconds(run_by_library("all-gather", layout, Pass::backward, machine).makespan(),
                     std::max(2.5 * square, gather) + 2.5 * (cp - 1) * square + gather);
      const std::string name = ring ? "all-gather KV, by ring" : "all-gather KV, by tree";
      for (const RankTimeline& rank : s.ranks) {
        const auto of_library = std::ranges::find(
            rank.spans, name, [](const SimulatedSpan& span) { return span.name; });
        ASSERT_NE(of_library, rank.spans.end());
        expect_seconds(of_library->end, gather);
        EXPECT_EQ(std::ssize(rank.transfers.at(0).sent), cp - 1);
        EXPECT_EQ(std::ssize(rank.transfers.at(0).received), cp - 1);
      }
    }
}

TEST(Simulate, ALibrarysOperationWaitsForTheLastRankAndForTheSlowestLink) {
  MachineModel machine = slow_machine();
  add_nodes(machine, 2);
  const Layout layout = one_document("contiguous", 4, 2000);
  // Between the two nodes once, over the links of both ranks of a node.
  const double gather =
      machine.links[1].latency_s + 3 * 2000 * kv_bytes_per_token / 2 / machine.links[1].bytes_per_s;
  AttentionProblem problem{&layout, shape, MaskKind::full, {}};
  problem.options.collectives = 1;
  Plan plan = plan_all(find_schedule("all-gather"), problem);
  const double late = 2000.0 * 2000 * flops_per_token_pair / machine.kernel.flops_per_s;
  for (Plan each : {plan}) {  // rank 2 attends its own keys before it joins
    std::vector<Step>& steps = each.ranks[2].forward;
    const auto exchange = std::ranges::find_if(
        steps, [](const Step& s) { return std::holds_alternative<step::Exchange>(s); });
    std::iter_swap(exchange, exchange + 1);
    ASSERT_TRUE(std::holds_alternative<step::Compute>(*exchange));
    const Simulation s = simulate(each, Pass::forward, shape, types, machine);
    expect_seconds(s.makespan(), late + gather + 3 * late);
  }
  // What is sent while it is under way waits for the link.
  const auto keys_behind = [&](PlanBuilder& p) {
    const int next = (p.rank() + 1) % 4, last = (p.rank() + 3) % 4;
    std::vector<Message> sends, recvs;
    std::vector<RankRows> rows;
    for (int r = 0; r < 4; ++r) rows.push_back(p.rows_of(r, ArrayKind::kv).front());
    const int all = p.add_array(ArrayKind::kv, rows, p.all_heads(ArrayKind::kv));
    for (int i = 1; i < 4; ++i) {
      const int from = (p.rank() + i) % 4;
      sends.push_back({from, {p.whole(own(ArrayKind::kv))}});
      recvs.push_back({from, {{all, from * 2000, 2000, p.all_heads(ArrayKind::kv)}}});
    }
    const int gathered = p.exchange("gather", sends, recvs, Transport::all_gather, {0, 1, 2, 3});
    const int block =
        p.add_array(ArrayKind::kv, p.rows_of(last, ArrayKind::kv), p.all_heads(ArrayKind::kv));
    const int hop =
        p.exchange_pair("hop", {next, {p.whole(own(ArrayKind::kv))}}, {last, {p.whole(block)}});
    p.wait(gathered);
    p.wait(hop);
  };
  const Plan behind = plan_of(problem, keys_behind);
  MachineModel flat = slow_machine();
  const double hop = flat.links[0].latency_s + 2000 * kv_bytes_per_token / 1e6;
  expect_seconds(run(behind, flat).makespan(), 3 * hop + hop);
  // One that never joins.
  std::erase_if(plan.ranks[1].forward, [](const Step& s) {
    return std::holds_alternative<step::Exchange>(s) || std::holds_alternative<step::Wait>(s);
  });
  try {
    simulate(plan, Pass::forward, shape, types, machine);
    FAIL() << "a rank that does not join a collective";
  } catch (const std::exception& e) {
    EXPECT_NE(std::string(e.what()).find("a collective of 4 ranks that rank 1 does not join"),
              std::string::npos)
        << e.what();
  }
}

TEST(Simulate, MessagesOfOneRankLeaveOneAfterTheOther) {
  const Layout layout = one_document("contiguous", 4, 100);
  const AttentionProblem problem{&layout, shape, MaskKind::full, {}};
  const Plan plan = plan_of(problem, [](PlanBuilder& p) {
    std::vector<int> received;
    const int id = swap_kv(p, others(p), &received);
    p.compute({}, own(ArrayKind::kv));
    p.wait(id);
    for (const int array : received) p.compute({}, array);
  });
  const MachineModel machine = slow_machine();
  const double one = 100 * kv_bytes_per_token / machine.links[0].bytes_per_s;
  const double block = 100 * 100 * flops_per_token_pair / machine.kernel.flops_per_s;
  const Simulation s = run(plan, machine);
  expect_seconds(s.makespan(), std::max(block, machine.links[0].latency_s + 3 * one) + 3 * block);
  const RankTimeline& rank = s.ranks[2];
  expect_seconds(rank.wait, machine.links[0].latency_s + 3 * one - block);
  expect_seconds(rank.compute, 4 * block);
  int messages = 0;
  for (const SimulatedSpan& span : rank.spans)
    if (span.kind == SpanKind::message) {
      expect_seconds(1 + span.begin, 1 + messages * one);
      expect_seconds(span.left, (messages + 1) * one);
      expect_seconds(span.end, (messages + 1) * one + machine.links[0].latency_s);
      EXPECT_EQ(span.peer, (2 + 1 + messages) % 4);
      EXPECT_EQ(span.message, messages);
      EXPECT_EQ(span.lane, TraceLane::communication);
      ++messages;
    }
  EXPECT_EQ(messages, 3);
}

TEST(Simulate, ASenderWaitsUntilItsMessagesHaveLeft) {
  const Layout layout = one_document("contiguous", 2, 100);
  const AttentionProblem problem{&layout, shape, MaskKind::full, {}};
  const Plan plan = plan_of(problem, [](PlanBuilder& p) {
    const std::vector<Message> kv = {{1 - p.rank(), {p.whole(own(ArrayKind::kv))}}};
    p.wait(p.rank() == 0 ? p.exchange("out", kv, {}) : p.exchange("in", {}, kv));
  });
  const MachineModel machine = slow_machine();
  const Simulation s = run(plan, machine);
  expect_seconds(s.ranks[0].total, 100 * kv_bytes_per_token / machine.links[0].bytes_per_s);
  expect_seconds(s.ranks[1].total, 100 * kv_bytes_per_token / machine.links[0].bytes_per_s +
                                       machine.links[0].latency_s);
}

TEST(Simulate, LinksInsideANodeAreOfTheirOwn) {
  const Layout layout = one_document("contiguous", 4, 100);
  const AttentionProblem problem{&layout, shape, MaskKind::full, {}};
  const Plan plan = plan_of(problem, [](PlanBuilder& p) { p.wait(swap_kv(p, others(p))); });
  MachineModel machine = slow_machine();
  add_nodes(machine, 2, 1e-6, 1e9);
  LinkTier& between = machine.links[1];
  const double one = 100 * kv_bytes_per_token / between.bytes_per_s;
  // Two of the three messages of each rank leave the node.
  expect_seconds(run(plan, machine).makespan(), between.latency_s + 2 * one);
  between.bytes_per_s = 1e12;
  between.latency_s = 0;
  expect_seconds(run(plan, machine).makespan(), 1e-6 + one * 1e6 / 1e9);
}

TEST(Simulate, CopiesTakeTimeWhereSomethingIsCopied) {
  const Layout layout = one_document("contiguous", 2, 100);
  const AttentionProblem problem{&layout, shape, MaskKind::full, {}};
  MachineModel machine = slow_machine();
  machine.copy_bytes_per_s = 1e5;
  const double kv = 100 * kv_bytes_per_token / 1e5;  // to read it, or to write it
  // To the rank itself: a copy, and no message.
  const Plan local = plan_of(problem, [](PlanBuilder& p) { p.wait(swap_kv(p, {p.rank()})); });
  expect_seconds(run(local, machine).makespan(), 2 * kv);
  expect_seconds(run(local, machine).ranks[0].copy, 2 * kv);
  // All heads to a peer need none; one of two heads is packed, and unpacked on the other side.
  const Plan whole = plan_of(problem, [](PlanBuilder& p) { p.wait(swap_kv(p, others(p))); });
  EXPECT_EQ(run(whole, machine).ranks[0].copy, 0);
  const Plan head = plan_of(problem, [](PlanBuilder& p) {
    const int peer = 1 - p.rank();
    const int array =
        p.add_array(ArrayKind::kv, p.rows_of(peer, ArrayKind::kv), p.all_heads(ArrayKind::kv));
    p.wait(p.exchange("a head", {{peer, {{own(ArrayKind::kv), 0, 100, {1, 1}, false}}}},
                      {{peer, {{array, 0, 100, {1, 1}, false}}}}));
  });
  expect_seconds(run(head, machine).ranks[0].copy, kv + kv);
  expect_seconds(run(head, machine).makespan(),
                 kv + 100 * kv_bytes_per_token / 2 / 1e6 + 1e-3 + kv);
  // Adding reads both and writes the sum, on the receiver only.
  const Plan sum = plan_of(problem, [](PlanBuilder& p) {
    const int mine = own(ArrayKind::d_kv), peer = 1 - p.rank();
    p.wait(p.exchange("dKV", {{peer, {p.whole(mine)}}}, {{peer, {p.whole(mine, true)}}}));
  });
  expect_seconds(run(sum, machine).ranks[0].copy, 3 * kv);
  // Clearing is a pass over the array, and no communication.
  const Plan clear = plan_of(problem, [](PlanBuilder& p) { p.clear(own(ArrayKind::d_kv)); });
  expect_seconds(run(clear, machine).makespan(), kv);
  EXPECT_EQ(run(clear, machine).exposed(), 0);
}

TEST(Simulate, GradientsCostTheProductsTheyNeed) {
  const Layout layout = one_document("contiguous", 1, 10);
  const AttentionProblem problem{&layout, shape, MaskKind::full, {}};
  const auto flops = [&](bool d_q, bool d_kv) {
    const Plan plan = plan_of(problem, [&](PlanBuilder& p) {
      ArraySet set;
      if (!d_q) set.d_q = -1;
      p.begin(Pass::backward);
      p.compute(set, own(ArrayKind::kv), d_kv ? own(ArrayKind::d_kv) : -1);
    });
    return run(plan, slow_machine(), Pass::backward).makespan() * 1e9 / (100 * 8 * 16);
  };
  EXPECT_NEAR(flops(true, true), 10, 1e-9);
  EXPECT_NEAR(flops(true, false), 6, 1e-9);
  EXPECT_NEAR(flops(false, true), 8, 1e-9);
}

TEST(Simulate, RefusesPlansThatCannotEnd) {
  const Layout layout = one_document("contiguous", 2, 10);
  const AttentionProblem problem{&layout, shape, MaskKind::full, {}};
  const auto message = [](int peer, int64_t rows) {
    return std::vector<Message>{{peer, {{own(ArrayKind::kv), 0, rows, {0, 2}, false}}}};
  };
  const auto fails = [&](const std::string& why, const std::function<void(PlanBuilder&)>& steps) {
    try {
      run(plan_of(problem, steps), slow_machine());
      ADD_FAILURE() << "no error; expected " << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::runtime);
      EXPECT_EQ(error.what(), "schedule hand-made, fwd: rank " + why);
    }
  };
  fails("0 at step 2 waits for a message from rank 1, which itself waits at step 2 for rank 0",
        [&](PlanBuilder& p) {  // both receive before they send
          p.clear(own(ArrayKind::out));
          p.wait(p.exchange("in", {}, message(1 - p.rank(), 10)));
          p.wait(p.exchange("out", message(1 - p.rank(), 10), {}));
        });
  fails("1 at step 1 waits for a message from rank 0, which has ended", [&](PlanBuilder& p) {
    if (p.rank() == 1) p.wait(p.exchange("in", {}, message(0, 10)));
  });
  fails("0 at step 0 has not received what rank 1 sent at step 0", [&](PlanBuilder& p) {
    if (p.rank() == 1) p.wait(p.exchange("out", message(0, 10), {}));
  });
  fails("0 at step 1 expects 2304 bytes from rank 1, which sends 2560 at step 0",
        [&](PlanBuilder& p) {
          const int peer = 1 - p.rank();
          p.wait(p.exchange("KV", message(peer, 10), message(peer, 9 + p.rank())));
        });
  fails("0 at step 1 never waits for exchange #0 of step 0", [&](PlanBuilder& p) {
    p.exchange("KV", message(1 - p.rank(), 10), message(1 - p.rank(), 10));
  });
  fails("0 at step 0 waits for exchange #7, which is not under way",
        [](PlanBuilder& p) { p.wait(7); });
  fails("0 at step 0 exchanges with rank 5 of 2",
        [&](PlanBuilder& p) { p.exchange("out", message(5, 10), {}); });
}

KernelSurface& surface(MachineModel& m) {
  KernelSurface& one = m.kernel.surfaces.emplace_back();
  one.head_dim = 64;
  one.rows = one.keys = {64, 128};
  one.flops_per_s = {1, 1, 1, 1};
  return one;
}

TEST(Simulate, RefusesAMachineThatCannotBe) {
  using M = MachineModel;
  for (const auto& [message, spoil] : std::
           vector<std::pair<std::string, std::function<void(
                                             M&)>>>{{"flops_per_s of 0; wanted: at least 1",
                                                     [](M& m) { m.kernel.flops_per_s = 0; }},
                                                    {"bytes_per_s of -1; wanted: at least 1",
                                                     [](M& m) { m.links[1].bytes_per_s = -1; }},
                                                    {"bytes_per_s of nan; wanted: at least 1",
                                                     [](M& m) {
                                                       m.links[0].bytes_per_s = std::nan("");
                                                     }},
                                                    {"copy_bytes_per_s of 0; wanted: at least 1",
                                                     [](M& m) { m.copy_bytes_per_s = 0; }},
                                                    {"latency_s of -1; wanted: 0 or more",
                                                     [](M& m) { m.links[0].latency_s = -1; }},
                                                    {"latency_s of inf; wanted: 0 or more",
                                                     [](M& m) {
                                                       m.links[0].latency_s =
                                                           1 / m.links[1].latency_s;
                                                     }},
                                                    {"all_at_once of 2; wanted: more than 0, at "
                                                     "most 1",
                                                     [](M& m) { m.links[0].all_at_once = 2; }},
                                                    {"ranks of 0 in tier node; wanted: a multiple "
                                                     "of 1, or none for the last tier",
                                                     [](M& m) { m.links[0].ranks = 0; }},
                                                    {"ranks of 20 in tier network; wanted: a "
                                                     "multiple of the tier inside, 8, the nearest "
                                                     "16",
                                                     [](M& m) { m.links[1].ranks = 20; }},
                                                    {"message_bytes of 10 behind 20; wanted: more",
                                                     [](M& m) {
                                                       m.links[0].curve = {{20, 1}, {10, 1}};
                                                     }},
                                                    {"1 rows of a surface; wanted: 2 or more",
                                                     [](M& m) { surface(m).rows.resize(1); }},
                                                    {"keys of 64 at place 2; wanted: finite, above "
                                                     "0, ascending",
                                                     [](M& m) {
                                                       std::ranges::reverse(surface(m).keys);
                                                     }},
                                                    {"4 flops_per_s for 3 rows and 2 keys; wanted: "
                                                     "6",
                                                     [](M& m) { surface(m).rows.push_back(256); }},
                                                    {"flops_per_s of 0; wanted: at least 1",
                                                     [](M& m) { surface(m).flops_per_s[2] = 0; }},
                                                    {"launch_s of -1; wanted: 0 or more",
                                                     [](M& m) { surface(m).launch_s = -1; }},
                                                    {"head_dim of 0; wanted: 1 or more",
                                                     [](M& m) { surface(m).head_dim = 0; }}}) {
    M machine = flat_machine();
    add_nodes(machine, 8);
    spoil(machine);
    test::expect_usage(message, [&] { check_machine(machine); });
  }
}

/// Spans of a rank's lane of computation follow each other without a gap, and add up.
void check_timeline(const RankTimeline& rank, const PlanCount& counted, Pass pass,
                    bool reads_take_time) {
  double clock = 0, sums[4] = {};
  int64_t messages = 0;
  for (const SimulatedSpan& span : rank.spans) {
    if (span.kind == SpanKind::message) {
      RC_ASSERT(span.begin <= span.left && span.left <= span.end);
      ++messages;
      continue;
    }
    RC_ASSERT(std::abs(span.begin - clock) <= 1e-12 * rank.total);
    clock = span.end;
    sums[static_cast<size_t>(span.kind)] += span.end - span.begin;
  }
  const auto equal = [&](double a, double b) { return std::abs(a - b) <= 1e-9 * rank.total; };
  RC_ASSERT(equal(clock, rank.total));
  RC_ASSERT(equal(rank.compute + rank.pass + rank.copy + rank.wait, rank.total));
  RC_ASSERT(equal(sums[0], rank.compute));
  RC_ASSERT(equal(sums[1], rank.pass));
  RC_ASSERT(equal(sums[2], rank.copy));
  RC_ASSERT(equal(sums[3], rank.wait));
  RC_ASSERT(messages == counted.messages);
  if (pass == Pass::backward) return;
  const double seconds = attention_flops(pass, counted.pairs, shape) / 1e9;
  if (reads_take_time)
    RC_ASSERT(rank.compute >= seconds - 1e-9 * rank.total);
  else
    RC_ASSERT(equal(rank.compute, seconds));
}

TEST(Simulate, EveryScheduleEndsAndItsTimesAddUp) {
  EXPECT_TRUE(rc::check("any layout, mask and schedule", [] {
    const test::LayoutCase c = test::arbitrary_layout();
    MaskRule mask = *rc::gen::element<MaskRule>(MaskKind::causal, MaskKind::full,
                                                MaskRule(MaskKind::causal, 5));
    const AttentionProblem problem{&c.layout, shape, mask, {}};
    const Schedule& schedule = *rc::gen::elementOf(schedules());
    RC_TAG(schedule.name);
    if (!schedule.why_not(problem).empty()) RC_DISCARD("refused");
    const Plan plan = plan_all(schedule, problem);
    MachineModel machine = slow_machine();
    machine.copy_bytes_per_s = *rc::gen::element(1e6, std::numeric_limits<double>::infinity());
    const int node = *rc::gen::inRange(0, 5);
    if (node > 0) add_nodes(machine, node, 1e-6, 1e7);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Simulation s = run(plan, machine, pass);
      double longest = 0;
      for (size_t r = 0; r < s.ranks.size(); ++r) {
        check_timeline(s.ranks[r], count(plan.ranks[r], pass, shape, types), pass,
                       std::isfinite(machine.copy_bytes_per_s));
        longest = std::max(longest, s.ranks[r].total);
      }
      RC_ASSERT(s.makespan() == longest);
      RC_ASSERT(s.exposed() >= -1e-12 * longest);
    }
  }));
}

TEST(Simulate, IsFastFor64Ranks) {
  const Layout layout = one_document("dual-chunk-swap", 64, 1024);
  const AttentionProblem problem{&layout, shape, MaskKind::causal, {}};
  for (const Schedule& schedule : schedules()) {
    if (!schedule.why_not(problem).empty()) continue;
    const Plan plan = plan_all(schedule, problem);
    const std::clock_t begin = std::clock();
    run(plan, slow_machine());
    run(plan, slow_machine(), Pass::backward);
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    EXPECT_LT(seconds, 2) << schedule.name;  // of processor time; some 0.01 is usual
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre

// From which length on communication is hidden, on links and kernels of today and under every
// schedule that hides some: simulated plans against formulas. And that plans post what can be
// hidden before the steps that hide it.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "attention/schedules/registry.hpp"
#include "layout_cases.hpp"
#include "predict/simulate.hpp"

namespace gyre {
namespace GYRE_FILE {

Layout one_document(const std::string& layout, int cp, int64_t local) {
  LayoutOptions options;
  options.cp = cp;
  return find_layout(layout).make(test::full_bounds({cp * local}).view(), options);
}

/// What is simulated: one causal or full sequence in bf16, `group` query heads to one KV head.
struct Setting {
  std::string schedule = "ring";
  MaskKind mask = MaskKind::causal;
  Pass pass = Pass::forward;
  DType gradients = DType::bf16;  // on the wire
  int64_t group = 8;
  int cp = 4;
};

Simulation run(const Setting& s, int64_t local, const MachineModel& machine) {
  const Layout layout =
      one_document(s.mask == MaskKind::causal ? "dual-chunk-swap" : "contiguous", s.cp, local);
  const HeadShape heads{s.group, 1, 128, 1};
  const AttentionProblem problem{&layout, heads, s.mask, {}};
  const ElementTypes types{DType::bf16, DType::f32, DType::f32, s.gradients};
  return simulate(plan_all(find_schedule(s.schedule), problem), s.pass, heads, types, machine);
}

/// Expects that nothing is exposed at tokens per rank just above `threshold`, and something just
/// below it.
void expect_hidden_from(const Setting& s, double threshold, const MachineModel& machine) {
  const auto below = static_cast<int64_t>(threshold * 0.99) / 2 * 2;
  const auto above = static_cast<int64_t>(threshold * 1.01) / 2 * 2 + 2;
  const Simulation shorter = run(s, below, machine), longer = run(s, above, machine);
  EXPECT_GT(shorter.exposed(), 1e-3 * shorter.makespan()) << below;
  EXPECT_LT(longer.exposed(), 1e-9 * longer.makespan()) << above;
}

TEST(Hiding, NeedsTheseTokensPerRankOnTheLinksOfToday) {
  // 600 Tflop/s forward and 500 backward, bf16. Bytes/s of NVLink 4, a 400 Gb/s NIC, PCIe 4 and
  // 100 Gb/s Ethernet; tokens forward for groups of 8, 4 and 1, and backward for groups of 8 with
  // gradients in bf16 and f32.
  struct Row {
    double bytes_per_s, forward_8, backward_8, backward_8_wide, forward_4, forward_1;
  };
  const std::vector<Row> table = {{360e9, 417, 278, 417, 833, 3333},
                                  {50e9, 3000, 2000, 3000, 6000, 24000},
                                  {25e9, 6000, 4000, 6000, 12000, 48000},
                                  {12.5e9, 12000, 8000, 12000, 24000, 96000}};
  for (const Row& x : table) {
    SCOPED_TRACE(x.bytes_per_s);
    MachineModel machine = flat_machine();
    machine.links[0].bytes_per_s = x.bytes_per_s;
    machine.kernel.flops_per_s = 600e12;
    Setting s;
    expect_hidden_from(s, x.forward_8, machine);
    s.group = 4;
    expect_hidden_from(s, x.forward_4, machine);
    s.group = 1;
    expect_hidden_from(s, x.forward_1, machine);
    machine.kernel.flops_per_s = 500e12;
    s.group = 8;
    s.pass = Pass::backward;
    expect_hidden_from(s, x.backward_8, machine);
    s.gradients = DType::f32;
    expect_hidden_from(s, x.backward_8_wide, machine);
  }
}

TEST(Hiding, OfFullMasksNeedsHalfTheTokens) {
  MachineModel machine = flat_machine();
  machine.kernel.flops_per_s = 500e12;
  machine.links[0].bytes_per_s = 50e9;
  for (const DType gradients : {DType::bf16, DType::f32}) {
    // Forward F e / (2 G W); backward F (e + e_g) / (5 G W), in the steps that move both.
    Setting s{"ring", MaskKind::full, Pass::forward, gradients};
    expect_hidden_from(s, 500e12 * 2 / (2 * 8 * 50e9), machine);
    s.pass = Pass::backward;
    const double both = 2 + size_of(gradients);
    expect_hidden_from(s, 500e12 * both / (5 * 8 * 50e9), machine);
  }
}

TEST(Hiding, DoesNotDependOnTheNumberOfRanks) {
  MachineModel machine = flat_machine();
  machine.kernel.flops_per_s = 600e12;
  machine.links[0].bytes_per_s = 50e9;
  for (const int cp : {3, 8, 16}) {
    Setting s;
    s.cp = cp;
    expect_hidden_from(s, 3000, machine);
  }
}

/// 1 Gflop/s, 1 MB/s and 1 ms: times of a step of some 100 tokens are of one order.
MachineModel slow_machine() {
  MachineModel machine = flat_machine();
  machine.kernel.flops_per_s = 1e9;
  machine.links[0].bytes_per_s = 1e6;
  machine.links[0].latency_s = 1e-3;
  return machine;
}

TEST(Hiding, AGatherHidesBehindOwnKeysOnly) {
  const MachineModel machine = slow_machine();
  for (const int64_t local : {8, 32, 512}) {
    Setting s{"all-gather", MaskKind::full};
    const Simulation result = run(s, local, machine);
    const auto tokens = static_cast<double>(local);
    const double block = tokens * tokens * 4 * 8 * 128 / machine.kernel.flops_per_s;
    const double gather =
        machine.links[0].latency_s + 3 * tokens * 2 * 128 * 2 / machine.links[0].bytes_per_s;
    EXPECT_NEAR(result.makespan(), std::max(block, gather) + 3 * block, 1e-9 * result.makespan());
    EXPECT_EQ(result.exposed() > 0, gather > block) << local;
  }
}

TEST(Hiding, AnAllToAllExposesAllOfItsExchanges) {
  const MachineModel machine = slow_machine();
  Setting s{"all-to-all", MaskKind::full};
  constexpr double tokens = 64;
  // Q and KV follow each other, O comes when all is attended: 2 heads to each rank, and KV to all.
  const double head = tokens * 128 * 2 / machine.links[0].bytes_per_s;
  const double there = machine.links[0].latency_s + 3 * (2 + 2) * head,
               back = machine.links[0].latency_s + 3 * 2 * head;
  const Simulation result = run(s, 64, machine);
  const double attended = 16 * tokens * tokens * 4 * 2 * 128 / machine.kernel.flops_per_s;
  EXPECT_NEAR(result.makespan(), there + attended + back, 1e-9 * result.makespan());
  EXPECT_NEAR(result.exposed(), there + back, 1e-9 * result.makespan());
}

/// The steps of a list as letters: P posts, C computes, W waits.
std::string letters_of(const std::vector<Step>& steps) {
  std::string letters;
  for (const Step& s : steps) {
    if (std::holds_alternative<step::Exchange>(s)) letters += 'P';
    if (std::holds_alternative<step::Compute>(s)) letters += 'C';
    if (std::holds_alternative<step::Wait>(s)) letters += 'W';
  }
  return letters;
}

TEST(PlanOrder, PostsBeforeItComputesAndWaitsAfterwards) {
  const Layout layout = one_document("dual-chunk-swap", 4, 16);
  struct Case {
    std::string schedule, forward, backward;
    MaskRule mask = {};
  };
  const std::vector<Case> cases = {
      // Four blocks, three hops; backward two of KV, three of dKV one step behind.
      {"ring", "PCW PCW PCW C", "PCW PCW PCW PCW"},
      // The other way: KV, both, both, dKV, and home.
      {"ring-forward", "PCW PCW PCW C", "PCW PCW PCW PCW PW"},
      {"all-gather", "PCWC", "PCW C P C W P C W P W"},
      // Two stages of heads: the second is posted before the first is attended.
      {"all-gather-strided", "PCW PCW C", "PCW P CP CWP CWP W CWP CWP CWP W"},
      {"group-cast", "PCW PCW PCW C", "PC WPCP WPCWP WCWP W"},
      {"all-to-all", "PPWW C PW", "PW C PW"},
      {"halo", "PCWC", "CPCW", {MaskKind::causal, 4}},
      {"canonical", "PWC", "PPWCWC"}};
  for (const Case& x : cases) {
    const HeadShape heads{4, 2, 8, 1};
    const RankPlan plan = plan_rank(find_schedule(x.schedule), {&layout, heads, x.mask, {}}, 1);
    const auto packed = [](std::string text) {
      std::erase(text, ' ');
      return text;
    };
    EXPECT_EQ(letters_of(plan.forward), packed(x.forward)) << x.schedule;
    EXPECT_EQ(letters_of(plan.backward), packed(x.backward)) << x.schedule;
  }
}

}  // namespace GYRE_FILE
}  // namespace gyre
